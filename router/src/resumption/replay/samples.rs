//! Test streams that an engine can repeat with other token groups and ids, and a client's view of
//! them.

use hostler_api::Route;
use hostler_prompt::Dialect;
use serde_json::{Value, json};

use super::super::SEAM;
use super::super::memory::RecordMemory;
use super::plan::ReplayApi;
use super::record::ReplayRecord;
use super::transcript::Difference;

use Piece::{Arguments, Call, Content, Nothing, Reasoning};

/// A token's addition to an answer.
#[derive(Debug, Clone, Copy)]
enum Piece {
    Nothing,
    Reasoning(&'static str),
    Content(&'static str),
    Call(&'static str),
    Arguments(&'static str),
}

/// A chat that thinks, says something and calls two tools.
const CHAT: [(&str, Piece); 18] = [
    ("<think>", Nothing),
    ("Let", Reasoning("Let")),
    (" me", Reasoning(" me \n")),
    ("</think>", Nothing),
    ("Hé", Content("Hé")),
    ("f0 9f", Nothing),
    ("a6 80", Content("\u{1f980}")),
    (" q", Content(" \"q\\uo")),
    ("te", Content("te\" ")),
    ("<tool>", Nothing),
    ("get", Call("get_weather")),
    ("{", Arguments("{\"city\": ")),
    ("Z", Arguments("\"Zürich\"")),
    ("}", Arguments("}")),
    ("find", Call("find")),
    ("{", Arguments("{")),
    ("}", Arguments("}")),
    ("<end>", Nothing),
];

/// A text as grammars, stop strings and penalties shape it.
const TEXT: [(&str, Piece); 7] = [
    ("{", Content("{\"a\"")),
    ("f0 9f", Nothing),
    ("a6 80", Content(": \"\u{1f980}")),
    (" x", Content(" x")),
    (" y", Content(" y\\n")),
    ("}", Content("\"}")),
    ("<end>", Nothing),
];

/// How an engine splits an answer into events.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grouping {
    /// Distinguishes this engine's ids from others'.
    pub(crate) name: usize,
    /// Tokens per event.
    pub(crate) group: usize,
    pub(crate) front_end: Dialect,
}

/// The events with which an engine answers.
pub(crate) fn replayed_answer(path: &str, body: &[u8], grouping: Grouping) -> Vec<String> {
    let body: Value = serde_json::from_slice(body).unwrap();
    let tokens = if body["tools"].is_array() { &CHAT[..] } else { &TEXT[..] };
    match path {
        "/v1/messages" => message(tokens, grouping),
        path => choices(path == "/v1/completions", &body, tokens, grouping),
    }
}

fn choices(is_completion: bool, body: &Value, tokens: &[(&str, Piece)], Grouping { name, group, front_end }: Grouping) -> Vec<String> {
    let event = |choices: Value, usage: Option<Value>| {
        let mut event = json!({"id": format!("chatcmpl-{name}"), "object": "chunk", "created": name, "model": "m", "choices": choices});
        usage.inspect(|usage| event["usage"] = usage.clone());
        format!("data: {event}\n\n")
    };
    let count = body["n"].as_u64().unwrap_or(1);
    let mut events = Vec::new();
    if !is_completion {
        let delta = if front_end == Dialect::Rust { json!({"role": "assistant"}) } else { json!({"role": "assistant", "content": ""}) };
        let role = |index| json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
        events.extend((0..count).flat_map(|index| written(front_end, role(index))).map(|choice| event(json!([choice]), None)));
    }
    for (at, tokens_of_event) in tokens.chunks(group).enumerate() {
        let is_last = (at + 1) * group >= tokens.len();
        for index in 0..count {
            let delta = delta(tokens, at * group, tokens_of_event, name);
            let logprobs = logprobs(is_completion, body, tokens_of_event, at * group);
            if delta.as_object().unwrap().is_empty() && logprobs.is_null() && !is_last && !is_completion {
                continue;
            }
            let finish = if is_last { json!("stop") } else { Value::Null };
            let choice = if is_completion {
                let text = delta["content"].as_str().unwrap_or("");
                json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, "stop_reason": null, "prompt_token_ids": null, "token_ids": null})
            } else {
                json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish, "token_ids": null})
            };
            events.extend(written(front_end, choice).into_iter().map(|choice| event(json!([choice]), None)));
        }
    }
    if body["stream_options"]["include_usage"] == true {
        events
            .push(event(json!([]), Some(json!({"prompt_tokens": 2, "total_tokens": 2 + tokens.len(), "completion_tokens": tokens.len()}))));
    }
    events.push("data: [DONE]\n\n".into());
    events
}

/// Converts a choice of the Python front-end's events to those of a front-end. The Rust one leaves
/// out `null` fields and ends a choice in a separate event.
fn written(front_end: Dialect, mut choice: Value) -> Vec<Value> {
    if front_end == Dialect::Python {
        return vec![choice];
    }
    let (index, finish) = (choice["index"].clone(), choice["finish_reason"].take());
    let last = if choice["delta"].is_object() {
        json!({"index": index, "delta": {}, "finish_reason": finish})
    } else {
        json!({"index": index, "text": "", "finish_reason": finish})
    };
    choice.as_object_mut().unwrap().retain(|_, value| !value.is_null());
    if finish.is_null() { vec![choice] } else { vec![choice, last] }
}

/// The addition of some tokens to a chat; `before` counts the earlier ones.
fn delta(tokens: &[(&str, Piece)], before: usize, pieces: &[(&str, Piece)], name: usize) -> Value {
    let mut delta = json!({});
    let add = |field: &mut Value, text: &str| *field = format!("{}{text}", field.as_str().unwrap_or_default()).into();
    let mut call = tokens[..before].iter().filter(|(_, piece)| matches!(piece, Call(_))).count();
    for (_, piece) in pieces {
        match piece {
            Nothing => {}
            Reasoning(text) => add(&mut delta["reasoning"], text),
            Content(text) => add(&mut delta["content"], text),
            Call(function) => {
                call += 1;
                let head =
                    json!({"id": format!("call-{name}-{call}"), "type": "function", "index": call - 1, "function": {"name": function}});
                push_call(&mut delta, head);
            }
            Arguments(text) => {
                let calls = delta["tool_calls"].as_array_mut();
                match calls.and_then(|calls| calls.last_mut()).filter(|last| last["index"] == call - 1) {
                    Some(last) => add(&mut last["function"]["arguments"], text),
                    None => push_call(&mut delta, json!({"index": call - 1, "function": {"arguments": text}})),
                }
            }
        }
    }
    delta.as_object_mut().unwrap().retain(|_, value| !value.is_null());
    delta
}

fn push_call(delta: &mut Value, call: Value) {
    match delta["tool_calls"].as_array_mut() {
        Some(calls) => calls.push(call),
        None => delta["tool_calls"] = json!([call]),
    }
}

/// Log probabilities. The numbers differ slightly from group to group, as they do between engines.
fn logprobs(is_completion: bool, body: &Value, pieces: &[(&str, Piece)], before: usize) -> Value {
    if body["logprobs"].is_null() {
        return Value::Null;
    }
    let number = -0.5 - f64::from(u32::try_from(pieces.len()).unwrap()) / 1e6;
    let names: Vec<&str> = pieces.iter().map(|(token, _)| *token).collect();
    if is_completion {
        let offsets: Vec<usize> = (before..before + pieces.len()).collect();
        let numbers = vec![number; pieces.len()];
        return json!({"text_offset": offsets, "token_logprobs": numbers, "tokens": names, "top_logprobs": vec![Value::Null; pieces.len()]});
    }
    let entries: Vec<Value> =
        names.iter().map(|token| json!({"token": token, "logprob": number, "bytes": [], "top_logprobs": []})).collect();
    json!({ "content": entries })
}

fn message(tokens: &[(&str, Piece)], Grouping { name, group, .. }: Grouping) -> Vec<String> {
    let event = |data: Value| format!("event: {}\ndata: {data}\n\n", data["type"].as_str().unwrap());
    let usage = json!({"input_tokens": 2, "output_tokens": 0});
    let start =
        json!({"id": format!("chatcmpl-{name}"), "type": "message", "role": "assistant", "content": [], "model": "m", "usage": usage});
    let mut events = vec![event(json!({"type": "message_start", "message": start}))];
    let (mut open, mut index) = ("", 0);
    let stop = |events: &mut Vec<String>, open: &str, index: &mut u32| {
        if open == "thinking" {
            let signature = json!({"type": "signature_delta", "signature": format!("sign-{name}")});
            events.push(event(json!({"type": "content_block_delta", "index": index, "delta": signature})));
        }
        if !open.is_empty() {
            events.push(event(json!({"type": "content_block_stop", "index": index})));
            *index += 1;
        }
    };
    for chunk in tokens.chunks(group) {
        let mut texts: Vec<(&str, String)> = Vec::new();
        for (_, piece) in chunk {
            let (kind, text) = match piece {
                Nothing => continue,
                Reasoning(text) => ("thinking", *text),
                Content(text) => ("text", *text),
                Call(function) => ("call", *function),
                Arguments(text) => ("tool_use", *text),
            };
            match texts.last_mut().filter(|(last, _)| *last == kind && kind != "call") {
                Some((_, before)) => before.push_str(text),
                None => texts.push((kind, text.to_owned())),
            }
        }
        for (kind, text) in texts {
            let block = match kind {
                "call" => Some(json!({"type": "tool_use", "id": format!("call-{name}-{index}"), "name": text, "input": {}})),
                kind if kind != open => Some(json!({"type": kind, kind: ""})),
                _ => None,
            };
            if let Some(block) = block {
                stop(&mut events, open, &mut index);
                open = if kind == "call" { "tool_use" } else { kind };
                events.push(event(json!({"type": "content_block_start", "index": index, "content_block": block})));
            }
            let delta = match kind {
                "call" => continue,
                "tool_use" => json!({"type": "input_json_delta", "partial_json": text}),
                kind => json!({"type": format!("{kind}_delta"), kind: text}),
            };
            events.push(event(json!({"type": "content_block_delta", "index": index, "delta": delta})));
        }
    }
    stop(&mut events, open, &mut index);
    let usage = json!({"input_tokens": 2, "output_tokens": tokens.len()});
    events.push(event(json!({"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": null}, "usage": usage})));
    events.push(event(json!({"type": "message_stop"})));
    events
}

/// How many events an answer has in groups of so many tokens.
pub(crate) fn event_count(front_end: Dialect, path: &str, body: &str, group: usize) -> usize {
    replayed_answer(path, body.as_bytes(), Grouping { name: 0, group, front_end }).len()
}

/// The client's stream from engines with these token groups. Each engine but the last dies after so
/// many events.
pub(crate) fn resumed_stream(front_end: Dialect, path: &str, body: &str, engines: &[(usize, usize)]) -> Result<String, Difference> {
    let mut record = ReplayRecord::new(ReplayApi::for_route(Route::of(path)).unwrap(), &RecordMemory::default());
    let mut stream = String::new();
    for (name, (group, cut)) in engines.iter().enumerate() {
        let is_last = name + 1 == engines.len();
        let events = replayed_answer(path, body.as_bytes(), Grouping { name, group: *group, front_end });
        for event in events.iter().take(if is_last { usize::MAX } else { *cut }) {
            if record.is_replaying() {
                // Split events in halves: pieces end anywhere.
                let (one, other) = event.as_bytes().split_at(event.len() / 2);
                for half in [one, other] {
                    stream.push_str(std::str::from_utf8(&record.retell(half)?).unwrap());
                }
            } else {
                if !record.observe_common(event.as_bytes()) {
                    record.observe(event.as_bytes());
                }
                stream.push_str(event);
            }
        }
        if !is_last {
            assert!(record.is_known());
            record.rewind();
            stream.push_str(std::str::from_utf8(&SEAM).unwrap());
        }
    }
    assert!(record.is_told());
    Ok(stream)
}

/// A client's view of a stream: a list of its values, with successive texts joined.
pub(crate) fn understood(stream: &str) -> Vec<(String, Value)> {
    let mut list: Vec<(String, Value)> = Vec::new();
    let events = stream.split("\n\n").filter_map(|event| event.rsplit_once("data: ").map(|(_, data)| data));
    for data in events.filter(|data| *data != "[DONE]") {
        let event: Value = serde_json::from_str(data).unwrap_or_else(|error| panic!("{error}: {data}"));
        flatten("", &event, &mut list);
    }
    if stream.ends_with("data: [DONE]\n\n") {
        list.push(("done".into(), Value::Null));
    }
    // Choices and log probabilities may interleave in any way.
    list.sort_by(|(one, _), (other, _)| one.cmp(other));
    let mut understood: Vec<(String, Value)> = Vec::new();
    for (name, value) in list {
        match (understood.last_mut(), &value) {
            (Some((last, Value::String(text))), Value::String(more)) if *last == name && name.contains('+') => text.push_str(more),
            (Some((last, before)), value) if *last == name && before == value && !name.contains('+') => {}
            _ => understood.push((name, value)),
        }
    }
    understood
}

/// Flattens JSON into named values. A plus marks names with a text.
fn flatten(path: &str, value: &Value, list: &mut Vec<(String, Value)>) {
    const TEXTS: [&str; 8] = ["content", "reasoning", "text", "arguments", "thinking", "partial_json", "name", "role"];
    match value {
        Value::Object(fields) => {
            let index = fields.get("index").map_or(String::new(), |index| format!("[{index}]"));
            for (name, value) in fields {
                let mark = if TEXTS.contains(&&**name) && value.is_string() { "+" } else { "" };
                let number = ["logprob", "token_logprobs"].contains(&&**name);
                if !(number || name == "index" || value.is_null() || value == "") {
                    flatten(&format!("{path}{index}.{name}{mark}"), value, list);
                }
            }
        }
        Value::Array(values) if path.ends_with("tokens") || path.ends_with("text_offset") => {
            values.iter().for_each(|value| list.push((format!("{path}+"), value.to_string().into())));
        }
        Value::Array(values) => values.iter().for_each(|value| flatten(path, value, list)),
        Value::String(token) if path.ends_with(".token") => list.push((format!("{path}+"), token.as_str().into())),
        // The client has not seen these ids before, so they are those of the engine that sends
        // them.
        Value::String(id) if id.starts_with("call-") || id.starts_with("sign-") => list.push((path.to_owned(), id[..5].into())),
        value => list.push((path.to_owned(), value.clone())),
    }
}
