//! `hostler ps`: nodes and replicas as a table, or as JSON for scripts, as one router sees them.

use clap::Args;
use hostler_proto::fleet::v1 as wire;
use hostler_proto::fleet::v1::fleet_client::FleetClient;
use serde::Serialize;
use tonic::transport::Channel;

use crate::operate::{AdminArgs, connect, said};
use crate::output::{Side, say, table};

#[derive(Debug, Args)]
pub(crate) struct PsArgs {
    /// JSON, for scripts.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    admin: AdminArgs,
}

/// A node; the field names are those of `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct Node {
    pub(crate) node: String,
    pub(crate) agent_version: String,
    pub(crate) attached: bool,
    pub(crate) replicas: Vec<Replica>,
}

/// A replica; the field names are those of `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct Replica {
    pub(crate) id: String,
    /// A phase's word, or `suspect` when the agent is silent.
    pub(crate) phase: &'static str,
    pub(crate) reason: String,
    pub(crate) models: Vec<String>,
    pub(crate) gpu: String,
    pub(crate) epoch: u64,
    pub(crate) restarts: u32,
    /// Over all routers, counted by the agent.
    pub(crate) in_flight: u32,
    /// Of the router that was asked.
    pub(crate) own_in_flight: u32,
    pub(crate) served: u64,
    pub(crate) running: u32,
    pub(crate) waiting: u32,
    /// 0 to 1.
    pub(crate) kv_use: f64,
    pub(crate) cache: Cache,
    pub(crate) rates: Rates,
    pub(crate) engine_version: String,
    pub(crate) engine_pid: u32,
    pub(crate) engine_socket: String,
}

/// What the router knows of the blocks that a replica has cached; the field names are those of `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct Cache {
    /// They are known exactly. Otherwise requests are placed by their text.
    pub(crate) exact: bool,
    pub(crate) blocks: u64,
    /// Number and digest of the blocks are those that the agent last reported.
    pub(crate) matches: bool,
    /// How often they were not.
    pub(crate) resyncs: u64,
    /// The agent's reports contradict themselves.
    pub(crate) distrusted: bool,
    /// How the router's tokenizer for the model stands.
    pub(crate) tokenizer: String,
    /// Why not exact, where something stands in the way.
    pub(crate) reason: String,
}

/// A replica's speed as the router has learned it, in seconds; the field names are those of `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct Rates {
    pub(crate) step: f64,
    pub(crate) prefill: f64,
    pub(crate) attention: f64,
    pub(crate) decode: f64,
    pub(crate) context: f64,
    pub(crate) slowness: f64,
}

impl From<wire::Cache> for Cache {
    fn from(cache: wire::Cache) -> Self {
        let wire::Cache { exact, blocks, matches, resyncs, distrusted, tokenizer, reason } = cache;
        Self { exact, blocks, matches, resyncs, distrusted, tokenizer, reason }
    }
}

impl From<wire::Rates> for Rates {
    fn from(rates: wire::Rates) -> Self {
        let wire::Rates { step, prefill, attention, decode, context, slowness } = rates;
        Self { step, prefill, attention, decode, context, slowness }
    }
}

impl Cache {
    /// One cell of the table.
    fn cell(&self) -> String {
        if self.exact { format!("exact {}", self.blocks) } else { "text".into() }
    }
}

impl Replica {
    /// Whether it is still on its way to be ready.
    pub(crate) fn is_coming(&self) -> bool {
        matches!(self.phase, "starting" | "loading" | "suspect")
    }
}

/// `hostler ps`.
pub(crate) async fn ps(args: &PsArgs) -> anyhow::Result<()> {
    let nodes = list(&mut connect(&args.admin.admin).await?).await?;
    if args.json {
        say(&serde_json::to_string_pretty(&serde_json::json!({ "nodes": nodes }))?);
    } else {
        lines(&nodes).iter().for_each(|line| say(line));
    }
    Ok(())
}

/// The fleet as the router sees it.
pub(crate) async fn list(fleet: &mut FleetClient<Channel>) -> anyhow::Result<Vec<Node>> {
    let listed = fleet.list(wire::ListRequest {}).await.map_err(said)?.into_inner();
    let node = |node: wire::Node| Node {
        node: node.name,
        agent_version: node.agent_version,
        attached: node.attached,
        replicas: node.replicas.into_iter().map(replica).collect(),
    };
    Ok(listed.nodes.into_iter().map(node).collect())
}

fn replica(replica: wire::Replica) -> Replica {
    let state = replica.state.unwrap_or_default();
    let load = replica.load.unwrap_or_default();
    let engine = load.engine.unwrap_or_default();
    let phase = if replica.suspect { "suspect" } else { state.phase().word() };
    Replica {
        id: replica.id,
        phase,
        reason: state.reason,
        models: state.models.into_iter().map(|model| model.id).collect(),
        gpu: state.gpu,
        epoch: replica.epoch,
        restarts: state.restarts,
        in_flight: load.in_flight,
        own_in_flight: replica.own_in_flight,
        served: load.served,
        running: engine.running,
        waiting: engine.waiting,
        kv_use: engine.kv_use,
        cache: replica.cache.unwrap_or_default().into(),
        rates: replica.rates.unwrap_or_default().into(),
        engine_version: state.engine_version,
        engine_pid: state.engine_pid,
        engine_socket: state.engine_socket,
    }
}

/// What is in no column: for a replica that serves, its GPU and what keeps its cache from being known; for another one, its reason.
fn remark(replica: &Replica) -> String {
    let first_line = |reason: &str| reason.lines().next().unwrap_or_default().to_owned();
    if replica.phase != "ready" {
        return first_line(&replica.reason);
    }
    let cache = if replica.cache.distrusted { "its reports of cached blocks contradict themselves" } else { &replica.cache.reason };
    match (replica.gpu.as_str(), first_line(cache)) {
        (gpu, cache) if replica.cache.exact || cache.is_empty() => gpu.to_owned(),
        ("", cache) => format!("placed by text: {cache}"),
        (gpu, cache) => format!("{gpu}; placed by text: {cache}"),
    }
}

fn lines(nodes: &[Node]) -> Vec<String> {
    if nodes.is_empty() {
        return vec!["no agent has attached yet: start `hostler agent --router HOST:PORT` on a node".into()];
    }
    let mut rows = vec![
        ["REPLICA", "PHASE", "MODEL", "IN FLIGHT", "RUNNING", "WAITING", "KV", "CACHE", "SERVED", "RESTARTS", "ENGINE", ""]
            .map(String::from),
    ];
    for replica in nodes.iter().flat_map(|node| &node.replicas) {
        rows.push([
            replica.id.clone(),
            replica.phase.into(),
            replica.models.join(","),
            replica.in_flight.to_string(),
            replica.running.to_string(),
            replica.waiting.to_string(),
            format!("{:.0}%", replica.kv_use * 100.0),
            replica.cache.cell(),
            replica.served.to_string(),
            replica.restarts.to_string(),
            replica.engine_version.clone(),
            remark(replica),
        ]);
    }
    let mut lines = table([Side::Left; 12], &rows);
    let lost = nodes.iter().filter(|node| !node.attached).map(|node| format!("{}: its agent is not connected", node.node));
    lines.extend(lost);
    lines
}

#[cfg(test)]
mod tests;
