//! `hostler advise`: what slows the fleet's engines down, each with the evidence and what to
//! change.

use clap::Args;
use hostler_proto::agent::v1::Finding;
use hostler_proto::fleet::v1::{Node, Replica};
use serde::Serialize;

use crate::admin::{AdminArgs, connect, list_fleet};
use crate::output::say;
use crate::ps::{NO_AGENT, finding_lines};

/// A KV cache counts as full from this share on.
const FULL_FROM: f64 = 0.95;

#[derive(Debug, Args)]
pub(crate) struct AdviseArgs {
    /// A node, or a replica as `node/index`; all of the fleet without it.
    target: Option<String>,
    /// JSON, for scripts.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(crate) admin: AdminArgs,
}

/// A finding for a replica; the field names are those of `--json`.
#[derive(Debug, Serialize)]
struct Advice<'a> {
    replica: &'a str,
    #[serde(flatten)]
    finding: &'a Finding,
}

pub(crate) async fn advise(args: &AdviseArgs) -> anyhow::Result<()> {
    let listed = list_fleet(&mut connect(&args.admin).await?).await?;
    let nodes = listed.nodes;
    let replicas = select_replicas(&nodes, args.target.as_deref())?;
    if args.json {
        let findings: Vec<Advice<'_>> = advice(&replicas).collect();
        let json = serde_json::json!({ "fleet_findings": listed.findings, "findings": findings });
        say(&serde_json::to_string_pretty(&json)?);
        return Ok(());
    }
    finding_lines(&listed.findings).iter().for_each(|line| say(line));
    if nodes.is_empty() {
        say(NO_AGENT);
    } else {
        lines(&replicas).iter().for_each(|line| say(line));
    }
    Ok(())
}

/// Selected replicas: all, those of a node, or one.
fn select_replicas<'a>(nodes: &'a [Node], target: Option<&str>) -> anyhow::Result<Vec<&'a Replica>> {
    let replicas = nodes.iter().flat_map(|node| node.replicas.iter().map(move |replica| (node, replica)));
    let meant = |(node, replica): &(&Node, &Replica)| target.is_none_or(|target| node.name == target || replica.id == target);
    let chosen: Vec<&Replica> = replicas.filter(meant).map(|(_, replica)| replica).collect();
    match target {
        Some(target) if chosen.is_empty() => {
            anyhow::bail!("no node or replica is called {target:?}; `hostler ps` shows those there are")
        }
        _ => Ok(chosen),
    }
}

fn advice<'a>(replicas: &[&'a Replica]) -> impl Iterator<Item = Advice<'a>> {
    replicas.iter().flat_map(|replica| replica.state().findings.iter().map(|finding| Advice { replica: &replica.id, finding }))
}

fn lines(replicas: &[&Replica]) -> Vec<String> {
    let mut lines: Vec<String> = advice(replicas)
        .flat_map(|Advice { replica, finding }| {
            [format!("{replica}  {}", finding.kind), format!("  seen    {}", finding.evidence), format!("  change  {}", finding.advice)]
        })
        .collect();
    if lines.is_empty() {
        let serving = replicas.iter().filter(|replica| replica.is_ready()).count();
        let nothing = format!(
            "nothing to advise: {serving} of {} replicas serve, and nothing was seen that costs them speed; what does shows after half a minute of work",
            replicas.len()
        );
        return [nothing].into_iter().chain(replicas.iter().filter_map(|replica| pressure(replica))).collect();
    }
    lines.push(
        "--front-end, --tp and --profile are settings of the agent; other flags are the engine's, behind `--` of `hostler up` and `hostler agent` or in \
         agent.engine_args. Both are read when the agent starts."
            .to_owned(),
    );
    lines
}

/// What an engine is short of at this moment; `None` if of nothing.
fn pressure(replica: &Replica) -> Option<String> {
    let engine = replica.load().engine?;
    let full = (engine.kv_use >= FULL_FROM).then(|| format!("its KV cache is {:.0}% full", engine.kv_use * 100.0));
    let waiting = (engine.waiting > 0).then(|| format!("{} requests wait in the engine", engine.waiting));
    let short: Vec<String> = full.into_iter().chain(waiting).collect();
    (!short.is_empty()).then(|| format!("right now {}: {}", replica.id, short.join(", and ")))
}

#[cfg(test)]
mod tests;
