//! Assignment of GPUs to replicas.
//!
//! A replica gets the smallest number of GPUs, within one NVLink domain, that leaves room for the
//! model's context, and there are as many replicas as fit. This module is pure: the request
//! contains the facts about the model and the host, and the user's decisions.

use super::error::{Alternative, ModelDoesNotFit, PlanError};
use super::memory::MemoryBudget;
use super::model::{ModelFacts, ModelInfo};
use super::setup::EnginePlanSetup;
use super::weights::quantized_sizes;
use crate::gpu::{Gpu, NvlinkTopology};
use crate::sizes::GIB;

/// Shortest context with which a model is started if its own does not fit.
const MIN_CONTEXT: u32 = 8_192;

/// A cache of less than a tenth of the memory is too small.
///
/// It serves so few requests at once that a quantized model, or one more GPU, gives many times
/// more.
const MIN_CACHE_DIVISOR: u64 = 10;

/// A cache that holds this many full contexts is large enough, whatever its share of the memory.
const AMPLE_CONTEXTS: u64 = 4;

/// Most GPUs of one replica: hosts have no more that are joined.
const MAX_GPUS_PER_REPLICA: u32 = 16;

/// Shortened contexts are multiples of this.
const CONTEXT_STEP: u32 = 1_024;

#[derive(Debug, Clone, Copy)]
pub(super) struct LayoutRequest<'a> {
    pub(super) model: &'a ModelInfo,
    pub(super) gpus: &'a [Gpu],
    pub(super) links: &'a NvlinkTopology,
    /// GPUs of one replica, if the user has decided; 0 otherwise.
    pub(super) tp: u32,
    /// Number of replicas, if the user has decided; 0 otherwise.
    pub(super) replicas: u32,
    /// Nodes of one replica.
    pub(super) nodes: u32,
    pub(super) setup: &'a EnginePlanSetup,
}

/// Use of all GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuLayout {
    /// Layouts, one for each kind of GPU in use.
    pub shares: Vec<GpuGroupLayout>,
    /// GPUs that no replica uses, and why.
    pub spare: Vec<UnusedGpu>,
}

/// Use of the GPUs of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuGroupLayout {
    /// GPUs of each replica, in the order of its ranks. All replicas have the same size.
    pub replicas: Vec<Vec<Gpu>>,
    pub tp: u32,
    /// Reason for this number of GPUs.
    pub why: SizeReason,
    /// Memory budget of each GPU; `None` if the model or the memory is unknown.
    pub memory: Option<MemoryBudget>,
    /// Longest context of a request; `None` if the model is unknown.
    pub context: Option<u32>,
    /// Whether `context` was shortened because the model's own does not fit.
    pub is_context_shortened: bool,
    /// Whether the GPUs of a replica are not all joined by NVLink.
    pub over_pcie: bool,
    /// Arithmetic of half as many GPUs, or of one node less, if that decided the number.
    pub rejected: Option<MemoryBudget>,
    /// Smaller number of nodes that would hold the same context.
    pub enough_nodes: Option<u32>,
}

/// Reasons for a replica's number of GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SizeReason {
    /// The number is the smallest that leaves room for the cache.
    Smallest,
    /// The user requested the number.
    Requested,
    /// The model or its memory is unknown.
    Unknown,
    /// The devices are slices of GPUs, which cannot work together.
    Slices,
}

/// A GPU without a replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnusedGpu {
    pub gpu: Gpu,
    /// Reason, which ends a sentence.
    pub because: String,
}

/// Whether a size of a replica fits.
pub(super) enum SizeFit {
    /// The size fits with this context, which may be shorter than the model's own.
    Context { tokens: u32, shortened: bool },
    /// The size does not fit, or hardly.
    Not,
}

/// Distributes the replicas over the GPUs.
///
/// # Errors
/// When the model does not fit, or the user requested the impossible.
pub(super) fn plan_layout(question: &LayoutRequest<'_>) -> Result<GpuLayout, PlanError> {
    let mut whole = GpuLayout::default();
    let mut misfit: Option<ModelDoesNotFit> = None;
    for group in group_gpus(question.gpus) {
        match plan_group(question, &group) {
            Ok(share) => {
                let used: Vec<&Gpu> = share.replicas.iter().flatten().collect();
                let because = match share.tp {
                    1 => "it was not asked for".to_owned(),
                    tp => format!("a replica needs {tp} alike that reach each other"),
                };
                let left = group.iter().filter(|gpu| !used.contains(gpu));
                whole.spare.extend(left.map(|gpu| UnusedGpu { gpu: gpu.clone(), because: because.clone() }));
                whole.shares.push(share);
            }
            Err(PlanError::DoesNotFit(found)) => {
                whole
                    .spare
                    .extend(group.iter().map(|gpu| UnusedGpu { gpu: gpu.clone(), because: "the model does not fit there".to_owned() }));
                let larger = misfit.as_ref().is_none_or(|known| known.group_bytes() < found.group_bytes());
                misfit = if larger { Some(*found) } else { misfit };
            }
            Err(other) => return Err(other),
        }
    }
    match misfit {
        Some(misfit) if whole.shares.is_empty() => return Err(PlanError::DoesNotFit(Box::new(misfit))),
        _ => {}
    }
    limit_replicas(&mut whole, question)?;
    Ok(whole)
}

fn limit_replicas(layout: &mut GpuLayout, question: &LayoutRequest<'_>) -> Result<(), PlanError> {
    let possible: usize = layout.shares.iter().map(|share| share.replicas.len()).sum();
    let desired = usize::try_from(question.replicas).unwrap_or(usize::MAX);
    if possible == 0 || desired > possible {
        return Err(PlanError::TooManyReplicas {
            requested: question.replicas.max(1),
            possible: u32::try_from(possible).unwrap_or(u32::MAX),
            gpus: u32::try_from(question.gpus.len()).unwrap_or(u32::MAX),
            tp: layout.shares.first().map_or(question.tp.max(1), |share| share.tp),
        });
    }
    if desired == 0 {
        return Ok(());
    }
    let mut left = desired;
    for share in &mut layout.shares {
        let unused = share.replicas.split_off(left.min(share.replicas.len()));
        let because = || "no more replicas were asked for".to_owned();
        layout.spare.extend(unused.into_iter().flatten().map(|gpu| UnusedGpu { gpu, because: because() }));
        left -= share.replicas.len();
    }
    layout.shares.retain(|share| !share.replicas.is_empty());
    Ok(())
}

/// Groups GPUs by name and size, in the order of the first of each.
///
/// Slices are grouped by their size.
pub(super) fn group_gpus(gpus: &[Gpu]) -> Vec<Vec<Gpu>> {
    let mut groups: Vec<Vec<Gpu>> = Vec::new();
    for gpu in gpus {
        let alike = |group: &&mut Vec<Gpu>| {
            let first = &group[0];
            first.name == gpu.name && first.memory_bytes == gpu.memory_bytes && first.slice.is_some() == gpu.slice.is_some()
        };
        match groups.iter_mut().find(alike) {
            Some(group) => group.push(gpu.clone()),
            None => groups.push(vec![gpu.clone()]),
        }
    }
    groups
}

fn plan_group(question: &LayoutRequest<'_>, group: &[Gpu]) -> Result<GpuGroupLayout, PlanError> {
    let sliced = group[0].slice.is_some();
    if question.tp > 1 && sliced {
        return Err(PlanError::SlicesTogether { tp: question.tp });
    }
    let facts = match question.model {
        ModelInfo::Known(facts) if group[0].memory_bytes > 0 => facts,
        _ => {
            let why = match (question.tp, sliced) {
                (1.., _) => SizeReason::Requested,
                (0, true) => SizeReason::Slices,
                (0, false) => SizeReason::Unknown,
            };
            return Ok(plan_without_facts(question, group, why));
        }
    };
    let host = SizeSearch { question, group, facts };
    if question.tp > 0 {
        return host.plan_requested();
    }
    let mut share = host.smallest()?;
    if sliced {
        share.why = SizeReason::Slices;
    }
    Ok(share)
}

/// Layout with one GPU per replica, or as many as were requested, without any arithmetic.
pub(super) fn plan_without_facts(question: &LayoutRequest<'_>, group: &[Gpu], why: SizeReason) -> GpuGroupLayout {
    let tp = question.tp.max(1);
    let (replicas, over_pcie) = match partition(group, tp, Some(question.links)) {
        joined if !joined.is_empty() => (joined, false),
        _ => (partition(group, tp, None), true),
    };
    let context = question.setup.context().or_else(|| question.model.facts().map(|facts| facts.context));
    GpuGroupLayout { replicas, tp, why, memory: None, context, is_context_shortened: false, over_pcie, rejected: None, enough_nodes: None }
}

/// Search for a replica size on one kind of GPU.
pub(super) struct SizeSearch<'a> {
    pub(super) question: &'a LayoutRequest<'a>,
    pub(super) group: &'a [Gpu],
    pub(super) facts: &'a ModelFacts,
}

impl SizeSearch<'_> {
    fn memory(&self, tp: u32) -> MemoryBudget {
        MemoryBudget::new(self.facts, &self.group[0], tp, self.question.setup)
    }

    pub(super) fn context(&self) -> u32 {
        self.question.setup.context().unwrap_or(self.facts.context)
    }

    pub(super) fn fit(&self, memory: &MemoryBudget) -> SizeFit {
        let context = self.context();
        // Nothing is cached by token: the model only has states.
        let Some(contexts) = memory.requests_of(u64::from(context)) else {
            return if memory.missing == 0 { SizeFit::Context { tokens: context, shortened: false } } else { SizeFit::Not };
        };
        let roomy = memory.cache >= memory.total / MIN_CACHE_DIVISOR;
        if contexts >= AMPLE_CONTEXTS || contexts >= 1 && roomy {
            return SizeFit::Context { tokens: context, shortened: false };
        }
        let longest = memory.max_request_tokens(context) / CONTEXT_STEP * CONTEXT_STEP;
        // The user's own context is not changed.
        if roomy && longest >= MIN_CONTEXT.min(context) && self.question.setup.context().is_none() {
            return SizeFit::Context { tokens: longest, shortened: true };
        }
        SizeFit::Not
    }

    /// Smallest size that fits: first with the whole context and NVLink, then with a shorter one,
    /// and over PCIe only if both fail.
    fn smallest(&self) -> Result<GpuGroupLayout, PlanError> {
        let slices = self.group[0].slice.is_some();
        let sizes: Vec<u32> = self.candidate_sizes().take_while(|tp| !slices || *tp == 1).collect();
        for (over_pcie, may_shorten) in [(false, false), (false, true), (true, false), (true, true)] {
            for &tp in &sizes {
                let links = (!over_pcie).then_some(self.question.links);
                let replicas = partition(self.group, tp, links);
                let memory = self.memory(tp);
                match self.fit(&memory) {
                    SizeFit::Context { tokens, shortened } if !replicas.is_empty() && (may_shorten || !shortened) => {
                        let refused = (tp > 1).then(|| self.memory(tp / 2));
                        return Ok(GpuGroupLayout {
                            replicas,
                            tp,
                            why: SizeReason::Smallest,
                            memory: Some(memory),
                            context: Some(tokens),
                            is_context_shortened: shortened,
                            over_pcie,
                            rejected: refused,
                            enough_nodes: None,
                        });
                    }
                    _ => {}
                }
            }
        }
        Err(self.does_not_fit(sizes.last().copied().unwrap_or(1)))
    }

    /// Layout that the user requested, unless the weights do not fit.
    ///
    /// The rest is only an estimate, which the user may overrule.
    fn plan_requested(&self) -> Result<GpuGroupLayout, PlanError> {
        let tp = self.question.tp;
        let in_group = u32::try_from(self.group.len()).unwrap_or(u32::MAX);
        if !is_divisible(self.facts, tp) {
            let possible = (1..=MAX_GPUS_PER_REPLICA.min(self.facts.shape.heads)).filter(|tp| is_divisible(self.facts, *tp)).collect();
            return Err(PlanError::DoesNotDivide { tp, heads: self.facts.shape.heads, possible });
        }
        let memory = self.memory(tp);
        if memory.weights > memory.usable {
            return Err(self.does_not_fit(tp));
        }
        let (tokens, shortened) = match self.fit(&memory) {
            SizeFit::Context { tokens, shortened } => (tokens, shortened),
            SizeFit::Not => (self.context(), false),
        };
        let joined = partition(self.group, tp, Some(self.question.links));
        let over_pcie = joined.is_empty() && tp <= in_group;
        let replicas = if over_pcie { partition(self.group, tp, None) } else { joined };
        Ok(GpuGroupLayout {
            replicas,
            tp,
            why: SizeReason::Requested,
            memory: Some(memory),
            context: Some(tokens),
            is_context_shortened: shortened,
            over_pcie,
            rejected: None,
            enough_nodes: None,
        })
    }

    /// Powers of two that divide the model's heads, up to the number of GPUs.
    fn candidate_sizes(&self) -> impl Iterator<Item = u32> {
        let in_group = u32::try_from(self.group.len()).unwrap_or(u32::MAX);
        (0..)
            .map(|power| 1 << power)
            .take_while(move |tp| *tp <= in_group.min(MAX_GPUS_PER_REPLICA))
            .filter(|tp| is_divisible(self.facts, *tp))
    }

    fn does_not_fit(&self, tp: u32) -> PlanError {
        PlanError::DoesNotFit(Box::new(self.misfit(tp, self.memory(tp))))
    }

    pub(super) fn misfit(&self, tp: u32, memory: MemoryBudget) -> ModelDoesNotFit {
        ModelDoesNotFit {
            gpu: self.group[0].clone(),
            gpus: u32::try_from(self.group.len()).unwrap_or(u32::MAX),
            tp,
            weight_bytes: self.facts.weight_bytes,
            format: self.facts.format.name.clone(),
            context: self.context(),
            max_context: memory.max_request_tokens(self.context()),
            sliced: self.group[0].slice.is_some(),
            min_cache: memory.total / MIN_CACHE_DIVISOR,
            alternatives: self.would_fit(),
            spread: None,
            memory,
        }
    }

    /// Alternatives that would fit: the model in smaller formats on these GPUs, or unchanged on
    /// more of them.
    fn would_fit(&self) -> Vec<Alternative> {
        let mut found = Vec::new();
        let formats = if self.facts.format.is_unquantized() { quantized_sizes(self.facts.parameters).to_vec() } else { Vec::new() };
        let last = if self.group[0].slice.is_some() { 1 } else { MAX_GPUS_PER_REPLICA };
        for (format, weight_bytes) in formats {
            let facts = ModelFacts { weight_bytes, ..self.facts.clone() };
            let smaller = SizeSearch { facts: &facts, ..*self };
            if let Some(tp) = smaller.candidate_sizes().take_while(|tp| *tp <= last).find(|tp| smaller.fits(*tp)) {
                found.push(Alternative::Format { name: format, weight_bytes, tp });
            }
        }
        let more = (0..5).map(|power| 1_u32 << power).filter(|tp| is_divisible(self.facts, *tp) && *tp <= last);
        found.extend(more.into_iter().find(|tp| self.fits(*tp)).map(|tp| Alternative::Gpus { tp, gib: self.group[0].memory_bytes / GIB }));
        found
    }

    fn fits(&self, tp: u32) -> bool {
        matches!(self.fit(&self.memory(tp)), SizeFit::Context { .. })
    }
}

/// Whether vLLM can divide the model by this number.
///
/// Query heads must divide evenly, key and value heads evenly or each to an equal number of GPUs.
pub(super) fn is_divisible(facts: &ModelFacts, tp: u32) -> bool {
    let shape = &facts.shape;
    let shared = shape.latent.is_some() || shape.kv_heads.is_multiple_of(tp) || tp.is_multiple_of(shape.kv_heads);
    tp > 0 && shape.heads.is_multiple_of(tp) && shared
}

/// Disjoint sets of this many GPUs, in the order of the GPUs.
///
/// If `links` are given, each set is within one NVLink domain.
pub(super) fn partition(group: &[Gpu], size: u32, links: Option<&NvlinkTopology>) -> Vec<Vec<Gpu>> {
    let size = usize::try_from(size).unwrap_or(usize::MAX);
    let mut left: Vec<&Gpu> = group.iter().collect();
    let mut sets = Vec::new();
    while left.len() >= size {
        let mut set: Vec<Gpu> = vec![left[0].clone()];
        for gpu in &left[1..] {
            if set.len() == size {
                break;
            }
            set.push((*gpu).clone());
            if links.is_some_and(|links| !links.is_one_domain(&set)) {
                set.pop();
            }
        }
        if set.len() == size {
            left.retain(|gpu| !set.contains(gpu));
            sets.push(set);
        } else {
            // This GPU finds no partners; the others may.
            left.remove(0);
        }
    }
    sets
}

#[cfg(test)]
mod tests;
