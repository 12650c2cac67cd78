//! Flags of `hostler bench`.
//!
//! Each scenario's own numbers are in `workload`; the shared ones are here.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::error::Error;
use crate::record::Limits;
use crate::target::Target;
use crate::workload::{Scenario, Shape};

/// How long a load lasts if nothing else ends it.
const DURATION: Duration = Duration::from_secs(30);

/// Clients of a closed loop if neither their number nor a rate is given.
const CONCURRENCY: u32 = 16;

/// Most concurrent conversations of an open loop.
///
/// A process may usually open 1,024 files or, raised, some ten thousand.
const MOST_AT_ONCE: u32 = 8192;

/// Measure an OpenAI endpoint, or several beside each other under the same load.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// Which conversations.
    #[command(subcommand)]
    pub scenario: Scenario,
    /// Where to, and how.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// What every scenario lets one choose.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Load and targets")]
pub struct CommonArgs {
    /// An OpenAI endpoint, `http://HOST:PORT[/v1]`, `unix:PATH`, or the https address of your fleet
    /// of batch jobs; several are measured after each other, and the first is what the others are
    /// compared with
    #[arg(long, global = true, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub target: Vec<Target>,
    /// Name of a target in the report, in the order of the targets; default: its URL
    #[arg(long, global = true, value_name = "NAME")]
    pub name: Vec<String>,
    /// Model to ask for; default: the first that the target has
    #[arg(long, global = true, value_name = "MODEL")]
    pub model: Option<String>,
    /// API to use
    #[arg(long, global = true, value_enum, value_name = "API", default_value_t)]
    pub api: Api,
    /// Environment variable with the API key, if there is one
    #[arg(long, global = true, value_name = "VARIABLE", default_value = "OPENAI_API_KEY")]
    pub key_env: String,
    /// Conversations that begin in a second, at random and whether or not the target keeps up (an
    /// open loop)
    #[arg(long, global = true, value_name = "NUMBER", value_parser = rate, conflicts_with = "concurrency")]
    pub rate: Option<f64>,
    /// Clients, each of which begins the next conversation when its last is over (a closed loop);
    /// default: 16. Bursts and an open loop have 8192 conversations at once at most
    #[arg(long, global = true, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub concurrency: Option<u32>,
    /// Time in which requests begin; default: 30s, unless --requests is given or a trace ends by
    /// itself
    #[arg(long, global = true, value_name = "TIME", value_parser = duration)]
    pub duration: Option<Duration>,
    /// Requests in all
    #[arg(long, global = true, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    pub requests: Option<u64>,
    /// Load before that, which does not count
    #[arg(long, global = true, value_name = "TIME", default_value = "3s", value_parser = humantime::parse_duration)]
    pub warm_up: Duration,
    /// How often everything is measured; the order of the targets alternates, and the report has
    /// medians and ranges
    #[arg(long, global = true, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Tokens of a prompt, about; default by scenario
    #[arg(long, global = true, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub input_tokens: Option<u32>,
    /// Tokens of an answer at most; default by scenario
    #[arg(long, global = true, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub output_tokens: Option<u32>,
    /// How far off --output-tokens the limits of answers are at most, evenly, as a part of it;
    /// default: 0.1, of mixed and traces their own
    #[arg(long, global = true, value_name = "PART", value_parser = part)]
    pub output_spread: Option<f64>,
    /// Ask for all of an answer's tokens, whatever the model says; vLLM's own field
    #[arg(long, global = true)]
    pub ignore_eos: bool,
    /// Answers are JSON of this schema; several schemas take turns by question
    #[arg(long, global = true, value_name = "FILE")]
    pub schema: Vec<PathBuf>,
    /// Ask for whole answers instead of streams
    #[arg(long, global = true)]
    pub no_stream: bool,
    /// Decides lengths and times; the words are new in each load, so that it finds nothing of an
    /// earlier one in a cache
    #[arg(long, global = true, value_name = "NUMBER", default_value_t = 0)]
    pub seed: u64,
    /// Most time for one request; longer ones count as failed
    #[arg(long, global = true, value_name = "TIME", default_value = "120s", value_parser = duration)]
    pub request_timeout: Duration,
    /// Longest time to the first token of a good request
    #[arg(long, global = true, value_name = "TIME", value_parser = duration)]
    pub slo_ttft: Option<Duration>,
    /// Longest mean time between the tokens of a good request
    #[arg(long, global = true, value_name = "TIME", value_parser = duration)]
    pub slo_itl: Option<Duration>,
    /// Longest time to the end of a good request
    #[arg(long, global = true, value_name = "TIME", value_parser = duration)]
    pub slo_e2e: Option<Duration>,
    /// Page of metrics to ask once a second, in the order of the targets; default: the target's own
    /// /metrics, where there is one
    #[arg(long, global = true, value_name = "URL", value_parser = Target::page)]
    pub metrics: Vec<Target>,
    /// Write the report as JSON, too
    #[arg(long, global = true, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the report as a page with plots, too
    #[arg(long, global = true, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Show no progress
    #[arg(long, global = true)]
    pub quiet: bool,
}

/// An API that answers are generated by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Api {
    /// Messages, to `/chat/completions`.
    #[default]
    Chat,
    /// Texts, to `/completions`.
    Completions,
}

impl BenchArgs {
    /// Finds flags that contradict each other although each is valid by itself.
    ///
    /// # Errors
    /// With the flag to change.
    pub fn check(&self) -> Result<(), Error> {
        let CommonArgs { target, name, metrics, rate, .. } = &self.common;
        let refuse = |text: &str| Err(Error::Flags(text.to_owned()));
        if !name.is_empty() && name.len() != target.len() {
            return refuse("give as many --name as --target, or none");
        }
        if !metrics.is_empty() && metrics.len() != target.len() {
            return refuse("give as many --metrics as --target, or none");
        }
        let names: std::collections::BTreeSet<String> = (0..target.len()).map(|index| self.target_name(index)).collect();
        if names.len() != target.len() {
            return refuse("the targets need different names; give each a --name");
        }
        match self.scenario {
            Scenario::Burst { .. } | Scenario::Trace { .. } if rate.is_some() => {
                refuse("bursts and traces come at their own times; leave out --rate (see --every and --speed)")
            }
            Scenario::Sweep { .. } if rate.is_some() || self.common.concurrency.is_some() => {
                refuse("a sweep tries several numbers of clients; give them with --steps instead of --concurrency or --rate")
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn target_name(&self, index: usize) -> String {
        self.common.name.get(index).cloned().unwrap_or_else(|| self.common.target[index].to_string())
    }

    /// Whether conversations begin at their times.
    pub(crate) fn is_open(&self) -> bool {
        match self.scenario {
            Scenario::Burst { .. } => true,
            Scenario::Trace { .. } => self.common.concurrency.is_none(),
            _ => self.common.rate.is_some(),
        }
    }

    /// Whether the scenario has its own times instead of an even stream: bursts, or a trace.
    pub(crate) fn has_own_times(&self) -> bool {
        self.is_open() && self.common.rate.is_none()
    }

    pub(crate) fn shape(&self) -> Shape {
        let CommonArgs { rate, concurrency, input_tokens, output_tokens, output_spread, .. } = self.common;
        Shape { rate, closed: concurrency.is_some(), input_tokens, output_tokens, output_spread }
    }

    /// Most conversations at once; the clients of a closed loop.
    pub(crate) fn at_once(&self) -> u32 {
        self.common.concurrency.unwrap_or(if self.is_open() { MOST_AT_ONCE } else { CONCURRENCY })
    }

    /// Time in which requests begin, if nothing else ends the load.
    pub(crate) fn duration(&self) -> Option<Duration> {
        let ends_by_itself = self.common.requests.is_some() || matches!(self.scenario, Scenario::Trace { .. });
        self.common.duration.or((!ends_by_itself).then_some(DURATION))
    }

    pub(crate) fn limits(&self) -> Limits {
        Limits { ttft: self.common.slo_ttft, itl: self.common.slo_itl, e2e: self.common.slo_e2e }
    }

    /// The fields of a request that ask for JSON, one text for each schema.
    ///
    /// # Errors
    /// If a file cannot be read or is no JSON.
    pub(crate) fn response_formats(&self) -> Result<Vec<String>, Error> {
        let format = |path: &PathBuf| {
            let refused = |reason: String| Error::Schema { path: path.clone(), reason };
            let text = std::fs::read_to_string(path).map_err(|error| refused(error.to_string()))?;
            let schema: serde_json::Value = serde_json::from_str(&text).map_err(|error| refused(error.to_string()))?;
            let format = serde_json::json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}});
            Ok(format!(",\"response_format\":{format}"))
        };
        self.common.schema.iter().map(format).collect()
    }

    /// Settings for the report: the flags that decide its figures, and the scenario's own.
    pub(crate) fn settings(&self) -> BTreeMap<String, String> {
        let CommonArgs { api, warm_up, rounds, seed, request_timeout, rate, requests, slo_ttft, slo_itl, slo_e2e, .. } = &self.common;
        let time = |time: Duration| humantime::format_duration(time).to_string();
        let load = match (rate, &self.scenario) {
            (Some(rate), _) => format!("open loop, {rate} a second at random"),
            (None, Scenario::Sweep { .. }) => "closed loop, a step for each number of clients".to_owned(),
            (None, _) if self.is_open() => format!("open loop, at most {} at once", self.at_once()),
            (None, _) => format!("closed loop, {} clients", self.at_once()),
        };
        let always = [
            ("load", load),
            ("asks", self.scenario.describe(&self.shape()).to_string()),
            ("api", format!("{}{}", api.name(), if self.common.no_stream { ", whole answers" } else { ", streams" })),
            ("warm-up", time(*warm_up)),
            ("rounds", rounds.to_string()),
            ("seed", seed.to_string()),
            ("request-timeout", time(*request_timeout)),
        ];
        let sometimes = [
            ("duration", self.duration().map(time)),
            ("requests", requests.map(|requests| requests.to_string())),
            ("output-spread", self.common.output_spread.map(|part| part.to_string())),
            ("ignore-eos", self.common.ignore_eos.then(|| "yes".to_owned())),
            ("schemas", (!self.common.schema.is_empty()).then(|| self.common.schema.len().to_string())),
            ("slo-ttft", slo_ttft.map(time)),
            ("slo-itl", slo_itl.map(time)),
            ("slo-e2e", slo_e2e.map(time)),
        ];
        let given = sometimes.into_iter().filter_map(|(name, value)| Some((name, value?)));
        always.into_iter().chain(given).map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

impl Api {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
        }
    }

    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Chat => "/chat/completions",
            Self::Completions => "/completions",
        }
    }
}

/// Parses a time that is neither zero nor years.
fn duration(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(time) if time.is_zero() => Err("expected more than no time".to_owned()),
        Ok(time) if time > Duration::from_secs(7 * 86_400) => Err("expected a week at most".to_owned()),
        Ok(time) => Ok(time),
        Err(error) => Err(format!("{error}; expected a time such as 30s or 200ms")),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if rate > 0.0 && rate <= 1e6 => Ok(rate),
        _ => Err("expected a number above 0, up to 1000000".to_owned()),
    }
}

fn part(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(part) if (0.0..=1.0).contains(&part) => Ok(part),
        _ => Err("expected a number from 0 to 1".to_owned()),
    }
}

#[cfg(test)]
pub(crate) mod tests;
