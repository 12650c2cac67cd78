//! Translates chunks of an engine's answer to the events of a message.

use hostler_api::{ChunkChoice, ChunkMessage, ChunkToolCall, ChunkUsage, CompletionChunk};
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use super::answer::{MessageHead, made_up_id, stop_reason, usage_of};
use crate::edge::translation::{ArrivalTime, ChunkTranslator, TranslationError};
use crate::sse::Dialect;

/// Most bytes of text held during a call, and of a call's arguments.
const MAX_HELD_BYTES: usize = 4 * 1024 * 1024;

/// Translates chunks to events. A message's blocks follow each other, and each is closed before the
/// next one begins.
#[derive(Debug, Default)]
pub(in crate::edge) struct MessagesTranslator {
    /// The message's id, once it has begun.
    id: Option<String>,
    /// How many blocks have begun.
    block_count: usize,
    open_block: Option<OpenBlock>,
    /// Text that came during a call, whose arguments may go on, and blanks before any other text.
    held_text: String,
    has_call: bool,
    /// Arguments of the last call.
    arguments: String,
    finish_reason: Option<String>,
    stop_reason: Option<Value>,
    usage: ChunkUsage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OpenBlock {
    Thinking,
    Text,
    /// The call with this number from the engine.
    ToolUse(usize),
}

impl MessagesTranslator {
    fn begin_message(&mut self, id: Option<String>, model: Option<&str>, output: &mut Vec<u8>) {
        if self.id.is_none() {
            let id = id.unwrap_or_default();
            let message = MessageHead::new(&id, model.unwrap_or_default(), self.usage);
            write_event("message_start", &json!({"type": "message_start", "message": message}), output);
            self.id = Some(id);
        }
    }

    fn begin_block(&mut self, block: OpenBlock, content: &Value, output: &mut Vec<u8>) {
        self.end_block(output);
        let event = json!({"type": "content_block_start", "index": self.block_count, "content_block": content});
        write_event("content_block_start", &event, output);
        self.block_count += 1;
        self.open_block = Some(block);
    }

    /// Closes the open block. Held text becomes a separate block, unless it is blank: models put
    /// line ends around calls.
    fn end_block(&mut self, output: &mut Vec<u8>) {
        if let Some(open) = self.open_block.take() {
            if open == OpenBlock::Thinking {
                // Anthropic's signatures prove that its model wrote the thinking. Clients want a
                // signature.
                self.write_delta(&json!({"type": "signature_delta", "signature": self.id}), output);
            }
            write_event("content_block_stop", &json!({"type": "content_block_stop", "index": self.block_count - 1}), output);
        }
        let held = std::mem::take(&mut self.held_text);
        if !held.trim().is_empty() {
            self.write_text(&held, output);
            self.end_block(output);
        }
    }

    fn write_delta(&self, delta: &Value, output: &mut Vec<u8>) {
        let event = json!({"type": "content_block_delta", "index": self.block_count - 1, "delta": delta});
        write_event("content_block_delta", &event, output);
    }

    fn write_thinking(&mut self, thinking: &str, output: &mut Vec<u8>) {
        if self.open_block != Some(OpenBlock::Thinking) {
            self.begin_block(OpenBlock::Thinking, &json!({"type": "thinking", "thinking": "", "signature": ""}), output);
        }
        self.write_delta(&json!({"type": "thinking_delta", "thinking": thinking}), output);
    }

    fn write_text(&mut self, text: &str, output: &mut Vec<u8>) {
        if text.is_empty() {
            return;
        }
        if self.open_block != Some(OpenBlock::Text) {
            self.begin_block(OpenBlock::Text, &json!({"type": "text", "text": ""}), output);
        }
        self.write_delta(&json!({"type": "text_delta", "text": text}), output);
    }

    fn read_choice(&mut self, choice: ChunkChoice, output: &mut Vec<u8>) -> Result<(), TranslationError> {
        let ChunkChoice { message, finish_reason, stop_reason, .. } = choice;
        let ChunkMessage { content, reasoning, tool_calls, .. } = message.unwrap_or_default();
        if let Some(thinking) = reasoning.filter(|thinking| !thinking.is_empty()) {
            self.write_thinking(&thinking, output);
        }
        let text = content.unwrap_or_default();
        if self.open_block == Some(OpenBlock::Text) {
            self.write_text(&text, output);
        } else {
            self.held_text.push_str(&text);
            self.check_held()?;
            if !matches!(self.open_block, Some(OpenBlock::ToolUse(_))) && !self.held_text.trim().is_empty() {
                let text = std::mem::take(&mut self.held_text);
                self.write_text(&text, output);
            }
        }
        for call in tool_calls.unwrap_or_default() {
            self.read_tool_call(call, output)?;
        }
        if finish_reason.is_some() {
            (self.finish_reason, self.stop_reason) = (finish_reason, stop_reason);
        }
        Ok(())
    }

    /// Reads more of a call.
    fn read_tool_call(&mut self, call: ChunkToolCall, output: &mut Vec<u8>) -> Result<(), TranslationError> {
        let index = call.number();
        let ChunkToolCall { id, function, .. } = call;
        let is_open = self.open_block == Some(OpenBlock::ToolUse(index));
        if let Some(name) = function.name.filter(|name| !is_open && !name.is_empty()) {
            let id = id.unwrap_or_else(|| made_up_id(index));
            self.begin_block(OpenBlock::ToolUse(index), &json!({"type": "tool_use", "id": id, "name": name, "input": {}}), output);
            self.has_call = true;
            self.arguments.clear();
        }
        let Some(arguments) = function.arguments.filter(|arguments| !arguments.is_empty()) else { return Ok(()) };
        if self.open_block != Some(OpenBlock::ToolUse(index)) {
            return Err(TranslationError("the engine went on with a call of a tool that had ended".to_owned()));
        }
        self.arguments.push_str(&arguments);
        self.check_held()?;
        self.write_delta(&json!({"type": "input_json_delta", "partial_json": arguments}), output);
        Ok(())
    }

    fn check_held(&self) -> Result<(), TranslationError> {
        let held = self.held_text.len() + self.arguments.len();
        if held > MAX_HELD_BYTES { Err(TranslationError("the model's calls of tools are too large".to_owned())) } else { Ok(()) }
    }
}

impl ChunkTranslator for MessagesTranslator {
    fn read_chunk(&mut self, chunk: CompletionChunk, _now: ArrivalTime, output: &mut Vec<u8>) -> Result<(), TranslationError> {
        let CompletionChunk { id, model, choices, usage, .. } = chunk;
        self.usage = usage.unwrap_or(self.usage);
        self.begin_message(id, model.as_deref(), output);
        choices.into_iter().try_for_each(|choice| self.read_choice(choice, output))
    }

    fn finish(&mut self, _now: ArrivalTime, output: &mut Vec<u8>) -> Result<(), TranslationError> {
        let finish = self.finish_reason.take().ok_or_else(TranslationError::incomplete)?;
        // Clients read the first block of any answer.
        if self.block_count == 0 {
            let blank = std::mem::take(&mut self.held_text);
            self.begin_block(OpenBlock::Text, &json!({"type": "text", "text": ""}), output);
            self.write_text(&blank, output);
        }
        self.end_block(output);
        let is_whole = self.arguments.trim().is_empty() || serde_json::from_str::<IgnoredAny>(&self.arguments).is_ok();
        let (reason, sequence) = stop_reason(&finish, self.stop_reason.take(), self.has_call, self.has_call && is_whole);
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
        write_event("message_delta", &json!({"type": "message_delta", "delta": delta, "usage": usage_of(self.usage)}), output);
        write_event("message_stop", &json!({"type": "message_stop"}), output);
        Ok(())
    }

    fn write_error(&self, message: &str, output: &mut Vec<u8>) {
        output.extend_from_slice(&Dialect::Anthropic.error_event(message));
    }

    fn write_keep_alive(&self, output: &mut Vec<u8>) {
        output.extend_from_slice(&Dialect::Anthropic.keep_alive());
    }
}

fn write_event(name: &str, data: &Value, output: &mut Vec<u8>) {
    output.extend_from_slice(format!("event: {name}\ndata: {data}\n\n").as_bytes());
}
