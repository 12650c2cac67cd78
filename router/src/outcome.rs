//! How requests end, in the words that the metrics and the access log share.

/// How an answer that had begun ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerOutcome {
    Complete,
    /// The engine or its node broke off.
    Broken,
    ClientLeft,
}

impl AnswerOutcome {
    /// All outcomes, each at its own index.
    pub(crate) const ALL: [Self; 3] = [Self::Complete, Self::Broken, Self::ClientLeft];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Broken => "broken",
            Self::ClientLeft => "client_left",
        }
    }
}

/// Why a request got no engine's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

impl RefusalReason {
    /// All reasons, each at its own index.
    pub(crate) const ALL: [Self; 8] =
        [Self::Request, Self::NoRoute, Self::NoKey, Self::WrongKey, Self::Full, Self::Limit, Self::Fleet, Self::CrashSuspect];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::NoRoute => "no_route",
            Self::NoKey => "no_key",
            Self::WrongKey => "wrong_key",
            Self::Full => "full",
            Self::Limit => "limit",
            Self::Fleet => "fleet",
            Self::CrashSuspect => "crash_suspect",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache_level::CacheLevel;

    #[test]
    fn outcomes_reasons_and_levels_match_their_counter_indices() {
        assert!(AnswerOutcome::ALL.iter().enumerate().all(|(number, outcome)| *outcome as usize == number));
        assert!(RefusalReason::ALL.iter().enumerate().all(|(number, reason)| *reason as usize == number));
        assert!(CacheLevel::ALL.iter().enumerate().all(|(number, level)| *level as usize == number));
    }
}
