//! Sums of the samples of one kind, and the totals that follow.

use std::collections::BTreeMap;

use super::Limits;
use super::histogram::Histogram;
use crate::figures::Totals;
use crate::sample::{Outcome, Sample};

/// Output in the counted time, of complete answers only.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CountedOutput {
    /// Number of completed answers.
    pub(super) complete: u64,
    /// Completed answers that met every limit.
    pub(super) met: u64,
    /// Tokens of answers. An answer that was only partly in this time counts in part.
    pub(super) output_tokens: f64,
    /// Tokens of the prompts whose first token came.
    pub(super) prompt_tokens: u64,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Tally {
    requests: u64,
    complete: u64,
    failed: BTreeMap<Outcome, u64>,
    /// Prompt tokens of complete answers, if the target counted them.
    prompt_tokens: u64,
    output_tokens: u64,
    cached_tokens: u64,
    /// Prompt tokens of the answers that report how many were cached.
    told_tokens: u64,
    met: u64,
    /// Output within the counted time, whenever it was due.
    came: CountedOutput,
    ttft: Histogram,
    itl: Histogram,
    tpot: Histogram,
    e2e: Histogram,
    late: Histogram,
}

impl Tally {
    /// Adds the output of an answer.
    pub(super) fn add_output(&mut self, came: CountedOutput) {
        self.came.complete += came.complete;
        self.came.met += came.met;
        self.came.output_tokens += came.output_tokens;
        self.came.prompt_tokens += came.prompt_tokens;
    }

    /// Counts a request, with the microseconds between its events.
    pub(super) fn add(&mut self, sample: &Sample, gaps: &[u32], limits: &Limits) {
        self.requests += 1;
        self.late.add(sample.late);
        if let Some(first) = sample.first {
            self.ttft.add(first);
        }
        for gap in gaps {
            self.itl.add_micros(u64::from(*gap));
        }
        if sample.outcome != Outcome::Complete {
            *self.failed.entry(sample.outcome).or_default() += 1;
            return;
        }
        self.complete += 1;
        self.prompt_tokens += sample.prompt_tokens;
        self.output_tokens += sample.output_tokens;
        if let Some(cached) = sample.cached_tokens {
            self.cached_tokens += cached;
            self.told_tokens += sample.prompt_tokens;
        }
        self.e2e.add(sample.whole);
        if let Some(tpot) = sample.tpot() {
            self.tpot.add(tpot);
        }
        self.met += u64::from(limits.are_met(sample));
    }

    pub(super) fn merge(&mut self, other: &Self) {
        self.requests += other.requests;
        self.complete += other.complete;
        for (outcome, count) in &other.failed {
            *self.failed.entry(*outcome).or_default() += count;
        }
        self.prompt_tokens += other.prompt_tokens;
        self.output_tokens += other.output_tokens;
        self.cached_tokens += other.cached_tokens;
        self.told_tokens += other.told_tokens;
        self.met += other.met;
        self.add_output(other.came);
        for (ours, theirs) in [
            (&mut self.ttft, &other.ttft),
            (&mut self.itl, &other.itl),
            (&mut self.tpot, &other.tpot),
            (&mut self.e2e, &other.e2e),
            (&mut self.late, &other.late),
        ] {
            ours.merge(theirs);
        }
    }

    /// Totals over this many counted seconds.
    #[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^52")]
    pub(super) fn totals(&self, limits: &Limits, seconds: f64) -> Totals {
        let per_second = |count: f64| if seconds > 0.0 { count / seconds } else { 0.0 };
        let share = |part: u64, whole: u64| (whole > 0).then(|| part as f64 / whole as f64);
        let came = &self.came;
        Totals {
            requests: self.requests,
            complete: self.complete,
            failed: self.failed.iter().map(|(outcome, count)| (outcome.to_string(), *count)).collect(),
            seconds,
            requests_per_second: per_second(came.complete as f64),
            output_tokens_per_second: per_second(came.output_tokens),
            prompt_tokens_per_second: per_second(came.prompt_tokens as f64),
            prompt_tokens_mean: share(self.prompt_tokens, self.complete).filter(|mean| *mean > 0.0),
            output_tokens_mean: share(self.output_tokens, self.complete),
            cached_share: share(self.cached_tokens, self.told_tokens),
            goodput: limits.any().then(|| per_second(came.met as f64)),
            met: share(self.met, self.requests).filter(|_| limits.any()),
            ttft_ms: self.ttft.quantiles(),
            itl_ms: self.itl.quantiles(),
            tpot_ms: self.tpot.quantiles(),
            e2e_ms: self.e2e.quantiles(),
            late_ms: self.late.quantiles(),
        }
    }
}
