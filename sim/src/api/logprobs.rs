//! Log probabilities of generated tokens. The numbers are made up but equal for equal tokens.

use std::io::Write;

use super::errors::json_string;
use crate::tokens::{decode, log_probabilities};

pub(crate) fn push_chat_logprobs(tokens: &[u32], alternatives: Option<usize>, json: &mut Vec<u8>) {
    let Some(alternatives) = alternatives else {
        json.extend_from_slice(b"null");
        return;
    };
    json.extend_from_slice(br#"{"content":["#);
    for (position, token) in tokens.iter().enumerate() {
        if position > 0 {
            json.push(b',');
        }
        let ranked = log_probabilities(*token, alternatives);
        json.push(b'{');
        push_chat_entry(ranked[0], json);
        json.extend_from_slice(br#","top_logprobs":["#);
        for (rank, entry) in ranked.iter().take(alternatives).enumerate() {
            json.extend_from_slice(if rank > 0 { b",{" } else { b"{" });
            push_chat_entry(*entry, json);
            json.push(b'}');
        }
        json.extend_from_slice(b"]}");
    }
    json.extend_from_slice(b"]}");
}

fn push_chat_entry((token, probability): (u32, f64), json: &mut Vec<u8>) {
    let text = decode(&[token]);
    let bytes = serde_json::to_string(text.as_bytes()).expect("numbers are always valid JSON");
    let _ = write!(json, r#""token":{},"logprob":{probability:?},"bytes":{bytes}"#, json_string(&text));
}

/// Appends the `logprobs` of a text choice, or `null`.
///
/// `offset` is the length of the choice's earlier text, in characters. The first token of a prompt
/// has no probability.
pub(crate) fn push_text_logprobs(tokens: &[u32], alternatives: Option<usize>, (offset, is_prompt): (usize, bool), json: &mut Vec<u8>) {
    let Some(alternatives) = alternatives else {
        json.extend_from_slice(b"null");
        return;
    };
    let (mut offset, mut offsets) = (offset, Vec::new());
    let (mut probabilities, mut texts, mut tops) = (Vec::new(), Vec::new(), Vec::new());
    for (place, token) in tokens.iter().enumerate() {
        let is_known = place > 0 || !is_prompt;
        let text = decode(&[*token]);
        let ranked = log_probabilities(*token, alternatives);
        offsets.push(offset);
        offset += text.chars().count();
        probabilities.push(is_known.then_some(ranked[0].1));
        let top = ranked.iter().take(alternatives.max(1));
        let top = top.map(|(token, probability)| (decode(&[*token]), (*probability).into()));
        tops.push(is_known.then(|| top.collect::<serde_json::Map<_, _>>()));
        texts.push(text);
    }
    let list = |values: serde_json::Result<String>| values.expect("plain values are always valid JSON");
    let _ = write!(
        json,
        r#"{{"text_offset":{},"token_logprobs":{},"tokens":{},"top_logprobs":{}}}"#,
        list(serde_json::to_string(&offsets)),
        list(serde_json::to_string(&probabilities)),
        list(serde_json::to_string(&texts)),
        list(serde_json::to_string(&tops)),
    );
}

/// The `prompt_logprobs` of a prompt that is shown, by token id.
pub(crate) fn prompt_logprobs(tokens: &[u32], alternatives: usize) -> serde_json::Value {
    let known = tokens.iter().skip(1).map(|token| {
        let ranked = log_probabilities(*token, alternatives).into_iter().enumerate().take(alternatives.max(1));
        let entry = |(rank, (token, logprob)): (usize, (u32, f64))| {
            (token.to_string(), serde_json::json!({"logprob": logprob, "rank": rank + 1, "decoded_token": decode(&[token])}))
        };
        serde_json::Value::Object(ranked.map(entry).collect())
    });
    std::iter::once(serde_json::Value::Null).chain(known).collect()
}
