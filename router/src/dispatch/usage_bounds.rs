//! The work that a request asks of an engine, and the most usage its answer can have.
//!
//! An answer that reports more comes from a broken engine or a foreign node. The excess is neither
//! charged nor learned from.

use crate::sse::TokenUsage;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Work {
    /// Most prompts; 0 if the whole answer, with usage and finish reasons, is made of what the
    /// client sent.
    pub prompts: u64,
    /// Most answers to the prompts; 0 if nothing is generated.
    pub answers: u64,
    /// Most times that each is computed: once per turn for a request that uses the engine's own
    /// tools.
    pub turns: u64,
}

impl Work {
    #[must_use]
    pub(crate) fn is_some(self) -> bool {
        self.prompts > 0
    }

    #[must_use]
    pub(crate) fn generates(self) -> bool {
        self.answers > 0
    }

    /// The most tokens that the work can use on an engine with this context length. `max_tokens` is
    /// no bound: engines know names and forms of it that the router does not.
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

#[derive(Debug, Clone, Copy)]
pub(crate) struct UsageBounds {
    pub(super) work: Work,
    /// Tokens of one prompt and its answer.
    pub(super) context_tokens: u64,
    max_prompt_tokens: u64,
    max_completion_tokens: u64,
}

impl UsageBounds {
    /// The part of a reported usage that can be true.
    pub(super) fn clamp(&self, usage: TokenUsage) -> Option<TokenUsage> {
        let TokenUsage { prompt_tokens, completion_tokens, cached_tokens } = usage;
        let prompt_tokens = prompt_tokens.min(self.max_prompt_tokens);
        let bound = TokenUsage {
            prompt_tokens,
            completion_tokens: self.clamp_completion(completion_tokens),
            cached_tokens: cached_tokens.map(|cached_tokens| cached_tokens.min(prompt_tokens)),
        };
        self.work.is_some().then_some(bound)
    }

    /// The part of a count of generated tokens that can be true.
    pub(super) fn clamp_completion(&self, tokens: u64) -> u64 {
        tokens.min(self.max_completion_tokens)
    }
}

#[cfg(test)]
mod tests;
