//! How requests end, in the words that the metrics and the access log share.

use hostler_proto::lane::Fault;
use strum::{EnumCount, EnumIter, IntoEnumIterator, IntoStaticStr, VariantNames};

/// How an answer that had begun ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumCount, EnumIter, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum AnswerOutcome {
    Complete,
    /// The engine refused the request: 4xx.
    Rejected,
    /// The engine had no room: 429 or 503.
    Full,
    /// The engine failed: another 5xx.
    Error,
    /// The engine or its node broke off.
    Broken,
    ClientLeft,
}

impl AnswerOutcome {
    /// The outcome of an engine's answer with this status, if it is not cut short.
    #[must_use]
    pub(crate) fn of_status(status: u16) -> Self {
        match status {
            429 | 503 => Self::Full,
            400..=499 => Self::Rejected,
            500.. => Self::Error,
            _ => Self::Complete,
        }
    }

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
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumCount, EnumIter, VariantNames)]
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

/// What the end of a request says about the fleet. Each request has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumCount, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum Verdict {
    Answered,
    /// The request itself was wrong, or its key, or its tenant had reached a limit.
    ClientFault,
    /// The router or the engine had no room.
    Full,
    Error,
    ClientLeft,
}

impl Verdict {
    /// Whether the fleet has failed its client.
    pub(crate) fn is_failure(self) -> bool {
        matches!(self, Self::Full | Self::Error)
    }
}

impl From<AnswerOutcome> for Verdict {
    fn from(outcome: AnswerOutcome) -> Self {
        match outcome {
            AnswerOutcome::Complete => Self::Answered,
            AnswerOutcome::Rejected => Self::ClientFault,
            AnswerOutcome::Full => Self::Full,
            AnswerOutcome::Error | AnswerOutcome::Broken => Self::Error,
            AnswerOutcome::ClientLeft => Self::ClientLeft,
        }
    }
}

impl From<RefusalReason> for Verdict {
    fn from(reason: RefusalReason) -> Self {
        match reason {
            RefusalReason::Request | RefusalReason::NoRoute | RefusalReason::NoKey | RefusalReason::WrongKey | RefusalReason::Limit => {
                Self::ClientFault
            }
            RefusalReason::Full => Self::Full,
            RefusalReason::Fleet | RefusalReason::CrashSuspect => Self::Error,
        }
    }
}

/// Counts of ends since the router began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct EndCounts {
    pub(crate) answers: [u64; AnswerOutcome::COUNT],
    pub(crate) refused: [u64; RefusalReason::COUNT],
}

impl EndCounts {
    /// Requests by verdict.
    pub(crate) fn by_verdict(&self) -> [u64; Verdict::COUNT] {
        let mut counts = [0; Verdict::COUNT];
        let answers = AnswerOutcome::iter().map(Verdict::from).zip(self.answers);
        let refused = RefusalReason::iter().map(Verdict::from).zip(self.refused);
        for (verdict, count) in answers.chain(refused) {
            counts[verdict as usize] += count;
        }
        counts
    }

    /// The sum of both.
    pub(crate) fn plus(&self, other: &Self) -> Self {
        Self {
            answers: std::array::from_fn(|number| self.answers[number] + other.answers[number]),
            refused: std::array::from_fn(|number| self.refused[number] + other.refused[number]),
        }
    }

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
