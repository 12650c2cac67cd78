//! Test completions of one token.
//!
//! After a time without requests they show that the engine still works, and the watchdog runs one
//! if it is unsure. They go to the engine's own socket and bypass the request counters.

use std::time::Duration;

use hostler_api::Route;
use http::StatusCode;
use serde_json::json;
use tokio::time::{Instant, timeout};

use super::SUSPENDED_AFTER;
use super::diagnosis::EndCause;
use super::monitored_engine::MonitoredEngine;
use crate::engine_client::{ApiClient, FetchError};
use crate::process::activity::{ProcessActivity, ProcessSnapshot};
use crate::traffic::Traffic;

/// Time limit for the one token.
const TEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit for the first test of a life: the first use of a kernel or a shape may compile it.
const FIRST_TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Consecutive failures that end an engine's life.
const MAX_FAILURES: u32 = 2;

const RETRY_DELAY: Duration = Duration::from_secs(1);

#[derive(Debug, PartialEq, Eq)]
pub(super) enum CanaryOutcome {
    /// The engine computed a token.
    Computed,
    /// The engine takes no completions, as with pooling models, so tests are meaningless.
    Unsupported(StatusCode),
    Failed(String),
    TimedOut(Duration),
    /// This program and the engine were suspended during the test, so it is meaningless.
    Suspended,
}

#[derive(Debug)]
pub(super) struct Canary {
    client: ApiClient,
    has_answered: bool,
}

impl Canary {
    pub(super) fn new(subject: &MonitoredEngine) -> Self {
        Self { client: ApiClient::new(&subject.socket), has_answered: false }
    }

    /// Runs one test, and waits as long as a completion may take.
    pub(super) async fn run_test(&mut self, model: &str) -> CanaryOutcome {
        let deadline = if self.has_answered { TEST_TIMEOUT } else { FIRST_TEST_TIMEOUT };
        self.run_test_within(model, deadline).await
    }

    /// Runs one test with this deadline.
    pub(super) async fn run_test_within(&mut self, model: &str, deadline: Duration) -> CanaryOutcome {
        // Every vocabulary has a token 1, and a prompt of tokens needs no tokenizer.
        let body = json!({"model": model, "prompt": [1], "max_tokens": 1, "temperature": 0}).to_string();
        let sent_at = Instant::now();
        let outcome = match self.client.post(Route::Completions.path(), body, deadline).await {
            Ok(reply) if reply.status.is_success() => CanaryOutcome::Computed,
            Ok(reply) if reply.status.is_server_error() => CanaryOutcome::Failed(format!("status {}", reply.status.as_u16())),
            Ok(reply) => CanaryOutcome::Unsupported(reply.status),
            Err(FetchError::Timeout(_)) if sent_at.elapsed() > deadline + SUSPENDED_AFTER => CanaryOutcome::Suspended,
            Err(FetchError::Timeout(deadline)) => CanaryOutcome::TimedOut(deadline),
            Err(error) => CanaryOutcome::Failed(error.to_string()),
        };
        self.has_answered |= outcome == CanaryOutcome::Computed;
        outcome
    }
}

/// Tests a ready engine whenever it has had no request for a while, and returns why to give it up.
///
/// Waits forever if the engine must not or cannot be tested.
pub(super) async fn watch(subject: &MonitoredEngine) -> EndCause {
    let mut canary = Canary::new(subject);
    let mut tally = CanaryFailures::default();
    while !subject.canary_interval.is_zero() {
        await_idle(&subject.traffic, if tally.0 == 0 { subject.canary_interval } else { RETRY_DELAY }).await;
        let Some(model) = subject.model_if_ready() else { continue };
        let (progress, before) = (subject.work_counters(), ProcessSnapshot::take(subject.process_group()).await);
        let sent_at = Instant::now();
        let outcome = canary.run_test(&model).await;
        let after = ProcessSnapshot::take(subject.process_group()).await;
        let activity = subject.activity(&after, &before, sent_at.elapsed());
        let moved = subject.work_counters() != progress;
        // The engine may have been drained or put to sleep meanwhile.
        if subject.model_if_ready().is_none() {
            continue;
        }
        if let CanaryOutcome::Unsupported(status) = outcome {
            tracing::info!(socket = %subject.socket.display(), status = status.as_u16(), "the engine takes no test completions; while it is idle its health is all that is known");
            break;
        }
        if let Some(cause) = tally.record(&outcome, moved, &activity) {
            return cause;
        }
    }
    std::future::pending().await
}

/// Resolves once no request has been in flight for that long.
async fn await_idle(traffic: &Traffic, interval: Duration) {
    loop {
        traffic.wait_idle().await;
        let served = traffic.served_total();
        let busy = timeout(interval, traffic.wait_busy()).await.is_ok();
        // Some requests are too short to be observed in flight.
        if !busy && traffic.served_total() == served {
            return;
        }
    }
}

#[derive(Debug, Default)]
struct CanaryFailures(u32);

impl CanaryFailures {
    /// Records an outcome, and returns why to give the engine up after too many failures.
    ///
    /// `moved` says whether the engine made any progress meanwhile.
    fn record(&mut self, outcome: &CanaryOutcome, moved: bool, activity: &ProcessActivity) -> Option<EndCause> {
        let failed = match outcome {
            CanaryOutcome::Computed | CanaryOutcome::Unsupported(_) | CanaryOutcome::Suspended => None,
            CanaryOutcome::Failed(reason) => Some(reason.clone()),
            // A busy process may just be slow. The watchdog handles requests that wait.
            CanaryOutcome::TimedOut(_) if moved || matches!(activity, ProcessActivity::Computing | ProcessActivity::Unknown) => None,
            CanaryOutcome::TimedOut(deadline) => Some(format!("no answer within {} s", deadline.as_secs())),
        };
        let Some(reason) = failed else {
            self.0 = 0;
            return None;
        };
        self.0 += 1;
        let found = match activity {
            ProcessActivity::Stopped(process) => format!("; {process} is stopped"),
            ProcessActivity::Idle | ProcessActivity::Computing | ProcessActivity::Unknown => String::new(),
        };
        (self.0 >= MAX_FAILURES).then(|| EndCause::FailedTests { tests: self.0, reason: format!("{reason}{found}") })
    }
}

#[cfg(test)]
mod tests;
