//! `/v1/responses`: one text message; tools and formats are repeated, and never used. Where responses are kept, they are found and ended by their id; a request that continues
//! one is told where there is none, and answered as if it stood alone.

use std::collections::VecDeque;

use bytes::Bytes;
use http::{Method, StatusCode};
use serde_json::value::RawValue;

use super::answer::{Answer, answer_id, collect};
use super::errors::{ApiError, json_string, no_response, not_found, wrong_method};
use super::fields::{Fields, boolean, text};
use super::options::{Options, TokenLimit};
use super::prompt::{Ending, messages_prompt};
use super::{Api, random_id};
use crate::engine::{Generation, Prompt};
use crate::mailbox::{Delta, Finish};
use crate::reply::{Reply, events, json};
use crate::response_store::{CancelError, QUEUED, ResponseStore};
use crate::sse::{EventStream, WriteEvents};
use crate::tokens::push_escaped;

/// Answers one request.
pub(crate) async fn responses(api: &Api, body: &[u8], request_id: Option<&str>) -> Result<Reply, ApiError> {
    let fields = Fields::parse(body)?;
    let options = Options { choices: 1, ..Options::read(&fields, api, TokenLimit::Responses)? };
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
    let tokens = input_tokens(&fields)?;
    let limit = options.limit(&api.args, tokens.len())?;
    let id = answer_id("resp", request_id).replacen('-', "_", 1);
    let prompts = vec![Prompt { tokens, limit }];
    let (answer, generation) = Answer::start(&api.core, &api.args, id, options, prompts).await?;
    let repeated = |field: Option<&RawValue>, none: &str| field.map_or(none, RawValue::get).to_owned();
    let echo = Echo { tools: repeated(fields.tools, "[]"), text: repeated(fields.text, "null") };
    let mut writer = ResponseEvents::new(answer, stores.then(|| api.stored.clone()), echo);
    if in_background {
        return Ok(json(StatusCode::OK, writer.run(generation)));
    }
    if writer.answer.options.stream {
        return Ok(events(EventStream::new(generation, writer)));
    }
    Ok(json(StatusCode::OK, writer.whole(&generation).await?))
}

/// `/v1/responses/ID`, and `/cancel` below it.
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
    kept.map_or_else(|error| error.reply(), |kept| json(StatusCode::OK, kept))
}

fn missing(id: &str) -> ApiError {
    no_response(StatusCode::NOT_FOUND, format!("Response with id '{id}' not found."))
}

/// `input` is a text or a list of messages.
fn input_tokens(fields: &Fields<'_>) -> Result<Vec<u32>, ApiError> {
    let input = fields.input.ok_or_else(|| ApiError::missing("input"))?;
    let mut messages = Vec::new();
    if let Some(instructions) = text("instructions", fields.instructions)? {
        messages.push(format!(r#"{{"role":"system","content":{}}}"#, json_string(&instructions)));
    }
    if input.get().starts_with('"') {
        messages.push(format!(r#"{{"role":"user","content":{}}}"#, input.get()));
    } else if let Ok(items) = serde_json::from_str::<Vec<&RawValue>>(input.get()) {
        messages.extend(items.iter().map(|item| item.get().to_owned()));
    } else {
        return Err(ApiError::wrong_type("input", "list_type", "Input should be a valid list", input));
    }
    let messages = RawValue::from_string(format!("[{}]", messages.join(",")));
    let messages = messages.expect("a list of JSON values is valid JSON");
    messages_prompt("input", Some(&messages), None, Ending::AnswerStart)
}

/// What the response repeats of its request, as JSON.
#[derive(Debug)]
struct Echo {
    tools: String,
    text: String,
}

/// The events of a streamed response; also the writer of whole ones.
#[derive(Debug)]
struct ResponseEvents {
    answer: Answer,
    /// Where it is kept.
    stored: Option<ResponseStore>,
    echo: Echo,
    message_id: String,
    /// The text so far, escaped for JSON.
    text: Vec<u8>,
    generated: usize,
    sequence: usize,
}

impl ResponseEvents {
    fn new(answer: Answer, stored: Option<ResponseStore>, echo: Echo) -> Self {
        let message_id = format!("msg_{}", random_id(16));
        Self { answer, stored, echo, message_id, text: Vec::new(), generated: 0, sequence: 0 }
    }

    /// The whole response, once it is complete; it is kept by then.
    async fn whole(&mut self, generation: &Generation) -> Result<String, ApiError> {
        let choice = collect(generation).await?.pop().unwrap_or_default();
        push_escaped(&choice.tokens, &mut self.text);
        self.generated = choice.tokens.len();
        let response = self.response(choice.finish, generation.mailbox.cached_tokens());
        self.keep(&response);
        Ok(response)
    }

    /// Has it computed in the background; what is kept of it until then.
    fn run(mut self, generation: Generation) -> String {
        let queued = self.response(None, 0).replace(r#""status":"in_progress""#, QUEUED);
        let queued = queued.replace(r#""background":false"#, r#""background":true"#);
        let (id, stored) = (self.answer.id.clone(), self.stored.clone().unwrap_or_default());
        stored.begin(&id, queued.clone());
        // It ends with its generation, which the engine waits for.
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
        let id = self.message_id.clone();
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
        let (id, text, part) = (self.message_id.clone(), self.text(), self.part());
        let done = format!(r#"{{"content_index":0,"item_id":"{id}","logprobs":[],"output_index":0"#);
        // The only event whose type is not preceded by its sequence number alone.
        let sequence = self.next_sequence();
        events.push_back(
            format!(
                "event: response.output_text.done\ndata: {done},\"sequence_number\":{sequence},\"text\":\"{text}\",\"type\":\"response.output_text.done\"}}\n\n"
            )
            .into(),
        );
        let part = format!(r#"{{"content_index":0,"item_id":"{id}","output_index":0,"part":{part}"#);
        events.push_back(self.event("response.content_part.done", &part));
        let item = format!(r#"{{"item":{},"output_index":0"#, self.item());
        events.push_back(self.event("response.output_item.done", &item));
        let response = self.response(Some(finish), cached);
        self.keep(&response);
        events.push_back(self.event("response.completed", &format!(r#"{{"response":{response}"#)));
    }

    /// An event whose body is open at its end, for the fields that all events have.
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

    fn item(&self) -> String {
        let (id, part) = (&self.message_id, self.part());
        format!(r#"{{"id":"{id}","content":[{part}],"role":"assistant","status":"completed","type":"message","phase":null}}"#)
    }

    /// The response object; `finish` is `None` while it is in progress.
    fn response(&self, finish: Option<Finish>, cached: usize) -> String {
        let Answer { id, created, model, options, prompt_tokens, .. } = &self.answer;
        let (id, model) = (json_string(id), json_string(model));
        let Echo { tools, text } = &self.echo;
        let (status, incomplete) = match finish {
            None => ("in_progress", "null"),
            Some(Finish::Length) => ("incomplete", r#"{"reason":"max_output_tokens"}"#),
            Some(Finish::Stop) => ("completed", "null"),
            Some(Finish::Abort | Finish::Error) => ("cancelled", "null"),
        };
        let most = options.max_tokens.map_or("null".to_owned(), |tokens| tokens.to_string());
        let (mut output, mut usage) = (String::new(), "null".to_owned());
        if finish.is_some() {
            output = self.item();
            let generated = self.generated;
            usage = format!(
                r#"{{"input_tokens":{prompt_tokens},"input_tokens_details":{{"cached_tokens":{cached},"cache_write_tokens":0,"input_tokens_per_turn":[],"cached_tokens_per_turn":[]}},"output_tokens":{generated},"output_tokens_details":{{"reasoning_tokens":0,"tool_output_tokens":0,"output_tokens_per_turn":[],"tool_output_tokens_per_turn":[]}},"total_tokens":{}}}"#,
                prompt_tokens + generated
            );
        }
        format!(
            r#"{{"id":{id},"created_at":{created},"incomplete_details":{incomplete},"instructions":null,"metadata":null,"model":{model},"object":"response","output":[{output}],"parallel_tool_calls":true,"temperature":1.0,"tool_choice":"none","tools":{tools},"top_p":1.0,"background":false,"max_output_tokens":{most},"max_tool_calls":null,"previous_response_id":null,"prompt":null,"reasoning":null,"service_tier":"auto","status":"{status}","text":{text},"top_logprobs":null,"truncation":"disabled","usage":{usage},"user":null,"presence_penalty":0.0,"frequency_penalty":0.0,"kv_transfer_params":null,"ec_transfer_params":null,"input_messages":null,"output_messages":null}}"#
        )
    }
}

impl WriteEvents for ResponseEvents {
    /// With the events that open and close the response.
    fn write(&mut self, delta: &Delta, cached: usize, events: &mut VecDeque<Bytes>) {
        if self.sequence == 0 {
            self.open(events);
        }
        if !delta.tokens.is_empty() {
            let start = self.text.len();
            push_escaped(&delta.tokens, &mut self.text);
            self.generated += delta.tokens.len();
            let text = String::from_utf8_lossy(&self.text[start..]);
            let head = format!(r#"{{"content_index":0,"delta":"{text}","#);
            let body = format!(r#"{head}"item_id":"{}","logprobs":[],"output_index":0"#, self.message_id);
            events.push_back(self.event("response.output_text.delta", &body));
        }
        if let Some(finish) = delta.finish {
            self.close(finish, cached, events);
        }
    }
}
