//! The known state of a stream that has died: its tokens, as far as the client has seen their text,
//! and how its events begin.

use std::fmt::Write;

use bytes::Bytes;

use super::event_form::{AnswerDelta, EventForm, WholeUsage};
use super::sampling::Sampling;

/// Where a stream goes on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KnownTokens {
    /// The tokens of the prompt, then those of the answer, separated by commas.
    pub(super) ids: String,
    pub(super) prompt_tokens: u64,
    pub(super) emitted_tokens: u64,
    pub(super) form: &'static EventForm,
    /// How each event begins, up to its list of choices.
    pub(super) head: Bytes,
    /// The client has the finish reason.
    pub(super) is_finished: bool,
}

/// The request for the rest of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ContinuationRequest {
    pub(crate) body: Bytes,
    /// The place of the token list in the body.
    pub(crate) prompt: std::ops::Range<usize>,
    /// How many tokens that list has.
    pub(crate) known_tokens: u64,
    /// The fewest tokens that the rest has.
    pub(crate) min_tokens: u64,
    /// Most tokens of the rest; `None` for as many as there is room for.
    pub(crate) max_tokens: Option<u64>,
}

impl KnownTokens {
    #[must_use]
    pub(crate) fn total(&self) -> u64 {
        self.prompt_tokens + self.emitted_tokens
    }

    /// Whether the client has the finish reason.
    #[must_use]
    pub(crate) fn is_finished(&self) -> bool {
        self.is_finished
    }

    /// The request for the missing part of an answer in a context of so many tokens. `None` if only
    /// the end can be missing.
    #[must_use]
    pub(crate) fn continuation_request(&self, sampling: &Sampling, context: u64) -> Option<ContinuationRequest> {
        let left = sampling.max_tokens.map(|most| most.saturating_sub(self.emitted_tokens));
        let room = context.saturating_sub(self.total());
        // Without a number, or with `null`, a completion has sixteen tokens.
        let most = left.unwrap_or(room).min(room);
        if self.is_finished || most == 0 {
            return None;
        }
        let mut body = String::with_capacity(self.ids.len() + sampling.carried.len() + 160);
        body.push('{');
        body.push_str(&sampling.carried);
        let min = sampling.min_tokens.saturating_sub(self.emitted_tokens);
        if min > 0 {
            let _ = write!(body, "\"min_tokens\":{min},");
        }
        let options = if sampling.wants_usage { ",\"stream_options\":{\"include_usage\":true}" } else { "" };
        let _ = write!(body, "\"max_tokens\":{most},\"stream\":true{options},\"return_token_ids\":true,\"prompt\":");
        let begin = body.len();
        let _ = write!(body, "[{}]", self.ids);
        #[cfg(test)]
        if self.emitted_tokens > 0 && crate::simulation::sabotage::is(crate::simulation::sabotage::Sabotage::TokenTwice) {
            body.truncate(body.rfind(',').unwrap_or(body.len()));
            body.push(']');
        }
        let prompt = begin..body.len();
        body.push('}');
        let min_tokens = left.filter(|_| sampling.ignores_end).unwrap_or(min);
        Some(ContinuationRequest { body: body.into(), prompt, known_tokens: self.total(), min_tokens, max_tokens: left })
    }

    /// The end of a stream that lacks only that, without the usage if that has come.
    #[must_use]
    pub(crate) fn ending(&self, sampling: &Sampling, has_usage: bool) -> Bytes {
        let mut rest = Vec::new();
        if !self.is_finished {
            let end = AnswerDelta { text: "", ids: None, finish: Some((r#""length""#, "null")) };
            self.form.push_part(&self.head, end, None, &mut rest);
        }
        if sampling.wants_usage && !has_usage {
            let usage = WholeUsage { prompt: self.prompt_tokens, completion: self.emitted_tokens, cached: None };
            self.form.push_usage(&self.head, usage, None, &mut rest);
        }
        rest.extend_from_slice(b"data: [DONE]\n\n");
        rest.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resume_tier::ResumeTier;
    use crate::resumption::StreamApi;

    fn known(emitted_tokens: u64, is_finished: bool) -> KnownTokens {
        let head = Bytes::from_static(b"data: {\"id\":\"x\",\"choices\":[");
        let form = EventForm::of(StreamApi::Chat, br#","logprobs":null"#);
        KnownTokens { ids: "1,2,3,4,5".into(), prompt_tokens: 5 - emitted_tokens, emitted_tokens, form, head, is_finished }
    }

    fn sampling(max_tokens: Option<u64>, min_tokens: u64, wants_usage: bool) -> Sampling {
        let carried = "\"model\":\"m\",".into();
        let cache_salt = String::new();
        Sampling {
            api: StreamApi::Chat,
            tier: ResumeTier::TokenExact,
            carried,
            max_tokens,
            min_tokens,
            ignores_end: false,
            wants_usage,
            cache_salt,
        }
    }

    #[test]
    fn a_continuation_asks_for_the_rest_of_all_limits() {
        let request = known(2, false).continuation_request(&sampling(Some(10), 6, true), 100).unwrap();
        assert_eq!(
            request.body,
            r#"{"model":"m","min_tokens":4,"max_tokens":8,"stream":true,"stream_options":{"include_usage":true},"return_token_ids":true,"prompt":[1,2,3,4,5]}"#
        );
        assert_eq!((&request.body[request.prompt], request.max_tokens), (&b"[1,2,3,4,5]"[..], Some(8)));
        let left =
            |max_tokens| known(2, false).continuation_request(&sampling(max_tokens, 0, false), 100).map(|continued| continued.max_tokens);
        for (max_tokens, expected) in [(None, Some(None)), (Some(3), Some(Some(1))), (Some(2), None), (Some(1), None)] {
            assert_eq!(left(max_tokens), expected, "{max_tokens:?}");
        }
        let unlimited = known(2, false).continuation_request(&sampling(None, 2, false), 100).unwrap().body;
        assert_eq!(unlimited, r#"{"model":"m","max_tokens":95,"stream":true,"return_token_ids":true,"prompt":[1,2,3,4,5]}"#);
        assert_eq!(known(2, true).continuation_request(&sampling(None, 0, false), 100), None);
        // The context is full.
        assert_eq!(known(2, false).continuation_request(&sampling(None, 0, false), 5), None);
    }

    #[test]
    fn a_stream_lacking_only_its_end_gets_it_locally() {
        let ending = known(2, true).ending(&sampling(Some(2), 0, true), false);
        assert_eq!(
            ending,
            "data: {\"id\":\"x\",\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"total_tokens\":5,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n"
        );
        assert_eq!(known(2, true).ending(&sampling(Some(2), 0, false), false), "data: [DONE]\n\n");
        assert_eq!(known(2, true).ending(&sampling(Some(2), 0, true), true), "data: [DONE]\n\n");
        let ending = known(2, false).ending(&sampling(Some(2), 0, false), false);
        assert!(ending.starts_with(b"data: {\"id\":\"x\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"\"},"), "{ending:?}");
        assert!(
            ending.ends_with(b"\"finish_reason\":\"length\",\"stop_reason\":null,\"token_ids\":null}]}\n\ndata: [DONE]\n\n"),
            "{ending:?}"
        );
    }
}
