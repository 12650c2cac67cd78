//! Translates chunks of an engine's answer to the events of a response.

use hostler_api::{ChunkChoice, ChunkMessage, ChunkToolCall, ChunkUsage, CompletionChunk};
use serde_json::{Value, json};

use super::answer::{ResponseFields, ResponseHead, call_item, message_item, output_text, reasoning_item, token_logprobs};
use super::tools::{NamedTool, custom_input, is_cut};
use crate::edge::translation::{ArrivalTime, ChunkTranslator, TranslationError};
use crate::sse::Dialect;

/// Most bytes of an answer so far, because its last event repeats all of it.
const MAX_ANSWER_BYTES: usize = 16 * 1024 * 1024;

/// Translates chunks to events. A response's items follow each other, and each is closed before the
/// next one begins.
#[derive(Debug)]
pub(in crate::edge) struct ResponsesTranslator {
    fields: ResponseFields,
    /// Set once the response has begun.
    head: Option<ResponseHead>,
    /// Closed items.
    output: Vec<Value>,
    open_item: Option<OpenItem>,
    /// Text that came during a call, whose arguments may go on, and blanks before any other text.
    held_text: String,
    /// Arguments of a free-form call so far.
    custom_arguments: String,
    /// Log probabilities of tokens whose text has not come yet, or is held.
    held_logprobs: Vec<Value>,
    answer_bytes: usize,
    event_count: u64,
    finish_reason: Option<String>,
    usage: ChunkUsage,
}

/// The item that the answer continues.
#[derive(Debug)]
struct OpenItem {
    id: String,
    kind: ItemKind,
    /// The item's text so far.
    text: String,
    /// Log probabilities of the text's tokens, if they were asked for.
    logprobs: Vec<Value>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum ItemKind {
    Reasoning,
    Message,
    /// The call with this number from the engine.
    Call {
        index: usize,
        call_id: String,
        tool: NamedTool,
    },
}

impl OpenItem {
    fn to_value(&self, status: &str) -> Value {
        let Self { id, kind, text, .. } = self;
        match kind {
            ItemKind::Reasoning => reasoning_item(id, text, status),
            ItemKind::Message => message_item(id, self.part().filter(|_| status == "completed"), status),
            ItemKind::Call { call_id, tool, .. } => call_item(id, call_id, tool, text, status),
        }
    }

    /// The item's part. A call has none.
    fn part(&self) -> Option<Value> {
        match self.kind {
            ItemKind::Reasoning => Some(json!({"type": "reasoning_text", "text": self.text})),
            ItemKind::Message => Some(output_text(&self.text, &self.logprobs)),
            ItemKind::Call { .. } => None,
        }
    }

    /// The name of the events about the item's text, without their last word.
    fn event_name(&self) -> &'static str {
        match &self.kind {
            ItemKind::Reasoning => "response.reasoning_text",
            ItemKind::Message => "response.output_text",
            ItemKind::Call { tool, .. } if tool.is_custom => "response.custom_tool_call_input",
            ItemKind::Call { .. } => "response.function_call_arguments",
        }
    }
}

impl ResponsesTranslator {
    pub(in crate::edge) fn new(fields: ResponseFields) -> Self {
        Self {
            fields,
            head: None,
            output: Vec::new(),
            open_item: None,
            held_text: String::new(),
            custom_arguments: String::new(),
            held_logprobs: Vec::new(),
            answer_bytes: 0,
            event_count: 0,
            finish_reason: None,
            usage: ChunkUsage::default(),
        }
    }

    fn write_event(&mut self, name: &str, mut data: Value, output: &mut Vec<u8>) {
        data["type"] = name.into();
        data["sequence_number"] = self.event_count.into();
        self.event_count += 1;
        output.extend_from_slice(format!("event: {name}\ndata: {data}\n\n").as_bytes());
    }

    /// Writes an event about the open item.
    fn write_item_event(&mut self, name: &str, mut data: Value, output: &mut Vec<u8>) {
        let Some(item) = &self.open_item else { return };
        data["item_id"] = item.id.as_str().into();
        data["output_index"] = self.output.len().into();
        if !matches!(item.kind, ItemKind::Call { .. }) {
            data["content_index"] = 0.into();
        }
        self.write_event(name, data, output);
    }

    fn begin_item(&mut self, kind: ItemKind, output: &mut Vec<u8>) {
        self.end_item(output);
        let prefix = match &kind {
            ItemKind::Reasoning => "rs",
            ItemKind::Message => "msg",
            ItemKind::Call { tool, .. } => tool.id_prefix(),
        };
        let index = self.output.len();
        let id = self.head.as_ref().map(|head| head.item_id(prefix, index)).unwrap_or_default();
        let item = OpenItem { id, kind, text: String::new(), logprobs: Vec::new() };
        let (value, part) = (item.to_value("in_progress"), item.part());
        self.open_item = Some(item);
        self.write_event("response.output_item.added", json!({"output_index": index, "item": value}), output);
        if let Some(part) = part {
            self.write_item_event("response.content_part.added", json!({"part": part}), output);
        }
    }

    /// Closes the open item. Held text becomes a separate item, unless it is blank: models put line
    /// ends around calls.
    fn end_item(&mut self, output: &mut Vec<u8>) {
        self.close_item(output);
        let held = std::mem::take(&mut self.held_text);
        if !held.trim().is_empty() {
            self.write_text(ItemKind::Message, &held, output);
            self.close_item(output);
        } else if !held.is_empty() {
            self.held_logprobs.clear();
        }
    }

    fn close_item(&mut self, output: &mut Vec<u8>) {
        let is_cut = self.is_call_cut();
        self.write_custom_input(output);
        let Some(item) = &mut self.open_item else { return };
        if item.kind == ItemKind::Message {
            item.logprobs.append(&mut self.held_logprobs);
        }
        let status = if is_cut { "incomplete" } else { "completed" };
        let (name, part, value) = (item.event_name(), item.part(), item.to_value(status));
        let done = match &item.kind {
            ItemKind::Call { tool, .. } if tool.is_custom => json!({"input": item.text}),
            ItemKind::Call { tool, .. } => json!({"name": tool.name, "arguments": item.text}),
            ItemKind::Reasoning => json!({"text": item.text}),
            ItemKind::Message => json!({"text": item.text, "logprobs": item.logprobs}),
        };
        if !is_cut {
            self.write_item_event(&format!("{name}.done"), done, output);
        }
        if let Some(part) = part {
            self.write_item_event("response.content_part.done", json!({"part": part}), output);
        }
        self.open_item = None;
        self.write_event("response.output_item.done", json!({"output_index": self.output.len(), "item": value}), output);
        self.output.push(value);
    }

    /// Writes the input of a free-form call, which is known once the call's arguments have ended.
    fn write_custom_input(&mut self, output: &mut Vec<u8>) {
        let arguments = std::mem::take(&mut self.custom_arguments);
        let is_custom = |item: &OpenItem| matches!(&item.kind, ItemKind::Call { tool, .. } if tool.is_custom);
        if self.open_item.as_ref().is_some_and(is_custom) {
            self.write_delta(&custom_input(&arguments, self.finish_reason.as_deref()), output);
        }
    }

    /// Whether the open item is a call that the limit of the answer's length has cut.
    fn is_call_cut(&self) -> bool {
        let finish = self.finish_reason.as_deref();
        let is_cut_call = |item: &OpenItem| match &item.kind {
            ItemKind::Call { tool, .. } if tool.is_custom => is_cut(&self.custom_arguments, finish),
            ItemKind::Call { .. } => is_cut(&item.text, finish),
            ItemKind::Reasoning | ItemKind::Message => false,
        };
        self.open_item.as_ref().is_some_and(is_cut_call)
    }

    /// Writes more of the open item.
    fn write_delta(&mut self, delta: &str, output: &mut Vec<u8>) {
        let Some(item) = &mut self.open_item else { return };
        item.text.push_str(delta);
        let name = format!("{}.delta", item.event_name());
        let data = if item.kind == ItemKind::Message {
            let logprobs = std::mem::take(&mut self.held_logprobs);
            item.logprobs.extend_from_slice(&logprobs);
            json!({"delta": delta, "logprobs": logprobs})
        } else {
            json!({"delta": delta})
        };
        self.write_item_event(&name, data, output);
    }

    /// Writes more of the reasoning or the message.
    fn write_text(&mut self, kind: ItemKind, text: &str, output: &mut Vec<u8>) {
        if self.open_item.as_ref().is_none_or(|item| item.kind != kind) {
            self.begin_item(kind, output);
        }
        self.write_delta(text, output);
    }

    fn read_choice(&mut self, choice: ChunkChoice, output: &mut Vec<u8>) -> Result<(), TranslationError> {
        let ChunkChoice { message, logprobs, finish_reason, .. } = choice;
        let ChunkMessage { content, reasoning, tool_calls, .. } = message.unwrap_or_default();
        let text = |text: Option<String>| text.filter(|text| !text.is_empty());
        let (reasoning, content) = (text(reasoning), text(content));
        let logprob_bytes = logprobs.as_ref().and_then(|logprobs| logprobs.content.as_ref()).map_or(0, |content| content.get().len());
        self.count(reasoning.as_ref().map_or(0, String::len) + content.as_ref().map_or(0, String::len) + logprob_bytes)?;
        // Log probabilities of reasoning and calls have no place in a response.
        if reasoning.is_none() && tool_calls.is_none() {
            self.held_logprobs.append(&mut token_logprobs(logprobs).map_err(TranslationError)?);
        }
        if let Some(reasoning) = reasoning {
            self.write_text(ItemKind::Reasoning, &reasoning, output);
        }
        if let Some(content) = content {
            self.read_text(&content, output);
        }
        for call in tool_calls.unwrap_or_default() {
            self.read_tool_call(call, output)?;
        }
        self.finish_reason = finish_reason.or(self.finish_reason.take());
        Ok(())
    }

    fn read_text(&mut self, content: &str, output: &mut Vec<u8>) {
        let kind = self.open_item.as_ref().map(|item| &item.kind);
        if kind == Some(&ItemKind::Message) {
            self.write_delta(content, output);
            return;
        }
        let is_calling = matches!(kind, Some(ItemKind::Call { .. }));
        self.held_text.push_str(content);
        if !is_calling && !self.held_text.trim().is_empty() {
            let text = std::mem::take(&mut self.held_text);
            self.write_text(ItemKind::Message, &text, output);
        }
    }

    /// Reads more of a call.
    fn read_tool_call(&mut self, call: ChunkToolCall, output: &mut Vec<u8>) -> Result<(), TranslationError> {
        let index = call.number();
        let ChunkToolCall { id, function, .. } = call;
        let is_open =
            |open: &Option<OpenItem>| matches!(open, Some(OpenItem { kind: ItemKind::Call { index: at, .. }, .. }) if *at == index);
        if let Some(name) = function.name.filter(|name| !name.is_empty() && !is_open(&self.open_item)) {
            // End the open item first, so that the next item's number is known.
            self.end_item(output);
            let made_up = || self.head.as_ref().map(|head| head.item_id("call", self.output.len())).unwrap_or_default();
            let call_id = id.unwrap_or_else(made_up);
            let tool = self.fields.tools.client_tool(&name);
            self.begin_item(ItemKind::Call { index, call_id, tool }, output);
        }
        let Some(arguments) = function.arguments.filter(|arguments| !arguments.is_empty()) else { return Ok(()) };
        if !is_open(&self.open_item) {
            return Err(TranslationError("the engine went on with a call of a tool that had ended".to_owned()));
        }
        self.count(arguments.len())?;
        match &self.open_item {
            Some(OpenItem { kind: ItemKind::Call { tool, .. }, .. }) if tool.is_custom => self.custom_arguments.push_str(&arguments),
            _ => self.write_delta(&arguments, output),
        }
        Ok(())
    }

    fn count(&mut self, bytes: usize) -> Result<(), TranslationError> {
        self.answer_bytes += bytes;
        if self.answer_bytes > MAX_ANSWER_BYTES { Err(TranslationError("the answer is too large".to_owned())) } else { Ok(()) }
    }
}

impl ChunkTranslator for ResponsesTranslator {
    fn read_chunk(&mut self, chunk: CompletionChunk, now: ArrivalTime, output: &mut Vec<u8>) -> Result<(), TranslationError> {
        let CompletionChunk { id, model, choices, usage, .. } = chunk;
        self.usage = usage.unwrap_or(self.usage);
        if self.head.is_none() {
            let head = ResponseHead::new(id, model, now.time);
            let response = self.fields.response(&head, &[], None);
            self.head = Some(head);
            self.write_event("response.created", json!({"response": response}), output);
            self.write_event("response.in_progress", json!({"response": response}), output);
        }
        choices.into_iter().try_for_each(|choice| self.read_choice(choice, output))
    }

    fn finish(&mut self, _now: ArrivalTime, output: &mut Vec<u8>) -> Result<(), TranslationError> {
        let finish = self.finish_reason.clone().ok_or_else(TranslationError::incomplete)?;
        if self.output.is_empty() && self.open_item.is_none() && !self.held_text.is_empty() {
            let blank = std::mem::take(&mut self.held_text);
            self.write_text(ItemKind::Message, &blank, output);
        }
        self.end_item(output);
        let head = self.head.take().unwrap_or_default();
        let response = self.fields.response(&head, &self.output, Some((&finish, self.usage)));
        let name = if finish == "length" { "response.incomplete" } else { "response.completed" };
        self.write_event(name, json!({"response": response}), output);
        Ok(())
    }

    fn write_error(&self, message: &str, output: &mut Vec<u8>) {
        output.extend_from_slice(&Dialect::Responses.error_event(message));
    }

    fn write_keep_alive(&self, output: &mut Vec<u8>) {
        output.extend_from_slice(&Dialect::Responses.keep_alive());
    }
}
