//! The form of a stream's events by front-end, recorded from vLLM 0.32
//! (`tests/fixtures/vllm/sse_rust_*`).
//!
//! The form serves to find and remove the tokens in events, and to write continuations.

use std::io::Write;

use memchr::memmem;

use super::sampling::StreamApi;

/// How one front-end writes the events of one API. Each event begins with the stream's head.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct EventForm {
    /// From the head to the text.
    pub(super) opening: &'static [u8],
    /// From the text to its tokens: the part that is there without tokens too.
    pub(super) closing: &'static [u8],
    /// The name of the tokens, if it is absent without them.
    pub(super) field: &'static [u8],
    /// The value in place of tokens that were not requested.
    pub(super) absent: &'static [u8],
    /// How an event without its tokens ends.
    pub(super) end: &'static [u8],
    /// Marks of an event that comes for its tokens alone: any of these.
    pub(super) only_tokens: &'static [&'static [u8]],
    /// From the head to the tokens of an event without a text, if the text is absent rather than
    /// empty.
    textless: Option<&'static str>,
    finish: FinishForm,
    /// How the usage says that nothing was cached, and how it ends.
    nothing_cached: &'static str,
    usage_end: &'static str,
    has_fingerprint: bool,
}

/// How an answer ends.
#[derive(Debug, PartialEq, Eq)]
enum FinishForm {
    /// In the event of the last text: the part behind that text, and before its tokens.
    WithText { before: &'static str, tokens: &'static str },
    /// In a separate event, which begins like this.
    Apart(&'static str),
}

const PYTHON_CHAT: EventForm = EventForm {
    opening: br#"{"index":0,"delta":{"content":""#,
    closing: br#""},"logprobs":null,"finish_reason":null,"token_ids":"#,
    field: b"",
    absent: b"null",
    end: b"null}]}\n\n",
    only_tokens: &[br#""delta":{},"logprobs":null,"finish_reason":null,"token_ids":["#],
    textless: None,
    finish: FinishForm::WithText { before: r#""},"logprobs":null,"finish_reason":"#, tokens: r#","token_ids":"# },
    nothing_cached: "",
    usage_end: "}",
    has_fingerprint: true,
};

const PYTHON_COMPLETIONS: EventForm = EventForm {
    opening: br#"{"index":0,"text":""#,
    closing: br#"","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":"#,
    only_tokens: &[],
    finish: FinishForm::WithText { before: r#"","logprobs":null,"finish_reason":"#, tokens: r#","prompt_token_ids":null,"token_ids":"# },
    ..PYTHON_CHAT
};

const RUST_CHAT: EventForm = EventForm {
    opening: br#"{"index":0,"delta":{"content":""#,
    closing: br#""}"#,
    field: br#","token_ids":"#,
    absent: b"",
    end: b"}]}\n\n",
    only_tokens: &[br#""delta":{},"token_ids":["#],
    textless: Some(r#"{"index":0,"delta":{},"token_ids":"#),
    finish: FinishForm::Apart(r#"{"index":0,"delta":{},"finish_reason":"#),
    nothing_cached: r#","prompt_tokens_details":null"#,
    usage_end: r#","completion_tokens_details":{"reasoning_tokens":0}}"#,
    has_fingerprint: false,
};

const RUST_COMPLETIONS: EventForm = EventForm {
    opening: br#"{"index":0,"text":""#,
    closing: br#"""#,
    // vLLM's sources after 0.32 have the second form.
    only_tokens: &[br#""text":"","token_ids":[],"prompt_token_ids":["#, br#""text":"","prompt_token_ids":["#],
    textless: None,
    finish: FinishForm::Apart(r#"{"index":0,"text":"","finish_reason":"#),
    ..RUST_CHAT
};

/// The content of one event of an answer.
#[derive(Debug, Clone, Copy)]
pub(super) struct AnswerDelta<'a> {
    /// The text as it stands between its quotes.
    pub(super) text: &'a str,
    /// The list of its tokens.
    pub(super) ids: Option<&'a str>,
    /// The reason why the answer ends here, and what stopped it.
    pub(super) finish: Option<(&'a str, &'a str)>,
}

/// The tokens of an answer and its prompt.
#[derive(Debug, Clone, Copy)]
pub(super) struct WholeUsage<'a> {
    pub(super) prompt: u64,
    pub(super) completion: u64,
    /// The details of the prompt, if any are known.
    pub(super) cached: Option<&'a str>,
}

impl AnswerDelta<'_> {
    #[must_use]
    pub(super) fn is_empty(&self) -> bool {
        self.text.is_empty() && self.ids.is_none() && self.finish.is_none()
    }
}

impl EventForm {
    /// The form of the stream with this event. Only the Python front-end writes `null` fields.
    #[must_use]
    pub(super) fn of(api: StreamApi, event: &[u8]) -> &'static Self {
        // Log probabilities are never requested. Quotes within strings are escaped.
        let writes_null = memmem::find(event, br#","logprobs":null"#).is_some();
        match (api, writes_null) {
            (StreamApi::Chat, true) => &PYTHON_CHAT,
            (StreamApi::Completions, true) => &PYTHON_COMPLETIONS,
            (StreamApi::Chat, false) => &RUST_CHAT,
            (StreamApi::Completions, false) => &RUST_COMPLETIONS,
        }
    }

    /// Appends the events of this part of an answer, as an engine that returns tokens writes them.
    /// `fingerprint` follows the part's end.
    pub(super) fn push_part(&self, head: &[u8], part: AnswerDelta<'_>, fingerprint: Option<&str>, output: &mut Vec<u8>) {
        let AnswerDelta { text, ids, finish } = part;
        let close = |output: &mut Vec<u8>| {
            output.extend_from_slice(b"}]");
            if let Some(fingerprint) = fingerprint.filter(|_| self.has_fingerprint) {
                let _ = write!(output, ",\"system_fingerprint\":{fingerprint}");
            }
            output.extend_from_slice(b"}\n\n");
        };
        let is_apart = matches!(self.finish, FinishForm::Apart(_));
        if finish.is_none() || is_apart && (ids.is_some() || !text.is_empty()) {
            output.extend_from_slice(head);
            match (self.textless, ids) {
                (Some(textless), Some(ids)) if text.is_empty() => drop(write!(output, "{textless}{ids}")),
                _ => {
                    output.extend_from_slice(self.opening);
                    output.extend_from_slice(text.as_bytes());
                    output.extend_from_slice(self.closing);
                    self.push_ids(ids, output);
                }
            }
            close(output);
        }
        let Some((reason, stop)) = finish else { return };
        output.extend_from_slice(head);
        match self.finish {
            FinishForm::WithText { before, tokens } => {
                output.extend_from_slice(self.opening);
                let _ = write!(output, "{text}{before}{reason},\"stop_reason\":{stop}{tokens}");
                self.push_ids(ids, output);
            }
            FinishForm::Apart(opening) => {
                let _ = write!(output, "{opening}{reason}");
                if stop != "null" {
                    let _ = write!(output, ",\"stop_reason\":{stop}");
                }
            }
        }
        close(output);
    }

    fn push_ids(&self, ids: Option<&str>, output: &mut Vec<u8>) {
        match ids {
            Some(ids) => {
                output.extend_from_slice(self.field);
                output.extend_from_slice(ids.as_bytes());
            }
            None => output.extend_from_slice(self.absent),
        }
    }

    /// Appends the event with the usage of the whole answer.
    pub(super) fn push_usage(&self, head: &[u8], usage: WholeUsage<'_>, fingerprint: Option<&str>, output: &mut Vec<u8>) {
        let WholeUsage { prompt, completion, cached } = usage;
        let total = prompt + completion;
        output.extend_from_slice(head);
        let _ = write!(output, r#"],"usage":{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{completion}"#);
        match cached {
            Some(details) => drop(write!(output, ",\"prompt_tokens_details\":{details}")),
            None => output.extend_from_slice(self.nothing_cached.as_bytes()),
        }
        output.extend_from_slice(self.usage_end.as_bytes());
        if let Some(fingerprint) = fingerprint.filter(|_| self.has_fingerprint) {
            let _ = write!(output, ",\"system_fingerprint\":{fingerprint}");
        }
        output.extend_from_slice(b"}\n\n");
    }
}
