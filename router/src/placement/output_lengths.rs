//! The lengths of answers as every placement reads them, without a lock; only the end of an answer changes them.

use std::sync::atomic::{AtomicU64, Ordering};

use hostler_placement::output_lengths::OutputLengths;
use parking_lot::Mutex;

#[derive(Debug)]
pub(super) struct SharedOutputLengths {
    lengths: Mutex<OutputLengths>,
    /// What the lengths say, as the bits of an `f64` each.
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
    /// Tokens expected of an answer of at most `most`.
    pub(super) fn expected(&self, most: Option<u64>) -> f64 {
        bounded(&self.mean, most)
    }

    /// Tokens that an answer of at most `most` hardly exceeds.
    pub(super) fn long(&self, most: Option<u64>) -> f64 {
        bounded(&self.long, most)
    }

    /// Adds an answer's length.
    pub(super) fn observe(&self, tokens: u64) {
        let mut lengths = self.lengths.lock();
        lengths.observe(u32::try_from(tokens).unwrap_or(u32::MAX));
        self.mean.store(lengths.mean().to_bits(), Ordering::Relaxed);
        self.long.store(lengths.long().to_bits(), Ordering::Relaxed);
    }
}

#[allow(clippy::cast_precision_loss, reason = "token counts are far below 2^52")]
fn bounded(tokens: &AtomicU64, most: Option<u64>) -> f64 {
    let tokens = f64::from_bits(tokens.load(Ordering::Relaxed));
    most.map_or(tokens, |most| tokens.min(most as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_expected_to_be_as_long_as_they_lately_were_and_no_longer_than_they_may() {
        let outputs = SharedOutputLengths::default();
        assert_eq!((outputs.expected(None), outputs.expected(Some(10)), outputs.expected(Some(100_000))), (256.0, 10.0, 256.0));
        assert_eq!((outputs.long(None), outputs.long(Some(10)), outputs.long(Some(100_000))), (1024.0, 10.0, 1024.0));
        (1..=500).for_each(|answer| outputs.observe(if answer % 10 == 0 { 3000 } else { 1000 }));
        assert!((1000.0..=1500.0).contains(&outputs.expected(None)), "{}", outputs.expected(None));
        assert_eq!((outputs.long(None), outputs.long(Some(2000))), (3000.0, 2000.0));
    }
}
