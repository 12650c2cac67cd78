//! What the plan says of a replica over several nodes.

use super::super::layout::{GpuGroupLayout, SizeReason};
use super::super::network::NcclTransport;
use super::super::stage::{PipelineStage, ReplicaSpread};
use super::super::{ModelInfo, Plan};
use super::{count, describe_parts, explain_too_few};

/// Division of the nodes and its reasons.
pub(super) fn layout(plan: &Plan, spread: ReplicaSpread) -> Vec<String> {
    let size = format!("1 replica over {} nodes", spread.nodes);
    let Some(share) = plan.layout.as_ref().and_then(|layout| layout.shares.first()) else {
        return vec![format!("{size} on the CPU ({})", division(spread))];
    };
    let mut lines = vec![format!(
        "{size} of {} each ({}){}: {}",
        count(spread.ranks_per_node as usize, "GPU"),
        division(spread),
        joined(spread, share),
        why(plan, share)
    )];
    if let Some(memory) = &share.rejected {
        let what = format!("{} {} too few", count(spread.nodes as usize - 1, "node"), if spread.nodes == 2 { "is" } else { "are" });
        lines.push(explain_too_few(&what, memory, share.context.unwrap_or(0)));
    }
    if let Some(memory) = &share.memory {
        lines.push(format!("each GPU of {}: {}", stage(&memory.stage), describe_parts(memory)));
    }
    lines
}

fn division(spread: ReplicaSpread) -> String {
    format!("TP{} x {}", spread.tp, count(spread.stages as usize, "stage"))
}

fn joined(spread: ReplicaSpread, share: &GpuGroupLayout) -> &'static str {
    match spread.tp {
        1 => "",
        _ if spread.crosses_nodes_in_layers() => ", which share layers over the network",
        _ if share.over_pcie => ", which share layers over PCIe",
        _ => ", which share layers over NVLink",
    }
}

fn why(plan: &Plan, share: &GpuGroupLayout) -> &'static str {
    match (share.why, &plan.model) {
        (SizeReason::Smallest, _) => "the smallest number of nodes that leaves room for the cache",
        (_, ModelInfo::Unknown { .. }) => "as --nodes-per-replica says, since nothing can be computed",
        _ => "as --nodes-per-replica says",
    }
}

/// Stage with the least room, as in `stage 2 of 2, the fullest (40 layers, output head)`.
fn stage(stage: &PipelineStage) -> String {
    if stage.of <= 1 {
        return "the replica".to_owned();
    }
    let embeddings = if stage.is_first() { ", token embeddings" } else { "" };
    let head = if stage.is_last() { ", output head" } else { "" };
    format!("stage {} of {}, the fullest ({}{embeddings}{head})", stage.index + 1, stage.of, count(stage.layers as usize, "layer"))
}

/// Network between the nodes.
pub(super) fn network(plan: &Plan) -> Vec<String> {
    if plan.spread.is_none() || plan.setup.simulated {
        return Vec::new();
    }
    let interface = if plan.interface.is_empty() {
        "the interface on which the agents meet; agent.replica_interface names another".to_owned()
    } else {
        format!("{}, as agent.replica_interface says", plan.interface)
    };
    let transport = match &plan.transport {
        _ if plan.layout.is_none() => return vec![interface],
        NcclTransport::Unknown => {
            "NCCL uses InfiniBand if the nodes have it, and for Slingshot the plug-in that NCCL_NET names; else plain sockets".to_owned()
        }
        NcclTransport::Sockets(because) => format!("NCCL uses plain sockets: {because}"),
        NcclTransport::Fast(because) => format!("NCCL finds more than plain sockets on this host: {because}"),
    };
    vec![interface, transport]
}

pub(super) fn warnings(plan: &Plan) -> Vec<String> {
    let Some(spread) = plan.spread.filter(|_| !plan.setup.simulated) else { return Vec::new() };
    let mut warnings = vec![
        "vLLM's ports between the nodes have no authentication: who reaches them runs code as you; use nodes that are yours alone (docs/multinode.md)".to_owned(),
    ];
    if spread.crosses_nodes_in_layers() {
        warnings.push(format!(
            "--tp {} is more than the GPUs of a node: each layer of each step waits for the network; leave --tp out to share layers within a node",
            spread.tp
        ));
    }
    let Some(share) = plan.layout.as_ref().and_then(|layout| layout.shares.first()) else { return warnings };
    if let NcclTransport::Sockets(because) = &plan.transport {
        warnings.push(format!(
            "NCCL will use plain sockets between the nodes ({because}): each step waits for them; InfiniBand, or the site's plug-in for Slingshot, is faster"
        ));
    }
    if let Some(fewer) = share.enough_nodes {
        let nodes = count(fewer as usize, "node");
        warnings.push(format!("{nodes} would hold the model with the same context: fewer nodes are faster, and end less often"));
    }
    warnings
}
