//! The lengths of answers, which every placement reads without a lock. Only the end of an answer
//! changes them.

use std::sync::atomic::{AtomicU64, Ordering};

use hostler_placement::output_lengths::OutputLengths;
use parking_lot::Mutex;

#[derive(Debug)]
pub(super) struct SharedOutputLengths {
    lengths: Mutex<OutputLengths>,
    /// Statistics of the lengths, each the bits of an `f64`.
    mean: AtomicU64,
    long: AtomicU64,
}

impl Default for SharedOutputLengths {
    fn default() -> Self {
        let lengths = OutputLengths::default();
        let (mean, long) = (AtomicU64::new(lengths.mean().to_bits()), AtomicU64::new(lengths.long().to_bits()));
        Self { lengths: Mutex::new(lengths), mean, long }
    }
}

impl SharedOutputLengths {
    /// Expected tokens of an answer within these bounds.
    pub(super) fn expected(&self, bounds: OutputBounds) -> f64 {
        bounds.clamp(&self.mean)
    }

    /// Tokens that an answer within these bounds is unlikely to exceed.
    pub(super) fn long(&self, bounds: OutputBounds) -> f64 {
        bounds.clamp(&self.long)
    }

    /// Adds an answer's length.
    pub(super) fn observe(&self, tokens: u64) {
        let mut lengths = self.lengths.lock();
        lengths.observe(u32::try_from(tokens).unwrap_or(u32::MAX));
        self.mean.store(lengths.mean().to_bits(), Ordering::Relaxed);
        self.long.store(lengths.long().to_bits(), Ordering::Relaxed);
    }
}

/// How many tokens a request lets its answer have.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct OutputBounds {
    pub least: u64,
    /// The limit, which wins if it is below the least. `None`: until the model's context is full.
    pub most: Option<u64>,
}

impl OutputBounds {
    /// The bounds of a request that generates nothing.
    pub(crate) const NOTHING: Self = Self { least: 0, most: Some(0) };

    #[allow(clippy::cast_precision_loss, reason = "token counts are far below 2^52")]
    fn clamp(self, tokens: &AtomicU64) -> f64 {
        let tokens = f64::from_bits(tokens.load(Ordering::Relaxed)).max(self.least as f64);
        self.most.map_or(tokens, |most| tokens.min(most as f64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_expected_as_long_as_recent_ones() {
        let outputs = SharedOutputLengths::default();
        let (expected, long) = (|most| outputs.expected(at_most(most)), |most| outputs.long(at_most(most)));
        assert_eq!((expected(None), expected(Some(10)), expected(Some(100_000))), (256.0, 10.0, 256.0));
        assert_eq!((long(None), long(Some(10)), long(Some(100_000))), (1024.0, 10.0, 1024.0));
        (1..=500).for_each(|answer| outputs.observe(if answer % 10 == 0 { 3000 } else { 1000 }));
        assert!((1000.0..=1500.0).contains(&expected(None)), "{}", expected(None));
        assert_eq!((long(None), long(Some(2000))), (3000.0, 2000.0));
    }

    #[test]
    fn an_answer_with_a_minimum_length_is_expected_long() {
        let outputs = SharedOutputLengths::default();
        (0..500).for_each(|_| outputs.observe(4));
        let bounds = OutputBounds { least: 5000, most: Some(6000) };
        assert_eq!((outputs.expected(bounds), outputs.long(bounds)), (5000.0, 5000.0));
        let impossible = OutputBounds { least: 5000, most: Some(100) };
        assert_eq!((outputs.expected(impossible), outputs.long(impossible)), (100.0, 100.0));
    }

    fn at_most(most: Option<u64>) -> OutputBounds {
        OutputBounds { least: 0, most }
    }
}
