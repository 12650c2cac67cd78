//! Lengths of answers.
//!
//! The probable length of the next one determines its cost. The length that it hardly exceeds
//! decides whether a replica that ends soon can still give it. Each ended answer is added; the
//! router and the simulator read the result.

use std::collections::VecDeque;

/// Tokens expected of an answer before any has been seen.
const DEFAULT_TOKENS: u32 = 256;

/// Tokens expected of a long answer. This is a floor until [`MIN_ANSWERS`] have been seen.
const DEFAULT_LONG_TOKENS: u32 = 1024;

/// Fewer answers than this have no twentieth part.
const MIN_ANSWERS: usize = 20;

/// Answers that are remembered.
///
/// Among 256, thirteen are longer than the long one, so that chance moves it by a tenth or two.
const MAX_ANSWERS: usize = 256;

/// Share of the answers that are no longer than the long one.
///
/// `docs/simulate.md` shows the cost of other shares.
const LONG_SHARE: f64 = 0.95;

/// Weight of one answer in the moving average.
const MEAN_WEIGHT: f64 = 0.02;

/// Lengths of the latest answers.
#[derive(Debug, Clone)]
pub struct OutputLengths {
    mean: f64,
    /// Latest answers, the oldest first.
    latest: VecDeque<u32>,
    /// Latest answers, the shortest first.
    sorted: Vec<u32>,
}

impl Default for OutputLengths {
    fn default() -> Self {
        let (latest, sorted) = (VecDeque::with_capacity(MAX_ANSWERS), Vec::with_capacity(MAX_ANSWERS));
        Self { mean: DEFAULT_TOKENS.into(), latest, sorted }
    }
}

impl OutputLengths {
    /// Adds an answer of this many tokens.
    pub fn observe(&mut self, tokens: u32) {
        self.mean += MEAN_WEIGHT * (f64::from(tokens) - self.mean);
        if self.latest.len() == MAX_ANSWERS
            && let Some(oldest) = self.latest.pop_front()
        {
            self.sorted.remove(self.sorted.partition_point(|length| *length < oldest));
        }
        self.latest.push_back(tokens);
        self.sorted.insert(self.sorted.partition_point(|length| *length < tokens), tokens);
    }

    /// Mean tokens of an answer.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.mean
    }

    /// Tokens that nineteen of twenty answers do not exceed.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of at most 256")]
    pub fn long(&self) -> f64 {
        let rank = (self.sorted.len() as f64 * LONG_SHARE).ceil() as usize;
        let long = rank.checked_sub(1).map_or(0, |index| self.sorted[index]);
        f64::from(if self.sorted.len() < MIN_ANSWERS { long.max(DEFAULT_LONG_TOKENS) } else { long })
    }
}

#[cfg(test)]
mod tests;
