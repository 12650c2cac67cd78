//! The common parts of all translations between other APIs and the engines': the chunks of an
//! answer, the stream and its body, and messages about requests.

mod body;
mod error_words;
mod request;
#[cfg(test)]
pub(super) mod samples;
mod stream;
mod whole;

pub(super) use body::{TranslatedBody, translated_headers};
pub(super) use error_words::{error_message, unreadable_answer};
pub(super) use request::{USE_PYTHON, is_wanted};
pub(super) use stream::{ArrivalTime, ChunkTranslator, StreamTranslation, TranslationError};
pub(super) use whole::{text_beside_calls, translate_whole};
