//! What a request has an engine compute, and from that the most that its answer can have used. What an answer says beyond that is a broken
//! engine's word, or a foreign node's: it is neither charged nor learned from.

use crate::sse::TokenUsage;

/// What a request has an engine compute.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Prompts, at most; none where the answer is made of what the client sent, usage and finish reasons included.
    pub prompts: u64,
    /// Answers to them, at most; none where nothing is generated.
    pub answers: u64,
    /// Times that each is computed, at most: one that has tools of the engine's own, once for each turn.
    pub turns: u64,
}

impl Work {
    /// Whether there is any.
    #[must_use]
    pub fn is_some(self) -> bool {
        self.prompts > 0
    }

    /// Whether tokens are generated.
    #[must_use]
    pub fn generates(self) -> bool {
        self.answers > 0
    }

    /// The most tokens that it takes of an engine whose context has so many. What the client allows, as `max_tokens`, is no bound: engines
    /// know other names and forms of it than the router.
    #[must_use]
    pub(super) fn usage_bounds(self, context_tokens: u64) -> UsageBounds {
        let tokens = self.turns.saturating_mul(context_tokens);
        UsageBounds {
            work: self,
            context_tokens,
            max_prompt_tokens: self.prompts.saturating_mul(tokens),
            max_completion_tokens: self.answers.saturating_mul(tokens),
        }
    }
}

/// The most that an answer can have used.
#[derive(Debug, Clone, Copy)]
pub(crate) struct UsageBounds {
    pub(super) work: Work,
    /// Tokens of one prompt and its answer.
    pub(super) context_tokens: u64,
    max_prompt_tokens: u64,
    max_completion_tokens: u64,
}

impl UsageBounds {
    /// What of a usage can be true.
    pub(super) fn clamp(&self, usage: TokenUsage) -> Option<TokenUsage> {
        let TokenUsage { prompt_tokens, completion_tokens, cached_tokens } = usage;
        let prompt_tokens = prompt_tokens.min(self.max_prompt_tokens);
        let bound = TokenUsage {
            prompt_tokens,
            completion_tokens: completion_tokens.min(self.max_completion_tokens),
            cached_tokens: cached_tokens.map(|cached_tokens| cached_tokens.min(prompt_tokens)),
        };
        self.work.is_some().then_some(bound)
    }
}

#[cfg(test)]
mod tests;
