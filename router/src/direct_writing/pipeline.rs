//! What every piece of an answer meets on its way to the client, wherever it comes through: the relay, or, while that waits for the next
//! one, the lane's task, which then writes it to the client itself.

use std::sync::Arc;

use bytes::Bytes;
use hostler_proto::lane::{ConsumeOutcome, InlineConsumer};
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use super::direct_writer::DirectWriter;
use crate::crash_suspects::TrialProgress;
use crate::response_affinity::ResponseIdReader;
use crate::sse::{AnswerParser, ChunkOutcome, FinishState, SseScanner};

/// An answer on its way, shared by the relay and the lane's task, either of which may pass it on.
#[derive(Debug)]
pub(crate) struct AnswerPipeline(Mutex<PipelineState>);

#[derive(Debug)]
pub(crate) struct PipelineState {
    pub(crate) scanner: Option<SseScanner>,
    /// Reads a plain answer that is too long to be read whole before it is passed on.
    pub(crate) answer_parser: Option<Box<AnswerParser>>,
    pub(crate) response_id_reader: Option<ResponseIdReader>,
    pub(crate) trial_progress: Option<TrialProgress>,
    pub(crate) sent_bytes: u64,
    pub(crate) last_progress_at: Instant,
    pub(crate) direct_writer: Option<Arc<DirectWriter>>,
    /// A fault that the lane's task has found in a piece, for the relay.
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
            trial_progress,
            sent_bytes: 0,
            last_progress_at,
            direct_writer: None,
            failure: None,
        })))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, PipelineState> {
        self.0.lock()
    }
}

impl PipelineState {
    /// Reads a piece and returns what is to be sent of it.
    pub(crate) fn process(&mut self, bytes: Bytes) -> ChunkOutcome {
        if self.response_id_reader.as_mut().is_some_and(|watch| watch.push(&bytes)) {
            self.response_id_reader = None;
        }
        if self.trial_progress.as_mut().is_some_and(|progress| progress.observe_chunk(&bytes)) {
            self.trial_progress = None;
        }
        if let Some(scanner) = &mut self.scanner {
            return scanner.process(bytes);
        }
        if let Some(parser) = &mut self.answer_parser {
            parser.feed(&bytes);
            if parser.finish_state() == FinishState::Abort {
                return ChunkOutcome::Aborted(Bytes::new());
            }
        }
        ChunkOutcome::Forward(bytes)
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
        flow.last_progress_at = Instant::now();
        match flow.process(piece) {
            ChunkOutcome::Forward(bytes) if bytes.is_empty() => ConsumeOutcome::Consumed,
            ChunkOutcome::Forward(bytes) => {
                flow.sent_bytes += bytes.len() as u64;
                if free.write_chunk(&bytes) { ConsumeOutcome::Consumed } else { ConsumeOutcome::ConsumedAndWake }
            }
            failed => {
                flow.failure = Some(failed);
                ConsumeOutcome::ConsumedAndWake
            }
        }
    }
}

#[cfg(test)]
mod tests;
