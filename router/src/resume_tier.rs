//! How well a stream could go on elsewhere if its engine died, in the words that `explain`, the
//! access log, headers and metrics share.

use std::fmt;

/// The quality of a resumed stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResumeTier {
    /// The tokens that the lost engine would have given, except for numerics.
    TokenExact,
    /// Tokens that the lost engine could have given.
    ValidContinuation,
    /// The answer to the same request, sent again and compared with what the client has.
    Replay,
    /// The stream is not resumed, for this reason.
    None(&'static str),
}

impl ResumeTier {
    /// The tiers in which a stream is resumed, each at its own index.
    pub(crate) const RESUMED: [&'static str; 3] = ["token_exact", "valid_continuation", "replay"];

    #[must_use]
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::TokenExact => Self::RESUMED[0],
            Self::ValidContinuation => Self::RESUMED[1],
            Self::Replay => Self::RESUMED[2],
            Self::None(_) => "none",
        }
    }
}

impl fmt::Display for ResumeTier {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None(reason) => write!(formatter, "none:{reason}"),
            tier => formatter.write_str(tier.as_str()),
        }
    }
}
