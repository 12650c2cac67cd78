//! Streams as vLLM 0.32 writes them, for tests: a model whose answer is a list of texts, a token each. Its prompts have two tokens.

use serde_json::Value;

/// How the events of its chats begin.
pub(crate) const HEAD: &str =
    r#"data: {"id":"chatcmpl-r1","object":"chat.completion.chunk","created":1795466098,"model":"tiny","choices":["#;

const FINGERPRINT: &str = r#","system_fingerprint":"vllm-0.32.0-0ffacd72""#;

/// Tokens of every prompt.
const PROMPT_TOKENS: usize = 2;

/// The token of the first text.
const FIRST_TOKEN: usize = 10;

/// The first event of a chat; tokens are a list, or `null`.
pub(crate) fn role(prompt: &str) -> String {
    let choice = r#"{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}"#;
    format!("{HEAD}{choice}],\"prompt_token_ids\":{prompt},\"prompt_text\":null}}\n\n")
}

pub(crate) fn content(text: &str, ids: &str) -> String {
    let choice = format!(r#"{{"index":0,"delta":{{"content":"{text}"}},"logprobs":null,"finish_reason":null,"token_ids":{ids}}}"#);
    format!("{HEAD}{choice}]}}\n\n")
}

pub(crate) fn finish(text: &str, ids: &str, reason: &str) -> String {
    format!("{HEAD}{}]{FINGERPRINT}}}\n\n", last_choice(text, ids, reason))
}

fn last_choice(text: &str, ids: &str, reason: &str) -> String {
    format!(
        r#"{{"index":0,"delta":{{"content":"{text}"}},"logprobs":null,"finish_reason":"{reason}","stop_reason":null,"token_ids":{ids}}}"#
    )
}

/// An event of a completion that is called `id`.
pub(crate) fn text(id: &str, text: &str, prompt: &str, ids: &str, reason: &str) -> String {
    let head = format!(r#"data: {{"id":"{id}","object":"text_completion","created":1795466108,"model":"tiny","choices":["#);
    format!(
        "{head}{{\"index\":0,\"text\":\"{text}\",\"logprobs\":null,\"finish_reason\":{reason},\"stop_reason\":null,\"prompt_token_ids\":{prompt},\"token_ids\":{ids}}}]}}\n\n"
    )
}

/// The events with which the model answers a request, whose tokens say where it goes on.
pub(crate) fn answer(path: &str, body: &[u8], id: &str, texts: &[&str]) -> Vec<String> {
    let body: Value = serde_json::from_slice(body).unwrap();
    let (asks, wants_usage) = (body["return_token_ids"] == true, body["stream_options"]["include_usage"] == true);
    let prompt: Vec<u64> = body["prompt"].as_array().map_or(vec![1, 2], |ids| ids.iter().map(|id| id.as_u64().unwrap()).collect());
    let from = prompt.len() - PROMPT_TOKENS;
    let room = body["max_tokens"].as_u64().map_or(usize::MAX, |most| usize::try_from(most).unwrap());
    let end = texts.len().min(from.saturating_add(room));
    let reason = if end < texts.len() { "length" } else { "stop" };
    let list = |ids: String| if asks { format!("[{ids}]") } else { "null".into() };
    let prompt_list = list(prompt.iter().map(u64::to_string).collect::<Vec<_>>().join(","));
    let is_chat = path == "/v1/chat/completions";
    let mut events = if is_chat { vec![role(&prompt_list)] } else { Vec::new() };
    for at in from..end {
        let (piece, ids, is_last) = (texts[at], list((FIRST_TOKEN + at).to_string()), at + 1 == end);
        let first_prompt = if at == from { prompt_list.as_str() } else { "null" };
        let event = match (is_chat, is_last) {
            (true, false) => content(piece, &ids),
            (true, true) => format!("{HEAD}{}]}}\n\n", last_choice(piece, &ids, reason)),
            (false, false) => text(id, piece, first_prompt, &ids, "null"),
            (false, true) => text(id, piece, first_prompt, &ids, &format!("\"{reason}\"")),
        };
        events.push(if is_last && !wants_usage { event.replace("}]}\n\n", &format!("}}]{FINGERPRINT}}}\n\n")) } else { event });
    }
    if wants_usage {
        let head = if is_chat { HEAD.to_owned() } else { text(id, "", "", "", "").split_once("[{").unwrap().0.to_owned() + "[" };
        let (prompt, completion) = (prompt.len(), end - from);
        let total = prompt + completion;
        let usage = format!(r#"{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{completion}}}"#);
        events.push(format!("{head}],\"usage\":{usage}{FINGERPRINT}}}\n\n"));
    }
    events.push("data: [DONE]\n\n".into());
    events
}
