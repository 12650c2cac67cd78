//! A test completion of one token: after a time without requests it shows that the engine still can, and the watchdog asks for one where it is not sure. It goes to the engine's own socket, past the counts of requests.

use std::time::Duration;

use http::StatusCode;
use serde_json::json;
use tokio::time::{Instant, timeout};

use super::http::{Client, GetError};
use super::subject::Subject;
use crate::process::activity::{Activity, Look};
use crate::traffic::Traffic;

/// How long the one token may take.
const DEADLINE: Duration = Duration::from_secs(10);

/// How long the first one of a life may take: the first use of a kernel or a shape may compile it.
const FIRST_DEADLINE: Duration = Duration::from_secs(30);

/// Failures in a row that end an engine's life.
const PATIENCE: u32 = 2;

/// Between a failure and the next try.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// How one test completion went.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The engine computed a token.
    Proves,
    /// It does not take such requests, as one that pools does not, so they will tell nothing.
    Refuses(StatusCode),
    /// It could not, for this reason.
    Fails(String),
    /// No answer came within this time.
    Slow(Duration),
}

/// Asks one life of an engine for test completions.
#[derive(Debug)]
pub(super) struct Canary {
    client: Client,
    /// It has been answered before.
    warm: bool,
}

impl Canary {
    pub(super) fn new(subject: &Subject) -> Self {
        Self { client: Client::new(&subject.socket), warm: false }
    }

    /// Asks once, and waits for as long as a completion may take.
    pub(super) async fn ask(&mut self, model: &str) -> Outcome {
        let deadline = if self.warm { DEADLINE } else { FIRST_DEADLINE };
        self.ask_within(model, deadline).await
    }

    /// Asks once, and waits that long.
    pub(super) async fn ask_within(&mut self, model: &str, deadline: Duration) -> Outcome {
        // Every vocabulary has a token 1, and a prompt of tokens needs no tokenizer.
        let body = json!({"model": model, "prompt": [1], "max_tokens": 1, "temperature": 0}).to_string();
        let outcome = match self.client.post("/v1/completions", body, deadline).await {
            Ok(reply) if reply.status.is_success() => Outcome::Proves,
            Ok(reply) if reply.status.is_server_error() => Outcome::Fails(format!("status {}", reply.status.as_u16())),
            Ok(reply) => Outcome::Refuses(reply.status),
            Err(GetError::Slow(deadline)) => Outcome::Slow(deadline),
            Err(error) => Outcome::Fails(error.to_string()),
        };
        self.warm |= outcome == Outcome::Proves;
        outcome
    }
}

/// Asks a ready engine whenever it has had no request for a while; says why when it is to be given up. Waits for ever where it must not or cannot ask.
pub(super) async fn watch(subject: &Subject) -> String {
    let mut canary = Canary::new(subject);
    let mut tally = Tally::default();
    while !subject.canary_interval.is_zero() {
        quiet(&subject.traffic, if tally.0 == 0 { subject.canary_interval } else { AGAIN_AFTER }).await;
        let Some(model) = subject.model_if_ready() else { continue };
        let (progress, before) = (subject.progress(), Look::at(subject.group()).await);
        let asked = Instant::now();
        let outcome = canary.ask(&model).await;
        let activity = Look::at(subject.group()).await.since(&before, asked.elapsed());
        let moved = subject.progress() != progress;
        // One that has been drained or put to sleep meanwhile may refuse.
        if subject.model_if_ready().is_none() {
            continue;
        }
        if let Outcome::Refuses(status) = outcome {
            tracing::info!(socket = %subject.socket.display(), status = status.as_u16(), "the engine takes no test completions; while it is idle its health is all that is known");
            break;
        }
        if let Some(reason) = tally.add(&outcome, moved, &activity) {
            return reason;
        }
    }
    std::future::pending().await
}

/// Resolves when no request has been in flight for that long.
async fn quiet(traffic: &Traffic, interval: Duration) {
    loop {
        traffic.wait_idle().await;
        let served = traffic.served_total();
        let busy = timeout(interval, traffic.wait_busy()).await.is_ok();
        // Some requests are too short to be seen.
        if !busy && traffic.served_total() == served {
            return;
        }
    }
}

/// Failures in a row.
#[derive(Debug, Default)]
struct Tally(u32);

impl Tally {
    /// Takes an outcome into account; says why the engine is to be given up after too many failures. `moved` says whether anything came out of the engine meanwhile.
    fn add(&mut self, outcome: &Outcome, moved: bool, activity: &Activity) -> Option<String> {
        let failed = match outcome {
            Outcome::Proves | Outcome::Refuses(_) => None,
            Outcome::Fails(reason) => Some(reason.clone()),
            // Whoever is at work may just be slow: the watchdog sees to it when requests wait.
            Outcome::Slow(_) if moved || matches!(activity, Activity::Computing | Activity::Unknown) => None,
            Outcome::Slow(deadline) => Some(format!("no answer within {} s", deadline.as_secs())),
        };
        let Some(reason) = failed else {
            self.0 = 0;
            return None;
        };
        self.0 += 1;
        let found = match activity {
            Activity::Stopped(process) => format!("; {process} is stopped"),
            Activity::Idle | Activity::Computing | Activity::Unknown => String::new(),
        };
        (self.0 >= PATIENCE)
            .then(|| format!("a test completion failed {PATIENCE} times in a row while no request was running: {reason}{found}"))
    }
}

#[cfg(test)]
mod tests;
