//! Everything the agent counts, declared in one place.

use std::fmt::Write;

use hostler_boot::metrics::{Described, Metrics};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

use crate::engine::Phase;
use crate::uplink::Board;

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
                page.describe(FIGURES.iter().map(|&(name, kind, help)| Described { name: name.into(), kind, labels: &["replica"], help }));
                page
            },
        }
    }
}

const FIGURES: &[(&str, &str, &str)] = &[
    ("hostler_agent_engine_ready", "gauge", "1 when the engine serves."),
    ("hostler_agent_engine_in_flight", "gauge", "Requests of all routers in flight there."),
    ("hostler_agent_engine_restarts_total", "counter", "Starts of the engine after its first one."),
];

impl AgentMetrics {
    /// The page: the agent's own figures, then those of its engines.
    #[must_use]
    pub fn page(&self, board: &Board) -> String {
        let mut page = self.page.text();
        for &(name, kind, help) in FIGURES {
            let family = name.trim_end_matches("_total");
            let _ = writeln!(page, "# HELP {family} {help}\n# TYPE {family} {kind}");
            for replica in board.replicas() {
                let status = replica.engine.status();
                let status = status.borrow();
                let value = match name {
                    "hostler_agent_engine_ready" => u32::from(status.phase == Phase::Ready),
                    "hostler_agent_engine_in_flight" => replica.engine.traffic().total(),
                    _ => status.restarts,
                };
                let _ = writeln!(page, "{name}{{replica=\"{}\"}} {value}", replica.index);
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
