//! Tells the stream of a continuation, which is a completion's, in the form of the stream that it continues. Its events then go the way of all others.

use std::io::Write;

use bytes::{Bytes, BytesMut};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::KnownTokens;
use super::sampling::StreamApi;
use crate::sse::event_end;

/// What the client gets where its stream was resumed.
pub(crate) const SEAM: Bytes = Bytes::from_static(b": resumed\n\n");

/// The rest of a stream from another engine.
#[derive(Debug)]
pub(crate) struct Continuation {
    api: StreamApi,
    head: Bytes,
    prompt_tokens: u64,
    /// Tokens of the answer before the seam.
    emitted_tokens: u64,
    /// The beginning of an event.
    buffer: BytesMut,
}

/// An event of a completion's stream.
#[derive(Deserialize)]
struct CompletionEvent<'a> {
    #[serde(borrow)]
    choices: Vec<CompletionChoice<'a>>,
    usage: Option<Value>,
    #[serde(borrow)]
    system_fingerprint: Option<&'a RawValue>,
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

impl Continuation {
    /// Of a stream of `api` that has died.
    #[must_use]
    pub(crate) fn new(api: StreamApi, known: &KnownTokens) -> Self {
        let KnownTokens { prompt_tokens, emitted_tokens, head, .. } = known;
        let (prompt_tokens, emitted_tokens) = (*prompt_tokens, *emitted_tokens);
        Self { api, head: head.clone(), prompt_tokens, emitted_tokens, buffer: BytesMut::new() }
    }

    /// The events that are whole with this piece.
    pub(crate) fn retell(&mut self, piece: &[u8]) -> Bytes {
        self.buffer.extend_from_slice(piece);
        let mut told = Vec::with_capacity(self.buffer.len() + 256);
        while let Some(end) = event_end(&self.buffer) {
            let event = self.buffer.split_to(end);
            self.retell_event(&event, &mut told);
        }
        told.into()
    }

    /// Whether nothing is left of it that was not told.
    #[must_use]
    pub(crate) fn is_told(&self) -> bool {
        self.buffer.is_empty()
    }

    /// What is no event of a completion (errors, comments, `[DONE]`) stays as it is.
    fn retell_event(&self, event: &[u8], told: &mut Vec<u8>) {
        let data = event.strip_prefix(b"data: ").map(<[u8]>::trim_ascii_end);
        let Some(CompletionEvent { choices, usage, system_fingerprint }) = data.and_then(|data| serde_json::from_slice(data).ok()) else {
            told.extend_from_slice(event);
            return;
        };
        told.extend_from_slice(&self.head);
        if let Some(choice) = choices.first() {
            self.push_choice(choice, told);
        }
        told.push(b']');
        if let Some(mut usage) = usage.filter(|usage| !usage.is_null()) {
            self.add_up(&mut usage);
            let _ = write!(told, ",\"usage\":{usage}");
        }
        if let Some(fingerprint) = system_fingerprint {
            let _ = write!(told, ",\"system_fingerprint\":{fingerprint}");
        }
        told.extend_from_slice(b"}\n\n");
    }

    fn push_choice(&self, choice: &CompletionChoice<'_>, told: &mut Vec<u8>) {
        let raw = |value: Option<&RawValue>| value.map_or("null", RawValue::get).to_owned();
        let (text, finish, ids) = (choice.text.get(), raw(choice.finish_reason), raw(choice.token_ids));
        let stop = raw(choice.stop_reason);
        let _ = match self.api {
            StreamApi::Completions => write!(
                told,
                r#"{{"index":0,"text":{text},"logprobs":null,"finish_reason":{finish},"stop_reason":{stop},"prompt_token_ids":null,"token_ids":{ids}}}"#
            ),
            StreamApi::Chat if finish == "null" => {
                write!(told, r#"{{"index":0,"delta":{{"content":{text}}},"logprobs":null,"finish_reason":null,"token_ids":{ids}}}"#)
            }
            StreamApi::Chat => write!(
                told,
                r#"{{"index":0,"delta":{{"content":{text}}},"logprobs":null,"finish_reason":{finish},"stop_reason":{stop},"token_ids":{ids}}}"#
            ),
        };
    }

    /// To the continuation, what was emitted before is prompt.
    fn add_up(&self, usage: &mut Value) {
        let of_rest = usage.get("completion_tokens").and_then(Value::as_u64).unwrap_or(0);
        let completion = self.emitted_tokens + of_rest;
        for (name, tokens) in
            [("prompt_tokens", self.prompt_tokens), ("total_tokens", self.prompt_tokens + completion), ("completion_tokens", completion)]
        {
            if let Some(number) = usage.get_mut(name) {
                *number = tokens.into();
            }
        }
        if let Some(cached) = usage.pointer_mut("/prompt_tokens_details/cached_tokens") {
            *cached = cached.as_u64().unwrap_or(0).min(self.prompt_tokens).into();
        }
    }
}
