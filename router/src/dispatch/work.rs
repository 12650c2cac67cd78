//! What a request has an engine compute, and from that the most that its answer can have used. What an answer says beyond that is a broken
//! engine's word, or a foreign node's: it is neither charged nor learned from.

use super::Usage;

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
    pub(super) fn most(self, context: u64) -> Most {
        let tokens = self.turns.saturating_mul(context);
        Most { work: self, context, prompt: self.prompts.saturating_mul(tokens), completion: self.answers.saturating_mul(tokens) }
    }
}

/// The most that an answer can have used.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Most {
    pub(super) work: Work,
    /// Tokens of one prompt and its answer.
    pub(super) context: u64,
    prompt: u64,
    completion: u64,
}

impl Most {
    /// What of a usage can be true.
    pub(super) fn bound(&self, usage: Usage) -> Option<Usage> {
        let Usage { prompt, completion, cached } = usage;
        let prompt = prompt.min(self.prompt);
        let bound = Usage { prompt, completion: completion.min(self.completion), cached: cached.map(|cached| cached.min(prompt)) };
        self.work.is_some().then_some(bound)
    }
}

#[cfg(test)]
mod tests;
