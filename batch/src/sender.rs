//! One request until it has an answer: attempts and the pauses between them, as `Attempts` decides.
//!
//! The `drive` starts one sender for each request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hostler_batch_file::{Answer, Attempts, Judgement, Outcome};
use hostler_bench::{Call, Client, WholeAnswer};
use hostler_boot::Shutdown;
use tokio::sync::watch;
use tokio::time::Instant;

/// Time limits of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TimeLimits {
    /// Limit for all attempts together.
    pub(crate) request: Duration,
    pub(crate) attempt: Duration,
}

/// End of a request's attempts.
#[derive(Debug)]
pub(crate) enum Sent {
    Ended(Outcome),
    /// The batch is stopped first.
    Stopped,
    /// The target refused the key, with these words.
    KeyRefused(String),
}

/// Requests that wait for another attempt, for the progress.
#[derive(Debug, Clone, Default)]
pub(crate) struct Waiting {
    pub(crate) requests: usize,
    /// Why the last of them had no answer.
    pub(crate) reason: String,
}

/// State shared by all requests of a batch.
#[derive(Debug, Clone)]
pub(crate) struct Sender {
    pub(crate) limits: TimeLimits,
    pub(crate) waiting: watch::Sender<Waiting>,
    /// Whether a model has answered a request of this batch, by its number.
    pub(crate) served: Arc<[AtomicBool]>,
    pub(crate) shutdown: Shutdown,
}

impl Sender {
    /// Sends a request for a model until it has an answer.
    pub(crate) async fn send(&self, client: &mut Client, call: &Call, model: usize) -> Sent {
        let deadline = Instant::now() + self.limits.request;
        let mut attempts = Attempts::default();
        loop {
            if self.shutdown.is_draining() {
                return Sent::Stopped;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let answer = client.fetch(call, self.limits.attempt.min(left)).await;
            let answer = answer.map(|WholeAnswer { status, headers, body }| Answer { status, headers, body });
            let has_served = self.served[model].load(Ordering::Relaxed);
            let (pause, reason) = match attempts.judge(answer.map_err(|error| error.to_string()), has_served, fastrand::f64()) {
                Judgement::Ended(outcome) => return Sent::Ended(outcome),
                Judgement::KeyRefused(message) => return Sent::KeyRefused(message),
                Judgement::Again { pause, reason } => (pause, reason),
            };
            if Instant::now() + pause >= deadline {
                return Sent::Ended(self.expired(attempts.made(), &reason));
            }
            if !self.wait(pause, reason).await {
                return Sent::Stopped;
            }
        }
    }

    /// Waits for the next attempt; `false` if there will be none.
    async fn wait(&self, pause: Duration, reason: String) -> bool {
        self.waiting.send_modify(|waiting| *waiting = Waiting { requests: waiting.requests + 1, reason });
        let goes_on = tokio::select! {
            () = tokio::time::sleep(pause) => true,
            () = self.shutdown.wait_drain() => false,
        };
        self.waiting.send_modify(|waiting| waiting.requests -= 1);
        goes_on
    }

    /// Outcome with OpenAI's code for a request that was not answered in time.
    fn expired(&self, attempts: u32, reason: &str) -> Outcome {
        let limit = humantime::format_duration(self.limits.request);
        let message = format!("no answer within {limit} (--deadline) and {attempts} attempts; the last one: {reason}");
        Outcome::Failed { code: "batch_expired", message }
    }
}

#[cfg(test)]
mod tests;
