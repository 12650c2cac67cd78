//! How requests end, in the words that the metrics and the access log have in common.

/// How an answer that had begun came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerOutcome {
    /// Whole.
    Complete,
    /// The engine or its node broke off.
    Broken,
    /// The client left first.
    ClientLeft,
}

impl AnswerOutcome {
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
    /// It shows no key, and keys are wanted.
    NoKey,
    /// Its key is not valid.
    WrongKey,
    /// The router was full.
    Full,
    /// Its caller has reached a limit.
    Limit,
    /// No replica could take it, or each attempt was lost.
    Fleet,
    /// It crashes engines.
    CrashSuspect,
}

impl RefusalReason {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::NoKey => "no_key",
            Self::WrongKey => "wrong_key",
            Self::Full => "full",
            Self::Limit => "limit",
            Self::Fleet => "fleet",
            Self::CrashSuspect => "crash_suspect",
        }
    }
}
