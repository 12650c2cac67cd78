//! Translates a request of the Responses API to a chat.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::answer::ResponseFields;
use super::tools::{add_tools, chat_name, custom_arguments};
use crate::edge::translation::{USE_PYTHON, is_wanted};

/// Fields that a chat has too, with its name for each. The engine judges their values.
const SAME_FIELDS: [(&str, &str); 28] = [
    ("model", "model"),
    ("max_output_tokens", "max_tokens"),
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("top_k", "top_k"),
    ("min_p", "min_p"),
    ("presence_penalty", "presence_penalty"),
    ("frequency_penalty", "frequency_penalty"),
    ("repetition_penalty", "repetition_penalty"),
    ("seed", "seed"),
    ("stop", "stop"),
    ("user", "user"),
    ("cache_salt", "cache_salt"),
    ("priority", "priority"),
    ("chat_template_kwargs", "chat_template_kwargs"),
    ("logit_bias", "logit_bias"),
    ("include_reasoning", "include_reasoning"),
    ("skip_special_tokens", "skip_special_tokens"),
    ("include_stop_str_in_output", "include_stop_str_in_output"),
    ("stop_token_ids", "stop_token_ids"),
    ("ignore_eos", "ignore_eos"),
    ("structured_outputs", "structured_outputs"),
    ("media_io_kwargs", "media_io_kwargs"),
    ("mm_processor_kwargs", "mm_processor_kwargs"),
    ("vllm_xargs", "vllm_xargs"),
    ("watermarking", "watermarking"),
    ("request_id", "request_id"),
    ("session_id", "session_id"),
];

/// Fields that need an engine which keeps responses, runs tools itself, or answers with more than a
/// chat.
const ENGINE_FIELDS: [&str; 8] = [
    "previous_response_id",
    "background",
    "conversation",
    "prompt",
    "previous_input_messages",
    "enable_response_messages",
    "kv_transfer_params",
    "ec_transfer_params",
];

/// Fields for features that no engine has, whatever its front-end. A client should know so.
const UNKNOWN_FIELDS: [&str; 2] = ["moderation", "context_management"];

/// Asks for the log probabilities of the answer's text. Other inclusions belong to tools that
/// engines run.
const INCLUDE_LOGPROBS: &str = "message.output_text.logprobs";

/// A message, call, result or thought.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Item {
    Message {
        role: ItemRole,
        content: Value,
    },
    FunctionCall {
        call_id: String,
        name: String,
        arguments: String,
        namespace: Option<String>,
    },
    FunctionCallOutput {
        call_id: String,
        output: Value,
    },
    CustomToolCall {
        call_id: String,
        name: String,
        input: String,
        namespace: Option<String>,
    },
    CustomToolCallOutput {
        call_id: String,
        output: Value,
    },
    /// Its `encrypted_content` is for OpenAI's servers.
    Reasoning {
        #[serde(default)]
        content: Option<Vec<Words>>,
        #[serde(default)]
        summary: Vec<Words>,
    },
    /// Calls that OpenAI's servers have run, and what these have written for themselves: nothing in
    /// them is for a model.
    #[serde(
        alias = "image_generation_call",
        alias = "file_search_call",
        alias = "code_interpreter_call",
        alias = "mcp_list_tools",
        alias = "mcp_call",
        alias = "tool_search_call",
        alias = "tool_search_output",
        alias = "compaction",
        alias = "compaction_summary"
    )]
    WebSearchCall {},
}

#[derive(Debug, Deserialize)]
struct Words {
    text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ItemRole {
    User,
    Assistant,
    System,
    Developer,
}

impl ItemRole {
    fn as_str(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Assistant => "assistant",
            // Few templates know the developer role.
            Self::System | Self::Developer => "system",
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Part {
    #[serde(alias = "output_text")]
    InputText {
        text: String,
    },
    Refusal {
        refusal: String,
    },
    InputImage {
        image_url: String,
        detail: Option<String>,
    },
}

/// Whether a request refers to a response that an engine keeps, or is to keep while nobody waits
/// for it.
pub(in crate::edge) fn needs_kept_responses(body: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct AnyFields<'a>(#[serde(borrow)] BTreeMap<Cow<'a, str>, &'a RawValue>);

    let Ok(AnyFields(fields)) = serde_json::from_slice(body) else { return false };
    let is_empty_list = |value: &str| serde_json::from_str::<[(); 0]>(value).is_ok();
    let is_wanted = |value: &str| !matches!(value, "null" | "false") && !is_empty_list(value);
    ENGINE_FIELDS.iter().any(|name| fields.get(*name).is_some_and(|value| is_wanted(value.get())))
        || fields.get("store").is_some_and(|store| store.get() == "true")
}

/// The first of these fields that a request asks for.
fn wanted<'a>(fields: &Map<String, Value>, names: &[&'a str]) -> Option<&'a str> {
    names.iter().copied().find(|name| fields.get(*name).is_some_and(is_wanted))
}

/// The body of a chat for a body of `/v1/responses`, the fields that its answer repeats, and
/// whether it streams.
///
/// # Errors
/// If the body is no such request, or asks for something that a chat cannot do; in words for the
/// client.
pub(in crate::edge) fn chat_request(body: &[u8]) -> Result<(Value, ResponseFields, bool), String> {
    let mut fields: Map<String, Value> =
        serde_json::from_slice(body).map_err(|error| format!("the body is no request of the Responses API: {error}"))?;
    check_fields(&fields)?;
    let mut repeated = ResponseFields::new(&fields)?;
    let mut chat = Map::new();
    for (name, chats) in SAME_FIELDS {
        if let Some(value) = fields.get(name).filter(|value| !value.is_null()) {
            chat.insert(chats.to_owned(), value.clone());
        }
    }
    let mut messages = Vec::new();
    if let Some(instructions) = fields.get("instructions").filter(|instructions| !instructions.is_null()) {
        messages.push(json!({"role": "system", "content": instructions}));
    }
    match fields.remove("input") {
        Some(Value::String(text)) => messages.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) => {
            if items.last().is_some_and(is_partial) {
                chat.insert("add_generation_prompt".to_owned(), false.into());
                chat.insert("continue_final_message".to_owned(), true.into());
            }
            items.into_iter().try_for_each(|item| add_item(item, &mut messages))?;
        }
        _ => return Err("input is needed, as a text or a list of items".to_owned()),
    }
    chat.insert("messages".to_owned(), messages.into());
    repeated.tools = add_tools(&fields, &mut chat)?;
    add_logprobs(&fields, &mut chat);
    if let Some(format) = fields.get("text").and_then(|text| text.get("format")).filter(|format| !format.is_null()) {
        add_format(format, &mut chat)?;
    }
    if let Some(effort) = fields.get("reasoning").and_then(|reasoning| reasoning.get("effort")).filter(|effort| !effort.is_null()) {
        chat.insert("reasoning_effort".to_owned(), effort.clone());
    }
    // Keep as much of the prompt's end as fits.
    if fields.get("truncation").is_some_and(|truncation| truncation == "auto") {
        chat.insert("truncate_prompt_tokens".to_owned(), (-1).into());
    }
    let streams = fields.get("stream") == Some(&Value::Bool(true));
    if streams {
        chat.insert("stream".to_owned(), true.into());
        chat.insert("stream_options".to_owned(), json!({"include_usage": true}));
    }
    Ok((chat.into(), repeated, streams))
}

/// Refuses fields that a chat would lose: unsupported ones, and those in an unreadable form.
fn check_fields(fields: &Map<String, Value>) -> Result<(), String> {
    if let Some(field) = wanted(fields, &ENGINE_FIELDS) {
        return Err(format!("the engines of this model have a front-end that does not do `{field}`: {USE_PYTHON}"));
    }
    if let Some(field) = wanted(fields, &UNKNOWN_FIELDS) {
        return Err(format!("no engine does `{field}`: leave it out"));
    }
    type Form = (&'static str, &'static str, fn(&Value) -> bool);
    let forms: [Form; 7] = [
        ("instructions", "a text", Value::is_string),
        ("stream", "true or false", Value::is_boolean),
        ("include", "a list", Value::is_array),
        ("tools", "a list", Value::is_array),
        ("text", "an object", Value::is_object),
        ("reasoning", "an object", Value::is_object),
        ("truncation", "`auto` or `disabled`", |value| value == "auto" || value == "disabled"),
    ];
    match forms.iter().find(|(name, _, fits)| fields.get(*name).is_some_and(|value| !value.is_null() && !fits(value))) {
        Some((name, form, _)) => Err(format!("{name} is {form}")),
        None => Ok(()),
    }
}

/// Asks for log probabilities. Engines count alternatives only together with them.
fn add_logprobs(fields: &Map<String, Value>, chat: &mut Map<String, Value>) {
    let included = fields.get("include").and_then(Value::as_array);
    if included.is_some_and(|included| included.iter().any(|what| what == INCLUDE_LOGPROBS)) {
        chat.insert("logprobs".to_owned(), true.into());
        if let Some(count) = fields.get("top_logprobs").filter(|count| !count.is_null()) {
            chat.insert("top_logprobs".to_owned(), count.clone());
        }
    }
}

/// Whether the model must continue the text or reasoning of this item.
fn is_partial(item: &Value) -> bool {
    let kind = item.get("type").and_then(Value::as_str).unwrap_or("message");
    let status = item.get("status").and_then(Value::as_str);
    matches!(kind, "message" | "reasoning") && matches!(status, Some("in_progress" | "incomplete"))
}

fn add_format(format: &Value, chat: &mut Map<String, Value>) -> Result<(), String> {
    let format = match format["type"].as_str() {
        Some("text") => return Ok(()),
        Some("json_object") => json!({"type": "json_object"}),
        Some("json_schema") => {
            let mut schema = json!({"name": format["name"], "schema": format["schema"]});
            if format["strict"].is_boolean() {
                schema["strict"] = format["strict"].clone();
            }
            json!({"type": "json_schema", "json_schema": schema})
        }
        _ => return Err("text.format.type is text, json_object or json_schema".to_owned()),
    };
    chat.insert("response_format".to_owned(), format);
    Ok(())
}

/// Adds an item to the messages. A model's reasoning, text and calls in one turn are one message.
fn add_item(mut item: Value, messages: &mut Vec<Value>) -> Result<(), String> {
    if let Value::Object(fields) = &mut item {
        fields.entry("type").or_insert_with(|| "message".into());
    }
    let item = Item::deserialize(item).map_err(|error| format!("an item of the input cannot be understood: {error}"))?;
    match item {
        Item::Message { role: ItemRole::Assistant, content } => {
            let content = message_content(content)?;
            let turn = turn_without(messages, &["content", "tool_calls"]);
            turn["content"] = content;
        }
        Item::Message { role, content } => messages.push(json!({"role": role.as_str(), "content": message_content(content)?})),
        Item::Reasoning { content, summary } => {
            let words = content.filter(|content| !content.is_empty()).unwrap_or(summary);
            let reasoning: String = words.into_iter().map(|words| words.text).collect();
            if !reasoning.is_empty() {
                turn_without(messages, &["reasoning", "content", "tool_calls"])["reasoning"] = reasoning.into();
            }
        }
        Item::FunctionCall { call_id, name, arguments, namespace } => {
            add_call(&call_id, &chat_name(namespace.as_deref(), &name), &arguments, messages);
        }
        Item::CustomToolCall { call_id, name, input, namespace } => {
            add_call(&call_id, &chat_name(namespace.as_deref(), &name), &custom_arguments(&input), messages);
        }
        Item::FunctionCallOutput { call_id, output } | Item::CustomToolCallOutput { call_id, output } => {
            messages.push(json!({"role": "tool", "tool_call_id": call_id, "content": message_content(output)?}));
        }
        Item::WebSearchCall {} => {}
    }
    Ok(())
}

fn add_call(call_id: &str, name: &str, arguments: &str, messages: &mut Vec<Value>) {
    let call = json!({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}});
    match &mut turn_without(messages, &[])["tool_calls"] {
        Value::Array(calls) => calls.push(call),
        none => *none = json!([call]),
    }
}

/// The model's turn at the end of the messages, or a new one if that turn has one of these fields.
fn turn_without<'a>(messages: &'a mut Vec<Value>, fields: &[&str]) -> &'a mut Value {
    let goes_on = |turn: &Value| turn["role"] == "assistant" && fields.iter().all(|field| turn.get(field).is_none());
    if !messages.last().is_some_and(goes_on) {
        messages.push(json!({"role": "assistant"}));
    }
    messages.last_mut().expect("one was just added")
}

/// A chat's content. A single text is not wrapped in a list.
fn message_content(content: Value) -> Result<Value, String> {
    let Value::Array(parts) = content else {
        return if content.is_string() { Ok(content) } else { Err("a content is a text or a list of parts".to_owned()) };
    };
    let part = |part| {
        let part = Part::deserialize(part).map_err(|error| format!("a part of a content cannot be understood: {error}"))?;
        Ok(match part {
            Part::InputText { text } | Part::Refusal { refusal: text } => json!({"type": "text", "text": text}),
            Part::InputImage { image_url, detail } => {
                let mut image = json!({"url": image_url});
                if let Some(detail) = detail {
                    image["detail"] = detail.into();
                }
                json!({"type": "image_url", "image_url": image})
            }
        })
    };
    let mut parts = parts.into_iter().map(part).collect::<Result<Vec<Value>, String>>()?;
    Ok(match &mut parts[..] {
        [] => "".into(),
        [only] if only["type"] == "text" => only["text"].take(),
        _ => parts.into(),
    })
}
