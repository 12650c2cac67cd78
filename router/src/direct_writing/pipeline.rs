//! Processes every piece of an answer on its way to the client, on either path: through the relay,
//! or through the lane's task, which writes to the client while the relay waits.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hostler_proto::lane::{ConsumeOutcome, InlineConsumer};
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use super::direct_writer::DirectWriter;
use crate::crash_suspects::TrialProgress;
use crate::response_affinity::ResponseIdReader;
use crate::resumption::{Continuation, ReplayRecord, TokenRecord};
use crate::sse::{AnswerParser, ChunkOutcome, FinishState, SseScanner};

/// An answer on its way. The relay and the lane's task share it, and either may pass it on.
#[derive(Debug)]
pub(crate) struct AnswerPipeline(Mutex<PipelineState>);

#[derive(Debug)]
pub(crate) struct PipelineState {
    pub(crate) scanner: Option<SseScanner>,
    /// Reads a plain answer that is too long to be read whole before it is passed on.
    pub(crate) answer_parser: Option<Box<AnswerParser>>,
    pub(crate) response_id_reader: Option<ResponseIdReader>,
    /// Records the tokens of a stream that may be resumed, and removes them from its events.
    pub(crate) token_record: Option<Box<TokenRecord>>,
    /// Records the content of a stream that may be replayed, and removes it from the replay.
    pub(crate) replay_record: Option<Box<ReplayRecord>>,
    /// Rewrites the rest of a resumed stream.
    pub(crate) continuation: Option<Box<Continuation>>,
    pub(crate) trial_progress: Option<TrialProgress>,
    pub(crate) sent_bytes: u64,
    pub(crate) last_progress_at: Instant,
    /// The longest time between two pieces, and when it ended.
    pub(crate) longest_gap: (Duration, Instant),
    /// Since when the client of a replayed stream has received nothing.
    pub(crate) silent_since: Option<Instant>,
    pub(crate) direct_writer: Option<Arc<DirectWriter>>,
    /// A fault that the lane's task found in a piece, for the relay.
    pub(crate) failure: Option<ChunkOutcome>,
}

impl AnswerPipeline {
    pub(crate) fn new(
        scanner: Option<SseScanner>,
        response_id_reader: Option<ResponseIdReader>,
        trial_progress: Option<TrialProgress>,
    ) -> Arc<Self> {
        let last_progress_at = Instant::now();
        Arc::new(Self(Mutex::new(PipelineState {
            scanner,
            answer_parser: None,
            response_id_reader,
            token_record: None,
            replay_record: None,
            continuation: None,
            trial_progress,
            sent_bytes: 0,
            last_progress_at,
            longest_gap: (Duration::ZERO, last_progress_at),
            silent_since: None,
            direct_writer: None,
            failure: None,
        })))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, PipelineState> {
        self.0.lock()
    }
}

impl PipelineState {
    /// Records that a piece has come.
    pub(crate) fn record_progress(&mut self) {
        let now = Instant::now();
        let gap = now.saturating_duration_since(self.last_progress_at);
        if gap > self.longest_gap.0 {
            self.longest_gap = (gap, now);
        }
        self.last_progress_at = now;
    }

    /// Takes the longest gap of an engine's part of the stream. The next part begins without one.
    pub(crate) fn take_gap(&mut self) -> (Duration, Instant) {
        std::mem::replace(&mut self.longest_gap, (Duration::ZERO, self.last_progress_at))
    }

    /// Tokens of the stream so far: all if the engine returns them, else at least so many.
    pub(crate) fn seen_tokens(&self) -> u64 {
        let recorded = self.token_record.as_ref().map_or(0, |record| record.emitted_tokens());
        if recorded > 0 { recorded } else { self.scanner.as_ref().map_or(0, SseScanner::least_tokens) }
    }

    /// The rest of an answer that has ended, and whether it was complete.
    pub(crate) fn finish(&mut self) -> (Bytes, bool) {
        let Some(scanner) = &mut self.scanner else { return (Bytes::new(), true) };
        let rest = scanner.take_rest();
        // A continuation that ends within an event lacks that event.
        let is_told = self.continuation.as_ref().is_none_or(|continuation| continuation.is_told())
            && self.replay_record.as_ref().is_none_or(|record| record.is_told());
        let is_complete = is_told && scanner.is_complete();
        match &mut self.token_record {
            Some(record) if is_complete => (record.process(rest), true),
            _ => (rest, is_complete),
        }
    }

    /// Reads a piece. Returns the bytes to send, and the end to send after them.
    pub(crate) fn process(&mut self, bytes: Bytes) -> (ChunkOutcome, &'static [u8]) {
        if self.response_id_reader.as_mut().is_some_and(|watch| watch.push(&bytes)) {
            self.response_id_reader = None;
        }
        if self.trial_progress.as_mut().is_some_and(|progress| progress.observe_chunk(&bytes)) {
            self.trial_progress = None;
        }
        if self.token_record.is_some() {
            return self.process_with_tokens(bytes);
        }
        if self.replay_record.is_some() {
            return (self.process_with_replay(bytes), b"");
        }
        if let Some(scanner) = &mut self.scanner {
            return (scanner.process(bytes), b"");
        }
        if let Some(parser) = &mut self.answer_parser {
            parser.feed(&bytes);
            if parser.finish_state() == FinishState::Abort {
                return (ChunkOutcome::Aborted(Bytes::new()), b"");
            }
        }
        (ChunkOutcome::Forward(bytes), b"")
    }

    /// Reads a piece of an event stream that may be replayed, or is.
    fn process_with_replay(&mut self, bytes: Bytes) -> ChunkOutcome {
        let (Some(scanner), Some(record)) = (&mut self.scanner, &mut self.replay_record) else {
            return ChunkOutcome::Forward(bytes);
        };
        if record.is_replaying() {
            let Ok(new) = record.retell(&bytes) else { return ChunkOutcome::Aborted(Bytes::new()) };
            self.silent_since = self.silent_since.filter(|_| new.is_empty());
            return scanner.process(new);
        }
        if scanner.is_between_events() && record.observe_common(&bytes) {
            scanner.count_plain_event(&bytes);
            return ChunkOutcome::Forward(bytes);
        }
        let was_within_event = scanner.is_within_event();
        let outcome = scanner.process(bytes);
        if was_within_event || scanner.is_within_event() {
            record.give_up();
            return outcome;
        }
        match &outcome {
            ChunkOutcome::Forward(bytes) | ChunkOutcome::Aborted(bytes) => record.observe(bytes),
            ChunkOutcome::Failed { bytes, error_at, .. } => record.observe(&bytes[..*error_at]),
        }
        outcome
    }

    /// Reads a piece of an event stream whose engine returns tokens.
    fn process_with_tokens(&mut self, bytes: Bytes) -> (ChunkOutcome, &'static [u8]) {
        let (Some(scanner), Some(record)) = (&mut self.scanner, &mut self.token_record) else {
            return (ChunkOutcome::Forward(bytes), b"");
        };
        let bytes = match &mut self.continuation {
            Some(continuation) => continuation.retell(&bytes),
            None => bytes,
        };
        if scanner.is_between_events()
            && let Some((bytes, end)) = record.process_common(&bytes)
        {
            scanner.count_plain_event(&bytes);
            return (ChunkOutcome::Forward(bytes), end);
        }
        let was_within_event = scanner.is_within_event();
        let outcome = scanner.process(bytes);
        if was_within_event || scanner.is_within_event() {
            record.give_up();
            return (outcome, b"");
        }
        let outcome = match outcome {
            ChunkOutcome::Forward(bytes) if bytes.is_empty() => ChunkOutcome::Forward(bytes),
            ChunkOutcome::Forward(bytes) => ChunkOutcome::Forward(record.process(bytes)),
            ChunkOutcome::Aborted(bytes) => ChunkOutcome::Aborted(record.process(bytes)),
            ChunkOutcome::Failed { bytes, error_at, is_engine_dead } => {
                let before = record.process(bytes.slice(..error_at));
                let (error_at, bytes) = (before.len(), [&before[..], &bytes[error_at..]].concat().into());
                ChunkOutcome::Failed { bytes, error_at, is_engine_dead }
            }
        };
        (outcome, b"")
    }
}

/// The lane's task takes pieces of an event stream.
impl InlineConsumer for AnswerPipeline {
    fn consume(&self, piece: Bytes) -> ConsumeOutcome {
        let mut flow = self.lock();
        // Nothing is passed on after a failure.
        if flow.failure.is_some() {
            return ConsumeOutcome::Declined(piece);
        }
        let Some(direct_writer) = flow.direct_writer.clone() else { return ConsumeOutcome::Declined(piece) };
        let Some(free) = direct_writer.try_acquire() else { return ConsumeOutcome::Declined(piece) };
        flow.record_progress();
        match flow.process(piece) {
            (ChunkOutcome::Forward(bytes), _) if bytes.is_empty() => ConsumeOutcome::Consumed,
            (ChunkOutcome::Forward(bytes), end) => {
                flow.sent_bytes += (bytes.len() + end.len()) as u64;
                if free.write_chunk(&bytes, end) { ConsumeOutcome::Consumed } else { ConsumeOutcome::ConsumedAndWake }
            }
            (failed, _) => {
                flow.failure = Some(failed);
                ConsumeOutcome::ConsumedAndWake
            }
        }
    }
}

#[cfg(test)]
mod tests;
