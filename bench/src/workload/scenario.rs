//! Scenarios of the command line: which conversations there are, with the numbers that each one
//! has.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use clap::Subcommand;
use clap::builder::RangedU64ValueParser;

/// Clients of a sweep: close together where one GPU's batch is filled, far apart where only a fleet
/// is still quick.
const STEPS: &str = "1,5,10,50,100,250,500,1000,2000";

/// Which conversations.
#[derive(Debug, Clone, PartialEq, Subcommand)]
pub enum Scenario {
    /// Many questions at once, again and again
    Burst {
        /// Questions that come at once
        #[arg(long, default_value_t = 32, value_name = "COUNT", value_parser = up_to(100_000))]
        size: u32,
        /// From one burst to the next
        #[arg(long, default_value = "10s", value_name = "TIME", value_parser = humantime::parse_duration)]
        every: Duration,
    },
    /// The same kind of question, all the time
    Sustained,
    /// Short chats (70 %), long contexts (20 %) and long answers (10 %) beside each other
    ///
    /// `--input-tokens` and `--output-tokens` are the longest prompt and the longest answer. Long
    /// contexts have half of the longest prompt or more, long answers half of the longest answer or
    /// more; short chats have 1/80 to 1/25 and 1/20 to 1/6 of them.
    Mixed,
    /// Conversations whose context grows from turn to turn, with time to think between them
    Chat {
        /// Questions in each conversation
        #[arg(long, default_value_t = 5, value_name = "COUNT", value_parser = up_to(1000))]
        turns: u32,
        /// How long a user thinks in the mean: evenly from half of it to half more
        #[arg(long, default_value = "2s", value_name = "TIME", value_parser = humantime::parse_duration)]
        think: Duration,
    },
    /// Groups of questions, each group behind a long system prompt of its own
    Prefix {
        /// Different system prompts
        #[arg(long, default_value_t = 64, value_name = "COUNT", value_parser = up_to(100_000))]
        groups: u32,
        /// Tokens of each system prompt
        #[arg(long, default_value_t = 2048, value_name = "TOKENS", value_parser = up_to(1_000_000))]
        prefix_tokens: u32,
        /// How much more often the first groups come: the k-th with a frequency of 1/k to the power
        /// of this; 0 makes them equal
        #[arg(long, default_value_t = 1.0, value_name = "NUMBER", value_parser = from_zero)]
        skew: f64,
    },
    /// Sustained load by more and more clients, until the target breaks
    Sweep {
        /// Clients of each step
        #[arg(long, value_delimiter = ',', default_value = STEPS, value_name = "COUNTS", value_parser = up_to(100_000))]
        steps: Vec<u32>,
    },
    /// Requests with the lengths, times and common beginnings of a recorded trace
    Trace {
        /// JSON lines: `timestamp` in ms, `input_length`, `output_length`, `hash_ids` (one for each
        /// 512 tokens of the prompt)
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// How many times as fast as it was; with `--concurrency`, requests come as clients become
        /// free instead
        #[arg(long, default_value_t = 1.0, value_name = "FACTOR", value_parser = above_zero)]
        speed: f64,
    },
}

/// Parameters of all scenarios except traces.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Shape {
    /// Mean number of conversations that begin in a second, at random (a Poisson process), whether
    /// or not the target keeps up: an open loop.
    ///
    /// `None` is a closed loop, where the next begins when a client is free; but bursts come at
    /// their times.
    pub rate: Option<f64>,
    /// Whether clients of a closed loop replay a trace instead of its times.
    pub closed: bool,
    /// Tokens of a prompt; default by scenario.
    pub input_tokens: Option<u32>,
    /// Most tokens of an answer; default by scenario.
    pub output_tokens: Option<u32>,
    /// How far the limits of answers may differ from that, as a part of it; default: a tenth.
    ///
    /// `mixed` and traces have their own lengths.
    pub output_spread: Option<f64>,
}

/// Default spread: enough that clients of a closed loop do not begin and end in step.
const SPREAD: f64 = 0.1;

/// Tokens of prompts, without those that a chat template adds, and of answers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Lengths {
    pub(super) input: u32,
    pub(super) output: u32,
    /// See [`Shape::output_spread`].
    pub(super) spread: f64,
}

impl Scenario {
    /// Name on the command line.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Burst { .. } => "burst",
            Self::Sustained => "sustained",
            Self::Mixed => "mixed",
            Self::Chat { .. } => "chat",
            Self::Prefix { .. } => "prefix",
            Self::Sweep { .. } => "sweep",
            Self::Trace { .. } => "trace",
        }
    }

    /// Lengths in tokens.
    ///
    /// The defaults are typical of such users: a page with a question in it, a question within a
    /// conversation, a long document.
    pub(super) fn lengths(&self, shape: &Shape) -> Lengths {
        let (input, output) = match self {
            Self::Mixed => (8000, 1500),
            Self::Chat { .. } | Self::Prefix { .. } => (128, 128),
            Self::Burst { .. } | Self::Sustained | Self::Sweep { .. } | Self::Trace { .. } => (512, 128),
        };
        Lengths {
            input: shape.input_tokens.unwrap_or(input),
            output: shape.output_tokens.unwrap_or(output),
            spread: shape.output_spread.unwrap_or(SPREAD),
        }
    }

    #[must_use]
    pub fn describe(&self, shape: &Shape) -> Description {
        Description { scenario: self.clone(), shape: *shape }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Description {
    scenario: Scenario,
    shape: Shape,
}

impl fmt::Display for Description {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Lengths { input, output, .. } = self.scenario.lengths(&self.shape);
        match &self.scenario {
            Scenario::Burst { size, every } => {
                write!(to, "{size} at once every {}, {input} tokens in, {output} out", humantime::format_duration(*every))
            }
            Scenario::Sustained => write!(to, "{input} tokens in, {output} out"),
            Scenario::Mixed => {
                write!(to, "70 % short chats, 20 % long contexts, 10 % long answers; at most {input} tokens in, {output} out")
            }
            Scenario::Chat { turns, think } => {
                let think = humantime::format_duration(*think);
                write!(to, "conversations of {turns} turns, {think} between them, {input} tokens in and {output} out each")
            }
            Scenario::Prefix { groups, prefix_tokens, skew } => {
                write!(to, "{groups} system prompts of {prefix_tokens} tokens (Zipf {skew}), then {input} tokens in, {output} out")
            }
            Scenario::Sweep { .. } => write!(to, "more and more clients, {input} tokens in, {output} out"),
            Scenario::Trace { file, .. } if self.shape.closed => write!(to, "requests of {} as clients become free", file.display()),
            Scenario::Trace { file, speed } => write!(to, "requests of {}, {speed} times as fast as they came", file.display()),
        }
    }
}

fn up_to(most: u64) -> RangedU64ValueParser<u32> {
    RangedU64ValueParser::new().range(1..=most)
}

fn from_zero(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if (0.0..=100.0).contains(&number) => Ok(number),
        _ => Err("expected a number from 0 to 100".into()),
    }
}

fn above_zero(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if number > 0.0 && number <= 1e6 => Ok(number),
        _ => Err("expected a number above 0, up to 1000000".into()),
    }
}
