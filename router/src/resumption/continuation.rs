//! Rewrites a continuation's events, which are a completion's, in the form of the stream that it
//! continues. The events then take the path of all others.

use bytes::{Bytes, BytesMut};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::KnownTokens;
use super::event_form::{AnswerDelta, EventForm, WholeUsage};
use crate::sse::event_end;

/// The comment that the client gets where its stream was resumed.
pub(crate) const SEAM: Bytes = Bytes::from_static(b": resumed\n\n");

/// Longest text of a token: the longest are runs of blanks or line ends.
const MAX_TOKEN_TEXT_BYTES: usize = 256;

/// Ends a stream whose continuation is none.
const NO_CONTINUATION: &[u8] =
    b"data: {\"error\":{\"message\":\"the other engine told the prompt again\",\"type\":\"InternalServerError\",\"param\":null,\"code\":502}}\n\n";

/// The rest of a stream from another engine.
#[derive(Debug)]
pub(crate) struct Continuation {
    form: &'static EventForm,
    head: Bytes,
    prompt_tokens: u64,
    /// Tokens of the answer before the seam.
    emitted_tokens: u64,
    /// The beginning of an event.
    buffer: BytesMut,
    /// The continuation's first text was passed on.
    has_begun: bool,
}

/// An event of a completion's stream.
#[derive(Deserialize)]
struct CompletionEvent<'a> {
    #[serde(borrow)]
    choices: Vec<CompletionChoice<'a>>,
    usage: Option<CompletionUsage>,
    #[serde(borrow)]
    system_fingerprint: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct CompletionUsage {
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<Value>,
}

#[derive(Deserialize)]
struct CompletionChoice<'a> {
    #[serde(borrow)]
    text: &'a RawValue,
    #[serde(borrow)]
    finish_reason: Option<&'a RawValue>,
    #[serde(borrow)]
    stop_reason: Option<&'a RawValue>,
    #[serde(borrow)]
    token_ids: Option<&'a RawValue>,
}

impl<'a> CompletionChoice<'a> {
    fn part(&self) -> AnswerDelta<'a> {
        let text = self.text.get();
        AnswerDelta {
            text: text.get(1..text.len() - 1).unwrap_or_default(),
            ids: self.token_ids.map(RawValue::get).filter(|ids| *ids != "[]"),
            finish: self.finish_reason.map(|reason| (reason.get(), self.stop_reason.map_or("null", RawValue::get))),
        }
    }
}

/// Whether a text is no longer than its tokens can be. After a prompt that ends within a character,
/// vLLM's first text is that of the whole prompt. An event with several tokens may hide the
/// beginning of one, so not every cut can be known to be safe.
fn is_of_its_tokens(part: &AnswerDelta<'_>) -> bool {
    let tokens = part.ids.map_or(1, |ids| memchr::memchr_iter(b',', ids.as_bytes()).count() + 1);
    part.text.len() <= MAX_TOKEN_TEXT_BYTES * tokens
}

impl Continuation {
    /// Continues the stream that died.
    #[must_use]
    pub(crate) fn new(known: &KnownTokens) -> Self {
        let KnownTokens { form, prompt_tokens, emitted_tokens, head, .. } = known;
        let (prompt_tokens, emitted_tokens) = (*prompt_tokens, *emitted_tokens);
        Self { form, head: head.clone(), prompt_tokens, emitted_tokens, buffer: BytesMut::new(), has_begun: false }
    }

    /// The rewritten events that this piece completes.
    pub(crate) fn retell(&mut self, piece: &[u8]) -> Bytes {
        self.buffer.extend_from_slice(piece);
        let mut output = Vec::with_capacity(self.buffer.len() + 256);
        while let Some(end) = event_end(&self.buffer) {
            let event = self.buffer.split_to(end);
            self.retell_event(&event, &mut output);
        }
        output.into()
    }

    /// Whether everything that came was passed on.
    #[must_use]
    pub(crate) fn is_told(&self) -> bool {
        self.buffer.is_empty()
    }

    /// Rewrites an event. Other events than a completion's (errors, comments, `[DONE]`) stay as
    /// they are.
    fn retell_event(&mut self, event: &[u8], output: &mut Vec<u8>) {
        let data = event.strip_prefix(b"data: ").map(<[u8]>::trim_ascii_end);
        let Some(CompletionEvent { choices, usage, system_fingerprint }) = data.and_then(|data| serde_json::from_slice(data).ok()) else {
            output.extend_from_slice(event);
            return;
        };
        let fingerprint = system_fingerprint.map(RawValue::get);
        // An event with only the prompt's tokens says nothing of the answer.
        if let Some(part) = choices.first().map(CompletionChoice::part).filter(|part| !part.is_empty()) {
            if !self.has_begun && !is_of_its_tokens(&part) {
                output.extend_from_slice(NO_CONTINUATION);
                return;
            }
            self.has_begun |= !part.text.is_empty();
            self.form.push_part(&self.head, part, fingerprint, output);
        }
        if let Some(usage) = usage {
            // To the continuation, tokens emitted earlier are prompt.
            let completion = self.emitted_tokens + usage.completion_tokens.unwrap_or(0);
            let cached = usage.prompt_tokens_details.map(|details| self.bound_cached(details));
            let whole = WholeUsage { prompt: self.prompt_tokens, completion, cached: cached.as_deref() };
            self.form.push_usage(&self.head, whole, fingerprint, output);
        }
    }

    /// No more of a prompt can be cached than there is.
    fn bound_cached(&self, mut details: Value) -> String {
        if let Some(cached) = details.get_mut("cached_tokens") {
            *cached = cached.as_u64().unwrap_or(0).min(self.prompt_tokens).into();
        }
        details.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resumption::samples::text;

    fn rewritten(first: &str, ids: &str) -> String {
        let known = KnownTokens {
            form: EventForm::of(crate::resumption::StreamApi::Chat, crate::resumption::samples::role("[1]").as_bytes()),
            ids: "1,2".into(),
            prompt_tokens: 1,
            emitted_tokens: 1,
            head: Bytes::from_static(b"data: {\"choices\":["),
            is_finished: false,
        };
        let mut continuation = Continuation::new(&known);
        let events = [text("c", first, "null", ids, "null"), text("c", &"x".repeat(1000), "null", "[3]", "null")].concat();
        String::from_utf8(continuation.retell(events.as_bytes()).to_vec()).unwrap()
    }

    #[test]
    fn a_continuation_that_repeats_the_prompt_ends_in_error() {
        assert!(rewritten(&"x".repeat(257), "[2]").starts_with("data: {\"error\":"));
        assert!(rewritten(&"x".repeat(513), "[2,3]").starts_with("data: {\"error\":"));
        for (first, ids) in [("x".repeat(256), "[2]"), ("x".repeat(512), "[2,3]"), (String::new(), "[2]")] {
            assert_eq!(rewritten(&first, ids).contains("error"), first.is_empty(), "{}", first.len());
        }
        assert!(!rewritten("fine", "[2]").contains("error"));
    }
}
