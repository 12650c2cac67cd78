//! The route `/v1/responses`: one text message, or the call of a tool.
//!
//! Kept responses are found and ended by their id. A request that continues a response gets an
//! error if there is none; otherwise it is answered as if it stood alone.

use std::collections::VecDeque;

use bytes::Bytes;
use http::{Method, StatusCode};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};

use super::answer::{Answer, answer_id, collect};
use super::chat::ends_with_a_result;
use super::errors::{ApiError, json_string, no_response, not_found, wrong_method};
use super::fields::{Fields, boolean, text, typed};
use super::options::{Options, TokenLimit};
use super::prompt::{Ending, messages_prompt};
use super::tool_call::{CallProgress, ToolCall};
use super::{Api, random_id};
use crate::engine::{Generation, Prompt};
use crate::mailbox::{Delta, Finish};
use crate::reply::{Reply, events, json as json_reply};
use crate::response_store::{CancelError, QUEUED, ResponseStore};
use crate::sse::{EventStream, WriteEvents};
use crate::tokens::Detokenizer;

pub(crate) async fn responses(api: &Api, body: &[u8], request_id: Option<&str>) -> Result<Reply, ApiError> {
    let fields = Fields::parse(body, &api.args)?;
    let mut options = Options { choices: 1, ..Options::read(&fields, api, TokenLimit::Responses)? };
    if let Some(previous) = text("previous_response_id", fields.previous_response_id)?
        && api.stored.get(&previous).is_none()
    {
        return Err(missing(&previous));
    }
    let stores = api.args.sim_store_responses && (fields.store.is_none() || boolean("store", fields.store)?);
    let in_background = boolean("background", fields.background)?;
    if in_background && !stores {
        let message = "responses are not stored here, so none runs in the background".to_owned();
        return Err(ApiError { param: Some("background".to_owned()), ..no_response(StatusCode::BAD_REQUEST, message) });
    }
    let ChatTools { tools, choice } = ChatTools::read(&fields)?;
    let messages = messages(&fields)?;
    let chooses = api.args.sim_call_tools && !ends_with_a_result(Some(&messages));
    let tool_call = ToolCall::parse(tools.as_deref(), choice.as_deref(), (&api.args, chooses))?;
    options.structured = tool_call.as_ref().map(ToolCall::output).or(options.structured);
    let tokens = messages_prompt("input", Some(&messages), tools.as_deref(), Ending::AnswerStart)?;
    let limit = options.limit(&api.args, tokens.len())?;
    let id = answer_id("resp", request_id).replacen('-', "_", 1);
    let prompts = vec![Prompt { tokens, limit }];
    let (answer, generation) = Answer::start(&api.core, &api.args, id, options, prompts).await?;
    let repeated = |field: Option<&RawValue>, none: &str| field.map_or(none, RawValue::get).to_owned();
    let choice = if tools.is_some() { repeated(fields.tool_choice, r#""auto""#) } else { r#""none""#.to_owned() };
    let echo = Echo { tools: repeated(fields.tools, "[]"), tool_choice: choice, text: repeated(fields.text, "null") };
    let mut writer = ResponseEvents::new(answer, tool_call, stores.then(|| api.stored.clone()), echo);
    if in_background {
        return Ok(json_reply(StatusCode::OK, writer.run(generation)));
    }
    if writer.answer.options.stream {
        return Ok(events(EventStream::new(generation, writer)));
    }
    Ok(json_reply(StatusCode::OK, writer.whole(&generation).await?))
}

/// The routes `/v1/responses/ID`, and `/cancel` below it.
pub(crate) fn stored_response(api: &Api, method: &Method, below: &str) -> Reply {
    let kept = match below.split_once('/') {
        None if method == Method::GET => api.stored.get(below).ok_or_else(|| missing(below)),
        None => return wrong_method("GET"),
        Some((id, "cancel")) if method == Method::POST => api.stored.cancel(id).map_err(|why| match why {
            CancelError::Missing => missing(id),
            CancelError::Complete => no_response(StatusCode::BAD_REQUEST, "Cannot cancel a synchronous response.".to_owned()),
        }),
        Some((_, "cancel")) => return wrong_method("POST"),
        Some(_) => return not_found(),
    };
    kept.map_or_else(|error| error.reply(), |kept| json_reply(StatusCode::OK, kept))
}

fn missing(id: &str) -> ApiError {
    no_response(StatusCode::NOT_FOUND, format!("Response with id '{id}' not found."))
}

/// Messages of a chat. `input` is a text or a list of messages, calls and their results.
fn messages(fields: &Fields<'_>) -> Result<Box<RawValue>, ApiError> {
    let input = fields.input.ok_or_else(|| ApiError::missing("input"))?;
    let mut messages = Vec::new();
    if let Some(instructions) = text("instructions", fields.instructions)? {
        messages.push(json!({ "role": "system", "content": instructions }));
    }
    match serde_json::from_str(input.get()) {
        Ok(Value::String(text)) => messages.push(json!({ "role": "user", "content": text })),
        Ok(Value::Array(items)) => items.into_iter().for_each(|item| push_item(item, &mut messages)),
        _ => return Err(ApiError::wrong_type("input", "list_type", "Input should be a valid list", input)),
    }
    Ok(raw(&Value::Array(messages)))
}

/// Converts an item of the input to the chat's form.
///
/// A call belongs to the assistant's message before it.
fn push_item(item: Value, messages: &mut Vec<Value>) {
    match item["type"].as_str() {
        Some("function_call") => {
            let function = json!({ "name": item["name"], "arguments": item["arguments"] });
            let call = json!({ "id": item["call_id"], "type": "function", "function": function });
            match messages.last_mut().filter(|last| last["role"] == "assistant") {
                Some(last) => match last["tool_calls"].as_array_mut() {
                    Some(calls) => calls.push(call),
                    None => last["tool_calls"] = json!([call]),
                },
                None => messages.push(json!({ "role": "assistant", "tool_calls": [call] })),
            }
        }
        Some("function_call_output") => {
            messages.push(json!({ "role": "tool", "tool_call_id": item["call_id"], "content": item["output"] }));
        }
        Some("reasoning") => {}
        _ => messages.push(item),
    }
}

/// Tools of a request and its choice among them, in the form of a chat.
struct ChatTools {
    tools: Option<Box<RawValue>>,
    choice: Option<Box<RawValue>>,
}

impl ChatTools {
    /// Reads the tools that the client runs itself.
    fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        let tools: Option<Vec<Value>> = typed("tools", fields.tools, "list_type", "Input should be a valid list")?;
        let tools = tools.unwrap_or_default();
        if tools.iter().any(|tool| tool["type"] == "custom" && tool["format"]["type"] == "grammar") {
            let message = "Custom tools with a grammar format are not supported; only free-form text custom tools are accepted.";
            return Err(ApiError::refused(Some("tools"), message));
        }
        let functions = tools.into_iter().filter(|tool| tool["type"] == "function");
        let function = |tool: Value| json!({ "type": "function", "function": tool });
        let functions: Vec<Value> = functions.map(function).collect();
        let choice: Option<Value> = typed("tool_choice", fields.tool_choice, "value_error", "Invalid value for `tool_choice`")?;
        let refused = |message: &str| Err(ApiError::refused(Some("tool_choice"), message));
        let is_named = choice.as_ref().is_some_and(|choice| choice["type"] == "function");
        let has_name = |name: &Value| functions.iter().any(|tool| tool["function"]["name"] == *name);
        match &choice {
            Some(choice) if choice == "required" && functions.is_empty() => {
                return refused("Tool choice 'required' must be specified with 'tools' parameter.");
            }
            Some(choice) if is_named && !has_name(&choice["name"]) => {
                return refused("Tool choice 'function' not found in 'tools' parameter.");
            }
            _ => {}
        }
        let tools = (!functions.is_empty()).then(|| raw(&Value::Array(functions)));
        let choice = choice.map(|choice| if is_named { function(choice) } else { choice });
        Ok(Self { choice: choice.filter(|_| tools.is_some()).as_ref().map(raw), tools })
    }
}

fn raw(value: &Value) -> Box<RawValue> {
    to_raw_value(value).expect("a value is always valid JSON")
}

/// Fields that the response repeats from its request, as JSON.
#[derive(Debug)]
struct Echo {
    tools: String,
    tool_choice: String,
    text: String,
}

/// Events of a streamed response; also the writer of whole ones.
#[derive(Debug)]
struct ResponseEvents {
    answer: Answer,
    /// Store that keeps the response, if it is kept.
    stored: Option<ResponseStore>,
    echo: Echo,
    tool_call: Option<ToolCall>,
    call: CallProgress,
    /// Id of the single item of the output.
    item_id: String,
    /// Whether that item has been opened.
    is_open: bool,
    /// Text or arguments of the item so far, escaped for JSON.
    text: Vec<u8>,
    detokenizer: Detokenizer,
    generated: usize,
    sequence: usize,
}

impl ResponseEvents {
    fn new(answer: Answer, tool_call: Option<ToolCall>, stored: Option<ResponseStore>, echo: Echo) -> Self {
        let prefix = if tool_call.is_some() { "fc" } else { "msg" };
        Self {
            answer,
            stored,
            echo,
            tool_call,
            call: CallProgress::default(),
            item_id: format!("{prefix}_{}", random_id(16)),
            is_open: false,
            text: Vec::new(),
            detokenizer: Detokenizer::default(),
            generated: 0,
            sequence: 0,
        }
    }

    /// Returns the whole response, once it is complete and kept.
    async fn whole(&mut self, generation: &Generation) -> Result<String, ApiError> {
        let choice = collect(generation).await?.pop().unwrap_or_default();
        self.take(&choice.tokens);
        let response = self.response(choice.finish, generation.mailbox.cached_tokens());
        self.keep(&response);
        Ok(response)
    }

    /// Appends the text of some tokens to the item, and returns whether they open it.
    fn take(&mut self, tokens: &[u32]) -> bool {
        self.generated += tokens.len();
        let Some(call) = &self.tool_call else {
            self.detokenizer.push_escaped(tokens, &mut self.text);
            return !tokens.is_empty();
        };
        let added = call.advance(&mut self.call, tokens);
        self.text.extend_from_slice(added.arguments.as_bytes());
        added.opens
    }

    /// Computes the response in the background, and returns the kept version until then.
    fn run(mut self, generation: Generation) -> String {
        let queued = self.response(None, 0).replace(r#""status":"in_progress""#, QUEUED);
        let queued = queued.replace(r#""background":false"#, r#""background":true"#);
        let (id, stored) = (self.answer.id.clone(), self.stored.clone().unwrap_or_default());
        stored.begin(&id, queued.clone());
        // This task ends with its generation, for which the engine waits.
        let task = tokio::spawn(async move { self.whole(&generation).await.is_ok() });
        stored.set_task(&id, task.abort_handle());
        queued
    }

    fn keep(&self, response: &str) {
        if let Some(stored) = &self.stored {
            stored.complete(&self.answer.id, response.to_owned());
        }
    }

    fn open(&mut self, events: &mut VecDeque<Bytes>) {
        let response = self.response(None, 0);
        for kind in ["response.created", "response.in_progress"] {
            events.push_back(self.event(kind, &format!(r#"{{"response":{response}"#)));
        }
    }

    fn open_item(&mut self, events: &mut VecDeque<Bytes>) {
        if std::mem::replace(&mut self.is_open, true) {
            return;
        }
        if let Some(call) = &self.tool_call {
            let item = self.call_item(call, "in_progress", "");
            events.push_back(self.event("response.output_item.added", &format!(r#"{{"item":{item},"output_index":0"#)));
            return;
        }
        let id = self.item_id.clone();
        let item = format!(
            r#"{{"item":{{"id":"{id}","content":[],"role":"assistant","status":"in_progress","type":"message","phase":null}},"output_index":0"#
        );
        events.push_back(self.event("response.output_item.added", &item));
        let part = format!(
            r#"{{"content_index":0,"item_id":"{id}","output_index":0,"part":{{"annotations":[],"text":"","type":"output_text","logprobs":[]}}"#
        );
        events.push_back(self.event("response.content_part.added", &part));
    }

    fn close(&mut self, finish: Finish, cached: usize, events: &mut VecDeque<Bytes>) {
        if self.is_open {
            self.close_item(events);
        }
        let response = self.response(Some(finish), cached);
        self.keep(&response);
        events.push_back(self.event("response.completed", &format!(r#"{{"response":{response}"#)));
    }

    fn close_item(&mut self, events: &mut VecDeque<Bytes>) {
        let (id, text, item) = (self.item_id.clone(), self.text(), self.item());
        if let Some(call) = &self.tool_call {
            let done = format!(r#"{{"arguments":"{text}","item_id":"{id}","name":{},"output_index":0"#, json_string(&call.name));
            events.push_back(self.event("response.function_call_arguments.done", &done));
            events.push_back(self.event("response.output_item.done", &format!(r#"{{"item":{item},"output_index":0"#)));
            return;
        }
        let part = self.part();
        let done = format!(r#"{{"content_index":0,"item_id":"{id}","logprobs":[],"output_index":0"#);
        // This is the only event whose type is not preceded by its sequence number alone.
        let sequence = self.next_sequence();
        events.push_back(
            format!(
                "event: response.output_text.done\ndata: {done},\"sequence_number\":{sequence},\"text\":\"{text}\",\"type\":\"response.output_text.done\"}}\n\n"
            )
            .into(),
        );
        let part = format!(r#"{{"content_index":0,"item_id":"{id}","output_index":0,"part":{part}"#);
        events.push_back(self.event("response.content_part.done", &part));
        events.push_back(self.event("response.output_item.done", &format!(r#"{{"item":{item},"output_index":0"#)));
    }

    /// An event with an open body, for the fields that all events have.
    fn event(&mut self, kind: &str, body: &str) -> Bytes {
        let sequence = self.next_sequence();
        format!("event: {kind}\ndata: {body},\"sequence_number\":{sequence},\"type\":\"{kind}\"}}\n\n").into()
    }

    fn next_sequence(&mut self) -> usize {
        self.sequence += 1;
        self.sequence - 1
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.text).into_owned()
    }

    fn part(&self) -> String {
        let text = self.text();
        format!(r#"{{"annotations":[],"text":"{text}","type":"output_text","logprobs":null}}"#)
    }

    fn call_item(&self, call: &ToolCall, status: &str, arguments: &str) -> String {
        let (id, call_id, name) = (&self.item_id, &call.id, json_string(&call.name));
        format!(
            r#"{{"arguments":"{arguments}","call_id":"{call_id}","name":{name},"type":"function_call","id":"{id}","async_":null,"caller":null,"namespace":null,"status":"{status}"}}"#
        )
    }

    fn item(&self) -> String {
        if let Some(call) = &self.tool_call {
            return self.call_item(call, "completed", &self.text());
        }
        let (id, part) = (&self.item_id, self.part());
        format!(r#"{{"id":"{id}","content":[{part}],"role":"assistant","status":"completed","type":"message","phase":null}}"#)
    }

    /// Response object; `finish` is `None` while it is in progress.
    fn response(&self, finish: Option<Finish>, cached: usize) -> String {
        let Answer { id, created, model, options, prompt_tokens, .. } = &self.answer;
        let (id, model) = (json_string(id), json_string(model));
        let Echo { tools, tool_choice, text } = &self.echo;
        let (status, incomplete) = match finish {
            None => ("in_progress", "null"),
            Some(Finish::Length) => ("incomplete", r#"{"reason":"max_output_tokens"}"#),
            Some(Finish::Stop) => ("completed", "null"),
            Some(Finish::Abort | Finish::Error) => ("cancelled", "null"),
        };
        let most = options.max_tokens.map_or("null".to_owned(), |tokens| tokens.to_string());
        let (mut output, mut usage) = (String::new(), "null".to_owned());
        if finish.is_some() {
            // A call that was cut before its arguments does not count.
            output = if self.tool_call.is_some() && self.text.is_empty() { String::new() } else { self.item() };
            let generated = self.generated;
            usage = format!(
                r#"{{"input_tokens":{prompt_tokens},"input_tokens_details":{{"cached_tokens":{cached},"cache_write_tokens":0,"input_tokens_per_turn":[],"cached_tokens_per_turn":[]}},"output_tokens":{generated},"output_tokens_details":{{"reasoning_tokens":0,"tool_output_tokens":0,"output_tokens_per_turn":[],"tool_output_tokens_per_turn":[]}},"total_tokens":{}}}"#,
                prompt_tokens + generated
            );
        }
        format!(
            r#"{{"id":{id},"created_at":{created},"incomplete_details":{incomplete},"instructions":null,"metadata":null,"model":{model},"object":"response","output":[{output}],"parallel_tool_calls":true,"temperature":1.0,"tool_choice":{tool_choice},"tools":{tools},"top_p":1.0,"background":false,"max_output_tokens":{most},"max_tool_calls":null,"previous_response_id":null,"prompt":null,"reasoning":null,"service_tier":"auto","status":"{status}","text":{text},"top_logprobs":null,"truncation":"disabled","usage":{usage},"user":null,"presence_penalty":0.0,"frequency_penalty":0.0,"kv_transfer_params":null,"ec_transfer_params":null,"input_messages":null,"output_messages":null}}"#
        )
    }
}

impl WriteEvents for ResponseEvents {
    /// Writes the events, including those that open and close the response.
    fn write(&mut self, delta: &Delta, cached: usize, events: &mut VecDeque<Bytes>) {
        if self.sequence == 0 {
            self.open(events);
        }
        let start = self.text.len();
        let opens = self.take(&delta.tokens);
        if opens {
            self.open_item(events);
        }
        if self.text.len() > start {
            let text = String::from_utf8_lossy(&self.text[start..]);
            let (id, delta) = (&self.item_id, format!(r#""delta":"{text}","#));
            let (kind, body) = match self.tool_call {
                Some(_) => ("response.function_call_arguments.delta", format!(r#"{{{delta}"item_id":"{id}","output_index":0"#)),
                None => {
                    let body = format!(r#"{{"content_index":0,{delta}"item_id":"{id}","logprobs":[],"output_index":0"#);
                    ("response.output_text.delta", body)
                }
            };
            events.push_back(self.event(kind, &body));
        }
        if let Some(finish) = delta.finish {
            self.close(finish, cached, events);
        }
    }
}
