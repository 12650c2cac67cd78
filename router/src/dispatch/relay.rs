//! The answer's body on its way to the client: the engine's bytes as they come, scanned if they are
//! an event stream.
//!
//! The client's connection polls this body, so no task and no channel lies between the lane and the
//! socket. While the body waits for the next event, the lane's task writes that event to the socket
//! (`direct_writing`). The body ends cleanly only if the answer is whole. A broken event stream
//! gets an error event of its dialect. Every broken answer ends without its last chunk, so nothing
//! on the way to the user can take it for complete.

mod ending;
mod moving;
mod resuming;

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use hostler_proto::lane::{Fault, StreamFault, is_keep_alive_comment};
use http_body::{Body, Frame};
use tokio::time::{Instant, Sleep};

use super::resume::{ResumingAnswer, Resumption, StreamRecord};
use super::usage_bounds::UsageBounds;
use crate::access_log::{AccessEntry, AttemptEntry};
use crate::admission::Permit;
use crate::crash_suspects::CrashWatch;
use crate::direct_writing::{AnswerPipeline, DirectWriter};
use crate::fan_out::AnswerExchange;
use crate::fleet::{InFlight, Replica};
use crate::metrics::RouterMetrics;
use crate::outcome::{AnswerOutcome, LossCause};
use crate::placement::PlacementFeedback;
use crate::response_affinity::ResponseIdReader;
use crate::sse::{AnswerParser, ChunkOutcome, Dialect, SseScanner, TokenUsage};

use moving::{Move, MoveWatch};
use resuming::Loss;

#[derive(Debug)]
pub(crate) struct RelayContext {
    /// Counts the request at its replica until it has ended there.
    pub in_flight: Option<InFlight>,
    pub permit: Permit,
    pub replica: Arc<Replica>,
    /// Learns whether the engine crashes with the request.
    pub crash_watch: CrashWatch,
    /// Whether a complete answer shows that the request harms no engine. False if the engine had
    /// failed.
    pub clears_suspicion: bool,
    /// The outcome of this answer if it is not cut short.
    pub outcome_if_whole: AnswerOutcome,
    pub feedback: PlacementFeedback,
    /// Only comments have come so far. They keep the connection alive while the request waits in
    /// its engine.
    pub awaits_first_event: bool,
    /// Known if the answer was read whole before it was passed on.
    pub usage: Option<TokenUsage>,
    /// The answer was not read whole but may report usage.
    pub has_unread_body: bool,
    /// Reported usage beyond these bounds is not believed.
    pub(crate) usage_bounds: UsageBounds,
    pub log_entry: AccessEntry,
    /// Log entry of the attempt that gave this answer.
    pub attempt_entry: AttemptEntry,
    pub received_at: Instant,
    pub idle_timeout: Duration,
    pub metrics: Arc<RouterMetrics>,
}

#[derive(Debug)]
pub(crate) struct Relay {
    state: RelayState,
    /// The piece that was read before this answer was chosen.
    first_chunk: Option<Bytes>,
    pipeline: Arc<AnswerPipeline>,
    exchange: AnswerExchange,
    context: RelayContext,
    /// The inline consumer is still to be attached to the lane.
    is_direct_writing_pending: bool,
    silence_timer: Option<Pin<Box<Sleep>>>,
    /// The client of an event stream gets a keep-alive after so much silence.
    keep_alive: Option<Duration>,
    /// When the last keep-alive was sent.
    kept_alive_at: Option<Instant>,
    /// Set for a stream that goes on elsewhere if its engine is lost.
    resumption: Option<Box<Resumption>>,
    /// Tells when the stream should move to another engine.
    move_watch: Option<MoveWatch>,
    failed_moves: u32,
}

#[derive(Debug)]
enum RelayState {
    Streaming,
    /// The engine was lost, and another one is sought.
    Resuming(ResumingAnswer, Loss),
    /// Another engine is sought; the present one continues until then.
    Moving(ResumingAnswer, Move),
    /// The error event that is sent next.
    SendingError(Bytes, String),
    /// The connection gets [`BREAK_DELAY`] to send what it has, then breaks.
    Flushing(Pin<Box<Sleep>>, String),
    Ended,
}

/// How long a connection may send what it has before it breaks. HTTP/2 drops queued data when a
/// stream is reset.
pub(crate) const BREAK_DELAY: Duration = Duration::from_millis(200);

fn flushing_state(message: String) -> RelayState {
    RelayState::Flushing(Box::pin(tokio::time::sleep(BREAK_DELAY)), message)
}

impl Relay {
    /// The rest of `exchange` after its head and `first_chunk`. `watch` reads the response's id if
    /// that is to be remembered.
    #[must_use]
    pub(crate) fn new(
        exchange: AnswerExchange,
        first_chunk: Option<Bytes>,
        dialect: Option<Dialect>,
        watch: Option<ResponseIdReader>,
        context: RelayContext,
    ) -> Self {
        let trial_progress = dialect.and_then(|dialect| context.crash_watch.trial_progress(dialect.token_marker()));
        let pipeline = AnswerPipeline::new(dialect.map(SseScanner::new), watch, trial_progress);
        // The pipeline is given the first piece again.
        pipeline.lock().answer_parser = context.has_unread_body.then(|| Box::new(AnswerParser::new("")));
        Self {
            state: RelayState::Streaming,
            first_chunk,
            pipeline,
            exchange,
            context,
            is_direct_writing_pending: false,
            silence_timer: None,
            keep_alive: None,
            kept_alive_at: None,
            resumption: None,
            move_watch: None,
            failed_moves: 0,
        }
    }

    /// Records the stream, so that another engine can go on with it.
    pub(super) fn record_stream(&mut self, record: StreamRecord, resumption: Box<Resumption>) {
        let mut flow = self.pipeline.lock();
        match record {
            StreamRecord::Tokens(record) => {
                flow.scanner.as_mut().map(SseScanner::expect_tokens);
                flow.token_record = Some(record);
            }
            StreamRecord::Replay(record) => flow.replay_record = Some(record),
        }
        drop(flow);
        self.resumption = Some(resumption);
        self.watch_for_move(Duration::ZERO);
    }

    /// Counts text instead of tokens if tokens are charged and nothing else reports them.
    pub(super) fn count_text_of_unknown_tokens(&self) {
        let mut flow = self.pipeline.lock();
        if flow.token_record.is_none() && self.context.permit.is_charged() {
            flow.scanner.as_mut().map(SseScanner::count_text);
        }
    }

    /// Whether the engine answers with an event stream.
    pub(crate) fn is_event_stream(&self) -> bool {
        self.pipeline.lock().scanner.is_some()
    }

    /// Sends the client of an event stream a keep-alive after each silent `period`. Zero turns this
    /// off.
    pub(crate) fn send_keep_alives(&mut self, period: Duration) {
        self.keep_alive = Some(period).filter(|period| !period.is_zero() && self.is_event_stream());
    }

    /// Allows events to be written to the client's connection as HTTP/1.1 chunks, once the HTTP
    /// library has sent what comes before them.
    pub(crate) fn enable_direct_writing(&mut self, outlet: Arc<DirectWriter>) {
        let mut flow = self.pipeline.lock();
        if flow.scanner.is_some() {
            outlet.mark_busy();
            flow.direct_writer = Some(outlet);
            self.is_direct_writing_pending = true;
        }
    }

    fn poll_chunk(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Bytes>, StreamFault>> {
        if let Some(first) = self.first_chunk.take() {
            return Poll::Ready(Ok(Some(first)));
        }
        self.attach_consumer();
        if let Poll::Ready(piece) = self.exchange.poll_body(context) {
            self.pipeline.lock().record_progress();
            if matches!(&piece, Err(broken) if broken.fault == Fault::EngineLost) {
                let _ = self.context.crash_watch.record_engine_loss(&self.context.replica.engine_life());
            }
            return Poll::Ready(piece);
        }
        Poll::Pending
    }

    /// Sends a keep-alive after a silent period, and counts the engine as lost after `idle` without
    /// anything.
    ///
    /// Each answer has one timer, which is looked at only when it fires, so an event costs one
    /// reading of the clock.
    fn poll_silence(&mut self, context: &mut Context<'_>, idle: Duration) -> Poll<Result<Bytes, StreamFault>> {
        let period = self.keep_alive.unwrap_or(idle);
        let timer = self.silence_timer.get_or_insert_with(|| Box::pin(tokio::time::sleep(period.min(idle))));
        while timer.as_mut().poll(context).is_ready() {
            let flow = self.pipeline.lock();
            let (now, progress) = (Instant::now(), flow.last_progress_at);
            let shown = flow.silent_since.filter(|_| self.keep_alive.is_some()).unwrap_or(progress);
            if now >= progress + idle {
                return Poll::Ready(Err(StreamFault { fault: Fault::EngineLost, message: "the engine sent nothing for too long".into() }));
            }
            let is_due = now >= self.kept_alive_at.map_or(shown, |sent| sent.max(shown)) + period;
            let last = if is_due { now } else { self.kept_alive_at.map_or(shown, |sent| sent.max(shown)) };
            timer.as_mut().reset((last + period).min(progress + idle));
            if is_due {
                self.kept_alive_at = Some(now);
                if let Some(keep_alive) = flow.scanner.as_ref().and_then(SseScanner::keep_alive) {
                    return Poll::Ready(Ok(keep_alive));
                }
            }
        }
        Poll::Pending
    }

    /// Ends a stream that was silent for too long, unless the lane's task has just found its end.
    fn end_silence(&mut self, broken: StreamFault) -> Bytes {
        self.exchange.detach();
        let failed = self.pipeline.lock().failure.take();
        match failed {
            Some(failed) => self.apply_outcome(failed),
            None => self.lose(broken.fault.into(), broken.message).unwrap_or_default(),
        }
    }

    /// From the first event on, the lane's task may pass on the next ones.
    fn attach_consumer(&mut self) {
        if self.is_direct_writing_pending && !self.context.awaits_first_event {
            self.is_direct_writing_pending = false;
            self.exchange.attach(&self.pipeline);
        }
    }

    fn emit(&self, bytes: Bytes) -> Poll<Option<Result<Frame<Bytes>, StreamFault>>> {
        let mut flow = self.pipeline.lock();
        flow.sent_bytes += bytes.len() as u64;
        flow.direct_writer.as_ref().inspect(|outlet| outlet.mark_busy());
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }

    fn process_chunk(&mut self, bytes: Bytes) -> Bytes {
        // These bytes are the first event after comments.
        if self.context.awaits_first_event && !is_keep_alive_comment(&bytes) {
            self.context.awaits_first_event = false;
            self.context.in_flight.as_mut().map(InFlight::start_answer);
            self.context.feedback.record_start();
            self.context.log_entry.record_first_byte();
            self.context.attempt_entry.record_first_token();
            self.context.crash_watch.mark_answered();
            // The wait for the first event is no gap in the stream.
            self.pipeline.lock().take_gap();
        }
        let (passed, end) = self.pipeline.lock().process(bytes);
        let passed = self.apply_outcome(passed);
        if end.is_empty() { passed } else { [&passed[..], end].concat().into() }
    }

    /// The bytes to send for a piece that was read.
    fn apply_outcome(&mut self, passed: ChunkOutcome) -> Bytes {
        match passed {
            ChunkOutcome::Forward(bytes) => bytes,
            ChunkOutcome::Failed { bytes, error_at, is_engine_dead } => {
                if is_engine_dead {
                    let _ = self.context.crash_watch.record_engine_loss(&self.context.replica.engine_life());
                    if let Some(more) = self.lose(LossCause::EngineError, "the engine reported an error".into()) {
                        return [bytes.slice(..error_at), more].concat().into();
                    }
                } else {
                    self.fail(LossCause::EngineError, "the engine reported an error".into());
                }
                self.state = flushing_state("the engine reported an error".into());
                bytes
            }
            ChunkOutcome::Aborted(bytes) if self.differs() => {
                self.diverge();
                bytes
            }
            ChunkOutcome::Aborted(bytes) => {
                let more = self.lose(LossCause::EngineStopped, super::ABORT_MESSAGE.into()).unwrap_or_default();
                [bytes, more].concat().into()
            }
        }
    }

    fn finish_body(&mut self) -> Bytes {
        let (rest, is_complete) = self.pipeline.lock().finish();
        if is_complete {
            self.complete();
            return rest;
        }
        // After half an event, the client could not read the error event.
        self.lose(LossCause::Incomplete, super::END_MESSAGE.into()).unwrap_or_default()
    }

    /// Whether an answer that is not scanned has been read to its end.
    fn is_fully_read(&self) -> bool {
        self.pipeline.lock().scanner.is_none() && self.first_chunk.is_none() && self.exchange.is_finished()
    }
}

impl Body for Relay {
    type Data = Bytes;
    type Error = StreamFault;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, StreamFault>>> {
        let relay = self.get_mut();
        loop {
            match std::mem::replace(&mut relay.state, RelayState::Ended) {
                RelayState::Streaming => {
                    relay.state = RelayState::Streaming;
                    let polled = relay.poll_chunk(context);
                    // Check this after the inbox: until that poll, the lane's task may have found
                    // the fault. Bytes behind the fault are dropped.
                    let failed = relay.pipeline.lock().failure.take();
                    let sent = match (failed, polled) {
                        (Some(failed), _) => relay.apply_outcome(failed),
                        (None, Poll::Pending) if relay.poll_move(context) => continue,
                        (None, Poll::Pending) => match ready!(relay.poll_silence(context, relay.context.idle_timeout)) {
                            Ok(keep_alive) => keep_alive,
                            Err(broken) => relay.end_silence(broken),
                        },
                        (None, Poll::Ready(Ok(Some(bytes)))) => relay.process_chunk(bytes),
                        (None, Poll::Ready(Ok(None))) => relay.finish_body(),
                        (None, Poll::Ready(Err(broken))) => relay.lose(broken.fault.into(), broken.message).unwrap_or_default(),
                    };
                    if !sent.is_empty() {
                        return relay.emit(sent);
                    }
                }
                RelayState::Resuming(mut resuming, loss) => {
                    if let Poll::Ready(resumed) = resuming.poll(context) {
                        let sent = relay.resume(resumed, loss);
                        if !sent.is_empty() {
                            return relay.emit(sent);
                        }
                        continue;
                    }
                    let waited = relay.poll_silence(context, relay.context.idle_timeout.saturating_add(resuming.max_wait));
                    relay.state = RelayState::Resuming(resuming, loss);
                    match ready!(waited) {
                        Ok(keep_alive) => return relay.emit(keep_alive),
                        Err(broken) => relay.fail(broken.fault.into(), broken.message),
                    }
                }
                RelayState::Moving(mut moving, until) => {
                    let Poll::Ready(resumed) = moving.poll(context) else {
                        relay.state = RelayState::Moving(moving, until);
                        return Poll::Pending;
                    };
                    let sent = relay.finish_move(resumed, &until);
                    if !sent.is_empty() {
                        return relay.emit(sent);
                    }
                }
                RelayState::SendingError(event, message) => {
                    relay.state = flushing_state(message);
                    return relay.emit(event);
                }
                RelayState::Flushing(mut moment, message) => {
                    if moment.as_mut().poll(context).is_pending() {
                        relay.state = RelayState::Flushing(moment, message);
                        return Poll::Pending;
                    }
                    return Poll::Ready(Some(Err(StreamFault { fault: Fault::EngineLost, message })));
                }
                RelayState::Ended => return Poll::Ready(None),
            }
        }
    }

    /// A plain answer may be known to be complete with its last piece. Then no more is asked for.
    fn is_end_stream(&self) -> bool {
        match self.state {
            RelayState::Streaming => self.is_fully_read(),
            RelayState::Ended => true,
            _ => false,
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // Bytes that the lane's task takes after this would not be counted.
        self.exchange.detach();
        if matches!(self.state, RelayState::Streaming | RelayState::Resuming(..) | RelayState::Moving(..)) {
            self.record_disconnect();
        }
        self.context.log_entry.set_bytes(self.pipeline.lock().sent_bytes);
    }
}
