//! The route `/v1/chat/completions`.

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
use super::rust_events::RustEvents;
use super::tool_call::{CallProgress, ToolCall, check_tools, reason};
use crate::engine::{Generation, Prompt};
use crate::mailbox::{Delta, Finish};
use crate::reply::{Reply, events, json, rust_events};
use crate::sse::{DONE, EventStream, WriteEvents};
use crate::tokens::{Detokenizer, push_escaped};

pub(crate) async fn chat(api: &Api, body: &[u8], request_id: Option<&str>) -> Result<Reply, ApiError> {
    let fields = Fields::parse(body, &api.args)?;
    let ChatAnswer { answer, tool_call, generation } = start_chat(api, &fields, answer_id("chatcmpl", request_id)).await?;
    if answer.options.stream {
        return Ok(match api.args.sim_rust_front_end {
            true => rust_events(EventStream::new(generation, RustEvents::chat(answer, tool_call))),
            false => events(EventStream::new(generation, ChatEvents::new(answer, tool_call))),
        });
    }
    let choices = collect(&generation).await?;
    let cached_tokens = generation.mailbox.cached_tokens();
    Ok(json(StatusCode::OK, whole(&answer, tool_call.as_ref(), &choices, cached_tokens)))
}

/// A chat that is being answered.
#[derive(Debug)]
pub(super) struct ChatAnswer {
    pub(super) answer: Answer,
    /// Tool call that makes up the answer, if it is not text.
    pub(super) tool_call: Option<ToolCall>,
    pub(super) generation: Generation,
}

/// Starts the answer to a chat.
pub(super) async fn start_chat(api: &Api, fields: &Fields<'_>, id: String) -> Result<ChatAnswer, ApiError> {
    check_tools(fields, &api.args)?;
    let mut options = Options::read(fields, api, TokenLimit::Chat)?;
    let chooses = api.args.sim_call_tools && !ends_with_a_result(fields.messages);
    let tool_call = ToolCall::parse(fields.tools, fields.tool_choice, (&api.args, chooses))?;
    options.structured = tool_call.as_ref().map(ToolCall::output).or(options.structured);
    let tokens = chat_prompt(fields)?;
    let limit = options.limit(&api.args, tokens.len())?;
    let prompts = vec![Prompt { tokens, limit }];
    let (answer, generation) = Answer::start(&api.core, &api.args, id, options, prompts).await?;
    Ok(ChatAnswer { answer, tool_call, generation })
}

/// Whether the last message is a tool's result; a model then answers with its conclusion.
pub(super) fn ends_with_a_result(messages: Option<&RawValue>) -> bool {
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
    json.push(b'"');
    if tool_call.is_none() {
        push_escaped(&choice.tokens, json);
    }
    json.extend_from_slice(br#"","refusal":null,"annotations":null,"audio":null,"function_call":null"#);
    if let Some(call) = tool_call {
        let call = call.whole(&choice.tokens, finish == Finish::Stop).unwrap_or_default();
        let _ = write!(json, r#","tool_calls":[{call}]"#);
    }
    json.extend_from_slice(br#","reasoning":null},"logprobs":"#);
    push_chat_logprobs(&choice.tokens, answer.options.logprobs, json);
    let reason = reason(tool_call, finish);
    let ids = if answer.options.return_token_ids { token_list(&choice.tokens) } else { "null".to_owned() };
    let _ = write!(json, r#","finish_reason":"{reason}","stop_reason":null,"token_ids":{ids},"routed_experts":null}}"#);
}

/// Progress of a choice.
#[derive(Clone, Debug, Default)]
struct ChoiceProgress {
    tokens: usize,
    text: Detokenizer,
    call: CallProgress,
}

#[derive(Debug)]
struct ChatEvents {
    answer: Answer,
    tool_call: Option<ToolCall>,
    /// Common beginning of all events, up to the index of the choice.
    head: Vec<u8>,
    choices: Vec<ChoiceProgress>,
    started: bool,
}

impl ChatEvents {
    fn new(answer: Answer, tool_call: Option<ToolCall>) -> Self {
        let Answer { id, created, model, .. } = &answer;
        let (id, model) = (json_string(id), json_string(model));
        let head = format!(r#"data: {{"id":{id},"object":"chat.completion.chunk","created":{created},"model":{model},"choices":["#);
        let choices = vec![ChoiceProgress::default(); answer.options.choices];
        Self { answer, tool_call, head: head.into_bytes(), choices, started: false }
    }

    fn role_event(&self, choice: usize, cached: usize) -> Bytes {
        let mut event = self.head.clone();
        let _ = write!(event, r#"{{"index":{choice},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]"#);
        self.push_continuous_usage(0, cached, &mut event);
        let ids = self.answer.prompt_ids(0);
        let _ = write!(event, ",\"prompt_token_ids\":{ids},\"prompt_text\":null}}\n\n");
        event.into()
    }

    /// Content of a text event's `delta`.
    fn text_content(&mut self, delta: &Delta) -> Vec<u8> {
        let mut content = Vec::with_capacity(24 + 8 * delta.tokens.len());
        content.extend_from_slice(br#""content":""#);
        self.choices[delta.choice].text.push_escaped(&delta.tokens, &mut content);
        content.push(b'"');
        content
    }

    /// Contents of the `delta`s of a call.
    ///
    /// If tokens add nothing visible, there is no event unless it reports the tokens themselves.
    fn call_contents(&mut self, delta: &Delta) -> Vec<Vec<u8>> {
        let Some(call) = &self.tool_call else { return Vec::new() };
        let mut contents = Vec::with_capacity(3);
        let added = call.advance(&mut self.choices[delta.choice].call, &delta.tokens);
        if added.opens {
            let (id, name) = (&call.id, json_string(&call.name));
            let content =
                format!(r#""content":null,"tool_calls":[{{"id":"{id}","type":"function","index":0,"function":{{"name":{name}}}}}]"#);
            contents.push(content.into_bytes());
        }
        if !added.arguments.is_empty() {
            let arguments = added.arguments;
            let content = format!(r#""content":null,"tool_calls":[{{"index":0,"function":{{"arguments":"{arguments}"}}}}]"#);
            contents.push(content.into_bytes());
        }
        let Options { return_token_ids, logprobs, .. } = &self.answer.options;
        if delta.finish.is_some() || contents.is_empty() && (*return_token_ids || logprobs.is_some()) {
            contents.push(Vec::new());
        }
        contents
    }

    fn event(&self, (choice, tokens): (usize, &[u32]), content: &[u8], finish: Option<Finish>, cached: usize) -> Bytes {
        let options = &self.answer.options;
        let mut event = Vec::with_capacity(self.head.len() + content.len() + 192);
        event.extend_from_slice(&self.head);
        let _ = write!(event, r#"{{"index":{choice},"delta":{{"#);
        event.extend_from_slice(content);
        event.extend_from_slice(br#"},"logprobs":"#);
        push_chat_logprobs(tokens, options.logprobs, &mut event);
        match finish {
            None => event.extend_from_slice(br#","finish_reason":null"#),
            Some(finish) => {
                let _ = write!(event, r#","finish_reason":"{}","stop_reason":null"#, reason(self.tool_call.as_ref(), finish));
            }
        }
        event.extend_from_slice(br#","token_ids":"#);
        if options.return_token_ids {
            event.extend_from_slice(token_list(tokens).as_bytes());
        } else {
            event.extend_from_slice(b"null");
        }
        event.extend_from_slice(b"}]");
        self.push_continuous_usage(self.choices[choice].tokens, cached, &mut event);
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
    /// Writes the events, beginning with those that open each choice before the first tokens.
    fn write(&mut self, delta: &Delta, cached: usize, events: &mut VecDeque<Bytes>) {
        if !std::mem::replace(&mut self.started, true) {
            for choice in 0..self.choices.len() {
                events.push_back(self.role_event(choice, cached));
            }
        }
        self.choices[delta.choice].tokens += delta.tokens.len();
        if self.tool_call.is_none() {
            let content = self.text_content(delta);
            events.push_back(self.event((delta.choice, &delta.tokens), &content, delta.finish, cached));
            return;
        }
        let contents = self.call_contents(delta);
        let last = contents.len().saturating_sub(1);
        for (index, content) in contents.into_iter().enumerate() {
            let finish = delta.finish.filter(|_| index == last);
            let tokens = if index == 0 { &delta.tokens[..] } else { &[] };
            events.push_back(self.event((delta.choice, tokens), &content, finish, cached));
        }
    }

    fn end(&mut self, cached: usize, events: &mut VecDeque<Bytes>) {
        if self.answer.options.include_usage {
            let mut event = self.head.clone();
            event.extend_from_slice(br#"],"usage":"#);
            self.answer.chat_usage(self.choices.iter().map(|choice| choice.tokens).sum(), cached).push_last(&mut event);
            let _ = write!(event, ",\"system_fingerprint\":\"{}\"}}\n\n", self.answer.fingerprint);
            events.push_back(event.into());
        }
        events.push_back(Bytes::from_static(DONE));
    }
}
