//! Reasons why there is no plan, each with its arithmetic and a remedy.

use std::fmt;
use std::path::PathBuf;

use super::memory::MemoryBudget;
use super::stage::ReplicaSpread;
use crate::gpu::Gpu;
use crate::sizes::format_gib;

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanError {
    #[error("{0}")]
    DoesNotFit(Box<ModelDoesNotFit>),
    /// There are not enough GPUs.
    #[error("{}", describe_too_many(*.requested, *.possible, *.gpus, *.tp))]
    TooManyReplicas { requested: u32, possible: u32, gpus: u32, tp: u32 },
    #[error(
        "--tp {tp} cannot be: the model's {heads} attention heads are not shared evenly by so many GPUs; possible are {}",
        list(possible)
    )]
    DoesNotDivide { tp: u32, heads: u32, possible: Vec<u32> },
    #[error(
        "--tp {tp} cannot be: the GPUs are MIG slices, and slices cannot exchange data as one replica must; leave --tp out, or use whole GPUs"
    )]
    SlicesTogether { tp: u32 },
    #[error(
        "--tp {tp} cannot be: a replica over {nodes} nodes has {ranks} GPUs in all, which so many do not divide; leave --tp out to share \
         each layer by the GPUs of one node"
    )]
    DoesNotSpread { tp: u32, ranks: u32, nodes: u32 },
    #[error(
        "a replica over several nodes cannot be: the GPUs are MIG slices, and slices cannot exchange data as one replica must; leave \
         --nodes-per-replica out, or use whole GPUs"
    )]
    SlicesOverNodes,
    #[error(
        "{stages} stages cannot be: the model has {layers} layers, and each stage needs one; use fewer nodes with --nodes-per-replica, or \
         share each layer by more GPUs with --tp"
    )]
    TooManyStages { stages: u32, layers: u32 },
    #[error("--tp {tp} cannot be: this host has no GPU; leave --tp out to serve on the CPU")]
    NoGpus { tp: u32 },
    /// The model is a path that does not exist.
    #[error(
        "--model {path}: there is no such file or folder{}",
        nearest.as_ref().map(|path| format!("; the nearest is {}", path.display())).unwrap_or_default()
    )]
    NoSuchModel {
        /// Path of the model.
        path: String,
        /// Existing path with the most similar name, otherwise the deepest folder of the path that
        /// exists.
        nearest: Option<PathBuf>,
    },
    /// The Rust front-end was requested but is not installed.
    #[error("--front-end rust cannot be: {because}; use --front-end auto")]
    NoRustFrontEnd { because: String },
    #[error("--standby divides the memory of the GPUs between two engines, and {flag} would decide it for each: leave one of them out")]
    StandbyBesideFlag { flag: &'static str },
    #[error("--standby needs the size of the model, and {because}: leave --standby out for this start")]
    StandbyOfUnknownSize { because: String },
    #[error("{0}")]
    NoRoomForStandby(Box<NoRoomForStandby>),
}

/// Arithmetic of two engines that do not fit the same GPUs.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error(
    "there is no room for a standby: it takes {} of each GPU ({} of them weights), {}: leave --standby out, give a smaller --max-model-len after `--`, or more GPUs with --tp",
    format_gib(standby.usable),
    format_gib(standby.weights),
    describe_rest(left, *.context)
)]
pub struct NoRoomForStandby {
    pub(super) standby: MemoryBudget,
    /// Budget of the other engine beside it.
    pub(super) left: MemoryBudget,
    /// Context of which the other engine should hold one.
    pub(super) context: u32,
}

fn describe_rest(left: &MemoryBudget, context: u32) -> String {
    if left.missing > 0 {
        return format!("of which {} are missing", format_gib(left.missing));
    }
    let tokens = left.max_request_tokens(context);
    format!("and the {} that are left to the other engine's cache hold {tokens} tokens of a context of {context}", format_gib(left.cache))
}

fn describe_too_many(desired: u32, possible: u32, gpus: u32, tp: u32) -> String {
    let each = if tp > 1 { format!(", of which a replica takes {tp} that reach each other") } else { String::new() };
    let use_instead = if possible == 0 { "use a smaller --tp".to_owned() } else { format!("use --replicas {possible} or fewer") };
    let replicas = if desired == 1 { "1 replica was" } else { &format!("{desired} replicas were") };
    format!("{replicas} asked for, but the number of GPUs is {gpus}{each}: {use_instead}")
}

fn list(numbers: &[u32]) -> String {
    numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

/// Arithmetic of a model that does not fit.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelDoesNotFit {
    pub(super) gpu: Gpu,
    /// Number of these GPUs.
    pub(super) gpus: u32,
    /// Largest replica size that was tried.
    pub(super) tp: u32,
    /// Division over nodes with these GPUs each, if the user requested one.
    pub(super) spread: Option<ReplicaSpread>,
    pub(super) weight_bytes: u64,
    pub(super) format: String,
    /// Requested context.
    pub(super) context: u32,
    /// Longest context that would fit, as far as the cache goes.
    pub(super) max_context: u32,
    pub(super) sliced: bool,
    pub(super) min_cache: u64,
    pub(super) memory: MemoryBudget,
    pub(super) alternatives: Vec<Alternative>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Alternative {
    /// The model in a smaller format on these GPUs.
    Format { name: &'static str, weight_bytes: u64, tp: u32 },
    /// The model unchanged on more such GPUs.
    Gpus {
        /// Number of GPUs, joined by NVLink.
        tp: u32,
        /// Memory of each GPU.
        gib: u64,
    },
    /// The model unchanged on several such nodes.
    Nodes { spread: ReplicaSpread, over_pcie: bool, context: u32 },
}

impl ModelDoesNotFit {
    /// Total memory of the GPUs that were tried.
    pub(super) fn group_bytes(&self) -> u64 {
        self.gpu.memory_bytes * u64::from(self.gpus)
    }
}

impl fmt::Display for ModelDoesNotFit {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = &self.memory;
        let what = if self.sliced { "MIG slice" } else { "GPU" };
        let plural = if self.gpus == 1 { "" } else { "s" };
        let nodes = self.spread.map_or(String::new(), |spread| format!("{} nodes of ", spread.nodes));
        write!(out, "the model does not fit {nodes}{} {what}{plural} of {} ({}): ", self.gpus, format_gib(memory.total), self.gpu.name)?;
        let over = match self.spread {
            Some(spread) => format!(" over {} stages of {} GPUs", spread.stages, self.tp),
            None if self.tp > 1 => format!(" over {} of them", self.tp),
            None => String::new(),
        };
        let each = if self.spread.is_some() { " of the fullest stage" } else { "" };
        write!(
            out,
            "its {} of {} weights{over} are {} on each{each}, ",
            format_gib(self.weight_bytes),
            self.format,
            format_gib(memory.weights)
        )?;
        write!(out, "an engine may use {}, ", format_gib(memory.usable))?;
        write!(out, "and running takes {}", format_gib(memory.runtime + memory.activations))?;
        if memory.missing > 0 {
            write!(out, ", so {} are missing", format_gib(memory.missing))?;
        } else {
            write!(out, ", so {} are left for the KV cache", format_gib(memory.cache))?;
            if memory.cache < self.min_cache {
                write!(out, ", which is less than a tenth of the memory ({})", format_gib(self.min_cache))?;
            }
            if self.max_context < self.context {
                write!(out, " and holds {} tokens of a context of {}", self.max_context, self.context)?;
            }
        }
        if self.alternatives.is_empty() {
            return write!(out, "; use GPUs with more memory");
        }
        write!(out, "; what would fit: ")?;
        for (at, fits) in self.alternatives.iter().enumerate() {
            write!(out, "{}{fits}", if at == 0 { "" } else { ", or " })?;
        }
        if memory.weights <= memory.usable && !self.sliced && self.spread.is_none() {
            write!(out, "; to start it all the same, give --tp {} and a --max-model-len", self.tp)?;
        }
        Ok(())
    }
}

impl fmt::Display for Alternative {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Format { name, weight_bytes, tp: 1 } => write!(out, "{name} weights ({}) on one of them", format_gib(*weight_bytes)),
            Self::Format { name, weight_bytes, tp } => write!(out, "{name} weights ({}) on {tp} of them", format_gib(*weight_bytes)),
            Self::Gpus { tp, gib } => write!(out, "{tp} GPUs of {gib} GiB joined by NVLink"),
            Self::Nodes { spread: ReplicaSpread { nodes, ranks_per_node, tp, stages }, over_pcie, context } => {
                let shared = match (tp, over_pcie) {
                    (1, _) => String::new(),
                    (tp, false) => format!("TP {tp} within NVLink, "),
                    (tp, true) => format!("TP {tp} over PCIe, "),
                };
                let gpus = if *ranks_per_node == 1 { "GPU" } else { "GPUs" };
                write!(out, "--nodes-per-replica {nodes}: {nodes} nodes of {ranks_per_node} such {gpus}, {shared}{stages} stages, ")?;
                write!(out, "a context of {context} tokens")
            }
        }
    }
}
