//! What clients of OpenAI's Responses API ask without the engine keeping anything, as a chat for an engine; and the engine's answer in their form.

mod answer;
mod request;
mod stream;

pub(super) use answer::{ResponseFields, translate_answer};
pub(super) use request::{chat_request, needs_kept_responses};
pub(super) use stream::ResponsesTranslator;

#[cfg(test)]
mod tests;
