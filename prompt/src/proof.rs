//! Comparison of an encoder and an engine.
//!
//! The router sends [`samples`] to `POST /tokenize` of an engine that has become ready. It then
//! believes the encoder for engines of the same kind, for the [`PromptForms`] of prompts about
//! which the answers agree. The result is a [`ProofResult`]. Differences between releases of
//! engines are found here, not by version.

use std::fmt;

use hostler_api::Route;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{Dialect, Encoder, PromptForm, PromptForms, PromptRequest};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}, for {sample}")]
pub struct Difference {
    sample: String,
    what: DifferenceKind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum DifferenceKind {
    /// The sample's body is not a request for tokens.
    NoRequest,
    /// The engine answered neither with tokens nor with a refusal.
    NoAnswer { status: u16 },
    /// Only the encoder refused.
    OnlyEngineEncodes { reason: String },
    /// First token that differs; `None` if one side has ended.
    Token { position: usize, encoder: Option<u32>, engine: Option<u32> },
}

impl Difference {
    /// Whether the engine did not answer about the sample.
    ///
    /// It may be busy or lack the route, so a later attempt may succeed.
    #[must_use]
    pub fn is_no_answer(&self) -> bool {
        matches!(self.what, DifferenceKind::NoAnswer { .. })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Agreement {
    Tokens,
    /// Both refuse the sample.
    Refusal,
    /// The engine refuses the sample, so there will be no such prompts.
    ///
    /// The Rust front-end refuses a message without text.
    Nothing,
}

#[derive(Debug, Default)]
pub struct Coverage {
    compared: usize,
    agreed: PromptForms,
    differed: PromptForms,
    difference: Option<Difference>,
}

#[derive(Debug, PartialEq, Eq)]
pub struct ProofResult {
    /// Forms that are encoded as in the engine. A prompt must have only these.
    pub forms: PromptForms,
    /// Number of samples with the same tokens on both sides.
    pub samples: usize,
    /// Why some forms are missing, and the observed difference.
    pub doubt: Option<String>,
}

impl Coverage {
    /// Records a comparison, attributed to the sample's last form, because the others have separate
    /// samples.
    pub fn record(&mut self, sample: &Value, compared: Result<Agreement, Difference>) {
        let request = PromptRequest::parse(Route::Tokenize.path(), sample.to_string().as_bytes());
        let Some(form) = request.and_then(|request| request.forms().iter().next_back()) else { return };
        match compared {
            Ok(Agreement::Nothing) => {}
            Ok(agreement) => {
                self.compared += usize::from(agreement == Agreement::Tokens);
                self.agreed = self.agreed.with(form);
            }
            Err(difference) => {
                self.differed = self.differed.with(form);
                self.difference.get_or_insert(difference);
            }
        }
    }

    /// Forms with at least one agreement and no difference.
    ///
    /// # Errors
    /// Why neither plain texts nor plain chats are among them.
    pub fn into_result(self) -> Result<ProofResult, String> {
        let forms = self.agreed.without(self.differed);
        let refused = |form: PromptForm| format!("the engine refuses all samples of {}, which the router encodes", form.description());
        let doubt = match self.difference {
            Some(difference) => Some(difference.to_string()),
            None => PromptForms::ALL.without(forms).iter().next().map(refused),
        };
        match doubt {
            Some(doubt) if !forms.has(PromptForm::Texts) && !forms.has(PromptForm::Chats) => Err(doubt),
            doubt if self.compared > 0 => Ok(ProofResult { forms, samples: self.compared, doubt }),
            _ => Err("neither the engine nor the router takes any of the samples".to_owned()),
        }
    }
}

impl fmt::Display for DifferenceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let or_end = |token: &Option<u32>| token.map_or_else(|| "the end".to_owned(), |token| token.to_string());
        match self {
            Self::NoRequest => f.write_str("not a request for tokens"),
            Self::NoAnswer { status } => write!(f, "the engine's answer {status} has no tokens"),
            Self::OnlyEngineEncodes { reason } => write!(f, "the engine has tokens where the router has none ({reason})"),
            Self::Token { position, encoder, engine } => {
                write!(f, "token {position} is {} for the router, {} for the engine", or_end(encoder), or_end(engine))
            }
        }
    }
}

/// Bodies of `POST /tokenize`, without `model`.
#[must_use]
pub fn samples() -> Vec<Value> {
    let code = "def area(r):\n    if r < 0:\n\t\traise ValueError('r')\n\n    return 3.14159 * r ** 2   # πr²\n";
    // Long enough to be read in several pieces.
    let numbers =
        |from: i32| (from..from + 60).map(|number| format!("Item {number} of the list isn't far from item {}, they say.\n", number + 1));
    let long: String = numbers(1).chain([code.to_owned()]).chain(numbers(100)).collect();
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
        json!({ "prompt": long }),
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
        json!({ "messages": [
            { "role": "system", "content": [{ "type": "text", "text": "You are" }, { "type": "text", "text": "terse." }] },
            { "role": "user", "content": [{ "type": "text", "text": "One" }] },
            { "role": "assistant", "content": [{ "type": "text", "text": "Two" }, { "type": "text", "text": "three" }] },
            user("Four"),
        ] }),
        json!({ "messages": [user("Weather in Zürich?")], "tools": [weather] }),
        json!({ "messages": [
            user("Weather in Zürich?"),
            { "role": "assistant", "content": null, "tool_calls": [call] },
            { "role": "tool", "tool_call_id": "call00001", "content": "{\"celsius\": 21.5, \"sky\": \"klar\"}" },
        ], "tools": [weather] }),
    ]
}

/// Compares the encoder with the answer (status and body) of an engine of this dialect to this body
/// of `POST /tokenize`.
pub fn compare(encoder: &Encoder, dialect: Dialect, body: &[u8], answer: (u16, &[u8])) -> Result<Agreement, Difference> {
    #[derive(Deserialize)]
    struct Answer {
        tokens: Vec<u32>,
    }
    let differ = |what| Err(Difference { sample: shortened(body), what });
    let Some(request) = PromptRequest::parse(Route::Tokenize.path(), body) else { return differ(DifferenceKind::NoRequest) };
    let encoded = encoder.encode_in(dialect, &request);
    let engine = match answer {
        (200, body) => match serde_json::from_slice::<Answer>(body) {
            Ok(answer) => Some(answer.tokens),
            Err(_) => return differ(DifferenceKind::NoAnswer { status: 200 }),
        },
        (400 | 422, _) => None,
        // The Rust front-end answers like this if the chat template refuses.
        (500, _) if encoded.is_err() => None,
        (status, _) => return differ(DifferenceKind::NoAnswer { status }),
    };
    match (encoded, engine) {
        (Err(_), None) => Ok(Agreement::Refusal),
        (Err(error), Some(_)) => differ(DifferenceKind::OnlyEngineEncodes { reason: error.to_string() }),
        (Ok(_), None) => Ok(Agreement::Nothing),
        (Ok(encoded), Some(engine)) => {
            // With media only the tokens before them are known, and the last of these may merge
            // with the following text.
            let known = if encoded.is_whole { encoded.tokens.len().max(engine.len()) } else { encoded.tokens.len().saturating_sub(1) };
            let position = (0..known).find(|position| encoded.tokens.get(*position) != engine.get(*position));
            match position {
                None => Ok(Agreement::Tokens),
                Some(position) => differ(DifferenceKind::Token {
                    position,
                    encoder: encoded.tokens.get(position).copied(),
                    engine: engine.get(position).copied(),
                }),
            }
        }
    }
}

/// Beginning of a body: samples differ there, and a log line must stay short.
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
