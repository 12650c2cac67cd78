//! Translates requests of Ollama's API for an engine, and the engine's answers back.

mod answer;
mod messages;
mod options;
mod request;
mod stream;

pub(super) use answer::{error_body, format_time, model_loaded_answer, translate_answer};
pub(super) use request::{OllamaRequest, OllamaRoute, OpenAiRequest};
pub(super) use stream::OllamaTranslator;
