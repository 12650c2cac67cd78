//! What clients of Ollama's API ask, as a request for an engine; and the engine's answer in their form.

mod answer;
mod messages;
mod options;
mod request;
mod stream;

pub(super) use answer::{error, loaded, message_of, moment, whole};
pub(super) use request::{Asked, Form, Wanted};
pub(super) use stream::{Retold, Teller};
