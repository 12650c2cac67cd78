//! Where the tokens stand in an event of vLLM's Python front-end, and the event without them: it then has `null` there.

use std::sync::LazyLock;

use bytes::{BufMut, BytesMut};
use memchr::memmem::Finder;

use super::sampling::StreamApi;

/// An event with a text and its tokens, and nothing else of interest.
pub(super) struct CommonEvent<'a> {
    /// What is in its list of tokens.
    pub(super) ids: &'a [u8],
    pub(super) has_text: bool,
    /// How much of the event stays as it is; [`END`] follows.
    pub(super) kept: usize,
}

/// The end of such an event without its tokens.
pub(super) const END: &[u8] = b"null}]}\n\n";

/// What such an event has between head and text.
pub(super) fn opening(api: StreamApi) -> &'static [u8] {
    match api {
        StreamApi::Chat => br#"{"index":0,"delta":{"content":""#,
        StreamApi::Completions => br#"{"index":0,"text":""#,
    }
}

/// What it has between text and tokens, the quote that ends the text included.
fn closing(api: StreamApi) -> &'static [u8] {
    match api {
        StreamApi::Chat => br#""},"logprobs":null,"finish_reason":null,"token_ids":["#,
        StreamApi::Completions => br#"","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":["#,
    }
}

impl<'a> CommonEvent<'a> {
    /// `prefix` is what such an event has up to its text. Each part is known to the byte, so this costs less than to look for what else may be in
    /// an event.
    pub(super) fn parse(api: StreamApi, prefix: &[u8], event: &'a [u8]) -> Option<Self> {
        let inner = event.strip_prefix(prefix)?.strip_suffix(b"]}]}\n\n")?;
        let (before, ids) = inner.split_at(memchr::memrchr(b'[', inner)? + 1);
        // A text has no bare quotes, so it ends where this begins; with a line end there would be two events.
        let text = before.strip_suffix(closing(api)).filter(|text| !ids.is_empty() && !text.contains(&b'\n'))?;
        Some(Self { ids, has_text: !text.is_empty(), kept: prefix.len() + before.len() - 1 })
    }
}

/// Appends an event without the list at this place.
fn push_without(event: &[u8], (begin, end): (usize, usize), out: &mut BytesMut) {
    out.put_slice(&event[..begin]);
    out.put_slice(b"null");
    out.put_slice(&event[end..]);
}

/// Appends any event without its lists of tokens, and nothing of one that an engine sends for its tokens alone.
pub(super) fn remove_tokens(event: &[u8], out: &mut BytesMut) {
    static TOKENS: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"token_ids\":["));
    static ONLY_TOKENS: LazyLock<Finder<'static>> =
        LazyLock::new(|| Finder::new(br#""delta":{},"logprobs":null,"finish_reason":null,"token_ids":["#));
    if ONLY_TOKENS.find(event).is_some() {
        return;
    }
    let mut copied = 0;
    // Quotes within strings are escaped, so each find is the end of a name.
    for found in TOKENS.find_iter(event) {
        let begin = found + TOKENS.needle().len() - 1;
        let inside = event[begin + 1..].iter().take_while(|byte| byte.is_ascii_digit() || **byte == b',').count();
        let end = begin + inside + 2;
        let named = [&b"\""[..], b"\"prompt_"].iter().any(|before| event[..found].ends_with(before));
        if named && event.get(end - 1) == Some(&b']') {
            push_without(&event[copied..end], (begin - copied, end - copied), out);
            copied = end;
        }
    }
    out.put_slice(&event[copied..]);
}
