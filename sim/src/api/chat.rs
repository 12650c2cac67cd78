//! `/v1/chat/completions`.

use std::collections::VecDeque;
use std::io::Write;

use bytes::Bytes;
use http::StatusCode;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::Api;
use super::answer::{Answer, Collected, answer_id, collect, token_list};
use super::errors::{ApiError, json_string};
use super::fields::Fields;
use super::logprobs::push_chat_logprobs;
use super::options::{Options, TokenLimit};
use super::prompt::chat_prompt;
use super::tool_call::ToolCall;
use crate::engine::Prompt;
use crate::mailbox::{Delta, Finish};
use crate::reply::{Reply, events, json};
use crate::sse::{DONE, EventStream, WriteEvents};
use crate::tokens::push_escaped;

/// Answers one request.
pub(crate) async fn chat(api: &Api, body: &[u8], request_id: Option<&str>) -> Result<Reply, ApiError> {
    let fields = Fields::parse(body)?;
    let options = Options::read(&fields, api, TokenLimit::Chat)?;
    let chooses = api.args.sim_call_tools && !ends_with_a_result(fields.messages);
    let tool_call = ToolCall::parse(fields.tools, fields.tool_choice, chooses)?;
    let tokens = chat_prompt(&fields)?;
    let limit = options.limit(&api.args, tokens.len())?;
    let limit = if tool_call.is_some() { ToolCall::limit(limit) } else { limit };
    let id = answer_id("chatcmpl", request_id);
    let prompts = vec![Prompt { tokens, limit }];
    let (answer, generation) = Answer::start(&api.core, &api.args, id, options, prompts).await?;
    if answer.options.stream {
        return Ok(events(EventStream::new(generation, ChatEvents::new(answer, tool_call))));
    }
    let choices = collect(&generation).await?;
    let cached_tokens = generation.mailbox.cached_tokens();
    Ok(json(StatusCode::OK, whole(&answer, tool_call.as_ref(), &choices, cached_tokens)))
}

/// Whether the last message is what a tool has found: a model then says what it makes of it.
fn ends_with_a_result(messages: Option<&RawValue>) -> bool {
    #[derive(Deserialize)]
    struct Message {
        role: String,
    }
    let messages: Vec<Message> = messages.and_then(|messages| serde_json::from_str(messages.get()).ok()).unwrap_or_default();
    messages.last().is_some_and(|last| last.role == "tool")
}

fn whole(answer: &Answer, tool_call: Option<&ToolCall>, choices: &[Collected], cached: usize) -> Vec<u8> {
    let mut json = Vec::with_capacity(1024);
    let Answer { id, created, model, fingerprint, .. } = answer;
    let (id, model) = (json_string(id), json_string(model));
    let _ = write!(json, r#"{{"id":{id},"object":"chat.completion","created":{created},"model":{model},"choices":["#);
    for (index, choice) in choices.iter().enumerate() {
        if index > 0 {
            json.push(b',');
        }
        push_choice(&mut json, answer, tool_call, (index, choice));
    }
    let _ = write!(json, r#"],"service_tier":null,"system_fingerprint":"{fingerprint}","usage":"#);
    let generated = choices.iter().map(|choice| choice.tokens.len()).sum();
    answer.chat_usage(generated, cached).push_whole(&mut json);
    let _ = write!(
        json,
        r#","prompt_logprobs":null,"prompt_token_ids":{},"prompt_text":null,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}}"#,
        answer.prompt_ids(0)
    );
    json
}

fn push_choice(json: &mut Vec<u8>, answer: &Answer, tool_call: Option<&ToolCall>, (index, choice): (usize, &Collected)) {
    let finish = choice.finish.unwrap_or(Finish::Stop);
    let _ = write!(json, r#"{{"index":{index},"message":{{"role":"assistant","content":"#);
    match tool_call {
        Some(_) => json.extend_from_slice(b"null"),
        None => {
            json.push(b'"');
            push_escaped(&choice.tokens, json);
            json.push(b'"');
        }
    }
    json.extend_from_slice(br#","refusal":null,"annotations":null,"audio":null,"function_call":null"#);
    if let Some(call) = tool_call {
        json.extend_from_slice(br#","tool_calls":["#);
        call.push_whole(&choice.tokens, json);
        json.push(b']');
    }
    json.extend_from_slice(br#","reasoning":null},"logprobs":"#);
    push_chat_logprobs(&choice.tokens, answer.options.logprobs, json);
    // Whole answers say `tool_calls` where streams, as recorded, say `stop`.
    let called = tool_call.is_some() && finish == Finish::Stop;
    let reason = if called { "tool_calls" } else { finish.as_str() };
    let ids = if answer.options.return_token_ids { token_list(&choice.tokens) } else { "null".to_owned() };
    let _ = write!(json, r#","finish_reason":"{reason}","stop_reason":null,"token_ids":{ids},"routed_experts":null}}"#);
}

/// The events of a streamed chat.
#[derive(Debug)]
struct ChatEvents {
    answer: Answer,
    tool_call: Option<ToolCall>,
    /// All events begin like this, up to the index of the choice.
    head: Vec<u8>,
    /// Tokens of each choice so far.
    generated: Vec<usize>,
    started: bool,
}

impl ChatEvents {
    fn new(answer: Answer, tool_call: Option<ToolCall>) -> Self {
        let Answer { id, created, model, .. } = &answer;
        let (id, model) = (json_string(id), json_string(model));
        let head = format!(r#"data: {{"id":{id},"object":"chat.completion.chunk","created":{created},"model":{model},"choices":["#);
        let generated = vec![0; answer.options.choices];
        Self { answer, tool_call, head: head.into_bytes(), generated, started: false }
    }

    fn role_event(&self, choice: usize, cached: usize) -> Bytes {
        let mut event = self.head.clone();
        let _ = write!(event, r#"{{"index":{choice},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]"#);
        self.push_continuous_usage(0, cached, &mut event);
        let ids = self.answer.prompt_ids(0);
        let _ = write!(event, ",\"prompt_token_ids\":{ids},\"prompt_text\":null}}\n\n");
        event.into()
    }

    /// The inside of a text event's `delta`.
    fn text_contents(&self, delta: &Delta) -> Vec<u8> {
        let mut content = Vec::with_capacity(24 + 8 * delta.tokens.len());
        content.extend_from_slice(br#""content":""#);
        push_escaped(&delta.tokens, &mut content);
        content.push(b'"');
        content
    }

    fn event(&self, delta: &Delta, content: &[u8], finish: Option<Finish>, cached: usize) -> Bytes {
        let options = &self.answer.options;
        let mut event = Vec::with_capacity(self.head.len() + content.len() + 192);
        event.extend_from_slice(&self.head);
        let _ = write!(event, r#"{{"index":{},"delta":{{"#, delta.choice);
        event.extend_from_slice(content);
        event.extend_from_slice(br#"},"logprobs":"#);
        push_chat_logprobs(&delta.tokens, options.logprobs, &mut event);
        match finish {
            None => event.extend_from_slice(br#","finish_reason":null"#),
            Some(finish) => {
                let _ = write!(event, r#","finish_reason":"{}","stop_reason":null"#, finish.as_str());
            }
        }
        event.extend_from_slice(br#","token_ids":"#);
        if options.return_token_ids {
            event.extend_from_slice(token_list(&delta.tokens).as_bytes());
        } else {
            event.extend_from_slice(b"null");
        }
        event.extend_from_slice(b"}]");
        self.push_continuous_usage(self.generated[delta.choice], cached, &mut event);
        if finish.is_some() && !options.include_usage {
            let _ = write!(event, r#","system_fingerprint":"{}""#, self.answer.fingerprint);
        }
        event.extend_from_slice(b"}\n\n");
        event.into()
    }

    fn push_continuous_usage(&self, generated: usize, cached: usize, event: &mut Vec<u8>) {
        if self.answer.options.continuous_usage {
            event.extend_from_slice(br#","usage":"#);
            self.answer.usage(generated, cached).push_continuous(event);
        }
    }
}

impl WriteEvents for ChatEvents {
    /// Before the first tokens, the events that open each choice.
    fn write(&mut self, delta: &Delta, cached: usize, events: &mut VecDeque<Bytes>) {
        if !std::mem::replace(&mut self.started, true) {
            for choice in 0..self.generated.len() {
                events.push_back(self.role_event(choice, cached));
            }
        }
        let position = self.generated[delta.choice];
        self.generated[delta.choice] += delta.tokens.len();
        let contents = match &self.tool_call {
            None => vec![self.text_contents(delta)],
            Some(call) => call.stream_contents(position, &delta.tokens, delta.finish),
        };
        let last = contents.len() - 1;
        for (index, content) in contents.into_iter().enumerate() {
            let finish = delta.finish.filter(|_| index == last);
            events.push_back(self.event(delta, &content, finish, cached));
        }
    }

    fn end(&mut self, cached: usize, events: &mut VecDeque<Bytes>) {
        if self.answer.options.include_usage {
            let mut event = self.head.clone();
            event.extend_from_slice(br#"],"usage":"#);
            self.answer.chat_usage(self.generated.iter().sum(), cached).push_last(&mut event);
            let _ = write!(event, ",\"system_fingerprint\":\"{}\"}}\n\n", self.answer.fingerprint);
            events.push_back(event.into());
        }
        events.push_back(Bytes::from_static(DONE));
    }
}
