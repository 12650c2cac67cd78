//! Whether an encoder and an engine agree about tokens. The router sends [`samples`] to `POST /tokenize` of an engine that has become ready
//! and believes the encoder for this engine if all answers agree; what releases of engines do differently is found here, not by versions.

use std::fmt;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{Encoder, Request};

/// Where an encoder and an engine differ.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}, for {sample}")]
pub struct Difference {
    sample: String,
    what: What,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum What {
    /// The body is no request for tokens.
    NoRequest,
    /// The engine answered neither with tokens nor with a refusal.
    NoAnswer { status: u16 },
    /// Only the encoder refused.
    OnlyEngineEncodes { reason: String },
    /// Only the engine refused.
    OnlyEngineRefuses { status: u16 },
    /// The first token that differs; `None` where one has ended.
    Token { position: usize, encoder: Option<u32>, engine: Option<u32> },
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let or_end = |token: &Option<u32>| token.map_or_else(|| "the end".to_owned(), |token| token.to_string());
        match self {
            Self::NoRequest => f.write_str("not a request for tokens"),
            Self::NoAnswer { status } => write!(f, "the engine's answer {status} has no tokens"),
            Self::OnlyEngineEncodes { reason } => write!(f, "the engine has tokens where the router has none ({reason})"),
            Self::OnlyEngineRefuses { status } => write!(f, "the engine refuses ({status}) what the router encodes"),
            Self::Token { position, encoder, engine } => {
                write!(f, "token {position} is {} for the router, {} for the engine", or_end(encoder), or_end(engine))
            }
        }
    }
}

/// Bodies of `POST /tokenize`, without `model`. A template that refuses one of them is no difference if the engine refuses too.
#[must_use]
pub fn samples() -> Vec<Value> {
    let code = "def area(r):\n    if r < 0:\n\t\traise ValueError('r')\n\n    return 3.14159 * r ** 2   # πr²\n";
    let user = |content: &str| json!({ "role": "user", "content": content });
    let weather = json!({ "type": "function", "function": {
        "name": "get_weather",
        "description": "Current weather <in> a city & \"more\"; °C",
        "parameters": { "type": "object", "required": ["city"], "properties": {
            "city": { "type": "string", "description": "e.g. Zürich" },
            "days": { "type": "integer", "default": 1, "minimum": 0.5 },
        } },
    } });
    let call = json!({ "id": "call00001", "type": "function", "function": { "name": "get_weather", "arguments": "{\"city\": \"Zürich\", \"days\": 2}" } });
    vec![
        json!({ "prompt": "The quick brown fox jumps over the lazy dog." }),
        json!({ "prompt": "  leading,  double  and trailing spaces \n\n\n" }),
        json!({ "prompt": code }),
        json!({ "prompt": "Grüße, мир, 世界, नमस्ते, 👩‍👩‍👧‍👦🏳️‍🌈 e\u{301} \u{a0}\u{200b}12345678 3.14" }),
        json!({ "prompt": "<|im_start|>user\n<s>[INST] <|eot_id|> </s> <bos><|endoftext|>", "add_special_tokens": false }),
        json!({ "messages": [user("Hello!")] }),
        json!({ "messages": [{ "role": "system", "content": "You are terse." }, user("  What is 2+2?  \n")] }),
        json!({ "messages": [
            { "role": "system", "content": "You write code." },
            user("Area of a circle?"),
            { "role": "assistant", "content": code },
            user("Now in Rust, and don't\texplain. 🦀"),
            { "role": "assistant", "content": "fn area(r: f64) -> f64 {\n    std::f64::consts::PI * r * r\n}" },
            user("Grüße, 世界! <|im_end|> </s> <end_of_turn>"),
        ] }),
        json!({ "messages": [user("One"), { "role": "assistant", "content": "Two" }], "add_generation_prompt": false }),
        json!({ "messages": [user("Count"), { "role": "assistant", "content": "One, two," }], "add_generation_prompt": false, "continue_final_message": true }),
        json!({ "messages": [user("")] }),
        json!({ "messages": [{ "role": "user", "content": [{ "type": "text", "text": "First part" }, { "type": "text", "text": "second part" }] }] }),
        json!({ "messages": [user("Weather in Zürich?")], "tools": [weather] }),
        json!({ "messages": [
            user("Weather in Zürich?"),
            { "role": "assistant", "content": null, "tool_calls": [call] },
            { "role": "tool", "tool_call_id": "call00001", "content": "{\"celsius\": 21.5, \"sky\": \"klar\"}" },
        ], "tools": [weather] }),
    ]
}

/// Whether the encoder agrees with what an engine answered to this body of `POST /tokenize`.
pub fn compare(encoder: &Encoder, body: &[u8], engine_status: u16, engine_answer: &[u8]) -> Result<(), Difference> {
    #[derive(Deserialize)]
    struct Answer {
        tokens: Vec<u32>,
    }
    let differ = |what| Err(Difference { sample: shortened(body), what });
    let Some(request) = Request::parse("/tokenize", body) else { return differ(What::NoRequest) };
    let encoded = encoder.encode(&request);
    let engine = match engine_status {
        200 => match serde_json::from_slice::<Answer>(engine_answer) {
            Ok(answer) => Some(answer.tokens),
            Err(_) => return differ(What::NoAnswer { status: engine_status }),
        },
        400 | 422 => None,
        status => return differ(What::NoAnswer { status }),
    };
    match (encoded, engine) {
        (Err(_), None) => Ok(()),
        (Err(error), Some(_)) => differ(What::OnlyEngineEncodes { reason: error.to_string() }),
        (Ok(_), None) => differ(What::OnlyEngineRefuses { status: engine_status }),
        (Ok(encoded), Some(engine)) => {
            // Of a prompt with media only what comes before them is known, and its last token may be joined with what follows.
            let known = if encoded.whole { encoded.tokens.len().max(engine.len()) } else { encoded.tokens.len().saturating_sub(1) };
            let position = (0..known).find(|position| encoded.tokens.get(*position) != engine.get(*position));
            match position {
                None => Ok(()),
                Some(position) => {
                    differ(What::Token { position, encoder: encoded.tokens.get(position).copied(), engine: engine.get(position).copied() })
                }
            }
        }
    }
}

/// The beginning of a body: samples differ there, and a log line has its limits.
fn shortened(body: &[u8]) -> String {
    const MOST: usize = 120;
    let text = String::from_utf8_lossy(body);
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.into_owned(),
    }
}

#[cfg(test)]
mod tests;
