//! Translates chunks of an engine's answer to lines of JSON for a client of Ollama's API.

use hostler_api::{ChunkChoice, ChunkMessage, ChunkToolCall, ChunkUsage, CompletionChunk};
use tokio::time::Instant;

use super::answer::{AnswerEnd, AnswerPart, AnswerTimings, OllamaToolCall, encode_line, error_body};
use super::request::OllamaRoute;
use crate::edge::translation::{ArrivalTime, ChunkTranslator, TranslationError};

/// Most bytes of arguments in all calls of an answer, which are sent when they are complete.
const MAX_TOOL_CALL_BYTES: usize = 4 * 1024 * 1024;

/// Turns chunks into lines.
#[derive(Debug)]
pub(in crate::edge) struct OllamaTranslator {
    route: OllamaRoute,
    model: String,
    received_at: Instant,
    first_token_at: Option<Instant>,
    tool_calls: Vec<PartialToolCall>,
    finish_reason: Option<String>,
    usage: ChunkUsage,
}

#[derive(Debug, Default)]
struct PartialToolCall {
    id: Option<String>,
    name: String,
    arguments: String,
}

impl OllamaTranslator {
    /// `begun` is when the request came.
    pub(in crate::edge) fn new(form: OllamaRoute, model: String, begun: Instant) -> Self {
        Self {
            route: form,
            model,
            received_at: begun,
            first_token_at: None,
            tool_calls: Vec::new(),
            finish_reason: None,
            usage: ChunkUsage::default(),
        }
    }

    fn read_choice(&mut self, choice: ChunkChoice, now: ArrivalTime, lines: &mut Vec<u8>) -> Result<(), TranslationError> {
        let ChunkChoice { message, text, logprobs, finish_reason, .. } = choice;
        let ChunkMessage { content, reasoning, tool_calls, .. } = message.unwrap_or_default();
        let text = content.as_deref().or(text.as_deref()).unwrap_or_default();
        let thinking = reasoning.as_deref().filter(|thinking| !thinking.is_empty());
        let calls = tool_calls.unwrap_or_default();
        let logprobs = logprobs.and_then(|logprobs| logprobs.content);
        // The first event of a chat has a role and no token.
        if !text.is_empty() || thinking.is_some() || !calls.is_empty() {
            self.first_token_at.get_or_insert(now.instant);
        }
        if !text.is_empty() || thinking.is_some() || logprobs.is_some() {
            self.write_line(&AnswerPart { text, thinking, logprobs: logprobs.as_deref(), ..AnswerPart::default() }, now, lines);
        }
        calls.into_iter().try_for_each(|call| self.read_tool_call(call))?;
        if let Some(finish) = finish_reason {
            self.write_tool_calls(now, lines)?;
            self.finish_reason = Some(finish);
        }
        Ok(())
    }

    fn read_tool_call(&mut self, call: ChunkToolCall) -> Result<(), TranslationError> {
        let index = call.number();
        let ChunkToolCall { id, function, .. } = call;
        // Calls come one after another.
        if index >= self.tool_calls.len() {
            self.tool_calls.push(PartialToolCall::default());
        }
        let at = index.min(self.tool_calls.len() - 1);
        let begun = &mut self.tool_calls[at];
        begun.id = id.or(begun.id.take());
        begun.name.push_str(function.name.as_deref().unwrap_or_default());
        begun.arguments.push_str(function.arguments.as_deref().unwrap_or_default());
        let bytes: usize = self.tool_calls.iter().map(|call| call.name.len() + call.arguments.len()).sum();
        if bytes > MAX_TOOL_CALL_BYTES { Err(TranslationError("the model's calls of tools are too large".to_owned())) } else { Ok(()) }
    }

    /// Writes the calls, which are complete now: clients read their arguments as objects.
    fn write_tool_calls(&mut self, now: ArrivalTime, lines: &mut Vec<u8>) -> Result<(), TranslationError> {
        if self.tool_calls.is_empty() {
            return Ok(());
        }
        let calls = std::mem::take(&mut self.tool_calls).into_iter().enumerate();
        let calls = calls.map(|(index, call)| OllamaToolCall::new(index, call.id, call.name, &call.arguments));
        let calls = calls.collect::<Result<Vec<_>, String>>().map_err(TranslationError)?;
        self.write_line(&AnswerPart { tool_calls: &calls, ..AnswerPart::default() }, now, lines);
        Ok(())
    }

    fn write_line(&self, told: &AnswerPart<'_>, now: ArrivalTime, lines: &mut Vec<u8>) {
        lines.extend_from_slice(&encode_line(self.route, &self.model, told, now.time));
        lines.push(b'\n');
    }
}

impl ChunkTranslator for OllamaTranslator {
    fn read_chunk(&mut self, chunk: CompletionChunk, now: ArrivalTime, lines: &mut Vec<u8>) -> Result<(), TranslationError> {
        self.usage = chunk.usage.unwrap_or(self.usage);
        chunk.choices.into_iter().try_for_each(|choice| self.read_choice(choice, now, lines))
    }

    /// The last line.
    fn finish(&mut self, now: ArrivalTime, lines: &mut Vec<u8>) -> Result<(), TranslationError> {
        let finish = self.finish_reason.take().ok_or_else(TranslationError::incomplete)?;
        self.write_tool_calls(now, lines)?;
        let first = self.first_token_at.unwrap_or(now.instant);
        let took =
            AnswerTimings { total: now.instant - self.received_at, prompt: Some(first - self.received_at), answer: now.instant - first };
        let end = AnswerEnd { finish_reason: &finish, usage: self.usage, timings: took };
        self.write_line(&AnswerPart { end: Some(end), ..AnswerPart::default() }, now, lines);
        Ok(())
    }

    /// Writes an error line.
    fn write_error(&self, message: &str, lines: &mut Vec<u8>) {
        lines.extend_from_slice(error_body(message).to_string().as_bytes());
        lines.push(b'\n');
    }

    /// Writes nothing: each line is an object with words of the answer.
    fn write_keep_alive(&self, _lines: &mut Vec<u8>) {}
}

#[cfg(test)]
mod tests;
