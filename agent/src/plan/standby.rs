//! Standby of a node: a small second engine on the GPUs of the only replica, and the memory that the
//! two share.
//!
//! Arithmetic only. Routers use a standby while no other replica serves its model (decision 35).

use super::error::{NoRoomForStandby, PlanError};
use super::layout::GpuGroupLayout;
use super::memory::MemoryBudget;
use super::model::ModelInfo;
use super::setup::{EnginePlanSetup, StepLimits};
use crate::vllm::arguments::EngineArguments;

/// Most work in one step of a standby. Small steps leave memory to the other engine.
const STANDBY_STEPS: StepLimits = StepLimits { tokens: 2_048, sequences: 128 };

/// Longest context that a standby has room for, unless the user has set one.
const MAX_STANDBY_CONTEXT: u32 = 32_768;

/// Flags that would give each of the two engines the memory that they must share.
const MEMORY_FLAGS: [&str; 3] = ["--gpu-memory-utilization", "--kv-cache-memory-bytes", "--num-gpu-blocks-override"];

/// How two engines share the memory of the same GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StandbyMemory {
    /// Budget of one GPU for the standby. Its `usable` is a whole number of hundredths of `total`.
    pub budget: MemoryBudget,
    /// Longest context that the standby takes.
    pub context: u32,
    /// Steps of the standby.
    pub(super) steps: StepLimits,
}

/// Part of its GPUs' memory that an engine gets.
#[derive(Debug, Clone, Copy)]
pub(super) enum MemoryPart<'a> {
    /// What the profile leaves to an engine that has its GPUs alone.
    Alone,
    BesideStandby(&'a StandbyMemory),
    Standby(&'a StandbyMemory),
}

impl StandbyMemory {
    /// Hundredths of a GPU's memory that the standby gets.
    fn hundredths(&self) -> u64 {
        (self.budget.usable * 100).div_ceil(self.budget.total.max(1))
    }
}

impl MemoryPart<'_> {
    /// Share of a GPU's memory, as `--gpu-memory-utilization` takes it.
    #[allow(clippy::cast_precision_loss, reason = "it is a hundred at most")]
    pub(super) fn utilization(self, setup: &EnginePlanSetup) -> f64 {
        match self {
            Self::Alone => setup.utilization(),
            Self::Standby(standby) => standby.hundredths() as f64 / 100.0,
            // Rounded, because a difference of two such numbers has many digits.
            Self::BesideStandby(standby) => (setup.utilization() * 100.0 - standby.hundredths() as f64).round().max(0.0) / 100.0,
        }
    }
}

/// Divides the memory of a replica's GPUs, and takes the standby's part from `share`.
///
/// # Errors
/// When the two do not fit, or their sizes cannot be computed.
pub(super) fn divide(setup: &EnginePlanSetup, model: &ModelInfo, share: &mut GpuGroupLayout) -> Result<StandbyMemory, PlanError> {
    if let Some(flag) = MEMORY_FLAGS.into_iter().find(|flag| EngineArguments(&setup.arguments).has(flag)) {
        return Err(PlanError::StandbyBesideFlag { flag });
    }
    let unknown = |because: &str| PlanError::StandbyOfUnknownSize { because: because.to_owned() };
    let facts = match model {
        ModelInfo::Known(facts) => facts,
        ModelInfo::Unknown { because } => return Err(unknown(because)),
    };
    let Some((budget, context)) = share.memory.clone().zip(share.context) else {
        return Err(unknown("the memory of its GPU is not known"));
    };
    let gpu = share.replicas[0].first();
    let steps = match (setup.profile_steps(gpu), setup.steps(gpu)) {
        (Some(_), steps) => {
            StepLimits { tokens: steps.tokens.min(STANDBY_STEPS.tokens), sequences: steps.sequences.min(STANDBY_STEPS.sequences) }
        }
        (None, steps) => steps,
    };
    let context = setup.context().unwrap_or_else(|| context.min(MAX_STANDBY_CONTEXT));
    let standby = StandbyMemory { budget: budget.of_standby(facts, steps, context), context, steps };
    let left = budget.beside(&standby.budget);
    if left.missing > 0 || left.requests_of(u64::from(context)) == Some(0) {
        return Err(PlanError::NoRoomForStandby(Box::new(NoRoomForStandby { standby: standby.budget, left, context })));
    }
    if let Some(own) = share.context.filter(|own| left.requests_of(u64::from(*own)) == Some(0)) {
        if setup.context().is_some() {
            return Err(PlanError::NoRoomForStandby(Box::new(NoRoomForStandby { standby: standby.budget, left, context: own })));
        }
        share.context = Some(left.max_request_tokens(own));
        share.is_context_shortened = true;
    }
    share.memory = Some(left);
    Ok(standby)
}
