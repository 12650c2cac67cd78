//! Explains to the client why no engine answered its request.

use std::time::Duration;

use hostler_placement::queue::QueueFull;
use tokio::time::Instant;

use crate::crash_suspects::{Ban, Confinement, TrialQueueFull};
use crate::fleet::{Arrival, FleetView, Phase, Replica};
use crate::placement::{MAX_QUEUED_BYTES, Overload};

/// Seconds after which a client may retry if the queue was full.
const QUEUE_FULL_RETRY_SECONDS: u64 = 5;

/// Seconds after which a client may retry if nobody knows when a replica comes. OpenAI's SDKs retry
/// twice, which together covers the start of a small model.
const UNKNOWN_RETRY_SECONDS: u64 = 10;

/// Seconds after which a client of a leaving router may retry. Another router may be there already.
const STOPPING_RETRY_SECONDS: u64 = 1;

/// Longest Retry-After that a client ever gets: OpenAI's SDKs ignore longer ones.
const MAX_RETRY_SECONDS: f64 = 60.0;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    /// No replica serves the model, and all models of the fleet are known.
    #[error("The model `{model}` does not exist. Valid aliases: {known}.")]
    UnknownModel {
        model: String,
        /// The models that exist, separated by commas.
        known: String,
    },
    /// All replicas that serve the model have a front-end without this route.
    #[error(
        "the engines of this model run with vLLM's Rust front-end, which has no {path}: whoever runs them starts their agents with --front-end python"
    )]
    MissingRoute {
        /// The path as the client sent it.
        path: String,
    },
    /// All replicas that serve the model have this route for routers alone.
    #[error("{path} is not for clients of this model: whoever runs its engines opens it with `-- --enable-scale-out`")]
    WithheldRoute {
        /// The path as the client sent it.
        path: String,
    },
    /// Nothing can take the request now.
    #[error("{message}")]
    NotReady {
        message: String,
        /// Seconds after which the client may try again.
        retry_after: u64,
    },
    #[error(
        "the answer was lost {attempts} times, the last time because {last}; nothing had reached you yet, so the request may be sent again"
    )]
    Lost {
        attempts: usize,
        last: String,
        /// Seconds after which the client may try again.
        retry_after: u64,
    },
    #[error("no engine began to answer within {}", format_seconds(*.0))]
    TooSlow(Duration),
    /// The request has crashed engines.
    #[error("{0}")]
    CrashSuspect(Ban),
    /// The fleet has more work than it can do in time.
    #[error("{message}")]
    Overloaded {
        message: String,
        /// Seconds after which the client may try again.
        retry_after: u64,
    },
}

impl Refusal {
    pub(crate) fn as_str(&self) -> &'static str {
        match self {
            Self::UnknownModel { .. } => "unknown_model",
            Self::MissingRoute { .. } => "missing_route",
            Self::WithheldRoute { .. } => "withheld_route",
            Self::NotReady { .. } => "not_ready",
            Self::Lost { .. } => "lost",
            Self::TooSlow(_) => "too_slow",
            Self::CrashSuspect(_) => "crash_suspect",
            Self::Overloaded { .. } => "overloaded",
        }
    }
}

impl From<Ban> for Refusal {
    fn from(ban: Ban) -> Self {
        Refusal::CrashSuspect(ban)
    }
}

impl From<TrialQueueFull> for Refusal {
    fn from(_: TrialQueueFull) -> Self {
        Refusal::Overloaded {
            message: "this request was in flight when an engine crashed, and too many of those wait to be tried again one by one".into(),
            retry_after: QUEUE_FULL_RETRY_SECONDS,
        }
    }
}

fn format_seconds(duration: Duration) -> String {
    format!("{} s", duration.as_secs_f64())
}

impl From<Overload> for Refusal {
    fn from(overload: Overload) -> Self {
        match overload {
            Overload::Full(full) => Refusal::Overloaded {
                message: match full {
                    QueueFull::Requests => "as many requests wait for a replica, of all or of yours, as router.max_queued allows".into(),
                    QueueFull::Bytes => {
                        format!(
                            "requests that wait for a replica, all or yours, have as many bytes as may wait ({} GiB in all)",
                            MAX_QUEUED_BYTES >> 30
                        )
                    }
                },
                retry_after: QUEUE_FULL_RETRY_SECONDS,
            },
            Overload::Stopping => Refusal::NotReady { message: "the router is stopping".into(), retry_after: STOPPING_RETRY_SECONDS },
            Overload::TooLate { predicted, allowed } => Refusal::Overloaded {
                message: format!(
                    "the fleet is overloaded: a first token is predicted in {predicted:.0} s, and router.max_queue_wait allows {allowed:.0} s"
                ),
                retry_after: retry_seconds(predicted - allowed),
            },
        }
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to what fits")]
fn retry_seconds(expected: f64) -> u64 {
    expected.clamp(1.0, MAX_RETRY_SECONDS).ceil() as u64
}

/// Seconds after which a client may retry if no replica takes its request now.
pub(super) fn retry_after(arrival: Arrival) -> u64 {
    match arrival {
        Arrival::Within(time) => retry_seconds(time.as_secs_f64()),
        Arrival::Starting | Arrival::Unknown => UNKNOWN_RETRY_SECONDS,
    }
}

impl Refusal {
    /// The refusal for a confined tenant whose only replica takes no requests now.
    pub(super) fn of_confined(confinement: &Confinement) -> Self {
        let place = confinement
            .replica
            .as_ref()
            .map_or("and none takes them now".to_owned(), |replica| format!("which is {replica}, and it takes none now"));
        let message = format!("your requests have crashed {} engines, so all of them go to one replica: {place}", confinement.crashes);
        Refusal::NotReady { message, retry_after: UNKNOWN_RETRY_SECONDS }
    }

    /// Why no replica can take a request for `model` on this path, in a sentence for the client.
    pub(super) fn for_request(view: &FleetView, model: Option<&str>, path: &str) -> Self {
        let mut eligible = view.eligible(model, &[]).map(|(_, replica)| replica).peekable();
        let is_withheld = eligible.peek().is_some_and(|replica| !replica.has_rust_front_end());
        if eligible.peek().is_some() && eligible.all(|replica| !replica.has_route(path)) {
            let path = path.to_owned();
            return if is_withheld { Refusal::WithheldRoute { path } } else { Refusal::MissingRoute { path } };
        }
        // Some engines say only when they are ready which names they have.
        let all_known = !view.replicas.is_empty() && view.replicas.iter().all(|replica| !replica.state.models.is_empty());
        let expectation = view.expectation(model);
        let exists = |model: &&str| expectation.is_some() || view.replicas.iter().any(|replica| replica.serves(Some(model)));
        if let Some(model) = model.filter(|model| all_known && !exists(model)) {
            let known: Vec<&str> = view.models().into_iter().map(|model| model.id.as_str()).collect();
            if !known.is_empty() {
                return Refusal::UnknownModel { model: model.to_owned(), known: known.join(", ") };
            }
        }
        if view.replicas.is_empty() && expectation.is_none() {
            let message = "no agent has attached yet: start `hostler agent --router HOST:PORT` on a node".into();
            return Refusal::NotReady { message, retry_after: UNKNOWN_RETRY_SECONDS };
        }
        let of_interest = view.replicas.iter().filter(|replica| !replica.is_ready() && view.may_serve(replica, model));
        let mut reasons: Vec<String> = of_interest.take(5).map(|replica| describe_replica(replica)).collect();
        reasons.extend(expectation.map(|expectation| expectation.reason.to_string()));
        if reasons.is_empty() {
            // The model's last replica has just left, and the others do not serve it.
            reasons.push(model.map_or("none takes requests".to_owned(), |model| format!("none that serves `{model}` is attached")));
        }
        let which = expectation.map(|expectation| format!(" of the model `{}`", expectation.model.id)).unwrap_or_default();
        let retry_after = retry_after(view.arrival(model, Instant::now()));
        Refusal::NotReady { message: format!("no replica{which} is ready: {}", reasons.join("; ")), retry_after }
    }
}

fn describe_replica(replica: &Replica) -> String {
    let (id, word) = (&replica.id, replica.state.phase.as_str());
    // Use only the first line: a failure's reason continues with the engine's log, which is for
    // operators.
    let reason = replica.state.reason.lines().next().unwrap_or_default();
    match replica.state.phase {
        Phase::Ready => format!("{id} has lost its agent"),
        _ if reason.is_empty() => format!("{id} is {word}"),
        _ => format!("{id} is {word} ({reason})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::tests::{ReplicaChange, announce, attach, fleet, ready, state};

    #[tokio::test(start_paused = true)]
    async fn a_client_learns_why_an_expected_model_is_late() {
        let fleet = fleet();
        announce(&fleet, &[("soon", Some(45)), ("late", Some(7200)), ("one day", None), ("failing", Some(30))]).await;
        let refusal = |model| Refusal::for_request(&fleet.view(), Some(model), "/v1/chat/completions");
        let check = |model, replicas: &str, seconds| {
            let words = format!("no replica of the model `{model}` is ready: {replicas}2 jobs wait: ngpus");
            assert_eq!(refusal(model), Refusal::NotReady { message: words, retry_after: seconds });
        };
        check("soon", "", 45);
        check("late", "", 60);
        check("one day", "", UNKNOWN_RETRY_SECONDS);
        // An expected model is not unknown either beside engines of other models.
        let failing = ReplicaChange { state: Some(state(Phase::Failed, "failing")), ..ready(1) };
        let _lane = attach(&fleet, 1, vec![ready(0), failing]).await;
        check("soon", "", 45);
        check("failing", "n/1 is failed; ", 30);
        assert_eq!(refusal("other").to_string(), "The model `other` does not exist. Valid aliases: failing, late, m, one day, soon.");
    }

    #[tokio::test(start_paused = true)]
    async fn a_wrong_name_is_refused_while_the_models_load_whose_names_are_known() {
        let fleet = fleet();
        let loads = |index, name| ReplicaChange { state: Some(state(Phase::Loading, name)), ..ready(index) };
        let refusal = || Refusal::for_request(&fleet.view(), Some("wrong"), "/v1/chat/completions");
        let _lane = attach(&fleet, 1, vec![loads(0, "chat")]).await;
        assert_eq!(refusal(), Refusal::UnknownModel { model: "wrong".into(), known: "chat".into() });
        let mut nameless = loads(1, "");
        nameless.state.as_mut().unwrap().models.clear();
        let _other = attach(&fleet, 2, vec![loads(0, "chat"), nameless]).await;
        assert!(matches!(refusal(), Refusal::NotReady { .. }), "the second may be it");
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_learns_that_no_replica_serves_its_model() {
        let fleet = fleet();
        let stopped = ReplicaChange { state: Some(state(Phase::Stopped, "other")), ..ready(0) };
        let _lane = attach(&fleet, 1, vec![stopped]).await;
        let refusal = Refusal::for_request(&fleet.view(), Some("chat"), "/v1/chat/completions");
        let message = "no replica is ready: none that serves `chat` is attached".to_owned();
        assert_eq!(refusal, Refusal::NotReady { message, retry_after: UNKNOWN_RETRY_SECONDS });
    }

    #[test]
    fn a_client_learns_when_a_replica_is_expected() {
        let within = |seconds| Arrival::Within(Duration::from_secs_f64(seconds));
        for (arrival, seconds) in [
            (within(0.0), 1),
            (within(0.4), 1),
            (within(2.1), 3),
            (within(45.0), 45),
            (within(119.0), 60),
            (Arrival::Starting, UNKNOWN_RETRY_SECONDS),
            (Arrival::Unknown, UNKNOWN_RETRY_SECONDS),
        ] {
            assert_eq!(retry_after(arrival), seconds, "{arrival:?}");
        }
        let late = |predicted| Refusal::from(Overload::TooLate { predicted, allowed: 300.0 });
        for (predicted, seconds) in [(300.2, 1), (304.5, 5), (1000.0, 60)] {
            assert!(matches!(late(predicted), Refusal::Overloaded { retry_after, .. } if retry_after == seconds), "{predicted}");
        }
    }
}
