//! Compares an event's log probabilities by their tokens, because the numbers differ slightly from
//! engine to engine.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::event::{Telling, Text, json};
use super::transcript::Difference;

const TOKEN: u8 = 8;

/// The log probabilities of a chat.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct ChatLogprobs<'a> {
    #[serde(borrow)]
    content: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
struct TokenName<'a> {
    #[serde(borrow)]
    token: Text<'a>,
}

/// The log probabilities of a completion: a list for each field.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct TextLogprobs<'a> {
    #[serde(borrow)]
    text_offset: Vec<&'a RawValue>,
    #[serde(borrow)]
    token_logprobs: Vec<&'a RawValue>,
    #[serde(borrow)]
    tokens: Vec<Text<'a>>,
    #[serde(borrow)]
    top_logprobs: Vec<&'a RawValue>,
}

/// Compares log probabilities. Returns the new part, unless all is new.
pub(super) fn tell_logprobs(raw: &RawValue, telling: &mut Telling<'_>) -> Result<Option<String>, Difference> {
    if let Ok(ChatLogprobs { mut content }) = serde_json::from_str(raw.get()) {
        let mut known = 0;
        for entry in &content {
            let TokenName { token } = serde_json::from_str(entry.get()).map_err(|_| Difference)?;
            known += usize::from(telling.mark(TOKEN, &[&token.0])?);
        }
        content.drain(..known);
        let rest = || if content.is_empty() { "null".into() } else { json(&ChatLogprobs { content }) };
        return Ok((known > 0).then(rest));
    }
    let mut lists: TextLogprobs<'_> = serde_json::from_str(raw.get()).map_err(|_| Difference)?;
    let count = lists.tokens.len();
    if [lists.text_offset.len(), lists.token_logprobs.len(), lists.top_logprobs.len()] != [count; 3] {
        return Err(Difference);
    }
    let mut known = 0;
    for Text(token) in &lists.tokens {
        known += usize::from(telling.mark(TOKEN, &[token])?);
    }
    lists.tokens.drain(..known);
    for list in [&mut lists.text_offset, &mut lists.token_logprobs, &mut lists.top_logprobs] {
        list.drain(..known);
    }
    let rest = || if known == count { "null".into() } else { json(&lists) };
    Ok((known > 0).then(rest))
}
