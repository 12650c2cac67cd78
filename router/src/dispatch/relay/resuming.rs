//! How the relay reacts when its stream leaves the engine: another one goes on, or the answer
//! fails.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::{Relay, RelayState};
use crate::dispatch::StartedAnswer;
use crate::dispatch::resume::{Departure, ResumedAnswer, Resumption};
use crate::outcome::LossCause;
use crate::resume_tier::ResumeTier;
use crate::resumption::{Continuation, ContinuationRequest, KnownTokens, SEAM};

/// Why and when a stream left its engine.
#[derive(Debug)]
pub(super) struct Loss {
    pub(super) cause: LossCause,
    pub(super) message: String,
    pub(super) at: Instant,
}

impl Relay {
    /// Handles the loss of the engine. Returns the bytes to send if another engine goes on or only
    /// the end was missing, and `None` if the answer has failed.
    pub(super) fn lose(&mut self, cause: LossCause, message: String) -> Option<Bytes> {
        self.exchange.detach();
        // A fault that the lane's task found behind the loss belongs to the lost engine.
        self.pipeline.lock().failure = None;
        let Some((resumption, known)) = self.take_resumption() else {
            self.fail(cause, message);
            return None;
        };
        self.context.attempt_entry.record_failure(cause);
        let loss = Loss { cause, message, at: Instant::now() };
        let rest = self.rest_of(&resumption, known.as_ref());
        if let (Some(None), Some(known)) = (&rest, &known) {
            self.resumption = Some(resumption);
            return Some(self.tell_end(known, &loss));
        }
        self.pipeline.lock().last_progress_at = loss.at;
        // The lost engine computes nothing any more.
        self.context.in_flight = None;
        // A trial there is over.
        self.context.crash_watch.end_trial();
        let idle_watch = resumption.idle_watch();
        let crash_watch = std::mem::replace(&mut self.context.crash_watch, idle_watch);
        let replica = &self.context.replica;
        tracing::info!(replica = %replica.id, reason = loss.message, "a stream has lost its engine and is to go on elsewhere");
        let departure = Departure::Loss { is_explained: !cause.is_unexplained(), is_agents: cause == LossCause::AgentLost };
        let resuming = resumption.start(departure, rest.flatten(), replica, crash_watch);
        self.state = RelayState::Resuming(resuming, loss);
        Some(Bytes::new())
    }

    /// Whether another engine gives another answer to the same request.
    pub(super) fn differs(&self) -> bool {
        self.pipeline.lock().replay_record.as_ref().is_some_and(|record| record.differs())
    }

    /// Ends a stream that cannot go on.
    pub(super) fn diverge(&mut self) {
        if let Some(resumption) = self.resumption.take() {
            self.context.metrics.record_resumption(resumption.tier, LossCause::Difference, None);
        }
        self.fail(LossCause::Difference, "the engine was lost, and another one did not give the same answer".into());
    }

    /// The request for the rest of a stream that goes on from its tokens, if any rest is left.
    pub(super) fn rest_of(&self, resumption: &Resumption, known: Option<&KnownTokens>) -> Option<Option<ContinuationRequest>> {
        let (known, sampling) = known.zip(resumption.sampling())?;
        let context = resumption.context_to_go_on(known.total(), self.context.replica.max_context_tokens());
        Some(known.continuation_request(sampling, context))
    }

    /// The state that the stream goes on from, if it may be resumed again and all of it is known. A
    /// replayed stream has no tokens.
    pub(super) fn take_resumption(&mut self) -> Option<(Box<Resumption>, Option<KnownTokens>)> {
        self.resumption.as_ref().filter(|resumption| resumption.is_allowed() && resumption.fleet().cut_off_reason().is_none())?;
        let flow = self.pipeline.lock();
        let scanner = flow.scanner.as_ref()?;
        if scanner.is_within_event() || scanner.is_complete() {
            return None;
        }
        let known = match &flow.replay_record {
            Some(record) => record.is_known().then_some(None)?,
            None => Some(flow.token_record.as_ref()?.known()?),
        };
        drop(flow);
        Some((self.resumption.take()?, known))
    }

    /// Sends the end of a stream whose client lacks only that.
    fn tell_end(&mut self, known: &KnownTokens, loss: &Loss) -> Bytes {
        let Some(resumption) = &self.resumption else { return Bytes::new() };
        self.context.metrics.record_resumption(resumption.tier, loss.cause, Some(Duration::ZERO));
        self.context.log_entry.record_resumption();
        let sampling = resumption.sampling().cloned();
        let has_usage = self.pipeline.lock().scanner.as_ref().is_some_and(|scanner| scanner.usage().is_some());
        // The engine died with the request all the same.
        self.context.clears_suspicion = false;
        let _ = self.rewind();
        let ending = sampling.map(|sampling| known.ending(&sampling, has_usage)).unwrap_or_default();
        let ending = self.process_chunk(ending);
        self.complete();
        ending
    }

    /// Forgets events that the client has not received whole, and returns the state that the stream
    /// goes on from. A replayed stream has no tokens.
    fn rewind(&self) -> Option<Option<KnownTokens>> {
        let mut flow = self.pipeline.lock();
        let (known, is_finished) = match &mut flow.replay_record {
            Some(record) => {
                record.rewind();
                (None, record.is_finished())
            }
            None => {
                let known = flow.token_record.as_mut()?.rewind()?;
                let is_finished = known.is_finished();
                (Some(known), is_finished)
            }
        };
        flow.scanner.as_mut()?.rewind(is_finished);
        flow.continuation = None;
        Some(known)
    }

    /// Ends a resumption: another engine has begun, or none will. Returns the bytes to send.
    pub(super) fn resume(&mut self, resumed: ResumedAnswer, loss: Loss) -> Bytes {
        let ResumedAnswer { resumption, crash_watch, outcome } = resumed;
        let tier = resumption.tier;
        self.resumption = Some(resumption);
        self.context.crash_watch = crash_watch;
        match outcome {
            Ok(begun) => {
                // A continuation is another request than the one that may have killed the engine,
                // so its good end acquits nobody.
                self.context.clears_suspicion &= tier == ResumeTier::Replay;
                self.continue_with(*begun, &loss)
            }
            Err(reason) => {
                self.context.metrics.record_resumption(tier, loss.cause, None);
                self.fail(loss.cause, format!("{}; it could not be resumed: {reason}", loss.message));
                Bytes::new()
            }
        }
    }

    /// Goes on with another engine's answer. Returns the seam.
    pub(super) fn continue_with(&mut self, begun: StartedAnswer, loss: &Loss) -> Bytes {
        let Some((known, resumption)) = self.rewind().zip(self.resumption.as_ref()) else {
            self.fail(loss.cause, loss.message.clone());
            return Bytes::new();
        };
        self.context.metrics.record_resumption(resumption.tier, loss.cause, Some(loss.at.elapsed()));
        self.context.log_entry.record_resumption();
        let continuation = known.as_ref().map(Continuation::new).map(Box::new);
        let dialect = resumption.dialect();
        let StartedAnswer { first_chunk, exchange, in_flight, replica, feedback, entry, awaits_first_event, .. } = begun;
        if !awaits_first_event {
            self.context.crash_watch.mark_answered();
        }
        self.context.feedback.record_gap(self.pipeline.lock().take_gap());
        self.context.feedback.record_outcome(loss.cause.as_str());
        self.context.in_flight = in_flight;
        self.context.replica = replica;
        self.context.feedback = feedback;
        self.context.attempt_entry = entry;
        self.context.awaits_first_event = awaits_first_event;
        self.exchange = exchange;
        self.first_chunk = first_chunk;
        self.state = RelayState::Streaming;
        // The timer may have been set for the end of a long wait.
        self.silence_timer = None;
        let mut flow = self.pipeline.lock();
        flow.continuation = continuation;
        flow.record_progress();
        flow.silent_since = flow.replay_record.as_ref().map(|_| loss.at);
        flow.trial_progress = self.context.crash_watch.trial_progress(dialect.token_marker());
        self.is_direct_writing_pending = flow.direct_writer.is_some();
        drop(flow);
        self.watch_for_move(Duration::ZERO);
        SEAM
    }
}
