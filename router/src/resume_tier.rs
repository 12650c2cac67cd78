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
    None(NotResumed),
}

/// Why a stream is not resumed, or is replayed and not continued from its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum NotResumed {
    /// `router.resume_streams` is off.
    Off,
    /// The answer is no event stream.
    NoStream,
    /// The API has no resumption.
    Route,
    /// No engine is known to go on with it.
    Engine,
    /// An engine's parser keeps tokens to itself.
    Parser,
    /// The body is not a JSON object.
    Body,
    /// The body, or what a continuation would take over of it, is too large.
    Size,
    /// The prompt has images, audio or video.
    Media,
    /// A field has no rule.
    Field,
    /// A field is there twice.
    RepeatedField,
    /// Messages are replayed only at temperature 0.
    Sampling,
    /// A continuation would draw other tokens of the seed.
    Seed,
    /// There are several prompts or answers.
    Choices,
    /// Penalties count the tokens before the seam.
    Penalty,
    /// Log probabilities are not sent again.
    Logprobs,
    /// The answer may be a call of a tool.
    Tools,
    /// The grammar would begin anew.
    Grammar,
    /// A stop string may straddle the seam.
    Stop,
    /// The prompt is part of the answer.
    Echo,
    /// Each event counts tokens.
    ContinuousUsage,
    /// The stream options cannot be read.
    StreamOptions,
    /// The client asks for tokens itself.
    TokenIds,
    /// The limit of tokens cannot be read.
    MaxTokens,
    /// Completions have no such field.
    MaxCompletionTokens,
    /// The least number of tokens cannot be read.
    MinTokens,
}

impl NotResumed {
    #[must_use]
    pub(crate) fn as_str(self) -> &'static str {
        self.into()
    }
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
            Self::None(reason) => write!(formatter, "none:{}", reason.as_str()),
            tier => formatter.write_str(tier.as_str()),
        }
    }
}
