//! Everything the router counts, declared in one place. Handles are resolved once; the request path only adds to them.

use std::fmt::Write;

use hostler_boot::metrics::{Described, Metrics};
use hostler_proto::agent::v1::EngineLoad;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use tokio::time::Instant;

use crate::dispatch::Scanner;
use crate::fleet::{FleetView, Phase, Replica};

/// How an answer that had begun came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Whole.
    Complete,
    /// The engine or its node broke off.
    Broken,
    /// The client left first.
    ClientLeft,
}

impl Outcome {
    fn word(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Broken => "broken",
            Self::ClientLeft => "client_left",
        }
    }
}

/// Why a request got no engine's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The request itself: malformed, too large, or of an unknown model.
    Request,
    /// The router was full.
    Full,
    /// No replica could take it, or each attempt was lost.
    Fleet,
}

impl Refused {
    fn word(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Full => "full",
            Self::Fleet => "fleet",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RefusedLabel {
    reason: &'static str,
}

/// The router's own figures.
#[derive(Debug)]
pub struct RouterMetrics {
    page: Metrics,
    /// Attempts beyond a request's first.
    pub retries: Counter,
    /// Frames of agents for requests that nobody knows any more.
    pub unknown_frames: Counter,
    complete: Counter,
    broken: Counter,
    client_left: Counter,
    refused: Family<RefusedLabel, Counter>,
    first_byte: Histogram,
    duration: Histogram,
    events: Counter,
    tokens: Counter,
}

/// 1 ms to about 9 minutes, each bucket twice the one before.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 20))
}

impl Default for RouterMetrics {
    fn default() -> Self {
        let mut page = Metrics::default();
        let outcomes =
            page.counter("answers", &["outcome"], "Answers that had begun, by how they ended.", Family::<OutcomeLabel, Counter>::default());
        let outcome = |outcome: Outcome| outcomes.get_or_create(&OutcomeLabel { outcome: outcome.word() }).clone();
        Self {
            complete: outcome(Outcome::Complete),
            broken: outcome(Outcome::Broken),
            client_left: outcome(Outcome::ClientLeft),
            refused: page.counter("refused", &["reason"], "Requests that got no engine's answer, by why.", Family::default()),
            retries: page.counter("retries", &[], "Attempts beyond a request's first.", Counter::default()),
            unknown_frames: page.counter(
                "unknown_frames",
                &[],
                "Frames of agents for requests that nobody knows any more.",
                Counter::default(),
            ),
            first_byte: page.seconds("first_byte", &[], "From a request's arrival to the first byte of its answer.", seconds()),
            duration: page.seconds("answer", &[], "From a request's arrival to the last byte of its answer.", seconds()),
            events: page.counter("stream_events", &[], "Events of completed streams.", Counter::default()),
            tokens: page.counter(
                "completion_tokens",
                &[],
                "Tokens of completed streams, where their usage was asked for.",
                Counter::default(),
            ),
            page: {
                page.describe(fleet_descriptions());
                page
            },
        }
    }
}

impl RouterMetrics {
    /// An answer has begun.
    pub fn first_byte(&self, begun: Instant) {
        self.first_byte.observe(begun.elapsed().as_secs_f64());
    }

    /// An answer that had begun has ended.
    pub fn ended(&self, outcome: Outcome, begun: Instant) {
        self.duration.observe(begun.elapsed().as_secs_f64());
        match outcome {
            Outcome::Complete => self.complete.inc(),
            Outcome::Broken => self.broken.inc(),
            Outcome::ClientLeft => self.client_left.inc(),
        };
    }

    /// A stream has ended whole.
    pub fn streamed(&self, scanner: &Scanner) {
        self.events.inc_by(scanner.events());
        self.tokens.inc_by(scanner.usage().map_or(0, |usage| usage.completion));
    }

    /// A request got no engine's answer.
    pub fn refused(&self, reason: Refused) {
        self.refused.get_or_create(&RefusedLabel { reason: reason.word() }).inc();
    }

    /// The page: the router's own figures, then those that agents reported, by node and replica.
    #[must_use]
    pub fn page(&self, view: &FleetView, in_flight: usize) -> String {
        let mut page = self.page.text();
        for figure in FIGURES {
            let name = figure.name;
            let _ = writeln!(page, "# HELP {name} {}\n# TYPE {name} {}", figure.help, figure.kind);
            let suffix = if figure.kind == "counter" { "_total" } else { "" };
            for replica in &view.replicas {
                let (node, id) = (escape(&replica.node), escape(&replica.id));
                let _ = writeln!(page, "{name}{suffix}{{node=\"{node}\",replica=\"{id}\"}} {}", (figure.value)(replica));
            }
        }
        let _ = writeln!(page, "# HELP {IN_FLIGHT} {IN_FLIGHT_HELP}\n# TYPE {IN_FLIGHT} gauge\n{IN_FLIGHT} {in_flight}");
        page
    }

    /// What is on the page, for the manual.
    #[must_use]
    pub fn described(&self) -> &[Described] {
        self.page.described()
    }
}

const IN_FLIGHT: &str = "hostler_in_flight";
const IN_FLIGHT_HELP: &str = "Requests in flight in this router.";

fn escape(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// A figure that each replica has.
struct Figure {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    value: fn(&Replica) -> f64,
}

/// A figure that the engine reported, 0 before it has.
#[allow(clippy::cast_precision_loss, reason = "a metrics page has only floating point")]
fn engine(replica: &Replica, figure: fn(&EngineLoad) -> u64) -> f64 {
    replica.load.wire.engine.as_ref().map_or(0.0, |load| figure(load) as f64)
}

const fn figure(name: &'static str, kind: &'static str, help: &'static str, value: fn(&Replica) -> f64) -> Figure {
    Figure { name, kind, help, value }
}

#[allow(clippy::cast_precision_loss, reason = "a metrics page has only floating point")]
const FIGURES: &[Figure] = &[
    figure("hostler_replica_ready", "gauge", "1 when the replica can be sent requests.", |replica| f64::from(u8::from(replica.is_ready()))),
    figure("hostler_replica_failed", "gauge", "1 while the agent waits before it starts a failed engine again.", |replica| {
        f64::from(u8::from(replica.state.phase == Phase::Failed))
    }),
    figure("hostler_replica_suspect", "gauge", "1 when its agent's lease has lapsed.", |replica| f64::from(u8::from(replica.suspect))),
    figure("hostler_replica_restarts", "counter", "Starts of the engine after its first one.", |replica| {
        f64::from(replica.state.wire.restarts)
    }),
    figure("hostler_replica_own_in_flight", "gauge", "Requests of this router in flight there.", |replica| {
        f64::from(replica.own.in_flight())
    }),
    figure("hostler_replica_in_flight", "gauge", "Requests of all routers in flight there, counted by its agent.", |replica| {
        f64::from(replica.load.wire.in_flight)
    }),
    figure("hostler_replica_served", "counter", "Requests taken since its agent started.", |replica| replica.load.wire.served as f64),
    figure("hostler_replica_running", "gauge", "Requests that the engine runs.", |replica| engine(replica, |load| load.running.into())),
    figure("hostler_replica_waiting", "gauge", "Requests that wait in the engine.", |replica| engine(replica, |load| load.waiting.into())),
    figure("hostler_replica_kv_use", "gauge", "Share of the engine's KV blocks in use, 0 to 1.", |replica| {
        replica.load.wire.engine.as_ref().map_or(0.0, |load| load.kv_use)
    }),
    figure("hostler_replica_prompt_tokens", "counter", "Prompt tokens that the engine has processed.", |replica| {
        engine(replica, |load| load.prompt_tokens)
    }),
    figure("hostler_replica_generation_tokens", "counter", "Tokens that the engine has generated.", |replica| {
        engine(replica, |load| load.generation_tokens)
    }),
    figure("hostler_replica_preemptions", "counter", "Requests that the engine has preempted.", |replica| {
        engine(replica, |load| load.preemptions)
    }),
    figure("hostler_replica_prefix_queries", "counter", "Tokens looked up in the engine's prefix cache.", |replica| {
        engine(replica, |load| load.prefix_queries)
    }),
    figure("hostler_replica_prefix_hits", "counter", "Tokens found in the engine's prefix cache.", |replica| {
        engine(replica, |load| load.prefix_hits)
    }),
];

fn fleet_descriptions() -> Vec<Described> {
    let described = |figure: &Figure| Described {
        name: format!("{}{}", figure.name, if figure.kind == "counter" { "_total" } else { "" }),
        kind: figure.kind,
        labels: &["node", "replica"],
        help: figure.help,
    };
    let in_flight = Described { name: IN_FLIGHT.into(), kind: "gauge", labels: &[], help: IN_FLIGHT_HELP };
    FIGURES.iter().map(described).chain([in_flight]).collect()
}
