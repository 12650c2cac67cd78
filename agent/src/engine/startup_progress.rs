//! Progress of an engine's start, read from the lines that vLLM prints: the stage in words, the
//! share of the whole start, the time left, and facts on the way that others need.
//!
//! The supervisor passes each line of a life until the engine is ready.

use std::str::FromStr;
use std::time::Duration;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartupProgress {
    /// Present stage, such as `loading weights`.
    pub stage: String,
    /// Percent of the whole start, 0 to 99. An engine that serves is at 100.
    pub percent: u8,
    /// Time until the engine serves, if it can be estimated.
    pub seconds_left: Option<u32>,
}

/// A stage of a start that is over.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PastStage {
    /// As in `StartupProgress`.
    pub(crate) stage: &'static str,
    pub(crate) part: StartPart,
    pub(crate) took: Duration,
}

/// Parts of a cold start, of which each takes as long as something else allows: other nodes, the
/// file system, Python, the disk, the compiler, the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StartPart {
    /// The job's wait in the scheduler's queue.
    Queue,
    /// Waiting for a turn to read from a shared file system.
    Turn,
    /// Copying the model to the node.
    Stage,
    /// Until the engine begins with its weights.
    Begin,
    Load,
    Compile,
    WarmUp,
}

impl StartPart {
    /// The word in reports.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Turn => "turn",
            Self::Stage => "stage",
            Self::Begin => "begin",
            Self::Load => "load",
            Self::Compile => "compile",
            Self::WarmUp => "warm-up",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct LogFacts {
    pub kv_tokens: Option<u64>,
    pub max_model_len: Option<u64>,
    pub eager: bool,
    pub weights_seconds: Option<f32>,
    /// GPU memory that the model takes, in GiB.
    pub weights_gib: Option<f32>,
    /// Whether the compiled model exists, from the cache or compiled now.
    ///
    /// The other engines need not wait for it any longer.
    pub compiled: bool,
    /// How long `torch.compile` took, even if it only read its cache.
    pub compile_seconds: Option<f32>,
    pub graph_seconds: Option<f32>,
    /// Whether prefixes are cached, if the engine printed it.
    pub prefix_caching: Option<bool>,
    /// How many requests of the longest context fit into the cache at once.
    pub max_concurrency: Option<f32>,
    pub version: Option<String>,
    pub address: Option<String>,
}

/// Stages of an engine's start, in order.
///
/// Each stage begins at a share of the whole start. The shares are rough, from starts of models of
/// 0.01 to 30 GB with vLLM 0.24 and 0.32, and good enough for a bar.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum StartupStage {
    Imports,
    Configuration,
    Processes,
    Weights,
    Model,
    Compile,
    Memory,
    WarmUp,
    Graphs,
    Server,
    Routes,
}

impl StartupStage {
    fn start_percent(self) -> f32 {
        match self {
            Self::Imports => 0.0,
            Self::Configuration => 10.0,
            Self::Processes => 18.0,
            Self::Weights => WEIGHTS_START_PERCENT,
            Self::Model => WEIGHTS_END_PERCENT,
            Self::Compile => 62.0,
            Self::Memory => 75.0,
            Self::WarmUp => 80.0,
            Self::Graphs => 82.0,
            Self::Server => 95.0,
            Self::Routes => 98.0,
        }
    }

    /// Where the stage ends if it reports its own progress.
    fn end_percent(self) -> f32 {
        match self {
            Self::Weights => WEIGHTS_END_PERCENT,
            Self::Graphs => 95.0,
            other => other.start_percent(),
        }
    }

    fn part(self) -> StartPart {
        match self {
            Self::Imports | Self::Configuration | Self::Processes => StartPart::Begin,
            Self::Weights | Self::Model => StartPart::Load,
            Self::Compile => StartPart::Compile,
            Self::Memory | Self::WarmUp | Self::Graphs | Self::Server | Self::Routes => StartPart::WarmUp,
        }
    }

    fn past(self, took: Duration) -> PastStage {
        PastStage { stage: self.describe(), part: self.part(), took }
    }

    fn describe(self) -> &'static str {
        match self {
            Self::Imports => "starting Python",
            Self::Configuration => "reading the model's configuration",
            Self::Processes => "starting its processes",
            Self::Weights => "loading weights",
            Self::Model => "preparing the model",
            Self::Compile => "compiling the model",
            Self::Memory => "measuring memory",
            Self::WarmUp => "warming up",
            Self::Graphs => "capturing CUDA graphs",
            Self::Server => "starting its server",
            Self::Routes => "beginning to answer",
        }
    }
}

/// Shares of the whole start, in percent.
///
/// The parts outside of them take about as long for every model.
const WEIGHTS_START_PERCENT: f32 = 30.0;
const WEIGHTS_END_PERCENT: f32 = 60.0;

/// Below this share the rate so far says nothing: imports take as long for every model.
const MIN_RATE_PERCENT: f32 = WEIGHTS_START_PERCENT;

/// Below this share of the weights the rate of reading is uncertain.
const MIN_WEIGHTS_RATE_PERCENT: f32 = 5.0;

/// Lines that begin a stage.
///
/// In some releases compilation can follow the measuring of memory, but a stage never goes back.
const STAGE_MARKERS: [(&str, StartupStage); 20] = [
    ("non-default args", StartupStage::Configuration),
    ("Resolved architecture", StartupStage::Configuration),
    ("Initializing a V1 LLM engine", StartupStage::Processes),
    ("Starting to load model", StartupStage::Weights),
    ("checkpoint shards:", StartupStage::Weights),
    ("Loading weights took", StartupStage::Model),
    ("Model loading took", StartupStage::Model),
    ("Starting torch.compile", StartupStage::Compile),
    ("Using cache directory:", StartupStage::Compile),
    ("Warming up model for the compilation", StartupStage::Compile),
    ("saved AOT compiled function", StartupStage::Memory),
    ("Directly load AOT compilation", StartupStage::Memory),
    ("torch.compile took", StartupStage::Memory),
    ("torch.compile takes", StartupStage::Memory),
    ("Available KV cache memory", StartupStage::Memory),
    ("KV cache size:", StartupStage::WarmUp),
    ("Capturing CUDA graph", StartupStage::Graphs),
    ("init engine (", StartupStage::Server),
    ("Starting vLLM", StartupStage::Routes),
    ("Application startup complete", StartupStage::Routes),
];

/// Lines after which a compile cache is as warm as it gets.
const COMPILED_MARKERS: [&str; 6] = [
    "torch.compile took",
    "torch.compile takes",
    "saved AOT compiled function",
    "Directly load AOT compilation",
    "Directly load the compiled graph",
    "init engine (",
];

#[derive(Debug)]
pub(crate) struct StartupLogParser {
    expected_duration: Option<Duration>,
    stage: StartupStage,
    /// When the present stage began, and those before it.
    stage_since: Duration,
    past_stages: Vec<PastStage>,
    percent: f32,
    /// Progress of the present stage, if the engine reports it.
    stage_percent: Option<f32>,
    weights_since: Option<Duration>,
    weights_duration: Duration,
    facts: LogFacts,
}

impl StartupLogParser {
    /// Reader for a start that has just begun.
    ///
    /// `expected` is how long an earlier start of this engine took.
    pub(crate) fn new(expected: Option<Duration>) -> Self {
        Self {
            expected_duration: expected,
            stage: StartupStage::Imports,
            stage_since: Duration::ZERO,
            past_stages: Vec::new(),
            percent: 0.0,
            stage_percent: None,
            weights_since: None,
            weights_duration: Duration::ZERO,
            facts: LogFacts::default(),
        }
    }

    /// Parses a line that was printed `elapsed` after the spawn, and returns the progress if the
    /// line changes it.
    ///
    /// A progress bar rewrites its line with carriage returns; the last version counts.
    pub(crate) fn parse_line(&mut self, line: &str, elapsed: Duration) -> Option<StartupProgress> {
        let mut changed = false;
        for writing in line.split('\r').filter(|writing| !writing.is_empty()) {
            self.parse_facts(writing);
            changed |= self.advance(writing, elapsed);
        }
        changed.then(|| self.progress(elapsed))
    }

    /// Progress at this time, which advances between two lines, too.
    pub(crate) fn progress(&self, elapsed: Duration) -> StartupProgress {
        let stage = self.stage.describe().to_owned();
        StartupProgress { stage, percent: to_percent(self.percent).min(99), seconds_left: self.seconds_left(elapsed) }
    }

    /// Whether the weights have been read.
    pub(crate) fn has_weights(&self) -> bool {
        self.stage > StartupStage::Weights
    }

    pub(crate) fn facts(&self) -> LogFacts {
        self.facts.clone()
    }

    /// All stages of a start that is over after this time.
    pub(crate) fn stages(&self, elapsed: Duration) -> Vec<PastStage> {
        let last = self.stage.past(elapsed.saturating_sub(self.stage_since));
        self.past_stages.iter().cloned().chain([last]).collect()
    }

    fn advance(&mut self, line: &str, elapsed: Duration) -> bool {
        let Some((_, stage)) = STAGE_MARKERS.iter().rev().find(|(sign, _)| line.contains(sign)) else {
            return false;
        };
        if *stage < self.stage {
            return false;
        }
        let before = (self.stage, to_percent(self.percent));
        if *stage != self.stage {
            self.change_stage(*stage, elapsed);
        }
        if let Some(of_stage) = parse_percentage(line) {
            let (begin, end) = (stage.start_percent(), stage.end_percent());
            // A second bar for other graphs begins at zero again.
            self.percent = self.percent.max(begin + (end - begin) * of_stage / 100.0);
            self.stage_percent = (end > begin).then_some(of_stage);
        }
        before != (self.stage, to_percent(self.percent))
    }

    fn change_stage(&mut self, stage: StartupStage, elapsed: Duration) {
        if self.stage == StartupStage::Weights {
            self.weights_duration = elapsed.saturating_sub(self.weights_since.unwrap_or(elapsed));
        }
        if stage == StartupStage::Weights {
            self.weights_since = Some(elapsed);
        }
        self.past_stages.push(self.stage.past(elapsed.saturating_sub(self.stage_since)));
        (self.stage, self.stage_since) = (stage, elapsed);
        self.stage_percent = None;
        self.percent = self.percent.max(stage.start_percent());
    }

    /// Time left, from an earlier start if there was one and this one is not slower.
    ///
    /// Otherwise it follows from the rate so far: one rate for reading the weights, another for the
    /// rest.
    fn seconds_left(&self, elapsed: Duration) -> Option<u32> {
        if let Some(left) = self.expected_duration.and_then(|expected| expected.checked_sub(elapsed)) {
            return Some(to_seconds(left.as_secs_f32()));
        }
        if self.percent < MIN_RATE_PERCENT {
            return None;
        }
        let loading = self.stage == StartupStage::Weights;
        let weights_spent = match self.weights_since {
            Some(since) if loading => elapsed.saturating_sub(since),
            _ => self.weights_duration,
        };
        let rest_spent = elapsed.saturating_sub(weights_spent).as_secs_f32();
        let rest_done = if loading { WEIGHTS_START_PERCENT } else { self.percent - (WEIGHTS_END_PERCENT - WEIGHTS_START_PERCENT) };
        let rest_all = 100.0 - (WEIGHTS_END_PERCENT - WEIGHTS_START_PERCENT);
        let rest_left = rest_spent * (rest_all - rest_done) / rest_done;
        let weights_left = match self.stage_percent {
            _ if !loading => 0.0,
            Some(done) if done >= MIN_WEIGHTS_RATE_PERCENT => weights_spent.as_secs_f32() * (100.0 - done) / done,
            _ => return None,
        };
        Some(to_seconds(rest_left + weights_left))
    }

    fn parse_facts(&mut self, line: &str) {
        let facts = &mut self.facts;
        if COMPILED_MARKERS.iter().any(|sign| line.contains(sign)) {
            facts.compiled = true;
        }
        replace_if_some(&mut facts.kv_tokens, number_after(line, "KV cache size: "));
        replace_if_some(&mut facts.max_model_len, number_after(line, "Using max model len "));
        replace_if_some(&mut facts.weights_seconds, number_after(line, "Loading weights took "));
        replace_if_some(&mut facts.weights_gib, number_after(line, "Model loading took "));
        replace_if_some(&mut facts.compile_seconds, number_after(line, "torch.compile took "));
        replace_if_some(&mut facts.compile_seconds, number_after(line, "torch.compile takes "));
        replace_if_some(&mut facts.graph_seconds, number_after(line, "Graph capturing finished in "));
        replace_if_some(&mut facts.version, word_after(line, "  version ").map(str::to_owned));
        replace_if_some(&mut facts.address, word_after(line, "server on ").map(str::to_owned));
        if let Some((_, after)) = line.split_once("Maximum concurrency for ") {
            replace_if_some(&mut facts.max_concurrency, number_after(after, "per request: "));
        }
        // One of these lines holds the whole configuration; the other holds the differences from
        // the defaults.
        replace_if_some(&mut facts.max_model_len, number_after(line, "max_seq_len="));
        replace_if_some(&mut facts.prefix_caching, bool_after(line, "enable_prefix_caching="));
        facts.eager |= line.contains("enforce_eager=True") || line.contains("'enforce_eager': True");
    }
}

/// Replaces a fact, because the latest value counts.
fn replace_if_some<T>(fact: &mut Option<T>, update: Option<T>) {
    if update.is_some() {
        *fact = update;
    }
}

/// Number after these words.
///
/// It may have commas between thousands, and a unit or a full stop behind it.
fn number_after<T: FromStr>(line: &str, words: &str) -> Option<T> {
    let (_, after) = line.split_once(words)?;
    let is_part = |character: char| character.is_ascii_digit() || matches!(character, '.' | ',');
    let end = after.find(|character| !is_part(character)).unwrap_or(after.len());
    after[..end].replace(',', "").trim_end_matches('.').parse().ok()
}

fn word_after<'a>(line: &'a str, words: &str) -> Option<&'a str> {
    line.split_once(words)?.1.split_whitespace().next()
}

fn bool_after(line: &str, words: &str) -> Option<bool> {
    let (_, after) = line.split_once(words)?;
    match after {
        after if after.starts_with("True") => Some(true),
        after if after.starts_with("False") => Some(false),
        _ => None,
    }
}

fn parse_percentage(line: &str) -> Option<f32> {
    let (before, _) = line.split_once('%')?;
    let number = before.rsplit(|character: char| !character.is_ascii_digit()).next()?;
    number.parse().ok().filter(|share| *share <= 100.0)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a percentage, which is between 0 and 100")]
fn to_percent(percent: f32) -> u8 {
    percent.clamp(0.0, 100.0) as u8
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "rounded, not negative, and no start takes longer than a day")]
fn to_seconds(left: f32) -> u32 {
    left.round().clamp(0.0, 86_400.0) as u32
}

#[cfg(test)]
mod tests;
