//! `hostler ps`: nodes and replicas as a table, or as JSON for scripts.

use clap::Args;
use hostler_proto::agent::v1::Phase;
use hostler_proto::fleet::v1 as wire;
use hostler_proto::fleet::v1::fleet_client::FleetClient;
use serde::Serialize;
use tonic::transport::Channel;

use crate::operate::{AdminArgs, connect, said};
use crate::output::say;

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
    pub(crate) engine_version: String,
    pub(crate) engine_pid: u32,
    pub(crate) engine_socket: String,
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
        table(&nodes).iter().for_each(|line| say(line));
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
    let phase = match state.phase() {
        _ if replica.suspect => "suspect",
        Phase::Unspecified | Phase::Starting => "starting",
        Phase::Loading => "loading",
        Phase::Ready => "ready",
        Phase::Draining => "draining",
        Phase::Stopped => "stopped",
        Phase::Failed => "failed",
    };
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
        engine_version: state.engine_version,
        engine_pid: state.engine_pid,
        engine_socket: state.engine_socket,
    }
}

fn table(nodes: &[Node]) -> Vec<String> {
    if nodes.is_empty() {
        return vec!["no agent has attached yet: start `hostler agent --router HOST:PORT` on a node".into()];
    }
    let mut rows =
        vec![["REPLICA", "PHASE", "MODEL", "IN FLIGHT", "RUNNING", "WAITING", "KV", "SERVED", "RESTARTS", "ENGINE", ""].map(String::from)];
    for replica in nodes.iter().flat_map(|node| &node.replicas) {
        rows.push([
            replica.id.clone(),
            replica.phase.into(),
            replica.models.join(","),
            replica.in_flight.to_string(),
            replica.running.to_string(),
            replica.waiting.to_string(),
            format!("{:.0}%", replica.kv_use * 100.0),
            replica.served.to_string(),
            replica.restarts.to_string(),
            replica.engine_version.clone(),
            if replica.phase == "ready" { replica.gpu.clone() } else { replica.reason.lines().next().unwrap_or_default().to_owned() },
        ]);
    }
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..11).map(width).collect();
    let line = |row: &[String; 11]| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    let mut lines: Vec<String> = rows.iter().map(line).collect();
    let lost = nodes.iter().filter(|node| !node.attached).map(|node| format!("{}: its agent is not connected", node.node));
    lines.extend(lost);
    lines
}
