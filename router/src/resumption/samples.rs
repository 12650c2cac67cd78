//! Test streams as the front-ends of vLLM 0.32 write them. The model's answer is a list of texts,
//! one per token, and its prompts have two tokens.

use hostler_prompt::Dialect;
use serde_json::Value;

/// How the events of a chat begin.
pub(crate) const HEAD: &str =
    r#"data: {"id":"chatcmpl-r1","object":"chat.completion.chunk","created":1795466098,"model":"tiny","choices":["#;

const FINGERPRINT: &str = r#","system_fingerprint":"vllm-0.32.0-0ffacd72""#;

/// Tokens of every prompt.
const PROMPT_TOKENS: usize = 2;

/// The token of the first text.
const FIRST_TOKEN: usize = 10;

/// The first event of a chat. Tokens are a list or `null`.
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

/// An event of a completion with this `id`.
pub(crate) fn text(id: &str, text: &str, prompt: &str, ids: &str, reason: &str) -> String {
    let head = format!(r#"data: {{"id":"{id}","object":"text_completion","created":1795466108,"model":"tiny","choices":["#);
    format!(
        "{head}{{\"index\":0,\"text\":\"{text}\",\"logprobs\":null,\"finish_reason\":{reason},\"stop_reason\":null,\"prompt_token_ids\":{prompt},\"token_ids\":{ids}}}]}}\n\n"
    )
}

/// A request, and the part of the texts that answers it.
struct SampleRequest {
    is_chat: bool,
    asks: bool,
    wants_usage: bool,
    prompt: Vec<u64>,
    /// Index of the first text of this answer.
    from: usize,
    end: usize,
    reason: &'static str,
}

impl SampleRequest {
    fn parse(path: &str, body: &[u8], texts: usize) -> Self {
        let body: Value = serde_json::from_slice(body).unwrap();
        let prompt: Vec<u64> = body["prompt"].as_array().map_or(vec![1, 2], |ids| ids.iter().map(|id| id.as_u64().unwrap()).collect());
        let from = prompt.len() - PROMPT_TOKENS;
        let room = body["max_tokens"].as_u64().map_or(usize::MAX, |most| usize::try_from(most).unwrap());
        let end = texts.min(from.saturating_add(room));
        let reason = if end < texts { "length" } else { "stop" };
        let (asks, wants_usage) = (body["return_token_ids"] == true, body["stream_options"]["include_usage"] == true);
        Self { is_chat: path == "/v1/chat/completions", asks, wants_usage, prompt, from, end, reason }
    }

    fn prompt_list(&self) -> String {
        format!("[{}]", self.prompt.iter().map(u64::to_string).collect::<Vec<_>>().join(","))
    }

    /// The head of the events of an answer. A completion has this `id`.
    fn head(&self, id: &str) -> String {
        if self.is_chat { HEAD.to_owned() } else { text(id, "", "", "", "").split_once("[{").unwrap().0.to_owned() + "[" }
    }

    fn usage(&self) -> String {
        let (prompt, completion) = (self.prompt.len(), self.end - self.from);
        let total = prompt + completion;
        format!(r#"{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{completion}"#)
    }
}

/// The events of an answer, starting where the request's tokens end.
pub(crate) fn answer(front_end: Dialect, path: &str, body: &[u8], id: &str, texts: &[&str]) -> Vec<String> {
    let request = SampleRequest::parse(path, body, texts.len());
    let mut events = match front_end {
        Dialect::Python => python_events(&request, id, texts),
        Dialect::Rust => rust_events(&request, id, texts),
    };
    events.push("data: [DONE]\n\n".into());
    events
}

fn python_events(request: &SampleRequest, id: &str, texts: &[&str]) -> Vec<String> {
    let SampleRequest { is_chat, asks, wants_usage, from, end, reason, .. } = *request;
    let or_null = |list: String| if asks { list } else { "null".into() };
    let prompt_list = or_null(request.prompt_list());
    let mut events = if is_chat { vec![role(&prompt_list)] } else { Vec::new() };
    // An answer without further text still has a last event.
    for at in from..end.max(from + 1) {
        let is_last = at + 1 >= end;
        let (piece, ids) = match texts.get(at).filter(|_| at < end) {
            Some(piece) => (*piece, or_null(format!("[{}]", FIRST_TOKEN + at))),
            None => ("", or_null("[]".to_owned())),
        };
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
        events.push(format!("{}],\"usage\":{}}}{FINGERPRINT}}}\n\n", request.head(id), request.usage()));
    }
    events
}

fn rust_events(request: &SampleRequest, id: &str, texts: &[&str]) -> Vec<String> {
    let head = request.head(id);
    let choice = |fields: &str| format!("{head}{{\"index\":0,{fields}}}]}}\n\n");
    let prompt = format!(r#","prompt_token_ids":{}"#, request.prompt_list());
    let mut events = match (request.is_chat, request.asks) {
        (true, asks) => {
            let prompt = if asks { prompt } else { String::new() };
            vec![format!("{head}{{\"index\":0,\"delta\":{{\"role\":\"assistant\"}}}}]{prompt}}}\n\n")]
        }
        (false, true) => vec![choice(&format!(r#""text":"","token_ids":[]{prompt}"#))],
        (false, false) => Vec::new(),
    };
    for (at, piece) in texts.iter().copied().enumerate().take(request.end).skip(request.from) {
        let ids = if request.asks { format!(r#","token_ids":[{}]"#, FIRST_TOKEN + at) } else { String::new() };
        match (request.is_chat, piece) {
            (true, "") if !request.asks => {}
            (true, "") => events.push(choice(&format!(r#""delta":{{}}{ids}"#))),
            (true, _) => events.push(choice(&format!(r#""delta":{{"content":"{piece}"}}{ids}"#))),
            (false, _) => events.push(choice(&format!(r#""text":"{piece}"{ids}"#))),
        }
    }
    let last = if request.is_chat { r#""delta":{}"# } else { r#""text":"""# };
    let no_ids = if request.asks && !request.is_chat { r#","token_ids":[]"# } else { "" };
    events.push(choice(&format!(r#"{last},"finish_reason":"{}"{no_ids}"#, request.reason)));
    if request.wants_usage {
        let details = r#","prompt_tokens_details":null,"completion_tokens_details":{"reasoning_tokens":0}"#;
        events.push(format!("{head}],\"usage\":{}{details}}}}}\n\n", request.usage()));
    }
    events
}
