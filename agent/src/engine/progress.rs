//! How far an engine's start has come, read from the lines that vLLM prints: the stage in words, the share of the whole start, the time
//! left, and the facts on the way that others need. The driver feeds it each line of a life until the engine is ready.

use std::str::FromStr;
use std::time::Duration;

/// How far a start has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// What the engine does now, such as `loading weights`.
    pub stage: String,
    /// Of the whole start, 0 to 99: the rest is done when the engine serves.
    pub percent: u8,
    /// Until the engine serves, where that can be told.
    pub seconds_left: Option<u32>,
}

/// What the log of one life has told.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Facts {
    /// Tokens that the KV cache holds.
    pub kv_tokens: Option<u64>,
    /// The longest context that the engine takes.
    pub max_model_len: Option<u64>,
    /// The engine neither compiles nor captures graphs.
    pub eager: bool,
    /// How long reading the weights took.
    pub weights_seconds: Option<f32>,
    /// What the model takes of the GPU's memory, in GiB.
    pub weights_gib: Option<f32>,
    /// Whether the compiled model is there, from the cache or made now: nobody needs to wait for it any longer.
    pub compiled: bool,
    /// How long `torch.compile` took, also where it only read its cache.
    pub compile_seconds: Option<f32>,
    /// How long capturing CUDA graphs took.
    pub graph_seconds: Option<f32>,
    /// Whether prefixes are cached, where the engine said so.
    pub prefix_caching: Option<bool>,
    /// How many requests of the longest context fit into the cache at once.
    pub max_concurrency: Option<f32>,
    /// vLLM's version, as the engine names itself.
    pub version: Option<String>,
    /// Where the engine says that it listens.
    pub address: Option<String>,
}

/// What an engine does while it starts, in order. Each begins at a share of the whole start: a rough one, from starts of models of
/// 0.01 to 30 GB with vLLM 0.24 and 0.32, that only has to be right enough for a bar.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
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

impl Stage {
    fn begins_at(self) -> f32 {
        match self {
            Self::Imports => 0.0,
            Self::Configuration => 10.0,
            Self::Processes => 18.0,
            Self::Weights => WEIGHTS_BEGIN,
            Self::Model => WEIGHTS_END,
            Self::Compile => 62.0,
            Self::Memory => 75.0,
            Self::WarmUp => 80.0,
            Self::Graphs => 82.0,
            Self::Server => 95.0,
            Self::Routes => 98.0,
        }
    }

    /// Where the stage ends if it tells its own progress.
    fn ends_at(self) -> f32 {
        match self {
            Self::Weights => WEIGHTS_END,
            Self::Graphs => 95.0,
            other => other.begins_at(),
        }
    }

    fn in_words(self) -> &'static str {
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

/// Shares of the whole start, in percent. What lies outside of them takes about as long for every model.
const WEIGHTS_BEGIN: f32 = 30.0;
const WEIGHTS_END: f32 = 60.0;

/// Before this share is reached the rate so far says nothing: imports take as long for every model.
const RATE_TELLS_FROM: f32 = WEIGHTS_BEGIN;

/// A smaller share of the weights says little about the rate of reading.
const WEIGHTS_RATE_TELLS_FROM: f32 = 5.0;

/// Lines that begin a stage. Compilation can follow the measuring of memory in some releases; a stage never goes back.
const SIGNS: [(&str, Stage); 20] = [
    ("non-default args", Stage::Configuration),
    ("Resolved architecture", Stage::Configuration),
    ("Initializing a V1 LLM engine", Stage::Processes),
    ("Starting to load model", Stage::Weights),
    ("checkpoint shards:", Stage::Weights),
    ("Loading weights took", Stage::Model),
    ("Model loading took", Stage::Model),
    ("Starting torch.compile", Stage::Compile),
    ("Using cache directory:", Stage::Compile),
    ("Warming up model for the compilation", Stage::Compile),
    ("saved AOT compiled function", Stage::Memory),
    ("Directly load AOT compilation", Stage::Memory),
    ("torch.compile took", Stage::Memory),
    ("torch.compile takes", Stage::Memory),
    ("Available KV cache memory", Stage::Memory),
    ("KV cache size:", Stage::WarmUp),
    ("Capturing CUDA graph", Stage::Graphs),
    ("init engine (", Stage::Server),
    ("Starting vLLM", Stage::Routes),
    ("Application startup complete", Stage::Routes),
];

/// Lines after which a compile cache is as warm as it gets.
const COMPILED_SIGNS: [&str; 6] = [
    "torch.compile took",
    "torch.compile takes",
    "saved AOT compiled function",
    "Directly load AOT compilation",
    "Directly load the compiled graph",
    "init engine (",
];

/// Reads the lines of one start.
#[derive(Debug)]
pub(crate) struct StartReader {
    expected: Option<Duration>,
    stage: Stage,
    percent: f32,
    /// Of the present stage, where the engine tells it.
    of_stage: Option<f32>,
    weights_since: Option<Duration>,
    weights_took: Duration,
    facts: Facts,
}

impl StartReader {
    /// A reader for a start that has just begun; `expected` is how long an earlier start of this engine took.
    pub(crate) fn new(expected: Option<Duration>) -> Self {
        Self {
            expected,
            stage: Stage::Imports,
            percent: 0.0,
            of_stage: None,
            weights_since: None,
            weights_took: Duration::ZERO,
            facts: Facts::default(),
        }
    }

    /// Takes a line that was printed `elapsed` after the spawn; tells the progress when the line changes it. A progress bar rewrites
    /// its line with carriage returns; the last writing counts.
    pub(crate) fn line(&mut self, line: &str, elapsed: Duration) -> Option<Progress> {
        let mut changed = false;
        for writing in line.split('\r').filter(|writing| !writing.is_empty()) {
            self.note_facts(writing);
            changed |= self.advance(writing, elapsed);
        }
        changed.then(|| self.progress(elapsed))
    }

    /// How far it is, for a clock that goes on between two lines.
    pub(crate) fn progress(&self, elapsed: Duration) -> Progress {
        let stage = self.stage.in_words().to_owned();
        Progress { stage, percent: whole(self.percent).min(99), seconds_left: self.seconds_left(elapsed) }
    }

    /// What the lines so far told.
    pub(crate) fn facts(&self) -> Facts {
        self.facts.clone()
    }

    fn advance(&mut self, line: &str, elapsed: Duration) -> bool {
        let Some((_, stage)) = SIGNS.iter().rev().find(|(sign, _)| line.contains(sign)) else {
            return false;
        };
        if *stage < self.stage {
            return false;
        }
        let before = (self.stage, whole(self.percent));
        if *stage != self.stage {
            self.change_stage(*stage, elapsed);
        }
        if let Some(of_stage) = share(line) {
            let (begin, end) = (stage.begins_at(), stage.ends_at());
            // A second bar for other graphs begins at nothing again.
            self.percent = self.percent.max(begin + (end - begin) * of_stage / 100.0);
            self.of_stage = (end > begin).then_some(of_stage);
        }
        before != (self.stage, whole(self.percent))
    }

    fn change_stage(&mut self, stage: Stage, elapsed: Duration) {
        if self.stage == Stage::Weights {
            self.weights_took = elapsed.saturating_sub(self.weights_since.unwrap_or(elapsed));
        }
        if stage == Stage::Weights {
            self.weights_since = Some(elapsed);
        }
        self.stage = stage;
        self.of_stage = None;
        self.percent = self.percent.max(stage.begins_at());
    }

    /// By an earlier start where there was one and this one is not slower; else by the rate so far, where reading the weights has a
    /// rate of its own and the rest another.
    fn seconds_left(&self, elapsed: Duration) -> Option<u32> {
        if let Some(left) = self.expected.and_then(|expected| expected.checked_sub(elapsed)) {
            return Some(seconds(left.as_secs_f32()));
        }
        if self.percent < RATE_TELLS_FROM {
            return None;
        }
        let loading = self.stage == Stage::Weights;
        let weights_spent = match self.weights_since {
            Some(since) if loading => elapsed.saturating_sub(since),
            _ => self.weights_took,
        };
        let rest_spent = elapsed.saturating_sub(weights_spent).as_secs_f32();
        let rest_done = if loading { WEIGHTS_BEGIN } else { self.percent - (WEIGHTS_END - WEIGHTS_BEGIN) };
        let rest_all = 100.0 - (WEIGHTS_END - WEIGHTS_BEGIN);
        let rest_left = rest_spent * (rest_all - rest_done) / rest_done;
        let weights_left = match self.of_stage {
            _ if !loading => 0.0,
            Some(done) if done >= WEIGHTS_RATE_TELLS_FROM => weights_spent.as_secs_f32() * (100.0 - done) / done,
            _ => return None,
        };
        Some(seconds(rest_left + weights_left))
    }

    fn note_facts(&mut self, line: &str) {
        let facts = &mut self.facts;
        if COMPILED_SIGNS.iter().any(|sign| line.contains(sign)) {
            facts.compiled = true;
        }
        keep(&mut facts.kv_tokens, number_after(line, "KV cache size: "));
        keep(&mut facts.max_model_len, number_after(line, "Using max model len "));
        keep(&mut facts.weights_seconds, number_after(line, "Loading weights took "));
        keep(&mut facts.weights_gib, number_after(line, "Model loading took "));
        keep(&mut facts.compile_seconds, number_after(line, "torch.compile took "));
        keep(&mut facts.compile_seconds, number_after(line, "torch.compile takes "));
        keep(&mut facts.graph_seconds, number_after(line, "Graph capturing finished in "));
        keep(&mut facts.version, word_after(line, "  version ").map(str::to_owned));
        keep(&mut facts.address, word_after(line, "server on ").map(str::to_owned));
        if let Some((_, after)) = line.split_once("Maximum concurrency for ") {
            keep(&mut facts.max_concurrency, number_after(after, "per request: "));
        }
        // One line holds the whole configuration; the other, what differs from the defaults.
        keep(&mut facts.max_model_len, number_after(line, "max_seq_len="));
        keep(&mut facts.prefix_caching, truth_after(line, "enable_prefix_caching="));
        facts.eager |= line.contains("enforce_eager=True") || line.contains("'enforce_eager': True");
    }
}

/// The latest telling counts.
fn keep<T>(fact: &mut Option<T>, told: Option<T>) {
    if told.is_some() {
        *fact = told;
    }
}

/// The number that follows these words; with thousands' commas, or with a unit or a full stop behind it.
fn number_after<T: FromStr>(line: &str, words: &str) -> Option<T> {
    let (_, after) = line.split_once(words)?;
    let is_part = |character: char| character.is_ascii_digit() || matches!(character, '.' | ',');
    let end = after.find(|character| !is_part(character)).unwrap_or(after.len());
    after[..end].replace(',', "").trim_end_matches('.').parse().ok()
}

fn word_after<'a>(line: &'a str, words: &str) -> Option<&'a str> {
    line.split_once(words)?.1.split_whitespace().next()
}

fn truth_after(line: &str, words: &str) -> Option<bool> {
    let (_, after) = line.split_once(words)?;
    match after {
        after if after.starts_with("True") => Some(true),
        after if after.starts_with("False") => Some(false),
        _ => None,
    }
}

/// The percentage of a progress bar.
fn share(line: &str) -> Option<f32> {
    let (before, _) = line.split_once('%')?;
    let number = before.rsplit(|character: char| !character.is_ascii_digit()).next()?;
    number.parse().ok().filter(|share| *share <= 100.0)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a percentage, which is between 0 and 100")]
fn whole(percent: f32) -> u8 {
    percent.clamp(0.0, 100.0) as u8
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "rounded, not negative, and no start takes longer than a day")]
fn seconds(left: f32) -> u32 {
    left.round().clamp(0.0, 86_400.0) as u32
}

#[cfg(test)]
mod tests;
