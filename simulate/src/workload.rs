//! Workload of the fleet: a list of requests with their arrival times.
//!
//! Everything is decided before a run begins, from a seed or a trace, so that every policy meets
//! exactly the same requests.

mod mooncake;
mod synthetic;

use std::path::PathBuf;

use clap::builder::RangedU64ValueParser;
use clap::{Args, ValueEnum};

use crate::flag_values::{positive, share};
use crate::request::Request;
use crate::trace::TraceError;
pub(crate) use synthetic::unrelated;

#[derive(Debug, Clone)]
pub struct Workload {
    pub name: String,
    /// Requests of the workload; those of a conversation in their order.
    pub arrivals: Vec<Arrival>,
}

#[derive(Debug, Clone)]
pub struct Arrival {
    pub request: Request,
    /// When the request comes.
    pub start: ArrivalTime,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ArrivalTime {
    /// This many seconds after the beginning.
    At(f64),
    /// This many seconds after the answer to this earlier request has ended.
    After(usize, f64),
}

/// Which requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, ValueEnum)]
pub enum WorkloadKind {
    /// A trace in Mooncake's format: real lengths, reuse and times.
    Mooncake,
    /// Applications with long system prompts whose conversations grow, turn by turn.
    Agentic,
    /// Most requests begin with the same long prefix.
    HotPrefix,
    /// Each prompt comes many times at once, as for the best of n answers.
    Bursts,
    /// No two prompts have anything in common.
    NoSharing,
}

impl WorkloadKind {
    #[must_use]
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// The numbers behind a workload.
#[derive(Debug, Clone, PartialEq, Args)]
pub struct WorkloadShape {
    /// Trace file (JSON lines: `timestamp` in ms, `input_length`, `output_length`, `hash_ids` of
    /// 512-token blocks), for `mooncake`.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// How fast: the factor by which a trace is sped up, or the conversations, requests or bursts
    /// per second. Each workload has a default of its own (mooncake 1.5, agentic 3.4, hot-prefix
    /// 24, bursts 0.8, no-sharing 16).
    #[arg(long, value_name = "NUMBER", value_parser = positive)]
    pub rate: Option<f64>,
    /// Requests, at most.
    #[arg(long, default_value_t = 6000, value_name = "COUNT", value_parser = RangedU64ValueParser::<usize>::new().range(1..=10_000_000))]
    pub requests: usize,
    /// What decides everything that is random.
    #[arg(long, default_value_t = 1, value_name = "NUMBER")]
    pub seed: u64,
    /// Applications, of which the k-th is chosen with a frequency of 1/k, for `agentic`.
    #[arg(long, default_value_t = 64, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub applications: u32,
    /// Turns of a conversation, in the mean, for `agentic`.
    #[arg(long, default_value_t = 9.0, value_name = "NUMBER", value_parser = positive)]
    pub turns: f64,
    /// Seconds between an answer and the next turn, in the mean, for `agentic`.
    #[arg(long, default_value_t = 4.0, value_name = "SECONDS", value_parser = positive)]
    pub think: f64,
    /// Share of the requests that begin with the hot prefix, for `hot-prefix`.
    #[arg(long, default_value_t = 0.7, value_name = "SHARE", value_parser = share)]
    pub hot: f64,
    /// Requests in a burst, for `bursts`.
    #[arg(long, default_value_t = 16, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub burst: u32,
}

impl Default for WorkloadShape {
    fn default() -> Self {
        let (applications, turns, think, hot, burst) = (64, 9.0, 4.0, 0.7, 16);
        Self { trace: None, rate: None, requests: 6000, seed: 1, applications, turns, think, hot, burst }
    }
}

impl WorkloadShape {
    /// Creates the workload of this kind.
    ///
    /// # Errors
    /// When a trace is needed and cannot be read.
    pub fn workload(&self, kind: WorkloadKind) -> Result<Workload, TraceError> {
        let rate = self.rate.unwrap_or(match kind {
            WorkloadKind::Mooncake => 1.5,
            WorkloadKind::Agentic => 3.4,
            WorkloadKind::HotPrefix => 24.0,
            WorkloadKind::Bursts => 0.8,
            WorkloadKind::NoSharing => 16.0,
        });
        let arrivals = match kind {
            WorkloadKind::Mooncake => mooncake::read(self.trace.as_deref().ok_or(TraceError::Missing)?, rate, self.requests)?,
            WorkloadKind::Agentic => synthetic::agentic(self, rate),
            WorkloadKind::HotPrefix => synthetic::hot_prefix(self, rate),
            WorkloadKind::Bursts => synthetic::bursts(self, rate),
            WorkloadKind::NoSharing => synthetic::no_sharing(self, rate),
        };
        let unit = if kind == WorkloadKind::Mooncake { format!("×{rate}") } else { format!("{rate}/s") };
        Ok(Workload { name: format!("{} {unit}", kind.name()), arrivals })
    }
}

impl Workload {
    /// Tokens of the longest prompt with its answer.
    #[must_use]
    pub fn max_tokens(&self) -> u32 {
        self.arrivals.iter().map(|arrival| arrival.request.prompt + arrival.request.output).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests;
