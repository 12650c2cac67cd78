//! Layout of a replica over several nodes, and the number of nodes that a model needs.
//!
//! Tensor parallelism exchanges data in every layer, so by default it stays within a node, where
//! NVLink joins the GPUs. The nodes are stages of a pipeline: each passes its result on once a
//! step.

use super::error::{Alternative, ModelDoesNotFit, PlanError};
use super::layout::{GpuGroupLayout, GpuLayout, LayoutRequest, SizeFit, SizeReason, SizeSearch, UnusedGpu};
use super::layout::{group_gpus, is_divisible, partition, plan_without_facts};
use super::memory::MemoryBudget;
use super::stage::ReplicaSpread;
use crate::gpu::Gpu;

/// Most nodes that are proposed for a model that does not fit.
const MAX_PROPOSED_NODES: u32 = 16;

/// Lays one replica over `question.nodes` nodes like this one.
///
/// # Errors
/// When the weights do not fit, or the user requested the impossible.
pub(super) fn plan_spread(question: &LayoutRequest<'_>) -> Result<(ReplicaSpread, GpuLayout), PlanError> {
    if question.gpus.iter().any(|gpu| gpu.slice.is_some()) {
        return Err(PlanError::SlicesOverNodes);
    }
    let mut groups = group_gpus(question.gpus);
    let bytes = |group: &Vec<Gpu>| group.iter().map(|gpu| gpu.memory_bytes).sum::<u64>();
    let most = groups.iter().map(bytes).max().unwrap_or(0);
    let at = groups.iter().position(|group| bytes(group) == most).unwrap_or(0);
    let group = groups.remove(at);
    let because = || "the GPUs of one replica are alike".to_owned();
    let spare = groups.into_iter().flatten().map(|gpu| UnusedGpu { gpu, because: because() }).collect();
    let (spread, share) = match question.model.facts().filter(|_| group[0].memory_bytes > 0) {
        Some(facts) => plan_nodes(&SizeSearch { question, group: &group, facts })?,
        None => {
            let ranks = count(&group);
            let spread = divide(question.nodes, ranks, if question.tp == 0 { ranks } else { question.tp })?;
            let why = if question.tp == 0 { SizeReason::Unknown } else { SizeReason::Requested };
            let (replicas, over_pcie) = ranks_in_order(question, &group, spread.tp);
            let assumed = plan_without_facts(question, &group, why);
            (spread, GpuGroupLayout { replicas, over_pcie, tp: spread.tp, ..assumed })
        }
    };
    Ok((spread, GpuLayout { shares: vec![share], spare }))
}

fn plan_nodes(search: &SizeSearch<'_>) -> Result<(ReplicaSpread, GpuGroupLayout), PlanError> {
    let (question, group, facts) = (search.question, search.group, search.facts);
    let nodes = question.nodes;
    let tp = shared_by(search)?;
    let spread = divide(nodes, count(group), tp)?;
    if spread.stages > facts.shape.layers {
        return Err(PlanError::TooManyStages { stages: spread.stages, layers: facts.shape.layers });
    }
    let memory = budget(search, spread);
    if memory.weights > memory.usable {
        let mut misfit = ModelDoesNotFit { spread: Some(spread), ..search.misfit(tp, memory) };
        misfit.alternatives.extend(propose_nodes(search, nodes + 1));
        return Err(PlanError::DoesNotFit(Box::new(misfit)));
    }
    let fit = search.fit(&memory);
    let (tokens, shortened) = match fit {
        SizeFit::Context { tokens, shortened } => (tokens, shortened),
        SizeFit::Not => (search.context(), false),
    };
    let with_nodes = |nodes| ReplicaSpread::new(nodes, count(group), tp).map(|fewer| budget(search, fewer));
    let is_enough = |memory: &MemoryBudget| matches!(search.fit(memory), SizeFit::Context { tokens: held, .. } if held >= tokens);
    let enough_nodes = (1..nodes).find(|nodes| with_nodes(*nodes).as_ref().is_some_and(is_enough));
    let is_smallest = question.tp == 0 && matches!(fit, SizeFit::Context { .. }) && enough_nodes.is_none();
    let (replicas, over_pcie) = ranks_in_order(question, group, tp);
    let share = GpuGroupLayout {
        replicas,
        tp,
        why: if is_smallest { SizeReason::Smallest } else { SizeReason::Requested },
        memory: Some(memory),
        context: Some(tokens),
        is_context_shortened: shortened,
        over_pcie,
        rejected: with_nodes(nodes - 1).filter(|_| is_smallest),
        enough_nodes,
    };
    Ok((spread, share))
}

/// Division over nodes with this many ranks each.
///
/// # Errors
/// When `tp` does not divide the ranks.
pub(super) fn divide(nodes: u32, ranks_per_node: u32, tp: u32) -> Result<ReplicaSpread, PlanError> {
    let ranks = ranks_per_node.saturating_mul(nodes);
    ReplicaSpread::new(nodes, ranks_per_node, tp).ok_or(PlanError::DoesNotSpread { tp, ranks, nodes })
}

/// Adds to the arithmetic of a model that does not fit a node over how many it would.
pub(super) fn with_proposal(error: PlanError, question: &LayoutRequest<'_>) -> PlanError {
    let (PlanError::DoesNotFit(mut misfit), Some(facts)) = (error.clone(), question.model.facts()) else { return error };
    if let Some(group) = group_gpus(question.gpus).iter().find(|group| group[0] == misfit.gpu) {
        misfit.alternatives.extend(propose_nodes(&SizeSearch { question, group, facts }, 2));
    }
    PlanError::DoesNotFit(misfit)
}

/// Smallest number of nodes, from `least` on, that hold a model which fewer do not hold.
fn propose_nodes(search: &SizeSearch<'_>, least: u32) -> Option<Alternative> {
    if search.group[0].slice.is_some() {
        return None;
    }
    let tp = shared_by(search).ok()?;
    (least..=MAX_PROPOSED_NODES).find_map(|nodes| {
        let spread = ReplicaSpread::new(nodes, count(search.group), tp)?;
        let SizeFit::Context { tokens, .. } = search.fit(&budget(search, spread)) else { return None };
        let over_pcie = ranks_in_order(search.question, search.group, tp).1;
        (spread.stages <= search.facts.shape.layers).then_some(Alternative::Nodes { spread, over_pcie, context: tokens })
    })
}

fn budget(search: &SizeSearch<'_>, spread: ReplicaSpread) -> MemoryBudget {
    MemoryBudget::of_fullest_stage(search.facts, &search.group[0], spread, search.question.setup)
}

/// GPUs that share each layer: as the user says, else as many of a node's as NVLink joins in sets
/// of that size, else all over PCIe, as the model's heads allow.
fn shared_by(search: &SizeSearch<'_>) -> Result<u32, PlanError> {
    let (question, group, facts) = (search.question, search.group, search.facts);
    let ranks = count(group);
    if question.tp > 0 {
        let all = ranks.saturating_mul(question.nodes.max(1));
        if !is_divisible(facts, question.tp) {
            let possible = (1..=all).filter(|tp| all.is_multiple_of(*tp) && is_divisible(facts, *tp)).collect();
            return Err(PlanError::DoesNotDivide { tp: question.tp, heads: facts.shape.heads, possible });
        }
        return Ok(question.tp);
    }
    let sizes = || (1..=ranks).rev().filter(|tp| ranks.is_multiple_of(*tp) && is_divisible(facts, *tp));
    let joined = sizes().find(|tp| *tp > 1 && !ranks_in_order(question, group, *tp).1);
    Ok(joined.or_else(|| sizes().next()).unwrap_or(1))
}

/// GPUs of a node in the order of their ranks, those that share layers side by side, and whether
/// these are not joined by NVLink.
fn ranks_in_order(question: &LayoutRequest<'_>, group: &[Gpu], tp: u32) -> (Vec<Vec<Gpu>>, bool) {
    let sets = partition(group, tp.min(count(group)), Some(question.links)).concat();
    let is_joined = sets.len() == group.len();
    (vec![if is_joined { sets } else { group.to_vec() }], !is_joined)
}

fn count(group: &[Gpu]) -> u32 {
    u32::try_from(group.len()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
