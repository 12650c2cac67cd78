//! Translates an engine's event stream to another API's form, however its bytes are cut.

use std::time::SystemTime;

use hostler_api::CompletionChunk;
use tokio::time::Instant;

use super::error_words::error_message;
use crate::sse::LineBuffer;

/// Longest event; a longer one ends the answer. The largest come with log probabilities, and have
/// about ten kilobytes.
const MAX_EVENT_BYTES: usize = 1024 * 1024;

/// Why an answer cannot be translated further. The client is told so, and its connection broken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::edge) struct TranslationError(pub(in crate::edge) String);

impl TranslationError {
    /// The error for an answer without a finish reason.
    pub(in crate::edge) fn incomplete() -> Self {
        Self("the engine ended the answer before it was complete".to_owned())
    }
}

/// When a piece came.
#[derive(Debug, Clone, Copy)]
pub(in crate::edge) struct ArrivalTime {
    pub(in crate::edge) instant: Instant,
    pub(in crate::edge) time: SystemTime,
}

impl ArrivalTime {
    pub(in crate::edge) fn now() -> Self {
        Self { instant: Instant::now(), time: SystemTime::now() }
    }
}

/// Writes chunks of an answer in the form of one API. The output is sent even if a later step
/// fails.
pub(in crate::edge) trait ChunkTranslator: std::fmt::Debug + Send {
    /// Takes in a chunk.
    fn read_chunk(&mut self, chunk: CompletionChunk, now: ArrivalTime, output: &mut Vec<u8>) -> Result<(), TranslationError>;

    /// Writes the end of the answer, or fails because the answer is not whole.
    fn finish(&mut self, now: ArrivalTime, output: &mut Vec<u8>) -> Result<(), TranslationError>;

    /// Writes an error that ends the answer.
    fn write_error(&self, message: &str, output: &mut Vec<u8>);

    /// Writes a keep-alive for the client's connection, if the API has one without content.
    fn write_keep_alive(&self, output: &mut Vec<u8>);
}

/// The translation of one stream.
#[derive(Debug)]
pub(in crate::edge) struct StreamTranslation {
    translator: Box<dyn ChunkTranslator>,
    lines: LineBuffer,
    /// Output for the client.
    output: Vec<u8>,
}

impl StreamTranslation {
    pub(in crate::edge) fn new(translator: impl ChunkTranslator + 'static) -> Self {
        Self { translator: Box::new(translator), lines: LineBuffer::default(), output: Vec::new() }
    }

    /// Reads bytes and returns the output, which may be empty.
    ///
    /// # Errors
    /// If the engine reports a failure, or its answer cannot be translated. Earlier output can
    /// still be taken.
    pub(in crate::edge) fn push(&mut self, bytes: &[u8], now: ArrivalTime) -> Result<Vec<u8>, TranslationError> {
        let mut lines = std::mem::take(&mut self.lines);
        lines.push(bytes, |line| self.read_line(line, now))?;
        if lines.len() > MAX_EVENT_BYTES {
            return Err(TranslationError("the engine sent an event that is too large".to_owned()));
        }
        self.lines = lines;
        Ok(self.take_output())
    }

    /// The output that was not taken yet.
    pub(in crate::edge) fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }

    /// The end of the answer, now that the stream has ended.
    ///
    /// # Errors
    /// If the answer is not whole.
    pub(in crate::edge) fn finish(&mut self, now: ArrivalTime) -> Result<Vec<u8>, TranslationError> {
        // An engine may leave out the last line end.
        let rest = self.lines.take();
        self.read_line(&rest, now)?;
        self.translator.finish(now, &mut self.output)?;
        Ok(self.take_output())
    }

    /// The output that was not taken yet, followed by an error.
    pub(in crate::edge) fn fail(&mut self, message: &str) -> Vec<u8> {
        self.translator.write_error(message, &mut self.output);
        self.take_output()
    }

    /// Reads one line of the event stream. Engines write an event's data in one line. Engines and
    /// the relay keep a silent stream alive with comments.
    fn read_line(&mut self, line: &[u8], now: ArrivalTime) -> Result<(), TranslationError> {
        if line.starts_with(b":") {
            self.translator.write_keep_alive(&mut self.output);
            return Ok(());
        }
        let Some(data) = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii) else { return Ok(()) };
        if data.is_empty() || data == b"[DONE]" {
            return Ok(());
        }
        let unreadable = |error: serde_json::Error| TranslationError(format!("an event of the engine cannot be read: {error}"));
        let chunk: CompletionChunk = serde_json::from_slice(data).map_err(unreadable)?;
        if chunk.error.is_some() {
            return Err(TranslationError(error_message(data)));
        }
        self.translator.read_chunk(chunk, now, &mut self.output)
    }
}
