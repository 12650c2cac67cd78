//! What the relay does when its stream leaves its engine: another one goes on, or the answer fails.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::{Relay, RelayState};
use crate::dispatch::StartedAnswer;
use crate::dispatch::resume::{Departure, ResumedAnswer, Resumption};
use crate::resumption::{Continuation, KnownTokens, SEAM};
use crate::sse::Dialect;

/// Why and when a stream left its engine.
#[derive(Debug)]
pub(super) struct Loss {
    pub(super) cause: &'static str,
    pub(super) message: String,
    pub(super) at: Instant,
}

impl Relay {
    /// The engine was lost. Returns what is to be sent where another one is to go on, or nothing but the end was missing; `None` where the answer has failed.
    pub(super) fn lose(&mut self, cause: &'static str, message: String) -> Option<Bytes> {
        self.exchange.detach();
        let Some((resumption, known)) = self.take_resumption() else {
            self.fail(cause, message);
            return None;
        };
        let loss = Loss { cause, message, at: Instant::now() };
        let Some(request) = known.continuation_request(resumption.sampling(), self.context.replica.max_context_tokens()) else {
            self.resumption = Some(resumption);
            return Some(self.tell_end(&known, &loss));
        };
        self.pipeline.lock().last_progress_at = loss.at;
        // It computes nothing there any more.
        self.context.in_flight = None;
        // Where it was on trial it is no more.
        self.context.crash_watch.end_trial();
        let idle_watch = resumption.idle_watch();
        let crash_watch = std::mem::replace(&mut self.context.crash_watch, idle_watch);
        let replica = &self.context.replica;
        tracing::info!(replica = %replica.id, message = loss.message, "a stream has lost its engine and is to go on elsewhere");
        let resuming = resumption.start(Departure::Loss, request, replica.engine_life(), crash_watch);
        self.state = RelayState::Resuming(resuming, loss);
        Some(Bytes::new())
    }

    /// What the stream goes on from, if it may be resumed once more and all of it is known.
    pub(super) fn take_resumption(&mut self) -> Option<(Box<Resumption>, KnownTokens)> {
        self.resumption.as_ref().filter(|resumption| resumption.is_allowed())?;
        let flow = self.pipeline.lock();
        let scanner = flow.scanner.as_ref()?;
        if scanner.is_within_event() || scanner.is_complete() {
            return None;
        }
        let known = flow.token_record.as_ref()?.known()?;
        drop(flow);
        Some((self.resumption.take()?, known))
    }

    /// Tells the end of a stream that the client has got but for that.
    fn tell_end(&mut self, known: &KnownTokens, loss: &Loss) -> Bytes {
        let Some(resumption) = &self.resumption else { return Bytes::new() };
        self.context.metrics.record_resumption(resumption.tier, loss.cause, Some(Duration::ZERO));
        self.context.log_entry.record_resumption();
        let sampling = resumption.sampling().clone();
        let has_usage = self.pipeline.lock().scanner.as_ref().is_some_and(|scanner| scanner.usage().is_some());
        // Its engine died with it all the same.
        self.context.clears_suspicion = false;
        let _ = self.rewind();
        let ending = self.process_chunk(known.ending(&sampling, has_usage));
        self.complete();
        ending
    }

    /// Forgets what the client has not got whole, and returns what the stream goes on from.
    fn rewind(&self) -> Option<KnownTokens> {
        let mut flow = self.pipeline.lock();
        let known = flow.token_record.as_mut()?.rewind()?;
        flow.scanner.as_mut()?.rewind(known.is_finished());
        flow.continuation = None;
        Some(known)
    }

    /// Another engine has begun to go on after a loss, or none does. Returns what is to be sent.
    pub(super) fn resume(&mut self, resumed: ResumedAnswer, loss: Loss) -> Bytes {
        let ResumedAnswer { resumption, crash_watch, outcome } = resumed;
        let tier = resumption.tier;
        self.resumption = Some(resumption);
        self.context.crash_watch = crash_watch;
        match outcome {
            Ok(begun) => self.continue_with(*begun, &loss),
            Err(reason) => {
                self.context.metrics.record_resumption(tier, loss.cause, None);
                self.fail(loss.cause, format!("{}; it could not be resumed: {reason}", loss.message));
                Bytes::new()
            }
        }
    }

    /// Goes on with the answer of another engine. Returns the seam.
    pub(super) fn continue_with(&mut self, begun: StartedAnswer, loss: &Loss) -> Bytes {
        let Some((known, resumption)) = self.rewind().zip(self.resumption.as_ref()) else {
            self.fail(loss.cause, loss.message.clone());
            return Bytes::new();
        };
        self.context.metrics.record_resumption(resumption.tier, loss.cause, Some(loss.at.elapsed()));
        self.context.log_entry.record_resumption();
        let continuation = Continuation::new(&known);
        let StartedAnswer { first_chunk, exchange, in_flight, replica, feedback, awaits_first_event, .. } = begun;
        if !awaits_first_event {
            self.context.crash_watch.mark_answered();
        }
        self.context.in_flight = in_flight;
        self.context.replica = replica;
        self.context.feedback = feedback;
        self.context.awaits_first_event = awaits_first_event;
        self.exchange = exchange;
        self.first_chunk = first_chunk;
        self.state = RelayState::Streaming;
        let mut flow = self.pipeline.lock();
        flow.continuation = Some(Box::new(continuation));
        flow.last_progress_at = Instant::now();
        flow.trial_progress = self.context.crash_watch.trial_progress(Dialect::OpenAi.token_marker());
        self.is_direct_writing_pending = flow.direct_writer.is_some();
        drop(flow);
        self.watch_for_move(Duration::ZERO);
        SEAM
    }
}
