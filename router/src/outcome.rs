//! How requests end, in the words that the metrics and the access log share.

use hostler_proto::lane::Fault;
use strum::{EnumCount, IntoStaticStr, VariantNames};

/// How an answer that had begun ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumCount, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum AnswerOutcome {
    Complete,
    /// The engine or its node broke off.
    Broken,
    ClientLeft,
}

impl AnswerOutcome {
    pub(crate) fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Why an attempt failed, or a stream left its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumCount, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum LossCause {
    /// The connection to its agent. The engine may live.
    AgentLost,
    /// A replay gave another answer than the client has got.
    Difference,
    /// The stream moves because its replica is emptied.
    Draining,
    /// The engine reported an error.
    EngineError,
    EngineLost,
    EngineStopped,
    /// The engine ended the answer before it was complete.
    Incomplete,
    /// The agent broke the protocol of lanes.
    Protocol,
    /// The stream moves because its agent is silent.
    Silent,
}

impl LossCause {
    pub(crate) fn as_str(self) -> &'static str {
        self.into()
    }

    /// Whether no request and no operator explains the loss: a host or an agent died, or an
    /// engine's answer just ended.
    pub(crate) fn is_unexplained(self) -> bool {
        matches!(self, Self::AgentLost | Self::Incomplete)
    }
}

impl From<Fault> for LossCause {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::EngineStopped => Self::EngineStopped,
            Fault::LaneLost => Self::AgentLost,
            Fault::Protocol => Self::Protocol,
            Fault::EngineLost | Fault::NotReady => Self::EngineLost,
        }
    }
}

/// Why a request got no engine's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumCount, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum RefusalReason {
    /// The request itself: malformed, too large, or of an unknown model.
    Request,
    /// The request's path is none of the router's, or takes another method.
    NoRoute,
    NoKey,
    WrongKey,
    Full,
    Limit,
    /// No replica could take it, or each attempt was lost.
    Fleet,
    /// The request crashes engines.
    CrashSuspect,
}

/// Counts of ends since the router began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct EndCounts {
    pub(crate) answers: [u64; AnswerOutcome::COUNT],
    pub(crate) refused: [u64; RefusalReason::COUNT],
}

impl EndCounts {
    /// Ends between those counts and these.
    pub(crate) fn since(&self, before: &Self) -> Self {
        Self {
            answers: std::array::from_fn(|number| self.answers[number].saturating_sub(before.answers[number])),
            refused: std::array::from_fn(|number| self.refused[number].saturating_sub(before.refused[number])),
        }
    }
}

/// The words of an enumeration, each at its variant's number, for counters by variant.
pub(crate) fn names<T: VariantNames, const COUNT: usize>() -> [&'static str; COUNT] {
    std::array::from_fn(|number| T::VARIANTS[number])
}
