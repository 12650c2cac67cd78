//! An answer of the router to `List` as the view needs it: the content of `hostler ps`, and the
//! counters behind rates.

use std::collections::HashMap;

use hostler_proto::fleet::v1 as wire;

use crate::ps::{GoneJob, Node, Replica};

#[derive(Debug, Default)]
pub(super) struct FleetPicture {
    pub(super) router_version: String,
    pub(super) nodes: Vec<Node>,
    pub(super) gone_jobs: Vec<GoneJob>,
    pub(super) demand: Vec<wire::ModelDemand>,
    /// First-token times of all streams.
    pub(super) first_tokens: Option<wire::FirstTokens>,
    pub(super) in_flight: u32,
    pub(super) queued: u32,
    pub(super) tenants: Vec<wire::TenantUse>,
    figures: HashMap<String, ReplicaFigures>,
}

/// Figures of a replica that `hostler ps` does not show.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ReplicaFigures {
    /// Counters from the engine's metrics; absent until those were read.
    pub(super) engine: Option<EngineCounters>,
    pub(super) first_tokens: Option<wire::FirstTokens>,
}

/// Counters of an engine since it began.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct EngineCounters {
    pub(super) generation_tokens: u64,
    pub(super) prefix_queries: u64,
    pub(super) prefix_hits: u64,
    pub(super) kv_blocks: u64,
    pub(super) preemptions: u64,
}

impl From<wire::ListResponse> for FleetPicture {
    fn from(listed: wire::ListResponse) -> Self {
        let replicas = listed.nodes.iter().flat_map(|node| &node.replicas);
        let figures = replicas.map(|replica| (replica.id.clone(), ReplicaFigures::of(replica))).collect();
        Self {
            router_version: listed.router_version,
            nodes: listed.nodes.into_iter().map(Node::from).collect(),
            gone_jobs: listed.gone_jobs.into_iter().map(GoneJob::from).collect(),
            demand: listed.demand,
            first_tokens: listed.first_tokens,
            in_flight: listed.in_flight,
            queued: listed.queued,
            tenants: listed.tenants,
            figures,
        }
    }
}

impl ReplicaFigures {
    fn of(replica: &wire::Replica) -> Self {
        let engine = replica.load.and_then(|load| load.engine).map(|engine| EngineCounters {
            generation_tokens: engine.generation_tokens,
            prefix_queries: engine.prefix_queries,
            prefix_hits: engine.prefix_hits,
            kv_blocks: engine.kv_blocks,
            preemptions: engine.preemptions,
        });
        Self { engine, first_tokens: replica.first_tokens }
    }
}

impl FleetPicture {
    /// Each replica with its node.
    pub(super) fn replicas(&self) -> impl Iterator<Item = (&Node, &Replica)> {
        self.nodes.iter().flat_map(|node| node.replicas.iter().map(move |replica| (node, replica)))
    }

    pub(super) fn find(&self, id: &str) -> Option<(&Node, &Replica)> {
        self.replicas().find(|(_, replica)| replica.id == id)
    }

    pub(super) fn has(&self, id: &str) -> bool {
        self.figures.contains_key(id)
    }

    pub(super) fn figures(&self, id: &str) -> ReplicaFigures {
        self.figures.get(id).copied().unwrap_or_default()
    }
}
