//! Translates requests of Anthropic's Messages API to chats for an engine, and the engine's answers
//! back. Both translations match those of vLLM's Python front-end.

mod answer;
mod request;
mod stream;

pub(super) use answer::{translate_answer, translate_count};
pub(super) use request::{chat_request, count_request};
pub(super) use stream::MessagesTranslator;

#[cfg(test)]
mod tests;
