//! Everything the agent counts, declared in one place.

use std::fmt::Write;

use hostler_boot::metrics::{Described, Metrics};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

use crate::engine::Phase;
use crate::uplink::{Board, Replica};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

/// The agent's own figures.
#[derive(Debug)]
pub struct AgentMetrics {
    page: Metrics,
    /// Answers relayed whole.
    pub complete: Counter,
    /// Answers that their engine did not finish.
    pub broken: Counter,
    /// Requests that a router cancelled.
    pub cancelled: Counter,
    /// Frames of routers for requests that nobody knows any more.
    pub unknown_frames: Counter,
}

impl Default for AgentMetrics {
    fn default() -> Self {
        let mut page = Metrics::default();
        let help = "Requests of routers, by how their answer ended.";
        let relayed = page.counter("agent_relayed", &["outcome"], help, Family::<OutcomeLabel, Counter>::default());
        let outcome = |outcome| relayed.get_or_create(&OutcomeLabel { outcome }).clone();
        let unknown = "Frames of routers for requests that nobody knows any more.";
        Self {
            complete: outcome("complete"),
            broken: outcome("broken"),
            cancelled: outcome("cancelled"),
            unknown_frames: page.counter("agent_unknown_frames", &[], unknown, Counter::default()),
            page: {
                page.describe(FIGURES.iter().map(|&Figure { name, kind, help, .. }| Described {
                    name: name.into(),
                    kind,
                    labels: &["replica"],
                    help,
                }));
                page
            },
        }
    }
}

/// Something about each engine that is read when the page is.
struct Figure {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    value: fn(&Replica) -> u64,
}

const FIGURES: &[Figure] = &[
    Figure {
        name: "hostler_agent_engine_ready",
        kind: "gauge",
        help: "1 when the engine serves.",
        value: |replica| (replica.engine.status().borrow().phase == Phase::Ready).into(),
    },
    Figure {
        name: "hostler_agent_engine_in_flight",
        kind: "gauge",
        help: "Requests of all routers in flight there.",
        value: |replica| replica.engine.traffic().total().into(),
    },
    Figure {
        name: "hostler_agent_engine_pending_tokens",
        kind: "gauge",
        help: "Prompt tokens of requests in flight that are still to be computed, as routers estimated them.",
        value: |replica| replica.engine.traffic().changes().borrow().sum().pending_tokens,
    },
    Figure {
        name: "hostler_agent_engine_restarts_total",
        kind: "counter",
        help: "Starts of the engine after its first one.",
        value: |replica| replica.engine.status().borrow().restarts.into(),
    },
    Figure {
        name: "hostler_agent_cache_exact",
        kind: "gauge",
        help: "1 when the agent knows exactly which blocks the engine has cached.",
        value: |replica| replica.engine.cache().watch().borrow().exact.into(),
    },
    Figure {
        name: "hostler_agent_cache_events_total",
        kind: "counter",
        help: "Events about cached blocks that the engine sent.",
        value: |replica| replica.engine.cache().counters().events,
    },
    Figure {
        name: "hostler_agent_cache_gaps_total",
        kind: "counter",
        help: "Times that some of these events were missing.",
        value: |replica| replica.engine.cache().counters().gaps,
    },
    Figure {
        name: "hostler_agent_cache_replays_total",
        kind: "counter",
        help: "Gaps that the engine filled by sending the events again.",
        value: |replica| replica.engine.cache().counters().replays,
    },
    Figure {
        name: "hostler_agent_cache_resets_total",
        kind: "counter",
        help: "Times that every block was forgotten because what was known could have been wrong.",
        value: |replica| replica.engine.cache().counters().resets,
    },
    Figure {
        name: "hostler_agent_cache_orphans_total",
        kind: "counter",
        help: "Blocks that were not taken in because the block before them is unknown.",
        value: |replica| replica.engine.cache().counters().orphans,
    },
    Figure {
        name: "hostler_agent_cache_malformed_total",
        kind: "counter",
        help: "Messages about cached blocks that could not be read.",
        value: |replica| replica.engine.cache().counters().malformed,
    },
    Figure {
        name: "hostler_agent_cache_ignored_total",
        kind: "counter",
        help: "Events about other memory than the GPU's, or about other groups of layers than the one that is followed.",
        value: |replica| replica.engine.cache().counters().ignored,
    },
];

impl AgentMetrics {
    /// The page: the agent's own figures, then those of its engines.
    #[must_use]
    pub fn page(&self, board: &Board) -> String {
        let mut page = self.page.text();
        for Figure { name, kind, help, value } in FIGURES {
            let family = name.trim_end_matches("_total");
            let _ = writeln!(page, "# HELP {family} {help}\n# TYPE {family} {kind}");
            for replica in board.replicas() {
                let _ = writeln!(page, "{name}{{replica=\"{}\"}} {}", replica.index, value(replica));
            }
        }
        page
    }

    /// What is on the page, for the manual.
    #[must_use]
    pub fn described(&self) -> &[Described] {
        self.page.described()
    }
}
