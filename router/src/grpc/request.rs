//! Converts a typed request to the JSON and headers that engines understand. Absent fields stay
//! absent, so that the engine's own defaults apply.

use std::fmt::Display;

use bytes::Bytes;
use hostler_api::Route;
use hostler_proto::inference::v1 as wire;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use serde::Serialize;
use serde_json::{Map, Value, json};
use tonic::Status;
use wire::content_part::Part;
use wire::generate_request::Prompt;
use wire::response_format::Format;

use super::json::object;
use super::status::invalid_field;

/// Longest id of a conversation or a request that is passed on.
const MAX_NAME_BYTES: usize = 256;

#[derive(Debug)]
pub(super) struct EngineRequest {
    pub(super) path: &'static str,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

/// The body of a request. Token ids stay numbers, because as values they take twenty times the
/// memory.
#[derive(Serialize)]
struct JsonBody {
    #[serde(flatten)]
    fields: Map<String, Value>,
    #[serde(flatten)]
    tokens: Option<TokenField>,
}

/// The field for token ids, named as engines name it.
#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum TokenField {
    Prompt(Vec<u32>),
    Input(Vec<Vec<u32>>),
}

impl TokenField {
    fn is_named(&self, name: &str) -> bool {
        match self {
            Self::Prompt(_) => name == "prompt",
            Self::Input(_) => name == "input",
        }
    }
}

/// Translates a generation request. `streams` says whether the answer is a stream.
pub(super) fn generate_request(request: wire::GenerateRequest, mut headers: HeaderMap, streams: bool) -> Result<EngineRequest, Status> {
    let wire::GenerateRequest { model, prompt, sampling, tools, tool_choice, response_format, .. } = request;
    let prompt = prompt.ok_or_else(|| invalid_field("prompt", "set one of text, chat and tokens"))?;
    let (mut body, mut tokens) = (Map::new(), None);
    put(&mut body, "model", non_empty(model));
    let is_chat = matches!(prompt, Prompt::Chat(_));
    let route = match prompt {
        Prompt::Chat(chat) => {
            put_chat(&mut body, chat)?;
            Route::ChatCompletions
        }
        Prompt::Text(text) => {
            body.insert("prompt".into(), text.into());
            Route::Completions
        }
        Prompt::Tokens(of_prompt) => {
            tokens = Some(TokenField::Prompt(of_prompt.ids));
            Route::Completions
        }
    };
    put_sampling(&mut body, sampling.unwrap_or_default(), is_chat)?;
    if !is_chat && (!tools.is_empty() || tool_choice.is_some()) {
        return Err(invalid_field("tools", "functions can be called in chats only"));
    }
    put(&mut body, "tools", non_empty_list(tools.into_iter().enumerate().map(|(index, of)| tool(index, of)).collect::<Result<_, _>>()?));
    put(&mut body, "tool_choice", tool_choice.and_then(self::tool_choice));
    put_format(&mut body, response_format.and_then(|format| format.format))?;
    put(&mut body, "user", non_empty(request.user));
    put(&mut body, "cache_salt", non_empty(request.cache_salt));
    put(&mut body, "return_token_ids", true_or_none(request.return_token_ids));
    body.insert("stream".into(), streams.into());
    if streams {
        body.insert("stream_options".into(), json!({"include_usage": true}));
    }
    put_name_header(&mut headers, "session", "x-session-id", &request.session)?;
    put_name_header(&mut headers, "request_id", "x-request-id", &request.request_id)?;
    put_priority_header(&mut headers, request.priority);
    build_request(route, headers, (body, tokens), request.extra)
}

pub(super) fn embed_request(request: wire::EmbedRequest, mut headers: HeaderMap) -> Result<EngineRequest, Status> {
    use wire::embed_request::Input;
    let (mut body, mut tokens) = (Map::new(), None);
    put(&mut body, "model", non_empty(request.model));
    match request.input.ok_or_else(|| invalid_field("input", "set one of texts and tokens"))? {
        Input::Texts(texts) => drop(body.insert("input".into(), texts.texts.into())),
        Input::Tokens(of_prompts) => tokens = Some(TokenField::Input(of_prompts.prompts.into_iter().map(|prompt| prompt.ids).collect())),
    }
    body.insert("encoding_format".into(), "float".into());
    put(&mut body, "dimensions", request.dimensions);
    put(&mut body, "user", non_empty(request.user));
    put_name_header(&mut headers, "request_id", "x-request-id", &request.request_id)?;
    put_priority_header(&mut headers, request.priority);
    build_request(Route::Embeddings, headers, (body, tokens), request.extra)
}

/// Builds the request with its caller's extra fields, and headers that fit the new body.
fn build_request(
    route: Route,
    mut headers: HeaderMap,
    (mut body, tokens): (Map<String, Value>, Option<TokenField>),
    extra: Option<prost_types::Struct>,
) -> Result<EngineRequest, Status> {
    for (name, value) in extra.map(object).unwrap_or_default() {
        if body.contains_key(&name) || tokens.as_ref().is_some_and(|tokens| tokens.is_named(&name)) {
            return Err(invalid_field(&format!("extra.{name}"), "this is set by another field of the request"));
        }
        body.insert(name, value);
    }
    let of_grpc = |name: &HeaderName| name.as_str().starts_with("grpc-") || name.as_str().ends_with("-bin");
    let names: Vec<HeaderName> = headers.keys().filter(|name| of_grpc(name)).cloned().collect();
    // The router reads the answer itself, so it must not be compressed.
    for name in names.iter().chain(&[header::TE, header::ACCEPT_ENCODING, header::ACCEPT, header::CONTENT_LENGTH]) {
        headers.remove(name);
    }
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let body = serde_json::to_vec(&JsonBody { fields: body, tokens }).expect("a map with text as its keys is always valid JSON");
    Ok(EngineRequest { path: route.path(), headers, body: body.into() })
}

fn put(body: &mut Map<String, Value>, name: &str, value: Option<impl Into<Value>>) {
    if let Some(value) = value {
        body.insert(name.into(), value.into());
    }
}

/// An empty string means absent.
fn non_empty(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

fn true_or_none(is_set: bool) -> Option<bool> {
    is_set.then_some(true)
}

fn non_empty_list<T>(list: Vec<T>) -> Option<Vec<T>> {
    Some(list).filter(|list| !list.is_empty())
}

fn put_name_header(headers: &mut HeaderMap, field: &str, header: &'static str, name: &str) -> Result<(), Status> {
    if name.is_empty() {
        return Ok(());
    }
    if name.len() > MAX_NAME_BYTES {
        return Err(invalid_field(field, &format!("a name has at most {MAX_NAME_BYTES} bytes")));
    }
    let value = HeaderValue::from_str(name).map_err(|_| invalid_field(field, "a name has no control characters"))?;
    headers.insert(header, value);
    Ok(())
}

/// Sets the priority for the router's own queue. Engines refuse a `priority` unless they schedule
/// by it; a client that wants that sets it in `extra`.
fn put_priority_header(headers: &mut HeaderMap, priority: Option<i32>) {
    if let Some(priority) = priority {
        headers.insert("x-hostler-priority", HeaderValue::from(priority));
    }
}

fn put_chat(body: &mut Map<String, Value>, chat: wire::Chat) -> Result<(), Status> {
    let messages: Vec<Value> = chat.messages.into_iter().enumerate().map(|(index, of)| message(index, of)).collect::<Result<_, _>>()?;
    body.insert("messages".into(), messages.into());
    put(body, "chat_template_kwargs", chat.template_arguments.map(object));
    // Engines refuse both together, and each is the other's default.
    let opens = chat.add_generation_prompt.or(chat.continue_final_message.then_some(false));
    put(body, "add_generation_prompt", opens);
    put(body, "continue_final_message", true_or_none(chat.continue_final_message));
    Ok(())
}

fn message(index: usize, message: wire::Message) -> Result<Value, Status> {
    if message.role.is_empty() {
        return Err(invalid_field(&format!("chat.messages[{index}].role"), "a message has a role, such as \"user\""));
    }
    let mut json = Map::new();
    json.insert("role".into(), message.role.into());
    let content = match <[_; 1]>::try_from(message.content) {
        // Templates handle a plain text best.
        Ok([wire::ContentPart { part: Some(Part::Text(text)) }]) => Value::String(text),
        Ok(one) => Value::Array(parts(index, one.into())?),
        Err(none) if none.is_empty() && message.tool_calls.is_empty() => Value::String(String::new()),
        Err(none) if none.is_empty() => Value::Null,
        Err(several) => Value::Array(parts(index, several)?),
    };
    json.insert("content".into(), content);
    let calls = message.tool_calls.into_iter();
    let calls = calls.map(|call| json!({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}));
    put(&mut json, "tool_calls", non_empty_list(calls.collect()));
    put(&mut json, "tool_call_id", non_empty(message.tool_call_id));
    put(&mut json, "name", non_empty(message.name));
    put(&mut json, "reasoning", non_empty(message.reasoning));
    Ok(Value::Object(json))
}

fn parts(message: usize, parts: Vec<wire::ContentPart>) -> Result<Vec<Value>, Status> {
    let part = |(index, part): (usize, wire::ContentPart)| match part.part {
        Some(Part::Text(text)) => Ok(json!({"type": "text", "text": text})),
        Some(Part::ImageUrl(url)) => Ok(json!({"type": "image_url", "image_url": {"url": url}})),
        Some(Part::AudioUrl(url)) => Ok(json!({"type": "audio_url", "audio_url": {"url": url}})),
        Some(Part::VideoUrl(url)) => Ok(json!({"type": "video_url", "video_url": {"url": url}})),
        Some(Part::Other(other)) => Ok(Value::Object(object(other))),
        None => Err(invalid_field(
            &format!("chat.messages[{message}].content[{index}]"),
            "a part has one of text, image_url, audio_url, video_url, other",
        )),
    };
    parts.into_iter().enumerate().map(part).collect()
}

fn tool(index: usize, tool: wire::Tool) -> Result<Value, Status> {
    let mut function = Map::new();
    function.insert("name".into(), tool.name.into());
    put(&mut function, "description", non_empty(tool.description));
    if !tool.parameters_json.is_empty() {
        function.insert("parameters".into(), parse_json(&format!("tools[{index}].parameters_json"), &tool.parameters_json)?);
    }
    put(&mut function, "strict", tool.strict);
    Ok(json!({"type": "function", "function": function}))
}

fn tool_choice(choice: wire::ToolChoice) -> Option<Value> {
    use wire::tool_choice::{Choice, Mode};
    Some(match choice.choice? {
        Choice::Function(name) => json!({"type": "function", "function": {"name": name}}),
        Choice::Mode(mode) => match Mode::try_from(mode).unwrap_or_default() {
            Mode::Unspecified => return None,
            Mode::Auto => "auto".into(),
            Mode::None => "none".into(),
            Mode::Required => "required".into(),
        },
    })
}

fn put_format(body: &mut Map<String, Value>, format: Option<Format>) -> Result<(), Status> {
    let guide = |name: &str, value: Value| ("structured_outputs", json!({name: value}));
    let (name, value) = match format {
        None | Some(Format::JsonObject(false)) => return Ok(()),
        Some(Format::JsonObject(true)) => ("response_format", json!({"type": "json_object"})),
        Some(Format::JsonSchema(schema)) => {
            let schema = parse_json("response_format.json_schema", &schema)?;
            // OpenAI's form requires a name, which engines ignore.
            ("response_format", json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}))
        }
        Some(Format::Regex(regex)) => guide("regex", regex.into()),
        Some(Format::Grammar(grammar)) => guide("grammar", grammar.into()),
        Some(Format::Choice(choices)) => guide("choice", choices.texts.into()),
        Some(Format::StructuralTag(tag)) => guide("structural_tag", tag.into()),
    };
    body.insert(name.into(), value);
    Ok(())
}

fn put_sampling(body: &mut Map<String, Value>, sampling: wire::Sampling, is_chat: bool) -> Result<(), Status> {
    for (name, number) in [
        ("temperature", sampling.temperature),
        ("top_p", sampling.top_p),
        ("min_p", sampling.min_p),
        ("presence_penalty", sampling.presence_penalty),
        ("frequency_penalty", sampling.frequency_penalty),
        ("repetition_penalty", sampling.repetition_penalty),
    ] {
        if number.is_some_and(|number| !number.is_finite()) {
            return Err(invalid_field(&format!("sampling.{name}"), "this is no finite number"));
        }
        put(body, name, number);
    }
    put(body, "max_tokens", sampling.max_tokens);
    put(body, "min_tokens", sampling.min_tokens);
    put(body, "top_k", sampling.top_k);
    put(body, "n", sampling.n);
    put(body, "seed", sampling.seed);
    put(body, "stop", non_empty_list(sampling.stop));
    put(body, "stop_token_ids", non_empty_list(sampling.stop_token_ids));
    put(body, "ignore_eos", true_or_none(sampling.ignore_eos));
    put(body, "skip_special_tokens", sampling.skip_special_tokens);
    put(body, "include_stop_str_in_output", true_or_none(sampling.include_stop_in_output));
    let mut bias: Vec<(u32, f64)> = sampling.logit_bias.into_iter().collect();
    bias.sort_by_key(|(token, _)| *token);
    let bias: Map<String, Value> = bias.into_iter().map(|(token, bias)| (token.to_string(), bias.into())).collect();
    put(body, "logit_bias", Some(bias).filter(|bias| !bias.is_empty()));
    match (sampling.logprobs, is_chat) {
        (Some(alternatives), true) => {
            body.insert("logprobs".into(), true.into());
            body.insert("top_logprobs".into(), alternatives.into());
        }
        (alternatives, _) => put(body, "logprobs", alternatives),
    }
    if sampling.echo && is_chat {
        return Err(invalid_field("sampling.echo", "an answer repeats texts and tokens, not chats"));
    }
    put(body, "echo", true_or_none(sampling.echo));
    Ok(())
}

fn parse_json(field: &str, json: &str) -> Result<Value, Status> {
    let not_json = |error: &dyn Display| invalid_field(field, &format!("this is no JSON: {error}"));
    serde_json::from_str(json).map_err(|error| not_json(&error))
}

#[cfg(test)]
mod tests;
