//! The model of all simulated engines. The next token is a function of all earlier tokens, so an
//! answer that continues from wrong tokens is another answer. Its streams have the bytes of vLLM
//! 0.32 with the Python front-end.

use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

use crate::resumption::samples;

/// Ends an answer; it has no text.
const END_TOKEN: u64 = 2;

/// The odds of each token to end an answer: one in this many.
const END_ODDS: u64 = 48;

/// Most tokens of a request and its answer together.
const CONTEXT_TOKENS: usize = 128;

/// The first token of a prompt is this plus the number of the request.
const QUESTION_TOKEN: u64 = 1000;

/// The default of `max_tokens` for completions.
const COMPLETION_TOKENS: usize = 16;

/// The words by which a prompt names its question.
pub(super) fn prompt_text(question: u64) -> String {
    format!("question {question}: what comes next?")
}

pub(super) fn prompt_tokens(question: u64) -> Vec<u64> {
    vec![QUESTION_TOKEN + question, 7]
}

/// A request to the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ModelRequest {
    pub(super) question: u64,
    prompt: Vec<u64>,
    max_tokens: usize,
    is_chat: bool,
    asks_tokens: bool,
    wants_usage: bool,
    pub(super) is_stream: bool,
}

/// Tokens of an answer, and why they end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ModelAnswer {
    pub(super) tokens: Vec<u64>,
    pub(super) finish: &'static str,
}

impl ModelRequest {
    /// `None` for requests that no client and no router sends here.
    pub(super) fn parse(path: &str, body: &[u8]) -> Option<Self> {
        let body: Value = serde_json::from_slice(body).ok()?;
        let is_chat = path == "/v1/chat/completions";
        let text = if is_chat { &body["messages"][0]["content"] } else { &body["prompt"] };
        let prompt = match text {
            Value::Array(tokens) => tokens.iter().map(Value::as_u64).collect::<Option<Vec<_>>>()?,
            text => prompt_tokens(text.as_str()?.strip_prefix("question ")?.split(':').next()?.parse().ok()?),
        };
        let max_tokens = match body.get("max_tokens") {
            None if !is_chat => COMPLETION_TOKENS,
            most => most.and_then(Value::as_u64).map_or(usize::MAX, |most| usize::try_from(most).unwrap_or(usize::MAX)),
        };
        Some(Self {
            question: prompt.first()?.checked_sub(QUESTION_TOKEN)?,
            prompt,
            max_tokens,
            is_chat,
            asks_tokens: body["return_token_ids"] == true,
            wants_usage: body["stream_options"]["include_usage"] == true,
            is_stream: body["stream"] == true,
        })
    }

    pub(super) fn answer(&self) -> ModelAnswer {
        let (mut context, mut finish) = (self.prompt.clone(), "length");
        while context.len() < CONTEXT_TOKENS && context.len() - self.prompt.len() < self.max_tokens {
            let next = next_token(&context);
            context.push(next);
            if next == END_TOKEN {
                finish = "stop";
                break;
            }
        }
        ModelAnswer { tokens: context.split_off(self.prompt.len()), finish }
    }

    /// The events of the request's stream, up to the last one.
    pub(super) fn events(&self, id: &str) -> Vec<String> {
        let ModelAnswer { tokens, finish } = self.answer();
        let list = |tokens: &[u64]| match self.asks_tokens {
            true => format!("[{}]", tokens.iter().map(u64::to_string).collect::<Vec<_>>().join(",")),
            false => "null".to_owned(),
        };
        let prompt = list(&self.prompt);
        let mut events = Vec::with_capacity(tokens.len() + 3);
        if self.is_chat {
            events.push(samples::role(&prompt));
        }
        for (at, token) in tokens.iter().enumerate() {
            let (text, ids, is_last) = (token_text(*token), list(&[*token]), at + 1 == tokens.len());
            events.push(match (self.is_chat, is_last) {
                (true, false) => samples::content(&text, &ids),
                (true, true) => samples::finish(&text, &ids, finish),
                (false, _) => {
                    let reason = if is_last { format!("\"{finish}\"") } else { "null".to_owned() };
                    samples::text(id, &text, if at == 0 { &prompt } else { "null" }, &ids, &reason)
                }
            });
        }
        if self.wants_usage {
            let usage = usage(self.prompt.len(), tokens.len());
            let head = events[0].split_once("\"choices\":[").map_or("", |(head, _)| head).to_owned();
            events.push(format!("{head}\"choices\":[],\"usage\":{usage}}}\n\n"));
        }
        events.push("data: [DONE]\n\n".to_owned());
        events
    }

    /// The whole answer, as a request without a stream gets it.
    pub(super) fn plain(&self) -> String {
        let ModelAnswer { tokens, finish } = self.answer();
        let text = text(&tokens);
        let choice = match self.is_chat {
            true => json!({"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}),
            false => json!({"index": 0, "text": text, "finish_reason": finish}),
        };
        json!({"id": "plain", "model": "tiny", "choices": [choice], "usage": usage(self.prompt.len(), tokens.len())}).to_string()
    }

    /// An event that ends a stream because its engine is being stopped.
    pub(super) fn aborted(&self, id: &str) -> String {
        let ids = if self.asks_tokens { "[99]" } else { "null" };
        if self.is_chat { samples::finish("cut", ids, "abort") } else { samples::text(id, "cut", "null", ids, "\"abort\"") }
    }
}

pub(super) fn usage(prompt: usize, completion: usize) -> Value {
    json!({"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion})
}

fn next_token(context: &[u64]) -> u64 {
    let bytes: Vec<u8> = context.iter().flat_map(|token| token.to_le_bytes()).collect();
    let drawn = xxh3_64(&bytes);
    if drawn.is_multiple_of(END_ODDS) { END_TOKEN } else { 100 + drawn / END_ODDS % 50_000 }
}

/// A token's text as it stands in an event: escaped. Some tokens are part of a character, and have
/// none.
fn token_text(token: u64) -> String {
    match token {
        END_TOKEN => String::new(),
        token if token % 6 == 0 => String::new(),
        token if token % 6 == 1 => "\u{1f980}".to_owned(),
        token if token % 6 == 2 => format!(" \\\"{token}\\n"),
        token => format!(" {token}"),
    }
}

/// The text that a client reads.
pub(super) fn text(tokens: &[u64]) -> String {
    tokens.iter().map(|token| token_text(*token).replace("\\\"", "\"").replace("\\n", "\n")).collect()
}
