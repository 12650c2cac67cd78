//! Counts of each second of a load.
//!
//! Tokens count in the second in which they came, whichever request they belong to, so that a stall
//! of the target shows where it was.

use std::time::Duration;

use super::histogram::upper_bound;

/// Seconds in the series, a day. Later ones are left out of the series, but not out of the figures.
const MOST_SECONDS: usize = 86_400;

#[derive(Debug, Default)]
pub(super) struct Seconds(Vec<Counts>);

#[derive(Debug, Clone, Default)]
pub(super) struct Counts {
    pub(super) complete: u32,
    pub(super) failed: u32,
    pub(super) tokens: u32,
    /// Times to first tokens: the histogram's buckets in order, and the count in each.
    ///
    /// Within a second, few are not empty.
    first: Vec<(u16, u32)>,
}

impl Seconds {
    /// Counts of the second with this microsecond after the start; `None` before the start, and
    /// long after it.
    pub(super) fn at(&mut self, micros: i64) -> Option<&mut Counts> {
        let second = usize::try_from(micros.div_euclid(1_000_000)).ok().filter(|second| *second < MOST_SECONDS)?;
        if self.0.len() <= second {
            self.0.resize_with(second + 1, Counts::default);
        }
        self.0.get_mut(second)
    }

    /// Counts the events of an answer: the first at this microsecond, the others after these gaps.
    pub(super) fn tokens(&mut self, first: i64, gaps: &[u32]) {
        let (mut at, mut run, mut second) = (first, 0_u32, first.div_euclid(1_000_000));
        for gap in std::iter::once(&0).chain(gaps) {
            at = at.saturating_add(i64::from(*gap));
            let now = at.div_euclid(1_000_000);
            if now != second {
                self.add_tokens(second, run);
                (run, second) = (0, now);
            }
            run += 1;
        }
        self.add_tokens(second, run);
    }

    fn add_tokens(&mut self, second: i64, tokens: u32) {
        if let Some(counts) = self.at(second.saturating_mul(1_000_000)) {
            counts.tokens += tokens;
        }
    }

    pub(super) fn merge(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize_with(other.0.len(), Counts::default);
        }
        for (ours, theirs) in self.0.iter_mut().zip(&other.0) {
            ours.complete += theirs.complete;
            ours.failed += theirs.failed;
            ours.tokens += theirs.tokens;
            for (bucket, count) in &theirs.first {
                ours.add_first(*bucket, *count);
            }
        }
    }

    pub(super) fn counts(&self) -> &[Counts] {
        &self.0
    }
}

impl Counts {
    pub(super) fn first(&mut self, time: Duration) {
        self.add_first(super::histogram::bucket(u64::try_from(time.as_micros()).unwrap_or(u64::MAX)), 1);
    }

    fn add_first(&mut self, bucket: u16, count: u32) {
        match self.first.binary_search_by_key(&bucket, |(bucket, _)| *bucket) {
            Ok(at) => self.first[at].1 += count,
            Err(at) => self.first.insert(at, (bucket, count)),
        }
    }

    /// Median time to the first token in milliseconds; 0 without any.
    #[expect(clippy::cast_precision_loss, reason = "microseconds of a request are far below 2^52")]
    pub(super) fn first_p50_ms(&self) -> f64 {
        let all: u64 = self.first.iter().map(|(_, count)| u64::from(*count)).sum();
        let mut seen = 0;
        for (bucket, count) in &self.first {
            seen += u64::from(*count);
            if 2 * seen >= all {
                return upper_bound(*bucket) as f64 / 1000.0;
            }
        }
        0.0
    }
}
