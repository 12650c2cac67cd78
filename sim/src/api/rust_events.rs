//! Streams of chats and completions in the format of vLLM's Rust front-end.
//!
//! Fields without a value are left out, the tokens of a prompt come before all others, and the end
//! of an answer has a separate event.

use std::collections::VecDeque;
use std::io::Write;

use bytes::Bytes;

use super::answer::{Answer, token_list};
use super::errors::json_string;
use super::logprobs::{push_chat_logprobs, push_text_logprobs};
use super::options::{Options, PromptEcho};
use super::tool_call::{CallProgress, ToolCall, reason};
use crate::mailbox::Delta;
use crate::sse::{DONE, WriteEvents};
use crate::tokens::{Detokenizer, decode, push_escaped};

#[derive(Debug)]
pub(super) struct RustEvents {
    answer: Answer,
    is_chat: bool,
    tool_call: Option<ToolCall>,
    /// Common beginning of all events, up to the choices.
    head: Vec<u8>,
    choices: Vec<RustProgress>,
    started: bool,
}

/// Progress of a choice.
#[derive(Clone, Debug, Default)]
struct RustProgress {
    tokens: usize,
    text: Detokenizer,
    call: CallProgress,
    /// Length of the text in characters; kept only for log probabilities.
    characters: usize,
}

impl RustEvents {
    pub(super) fn chat(answer: Answer, tool_call: Option<ToolCall>) -> Self {
        let choices = answer.options.choices;
        Self::new(answer, "chat.completion.chunk", choices, tool_call)
    }

    pub(super) fn completion(answer: Answer, choices: usize) -> Self {
        Self::new(answer, "text_completion", choices, None)
    }

    fn new(answer: Answer, object: &str, choices: usize, tool_call: Option<ToolCall>) -> Self {
        let Answer { id, created, model, .. } = &answer;
        let (id, model) = (json_string(id), json_string(model));
        let head = format!(r#"data: {{"id":{id},"object":"{object}","created":{created},"model":{model},"choices":["#).into_bytes();
        let is_chat = object != "text_completion";
        let before = |choice| RustProgress {
            characters: decode(answer.echoed(choice).unwrap_or_default()).chars().count(),
            ..RustProgress::default()
        };
        let choices = (0..choices).map(before).collect();
        Self { answer, is_chat, tool_call, head, choices, started: false }
    }

    /// An event of a choice with these fields; `after` follows the choices.
    fn event(&self, choice: usize, fields: &[u8], after: &str, cached: usize) -> Bytes {
        let mut event = Vec::with_capacity(self.head.len() + fields.len() + after.len() + 160);
        event.extend_from_slice(&self.head);
        let _ = write!(event, "{{\"index\":{choice},");
        event.extend_from_slice(fields);
        event.extend_from_slice(b"}]");
        if self.answer.options.continuous_usage {
            event.extend_from_slice(br#","usage":"#);
            self.answer.usage(self.choices[choice].tokens, cached).push_rust(&mut event);
        }
        event.extend_from_slice(after.as_bytes());
        event.extend_from_slice(b"}\n\n");
        event.into()
    }

    /// Event before the first tokens of a choice.
    ///
    /// A completion has one only if tokens or the prompt were requested.
    fn opening(&self, choice: usize, cached: usize) -> Option<Bytes> {
        let asks = self.answer.options.return_token_ids;
        let prompt = || format!(r#","prompt_token_ids":{}"#, self.answer.prompt_ids(choice));
        match (self.is_chat, asks) {
            (true, true) => Some(self.event(choice, br#""delta":{"role":"assistant"}"#, &prompt(), cached)),
            (true, false) => Some(self.event(choice, br#""delta":{"role":"assistant"}"#, "", cached)),
            (false, _) => self.completion_opening(choice, cached),
        }
    }

    /// As `opening`, with the prompt if it is to be shown.
    fn completion_opening(&self, choice: usize, cached: usize) -> Option<Bytes> {
        let asks = self.answer.options.return_token_ids;
        let echoed = self.answer.echoed(choice).filter(|_| !self.is_chat);
        if !asks && echoed.is_none() {
            return None;
        }
        let mut fields = br#""text":""#.to_vec();
        push_escaped(echoed.unwrap_or_default(), &mut fields);
        fields.push(b'"');
        if asks {
            let _ = write!(fields, r#","token_ids":[],"prompt_token_ids":{}"#, self.answer.prompt_ids(choice));
        }
        Some(self.event(choice, &fields, "", cached))
    }

    /// Contents of the `delta`s for tokens.
    ///
    /// Log probabilities and tokens come once, so everything that they belong to is then in one.
    fn chat_deltas(&mut self, delta: &Delta) -> Vec<Vec<u8>> {
        let Options { return_token_ids, logprobs, .. } = &self.answer.options;
        let in_one = *return_token_ids || logprobs.is_some();
        let progress = &mut self.choices[delta.choice];
        let mut deltas = Vec::new();
        if let Some(call) = &self.tool_call {
            let added = call.advance(&mut progress.call, &delta.tokens);
            let (id, name) = (&call.id, json_string(&call.name));
            let opens = added.opens.then(|| format!(r#"{{"index":0,"id":"{id}","type":"function","function":{{"name":{name}}}}}"#));
            let arguments = Some(added.arguments).filter(|arguments| !arguments.is_empty());
            let arguments = arguments.map(|arguments| format!(r#"{{"index":0,"function":{{"arguments":"{arguments}"}}}}"#));
            let calls: Vec<String> = [opens, arguments].into_iter().flatten().collect();
            let calls = if in_one && !calls.is_empty() { vec![calls.join(",")] } else { calls };
            deltas.extend(calls.into_iter().map(|call| format!(r#""tool_calls":[{call}]"#).into_bytes()));
        } else {
            let mut content = br#""content":""#.to_vec();
            let empty = content.len();
            progress.text.push_escaped(&delta.tokens, &mut content);
            if content.len() > empty {
                content.push(b'"');
                deltas.push(content);
            }
        }
        if deltas.is_empty() && in_one {
            deltas.push(Vec::new());
        }
        deltas
    }

    fn write_chat(&mut self, delta: &Delta, cached: usize, events: &mut VecDeque<Bytes>) {
        let deltas = self.chat_deltas(delta);
        let options = &self.answer.options;
        for (index, inside) in deltas.into_iter().enumerate() {
            let mut fields = [&br#""delta":{"#[..], &inside, b"}"].concat();
            if index == 0 && options.logprobs.is_some() {
                fields.extend_from_slice(br#","logprobs":"#);
                push_chat_logprobs(&delta.tokens, options.logprobs, &mut fields);
            }
            if index == 0 && options.return_token_ids && !delta.tokens.is_empty() {
                let _ = write!(fields, r#","token_ids":{}"#, token_list(&delta.tokens));
            }
            events.push_back(self.event(delta.choice, &fields, "", cached));
        }
    }

    fn write_completion(&mut self, delta: &Delta, cached: usize, events: &mut VecDeque<Bytes>) {
        let (options, progress) = (&self.answer.options, &mut self.choices[delta.choice]);
        let mut fields = br#""text":""#.to_vec();
        progress.text.push_escaped(&delta.tokens, &mut fields);
        fields.push(b'"');
        if options.logprobs.is_some() {
            fields.extend_from_slice(br#","logprobs":"#);
            push_text_logprobs(&delta.tokens, options.logprobs, (progress.characters, false), &mut fields);
            progress.characters += decode(&delta.tokens).chars().count();
        }
        if options.return_token_ids {
            let _ = write!(fields, r#","token_ids":{}"#, token_list(&delta.tokens));
        }
        events.push_back(self.event(delta.choice, &fields, "", cached));
    }
}

impl WriteEvents for RustEvents {
    fn write(&mut self, delta: &Delta, cached: usize, events: &mut VecDeque<Bytes>) {
        if !std::mem::replace(&mut self.started, true) {
            events.extend((0..self.choices.len()).filter_map(|choice| self.opening(choice, cached)));
        }
        self.choices[delta.choice].tokens += delta.tokens.len();
        match (self.is_chat, self.answer.options.echo) {
            (true, _) => self.write_chat(delta, cached, events),
            (false, PromptEcho::Alone) => {}
            (false, _) => self.write_completion(delta, cached, events),
        }
        if let Some(finish) = delta.finish {
            let reason = reason(self.tool_call.as_ref(), finish);
            let fields = match (self.is_chat, self.answer.options.return_token_ids) {
                (true, _) => format!(r#""delta":{{}},"finish_reason":"{reason}""#),
                (false, true) => format!(r#""text":"","finish_reason":"{reason}","token_ids":[]"#),
                (false, false) => format!(r#""text":"","finish_reason":"{reason}""#),
            };
            events.push_back(self.event(delta.choice, fields.as_bytes(), "", cached));
        }
    }

    fn end(&mut self, cached: usize, events: &mut VecDeque<Bytes>) {
        if self.answer.options.include_usage {
            let mut event = self.head.clone();
            event.extend_from_slice(br#"],"usage":"#);
            self.answer.usage(self.choices.iter().map(|choice| choice.tokens).sum(), cached).push_rust(&mut event);
            event.extend_from_slice(b"}\n\n");
            events.push_back(event.into());
        }
        events.push_back(Bytes::from_static(DONE));
    }
}
