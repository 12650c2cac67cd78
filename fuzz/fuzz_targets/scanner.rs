//! Fuzzes the reader of event streams.
//!
//! It must change no byte, pass on in the end what it holds, and reach the same result however the
//! stream is cut. The last two bytes of an input choose dialect and cut.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;

#[path = "../../router/src/sse/answer_parser.rs"]
mod answer_parser;
#[path = "../../router/src/sse/engine_error.rs"]
mod engine_error;
#[path = "../../router/src/sse/event.rs"]
mod event;
#[path = "../../router/src/sse/sse_scanner.rs"]
mod sse_scanner;
#[path = "../../router/src/sse/text_length.rs"]
mod text_length;

use answer_parser::TokenUsage;
use hostler_api::Dialect;
use sse_scanner::{ChunkOutcome, SseScanner};

/// Result for a stream: the bytes sent, how it ended, and its token usage.
#[derive(Debug, PartialEq)]
struct Thought {
    sent: Vec<u8>,
    ended: Option<&'static str>,
    complete: bool,
    usage: Option<TokenUsage>,
    events: u64,
}

fn think(dialect: Dialect, pieces: impl Iterator<Item = Bytes>) -> Thought {
    let mut scanner = SseScanner::new(dialect);
    let (mut sent, mut ended) = (Vec::new(), None);
    for piece in pieces {
        let (bytes, end) = match scanner.process(piece) {
            ChunkOutcome::Forward(bytes) => (bytes, None),
            ChunkOutcome::Failed { bytes, .. } => (bytes, Some("failed")),
            ChunkOutcome::Aborted(bytes) => (bytes, Some("aborted")),
        };
        sent.extend_from_slice(&bytes);
        ended = end;
        if ended.is_some() {
            break;
        }
    }
    if ended.is_none() {
        sent.extend_from_slice(&scanner.take_rest());
    }
    let _ = scanner.error_event("why");
    Thought { sent, ended, complete: scanner.is_complete(), usage: scanner.usage(), events: scanner.event_count() }
}

fuzz_target!(|input: &[u8]| {
    let [stream @ .., which, cut] = input else { return };
    let dialects = [Dialect::OpenAi, Dialect::Responses, Dialect::Anthropic, Dialect::Other];
    let dialect = dialects[usize::from(*which) % dialects.len()];
    let whole = think(dialect, std::iter::once(Bytes::copy_from_slice(stream)));
    assert!(stream.starts_with(&whole.sent));
    assert!(whole.ended.is_some() || stream == whole.sent);
    let pieces = stream.chunks(usize::from(*cut).max(1)).map(Bytes::copy_from_slice);
    assert_eq!(think(dialect, pieces), whole);
});
