//! What clients of Anthropic's Messages API ask, as a chat for an engine; and the engine's answer in their form. Both are what vLLM's Python
//! front-end makes of them.

mod answer;
mod request;
mod stream;

pub(super) use answer::{translate_answer, translate_count};
pub(super) use request::{chat_request, count_request};
pub(super) use stream::MessagesTranslator;

#[cfg(test)]
mod tests;
