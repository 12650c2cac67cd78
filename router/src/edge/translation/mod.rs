//! What all translations of engines' answers into another API share: the chunks, the stream and its body.

mod body;
mod chunk;
#[cfg(test)]
pub(super) mod samples;
mod stream;

pub(super) use body::{TranslatedBody, collect_body, translated_headers};
pub(super) use chunk::{
    ChunkChoice, ChunkFunction, ChunkMessage, ChunkToolCall, ChunkUsage, CompletionChunk, error_message, unreadable_answer,
};
#[cfg(test)]
pub(super) use stream::StreamTranslation;
pub(super) use stream::{ArrivalTime, ChunkTranslator, TranslationError};
