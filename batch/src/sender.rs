//! One request until it has an answer: attempts and the pauses between them, as `retry` decides.
//!
//! The `drive` starts one sender for each request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hostler_bench::{Call, Client, WholeAnswer};
use hostler_boot::Shutdown;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::output_line::{Outcome, error_message, is_aborted, is_unknown_model};
use crate::retry::{self, Verdict};

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
        let (mut attempts, mut server_errors) = (0, 0);
        loop {
            if self.shutdown.is_draining() {
                return Sent::Stopped;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let answer = client.fetch(call, self.limits.attempt.min(left)).await;
            attempts += 1;
            let (reason, retry_after) = match answer {
                Ok(answer) => {
                    let is_aborted = is_aborted(&answer);
                    server_errors += u32::from(is_aborted || answer.status.is_server_error());
                    // A model that has answered before is away. A model that never did may be
                    // misspelled.
                    let is_away = is_unknown_model(&answer) && self.served[model].load(Ordering::Relaxed);
                    match retry::judge(answer.status, is_aborted, server_errors) {
                        Verdict::Final if is_away => (describe(&answer, is_aborted), None),
                        Verdict::Final if is_aborted => return Sent::Ended(aborted()),
                        Verdict::Final => return Sent::Ended(Outcome::Answered(answer)),
                        Verdict::KeyRefused => return Sent::KeyRefused(error_message(&answer.body)),
                        Verdict::Retry => (describe(&answer, is_aborted), retry::retry_after(&answer.headers)),
                    }
                }
                Err(error) => (error.to_string(), None),
            };
            let pause = retry::pause(attempts, retry_after, fastrand::f64());
            if Instant::now() + pause >= deadline {
                return Sent::Ended(self.expired(attempts, &reason));
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

fn aborted() -> Outcome {
    Outcome::Failed { code: "answer_aborted", message: "engines gave the answer up again and again before its end".to_owned() }
}

fn describe(answer: &WholeAnswer, is_aborted: bool) -> String {
    if is_aborted {
        return "an engine gave the answer up before its end".to_owned();
    }
    format!("{}: {}", answer.status, error_message(&answer.body))
}

#[cfg(test)]
mod tests;
