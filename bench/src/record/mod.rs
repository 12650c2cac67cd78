//! Recorder of the samples of one load, which computes its figures.
//!
//! Each client counts the times between its events by itself and hands them in at the request's
//! end, so an event costs no lock. The sums are kept in several shards, so the ends of requests
//! seldom collide.

mod histogram;
mod seconds;
mod tally;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::figures::{Figures, FleetFigures, Second};
use crate::sample::{Outcome, Sample};
use histogram::Histogram;
use seconds::Seconds;
use tally::{CountedOutput, Tally};

/// Number of shards, more than most load-generating machines have processors for it.
const SHARDS: usize = 8;

/// Limits of a good request; `None` sets no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Longest time to the first token, or to the whole answer if it does not come as a stream.
    pub(crate) ttft: Option<Duration>,
    /// Longest mean time between the tokens of an answer.
    pub(crate) itl: Option<Duration>,
    pub(crate) e2e: Option<Duration>,
}

impl Limits {
    pub(crate) fn any(&self) -> bool {
        self.ttft.or(self.itl).or(self.e2e).is_some()
    }

    fn are_met(&self, sample: &Sample) -> bool {
        let within = |time: Duration, limit: Option<Duration>| limit.is_none_or(|limit| time <= limit);
        sample.outcome == Outcome::Complete
            && within(sample.first.unwrap_or(sample.whole), self.ttft)
            && within(sample.tpot().unwrap_or_default(), self.itl)
            && within(sample.whole, self.e2e)
    }
}

#[derive(Debug)]
pub(crate) struct Recorder {
    limits: Limits,
    /// When counting begins.
    ///
    /// Requests that were due before do not count, but they show in the series.
    start: Instant,
    /// End of the time that counts for the rates; `None` is the last request's end.
    ///
    /// For an even load, that end would include work for requests of the warm-up that does not
    /// count.
    end: Option<Instant>,
    shards: [Mutex<Shard>; SHARDS],
    next: AtomicU32,
    /// Ticks at the end of each second.
    ticks: Mutex<Vec<Tick>>,
    pub(crate) live: LiveCounters,
}

#[derive(Debug, Default)]
struct Shard {
    kinds: BTreeMap<&'static str, Tally>,
    seconds: Seconds,
    /// Microseconds from the start to the last end.
    last_end: i64,
}

#[derive(Debug, Clone, Copy)]
struct Tick {
    in_flight: u32,
    kv_use: Option<f64>,
}

#[derive(Debug, Default)]
pub(crate) struct LiveCounters {
    pub(crate) in_flight: AtomicU32,
    pub(crate) complete: AtomicU64,
    pub(crate) failed: AtomicU64,
    /// Number of events with text.
    pub(crate) tokens: AtomicU64,
    /// Times to first tokens since the warm-up.
    ttft: Mutex<Histogram>,
}

/// Counts a request in flight until it is dropped.
pub(crate) struct InFlight<'a>(&'a LiveCounters);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl LiveCounters {
    pub(crate) fn begin(&self) -> InFlight<'_> {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlight(self)
    }

    pub(crate) fn first_token(&self, time: Duration) {
        self.ttft.lock().add(time);
    }

    pub(crate) fn forget_first_tokens(&self) {
        *self.ttft.lock() = Histogram::default();
    }

    pub(crate) fn ttft_p50_ms(&self) -> f64 {
        self.ttft.lock().quantile(0.5)
    }
}

impl Recorder {
    pub(crate) fn new(start: Instant, end: Option<Instant>, limits: Limits) -> Self {
        let (shards, ticks, live) = (Default::default(), Mutex::default(), LiveCounters::default());
        Self { limits, start, end, shards, next: AtomicU32::new(0), ticks, live }
    }

    /// Records a request that ended: when it was due, its sample, and the microseconds between its
    /// events.
    pub(crate) fn record(&self, due: Instant, sample: Sample, gaps: &[u32]) {
        let counted = due >= self.start;
        let complete = sample.outcome == Outcome::Complete;
        let live = if complete { &self.live.complete } else { &self.live.failed };
        live.fetch_add(1, Ordering::Relaxed);
        let due = micros_between(self.start, due);
        let after = |time: Duration| due.saturating_add(i64::try_from(time.as_micros()).unwrap_or(i64::MAX));

        let mut shard = self.shards[self.next.fetch_add(1, Ordering::Relaxed) as usize % SHARDS].lock();
        shard.last_end = shard.last_end.max(after(sample.whole));
        let tally = shard.kinds.entry(sample.kind).or_default();
        if counted {
            tally.add(&sample, gaps, &self.limits);
        }
        if complete {
            tally.add_output(self.counted_output(&sample, due, gaps));
        }
        if let Some(first) = sample.first {
            shard.seconds.tokens(after(first), gaps);
            if let Some(counts) = shard.seconds.at(after(first)) {
                counts.first(first);
            }
        }
        if let Some(counts) = shard.seconds.at(after(sample.whole)) {
            *(if complete { &mut counts.complete } else { &mut counts.failed }) += 1;
        }
    }

    /// Output that a complete answer adds to the counted time; the answer was due at this
    /// microsecond.
    #[expect(clippy::cast_precision_loss, reason = "tokens of an answer are far below 2^52")]
    fn counted_output(&self, sample: &Sample, due: i64, gaps: &[u32]) -> CountedOutput {
        let end = self.end.map_or(i64::MAX, |end| micros_between(self.start, end));
        let after = |time: Duration| due.saturating_add(i64::try_from(time.as_micros()).unwrap_or(i64::MAX));
        let counts = |at: i64| (0..end).contains(&at);
        let ended = counts(after(sample.whole));
        let first = after(sample.first.unwrap_or(sample.whole));
        let mut at = first;
        let events = gaps.iter().filter(|gap| {
            at = at.saturating_add(i64::from(**gap));
            counts(at)
        });
        let part = (usize::from(counts(first)) + events.count()) as f64 / (gaps.len() + 1) as f64;
        CountedOutput {
            complete: u64::from(ended),
            met: u64::from(ended && self.limits.are_met(sample)),
            output_tokens: part * sample.output_tokens as f64,
            prompt_tokens: if counts(first) { sample.prompt_tokens } else { 0 },
        }
    }

    /// Records, at the end of each second, the values that can only be seen then.
    pub(crate) fn tick(&self, kv_use: Option<f64>) {
        let in_flight = self.live.in_flight.load(Ordering::Relaxed);
        self.ticks.lock().push(Tick { in_flight, kv_use });
    }

    pub(crate) fn figures(&self, fleet: Option<FleetFigures>) -> Figures {
        let (mut kinds, mut seconds, mut last_end) = (BTreeMap::<&'static str, Tally>::new(), Seconds::default(), 0);
        for shard in &self.shards {
            let shard = shard.lock();
            for (kind, tally) in &shard.kinds {
                kinds.entry(kind).or_default().merge(tally);
            }
            seconds.merge(&shard.seconds);
            last_end = last_end.max(shard.last_end);
        }
        let length = match self.end {
            Some(end) => end.saturating_duration_since(self.start),
            None => Duration::from_micros(u64::try_from(last_end).unwrap_or_default()),
        };
        let totals = |tally: &Tally| tally.totals(&self.limits, length.as_secs_f64());
        let mut all = Tally::default();
        kinds.values().for_each(|tally| all.merge(tally));
        let several = kinds.len() > 1;
        let kinds = kinds.iter().filter(|_| several).map(|(kind, tally)| ((*kind).to_owned(), totals(tally))).collect();
        Figures { all: totals(&all), kinds, series: self.series(&seconds), fleet }
    }

    fn series(&self, seconds: &Seconds) -> Vec<Second> {
        let ticks = self.ticks.lock();
        let counts = seconds.counts();
        let none = seconds::Counts::default();
        (0..counts.len().max(ticks.len()))
            .map(|index| {
                let (counts, tick) = (counts.get(index).unwrap_or(&none), ticks.get(index));
                Second {
                    at: u32::try_from(index).unwrap_or(u32::MAX),
                    // The last second ends after the last request.
                    in_flight: tick.map_or(0, |tick| tick.in_flight),
                    complete: counts.complete,
                    failed: counts.failed,
                    tokens: counts.tokens,
                    ttft_p50_ms: counts.first_p50_ms(),
                    kv_use: tick.and_then(|tick| tick.kv_use),
                }
            })
            .collect()
    }
}

/// Microseconds from `start` to `time`; negative if `time` is earlier.
fn micros_between(start: Instant, time: Instant) -> i64 {
    let micros = |time: Duration| i64::try_from(time.as_micros()).unwrap_or(i64::MAX);
    time.checked_duration_since(start).map_or_else(|| -micros(start - time), micros)
}

#[cfg(test)]
mod tests;
