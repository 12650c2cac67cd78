//! The advisor's observations of one engine: the last minute second by second, and a few totals of
//! this life.

use std::collections::VecDeque;

use crate::engine::control::LoraAdapter;
use crate::gpu::{Gpu, GpuReading};
use crate::probe::{EngineDetails, EngineMetrics};
use crate::vllm::arguments::{is_given, value_of};

/// Number of observations kept, one a second.
///
/// Long enough that a burst of requests is not mistaken for the rule, short enough that a changed
/// setting shows while an operator watches.
pub(super) const WINDOW_SECONDS: usize = 60;

/// One observation of an engine; unknown values are absent.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Observation {
    pub metrics: Option<EngineMetrics>,
    /// Details read only while the engine is busy.
    pub details: Option<EngineDetails>,
    /// Requests in flight whose answer follows a schema or grammar.
    pub guided: u32,
    /// Share of a core that the engine's busiest front-end process used.
    pub front_end_cpu: Option<f32>,
    pub gpus: Vec<GpuReading>,
}

impl Observation {
    pub(super) fn is_busy(&self) -> bool {
        self.metrics.is_some_and(|figures| figures.running > 0 || figures.waiting > 0)
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EngineSetup {
    /// The simulated engine has no front-end process.
    pub simulated: bool,
    /// Whether somebody else runs the engine.
    pub attached: bool,
    /// Why the Rust front-end is not used. Empty if it is used, until it fails to start.
    pub python_front_end_reason: String,
    pub profile: &'static str,
    /// Second name of the model, the last part of its path, if it has that.
    pub path_alias: Option<String>,
    /// Names by which it will serve its model; none if only the engine knows them.
    pub model_names: Vec<String>,
    /// GPUs that one replica computes on; 1 on CPU.
    pub tensor_parallel: u32,
    /// GPUs of the engine, none on CPU.
    pub gpus: Vec<Gpu>,
    /// Every pair of the engine's GPUs is connected over NVLink.
    pub has_nvlink_mesh: bool,
    pub weights_bytes: Option<u64>,
    /// Bytes of one token's keys and values on each GPU; 0 if unknown.
    pub kv_token_bytes: u64,
    /// Tokens that the engine's copies in the host's memory hold; 0 if it keeps none.
    pub host_kv_tokens: u64,
    pub arguments: Vec<String>,
}

impl EngineSetup {
    /// Where the engine listens that somebody else runs.
    pub(crate) fn attached_to(&self) -> Option<&str> {
        self.attached.then(|| self.arguments.get(1).map(String::as_str)).flatten()
    }

    pub(super) fn has_flag(&self, flag: &str) -> bool {
        is_given(&self.arguments, flag)
    }

    pub(super) fn flag_value(&self, flag: &str) -> Option<u64> {
        value_of(&self.arguments, flag)?.parse().ok()
    }
}

#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct RuntimeFacts {
    /// vLLM's Python front-end serves the engine.
    pub python: bool,
    /// The engine neither compiles nor captures graphs.
    pub eager: bool,
    pub max_model_len: Option<u64>,
    pub kv_tokens: Option<u64>,
    /// Adapters that operators had loaded and that the engine could not load again.
    pub lost_adapters: Vec<LoraAdapter>,
}

/// The last minute of one life of an engine.
#[derive(Debug, Default)]
pub(crate) struct Window {
    epoch: u64,
    observations: VecDeque<Observation>,
    /// Seconds of this life in which the engine had work.
    pub(super) busy_seconds: u32,
    /// The last details that were read in this life.
    pub(super) details: Option<EngineDetails>,
    /// Mean token distance without guided requests, by the size of the batch in powers of two.
    unguided_gaps: [TokenGapMean; 16],
}

/// Seconds in which a token distance was seen, and the sum of these distances.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct TokenGapMean {
    seconds: u32,
    sum: f64,
}

impl TokenGapMean {
    /// Adds one more second.
    ///
    /// Old seconds lose weight, because contexts grow and token distances grow with them.
    fn add(&mut self, gap: f64) {
        const MOST: u32 = 120;
        if self.seconds == MOST {
            *self = Self { seconds: MOST / 2, sum: self.sum / 2.0 };
        }
        *self = Self { seconds: self.seconds + 1, sum: self.sum + gap };
    }

    /// Mean distance, once enough seconds back it.
    fn mean(self) -> Option<f64> {
        const ENOUGH: u32 = 10;
        (self.seconds >= ENOUGH).then(|| self.sum / f64::from(self.seconds))
    }
}

impl Window {
    /// Adds the next second. A new life starts with an empty window.
    pub(crate) fn push(&mut self, epoch: u64, observation: Observation) {
        if self.epoch != epoch {
            *self = Self { epoch, ..Self::default() };
        }
        self.busy_seconds = self.busy_seconds.saturating_add(observation.is_busy().into());
        if observation.details.is_some() {
            self.details = observation.details;
        }
        if observation.guided == 0
            && self.observations.back().is_some_and(|before| before.guided == 0)
            && let Some((size, gap)) = self.observations.back().and_then(|before| token_gap(before, &observation))
        {
            self.unguided_gaps[size].add(gap);
        }
        if self.observations.len() == WINDOW_SECONDS {
            self.observations.pop_front();
        }
        self.observations.push_back(observation);
    }

    pub(super) fn observations_with<'a>(
        &'a self,
        sign: impl Fn(&Observation) -> bool + 'a,
    ) -> impl Iterator<Item = &'a Observation> + Clone {
        let signs: Vec<&Observation> = self.observations.iter().filter(|observation| sign(observation)).collect();
        signs.into_iter()
    }

    /// Metrics of the seconds that have any, oldest first.
    pub(super) fn metrics(&self) -> impl DoubleEndedIterator<Item = EngineMetrics> + '_ {
        self.observations.iter().filter_map(|observation| observation.metrics)
    }

    /// Seconds that have been seen, 1 at least.
    pub(super) fn observed_seconds(&self) -> u64 {
        (self.observations.len() as u64).max(1)
    }

    pub(super) fn counter_increase(&self, counter: fn(&EngineMetrics) -> u64) -> u64 {
        let mut figures = self.metrics();
        let first = figures.next().map_or(0, |first| counter(&first));
        figures.next_back().map_or(0, |last| counter(&last).saturating_sub(first))
    }

    /// Seconds of this minute with guided requests whose batch size was also seen without them.
    ///
    /// Returns the number of such seconds, their mean token distance, and the mean distance without
    /// guided requests.
    pub(super) fn guided_gaps(&self) -> (usize, f64, f64) {
        let pairs = self.observations.iter().zip(self.observations.iter().skip(1)).filter(|(_, now)| now.guided > 0);
        let compared = pairs.filter_map(|(before, now)| {
            let (size, gap) = token_gap(before, now)?;
            Some((gap, self.unguided_gaps[size].mean()?))
        });
        let (count, with, without) =
            compared.fold((0, 0.0, 0.0), |(count, with, without), (gap, plain)| (count + 1, with + gap, without + plain));
        let mean = |sum: f64| sum / f64::from(u32::try_from(count).unwrap_or(u32::MAX).max(1));
        (count, mean(with), mean(without))
    }

    pub(super) fn finished_requests(&self) -> u64 {
        self.first_and_last_details().map_or(0, |(first, last)| last.requests.saturating_sub(first.requests))
    }

    /// Mean queue time of the requests that began to run within the minute.
    pub(super) fn mean_queue_seconds(&self) -> Option<f64> {
        let (first, last) = self.first_and_last_details()?;
        let queued = u32::try_from(last.queued.checked_sub(first.queued)?).ok().filter(|queued| *queued > 0)?;
        Some((last.queue_seconds - first.queue_seconds).max(0.0) / f64::from(queued))
    }

    pub(super) fn kv_tokens(&self) -> Option<u64> {
        let last = self.metrics().next_back()?;
        Some(last.kv_blocks? * u64::from(last.block_size?))
    }

    fn first_and_last_details(&self) -> Option<(EngineDetails, EngineDetails)> {
        let mut details = self.observations.iter().filter_map(|observation| observation.details);
        let first = details.next()?;
        Some((first, details.next_back().unwrap_or(first)))
    }
}

/// Size of the batch in one second as a power of two, and the distance between tokens of an answer
/// in it.
fn token_gap(before: &Observation, now: &Observation) -> Option<(usize, f64)> {
    let running = now.metrics?.running.checked_ilog2()?;
    let (before, now) = (before.details?, now.details?);
    let gaps = u32::try_from(now.gaps.checked_sub(before.gaps)?).ok().filter(|gaps| *gaps > 0)?;
    let seconds = (now.gap_seconds - before.gap_seconds).max(0.0);
    Some(((running as usize).min(15), seconds / f64::from(gaps)))
}
