//! Translates requests of OpenAI's Responses API that keep nothing in the engine to chats, and the
//! engine's answers back.

mod answer;
mod request;
mod stream;
mod tools;

pub(super) use answer::{ResponseFields, translate_answer};
pub(super) use request::{chat_request, needs_kept_responses};
pub(super) use stream::ResponsesTranslator;

#[cfg(test)]
mod tests;
