//! How an answer ends: what is recorded, what the caller is charged, and what the client of a
//! broken answer gets.

use tokio::time::Instant;

use super::{Relay, RelayContext, RelayState, flushing_state};
use crate::admission::{ActualUsage, OutputTokens};
use crate::dispatch::job_end::explain_loss;
use crate::outcome::{AnswerOutcome, LossCause, Verdict};
use crate::sse::{SseScanner, TokenUsage};

impl Relay {
    pub(super) fn complete(&mut self) {
        self.state = RelayState::Ended;
        if self.context.clears_suspicion {
            self.context.crash_watch.clear_suspicion();
        }
        let usage = self.usage();
        let events = self.pipeline.lock().scanner.as_ref().map(SseScanner::event_count);
        if let Some(events) = events {
            self.context.metrics.record_stream(events, usage);
        }
        // Skip resumed answers: part of their time belongs to another engine.
        let is_resumed = self.resumption.as_ref().is_some_and(|resumption| resumption.is_under_way());
        if self.context.usage_bounds.work.is_some() && !is_resumed {
            let most = self.context.usage_bounds;
            self.context.feedback.record_end(usage, self.seen_tokens(), most.context_tokens, most.work.answers == 1);
        }
        self.record_end(self.context.outcome_if_whole, None, usage);
        self.reconcile_usage(usage, true);
    }

    /// Ends a broken answer: an event stream ends with an error event.
    pub(super) fn fail(&mut self, cause: LossCause, message: String) {
        self.exchange.detach();
        let fleet = self.context.feedback.fleet();
        let (cause, message) = match fleet.cut_off_reason() {
            Some(reason) => ("router_left", reason.to_owned()),
            None => (cause.as_str(), explain_loss(&fleet.view(), &self.context.replica, Instant::now(), message)),
        };
        let replica = &self.context.replica.id;
        let id = self.context.feedback.decision_id();
        tracing::warn!(event = "answer_broken", %replica, id = format_args!("{id:016x}"), reason = message, "an answer broke after it had begun");
        let usage = self.usage();
        self.record_end(AnswerOutcome::Broken, Some(cause), usage);
        self.reconcile_usage(usage, false);
        self.state = match &self.pipeline.lock().scanner {
            Some(scanner) => RelayState::SendingError(scanner.error_event(&message), message),
            None => flushing_state(message),
        };
    }

    /// Records that the client has left, unless the answer was complete.
    pub(super) fn record_disconnect(&mut self) {
        // A client that knows the length, or that there is no body, does not ask for the end.
        if self.is_fully_read() {
            self.complete();
        } else {
            #[cfg(test)]
            if crate::simulation::sabotage::is(crate::simulation::sabotage::Sabotage::PermitKept) {
                self.context.permit.keep();
            }
            // The status says how the answer ends, also to a client that does not read the rest.
            let outcome = match self.context.outcome_if_whole {
                AnswerOutcome::Complete => AnswerOutcome::ClientLeft,
                failed => failed,
            };
            let usage = self.usage();
            self.record_end(outcome, None, usage);
            self.reconcile_usage(usage, false);
        }
    }

    /// Records the end for whoever wants to know of it.
    fn record_end(&self, outcome: AnswerOutcome, cause: Option<&'static str>, usage: Option<TokenUsage>) {
        let RelayContext { metrics, log_entry, feedback, replica, received_at, .. } = &self.context;
        metrics.record_end(outcome, *received_at);
        log_entry.record_end(outcome, cause, usage);
        if usage.is_none() && self.is_event_stream() && self.context.usage_bounds.work.is_some() {
            let (prompt_tokens, completion_tokens) = (feedback.prompt_tokens().into(), self.seen_tokens());
            log_entry.set_counted(TokenUsage { prompt_tokens, completion_tokens, cached_tokens: None });
        }
        if self.is_event_stream() {
            feedback.record_gap(self.pipeline.lock().take_gap());
        }
        feedback.record_outcome(cause.unwrap_or(outcome.as_str()));
        if Verdict::from(outcome).is_failure() {
            replica.local_load.count_failure();
        }
    }

    /// Tokens of the stream so far, within the bounds of what is possible.
    fn seen_tokens(&self) -> u64 {
        self.context.usage_bounds.clamp_completion(self.pipeline.lock().seen_tokens())
    }

    /// Reconciles the caller's limits with the usage.
    ///
    /// No answer reports all of its usage before its end, and some never do. The part of a stream
    /// that has come always counts, so leaving early does not make an answer cheaper.
    fn reconcile_usage(&mut self, usage: Option<TokenUsage>, is_whole: bool) {
        let work = self.context.usage_bounds.work;
        if !work.is_some() {
            return;
        }
        let output_tokens = match usage {
            _ if !work.generates() => OutputTokens::Exact(0),
            Some(usage) if is_whole => OutputTokens::Exact(usage.completion_tokens),
            usage => OutputTokens::AtLeast(usage.map_or(0, |usage| usage.completion_tokens).max(self.seen_tokens())),
        };
        let prompt_tokens = usage.map(|usage| usage.prompt_tokens).filter(|prompt| *prompt > 0);
        self.context.permit.reconcile_usage(ActualUsage { prompt_tokens, output_tokens });
    }

    /// The engine's reported usage, within the bounds of what is possible.
    fn usage(&self) -> Option<TokenUsage> {
        let flow = self.pipeline.lock();
        let reported = match (&flow.scanner, &flow.answer_parser) {
            (Some(scanner), _) => scanner.usage(),
            (None, Some(parser)) => parser.usage(),
            (None, None) => self.context.usage,
        };
        self.context.usage_bounds.clamp(reported?)
    }
}
