//! Measures of a run from the users' view: times to the first token, times between tokens, hits,
//! and the balance of the work.

use serde::Serialize;

use crate::flag_values::positive;
use crate::run::{RequestRecord, RunResult};

/// When an answer is good enough.
#[derive(Debug, Clone, Copy, PartialEq, clap::Args)]
pub struct Objectives {
    /// The first token within so many seconds.
    #[arg(long, default_value_t = 2.0, value_name = "SECONDS", value_parser = positive)]
    pub slo_ttft: f64,
    /// The others within so many seconds each, in the mean.
    #[arg(long, default_value_t = 0.1, value_name = "SECONDS", value_parser = positive)]
    pub slo_tpot: f64,
}

impl Default for Objectives {
    fn default() -> Self {
        Self { slo_ttft: 2.0, slo_tpot: 0.1 }
    }
}

/// Measures of a run. Times are in seconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Measures {
    pub requests: usize,
    /// Time from a request's arrival to its first token: the mean and percentiles.
    pub ttft_mean: f64,
    /// Half of the requests were faster.
    pub ttft_p50: f64,
    /// Nine of ten requests were faster.
    pub ttft_p90: f64,
    /// All but one of a hundred requests were faster.
    pub ttft_p99: f64,
    /// Mean time per token after the first, over the answers of more than one.
    pub tpot_mean: f64,
    /// Share of the prompt tokens that were found, on a GPU or on its host.
    pub hit_rate: f64,
    /// Share of the prompt tokens that were loaded from the host's memory.
    pub loaded_rate: f64,
    /// Share of the requests that met both objectives.
    pub goodput: f64,
    /// Busy time of the busiest replica over the mean.
    pub imbalance: f64,
    /// Share of the requests whose answers were cut by the end of a job.
    pub cut: f64,
    /// Sequences that were preempted from a full KV cache.
    pub preemptions: u64,
    /// Seconds until the last answer ended.
    pub makespan: f64,
    /// Every time to the first token, in order, for plots.
    #[serde(skip)]
    pub ttfts: Vec<f64>,
}

impl RequestRecord {
    fn ttft(&self) -> f64 {
        self.first - self.arrived
    }

    fn tpot(&self) -> Option<f64> {
        (self.output > 1 && !self.cut).then(|| (self.last - self.first) / f64::from(self.output - 1))
    }
}

pub(crate) fn measure(run: &RunResult, objectives: &Objectives) -> Measures {
    let records = &run.records;
    let mut ttfts: Vec<f64> = records.iter().map(RequestRecord::ttft).collect();
    ttfts.sort_by(f64::total_cmp);
    let tokens = |of: fn(&RequestRecord) -> u32| records.iter().map(|record| f64::from(of(record))).sum::<f64>();
    let good = |record: &&RequestRecord| {
        !record.cut && record.ttft() <= objectives.slo_ttft && record.tpot().is_none_or(|interval| interval <= objectives.slo_tpot)
    };
    let busiest = run.busy.iter().copied().fold(0.0, f64::max);
    Measures {
        requests: records.len(),
        ttft_mean: mean(ttfts.iter().copied()),
        ttft_p50: percentile(&ttfts, 50),
        ttft_p90: percentile(&ttfts, 90),
        ttft_p99: percentile(&ttfts, 99),
        tpot_mean: mean(records.iter().filter_map(RequestRecord::tpot)),
        hit_rate: share(tokens(|record| record.found.cached), tokens(|record| record.prompt)),
        loaded_rate: share(tokens(|record| record.found.loaded), tokens(|record| record.prompt)),
        goodput: share(records.iter().filter(good).count() as f64, records.len() as f64),
        imbalance: share(busiest, mean(run.busy.iter().copied())),
        cut: share(records.iter().filter(|record| record.cut).count() as f64, records.len() as f64),
        preemptions: run.preemptions,
        makespan: records.iter().map(|record| record.last).fold(0.0, f64::max),
        ttfts,
    }
}

fn mean(of: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = of.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    share(sum, count)
}

fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

/// Least value that this percentage of the values does not exceed.
pub(crate) fn percentile(sorted: &[f64], percent: usize) -> f64 {
    sorted.get((sorted.len() * percent).div_ceil(100).saturating_sub(1)).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests;
