//! What the relay does when the engine of its stream is lost: another one goes on, or the answer fails.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::{Relay, RelayState};
use crate::dispatch::StartedAnswer;
use crate::dispatch::resume::{ResumedAnswer, Resumption};
use crate::resumption::{Continuation, KnownTokens, SEAM};
use crate::sse::Dialect;

/// Why and when an answer broke.
#[derive(Debug)]
pub(super) struct Loss {
    pub(super) cause: &'static str,
    message: String,
    at: Instant,
}

impl Relay {
    /// The engine was lost. Returns what is to be sent where another one goes on, or nothing but the end was missing; `None` where the answer has failed.
    pub(super) fn lose(&mut self, cause: &'static str, message: String) -> Option<Bytes> {
        self.exchange.detach();
        let Some((resumption, known)) = self.take_resumption() else {
            self.fail(cause, message);
            return None;
        };
        let sampling = resumption.sampling().clone();
        let Some(request) = known.continuation_request(&sampling) else {
            self.context.metrics.record_resumption(resumption.tier, cause, Some(Duration::ZERO));
            self.context.log_entry.record_resumption();
            let has_usage = self.pipeline.lock().scanner.as_ref().is_some_and(|scanner| scanner.usage().is_some());
            // Its engine died with it all the same.
            self.context.clears_suspicion = false;
            let ending = self.process_chunk(known.ending(&sampling, has_usage));
            self.complete();
            return Some(ending);
        };
        let mut flow = self.pipeline.lock();
        flow.continuation = Some(Box::new(Continuation::new(sampling.api, &known)));
        flow.last_progress_at = Instant::now();
        drop(flow);
        // It computes nothing there any more.
        self.context.in_flight = None;
        let idle_watch = resumption.idle_watch();
        let crash_watch = std::mem::replace(&mut self.context.crash_watch, idle_watch);
        let replica = &self.context.replica.id;
        tracing::info!(%replica, message, "a stream has lost its engine and is to go on elsewhere");
        let resuming = resumption.start(request, replica.clone(), crash_watch);
        self.state = RelayState::Resuming(resuming, Loss { cause, message, at: Instant::now() });
        Some(SEAM)
    }

    /// What the stream goes on from, if it may be resumed once more and all of it is known.
    fn take_resumption(&mut self) -> Option<(Box<Resumption>, KnownTokens)> {
        self.resumption.as_ref().filter(|resumption| resumption.is_allowed())?;
        let mut flow = self.pipeline.lock();
        let scanner = flow.scanner.as_ref()?;
        if scanner.is_within_event() || scanner.is_complete() {
            return None;
        }
        let known = flow.token_record.as_mut()?.rewind()?;
        flow.scanner.as_mut()?.rewind(known.is_finished());
        flow.continuation = None;
        drop(flow);
        Some((self.resumption.take()?, known))
    }

    /// Another engine has begun to go on, or none does.
    pub(super) fn resume(&mut self, resumed: ResumedAnswer, loss: Loss) {
        let ResumedAnswer { resumption, crash_watch, outcome } = resumed;
        let pause = outcome.is_ok().then(|| loss.at.elapsed());
        self.context.metrics.record_resumption(resumption.tier, loss.cause, pause);
        self.context.crash_watch = crash_watch;
        self.resumption = Some(resumption);
        let begun = match outcome {
            Ok(begun) => begun,
            Err(reason) => {
                self.fail(loss.cause, format!("{}; it could not be resumed: {reason}", loss.message));
                return;
            }
        };
        let StartedAnswer { first_chunk, exchange, in_flight, replica, feedback, awaits_first_event, .. } = *begun;
        self.context.log_entry.record_resumption();
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
        flow.last_progress_at = Instant::now();
        flow.trial_progress = self.context.crash_watch.trial_progress(Dialect::OpenAi.token_marker());
        self.is_direct_writing_pending = flow.direct_writer.is_some();
    }
}
