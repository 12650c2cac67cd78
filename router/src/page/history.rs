//! The last fifteen minutes in steps of ten seconds, so that a new viewer of the page sees the
//! past. A step costs one look at the fleet view and at the decisions of the last minute.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use hostler_proto::fleet::v1::FirstTokens;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use serde::Serialize;

use crate::event_log::millis_since_1970;
use crate::operators::{MAX_DECISIONS, Operators, first_token_quantiles};
use crate::placement::PlacementDecision;

pub(super) const SAMPLE_INTERVAL: Duration = Duration::from_secs(10);

/// Samples of fifteen minutes.
const MAX_SAMPLES: usize = 90;

/// Recent samples whose first tokens are updated: those of slow streams come late.
const OPEN_SAMPLES: usize = 6;

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Sample {
    /// The end of the sample's ten seconds, in milliseconds since 1970.
    pub(super) at: u64,
    pub(super) tokens_per_second: f64,
    pub(super) requests_per_second: f64,
    pub(super) in_flight: usize,
    pub(super) queued: usize,
    /// Times of the streams that were dispatched in these ten seconds.
    pub(super) first_tokens: Option<FirstTokens>,
}

/// Replicas' counters, by name. Each counter begins at 0 again with another engine or agent.
type Counters = FxHashMap<Arc<str>, ReplicaCounters>;

#[derive(Debug, Clone, Copy, Default)]
struct ReplicaCounters {
    tokens: u64,
    served: u64,
}

#[derive(Debug, Default)]
struct Samples {
    /// The samples, the oldest first.
    samples: VecDeque<Sample>,
    counters: Counters,
    sampled_at: Option<SystemTime>,
}

#[derive(Debug, Default)]
pub(super) struct History(Mutex<Samples>);

impl History {
    pub(super) fn samples(&self) -> Vec<Sample> {
        self.0.lock().samples.iter().cloned().collect()
    }

    /// Adds a sample at the end of ten seconds.
    pub(super) fn sample(&self, calls: &Operators, now: SystemTime) {
        let view = calls.fleet.view().clone();
        let counted = view.replicas.iter().map(|replica| {
            let counters = ReplicaCounters { tokens: replica.report.engine().generation_tokens, served: replica.load.served };
            (replica.id.clone(), counters)
        });
        let decisions = calls.placer.decisions.latest(MAX_DECISIONS);
        let (in_flight, queued) = (calls.admission.in_flight(), calls.queue.waiting_count());
        let mut history = self.0.lock();
        history.add(counted.collect(), (in_flight, queued), now);
        history.look_at_first_tokens(&decisions);
    }
}

impl Samples {
    fn add(&mut self, counters: Counters, (in_flight, queued): (usize, usize), now: SystemTime) {
        let before = std::mem::replace(&mut self.counters, counters);
        let since = self.sampled_at.replace(now).and_then(|at| now.duration_since(at).ok());
        let (mut tokens, mut served) = (0, 0);
        for (id, counted) in &self.counters {
            // Earlier counts of a newly seen replica do not belong to these ten seconds.
            let Some(known) = before.get(id) else { continue };
            tokens += growth(known.tokens, counted.tokens);
            served += growth(known.served, counted.served);
        }
        let seconds = since.unwrap_or(SAMPLE_INTERVAL).as_secs_f64().max(1.0);
        if self.samples.len() >= MAX_SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back(Sample {
            at: millis_since_1970(now),
            tokens_per_second: per_second(tokens, seconds),
            requests_per_second: per_second(served, seconds),
            in_flight,
            queued,
            first_tokens: None,
        });
    }

    fn look_at_first_tokens(&mut self, decisions: &[Arc<PlacementDecision>]) {
        let dispatched = decisions.iter().filter_map(|decision| {
            let seconds = decision.outcome.lock().first_token_seconds?;
            Some((millis_since_1970(decision.decided_at), seconds))
        });
        let dispatched: Vec<(u64, f64)> = dispatched.collect();
        let open = self.samples.len().saturating_sub(OPEN_SAMPLES);
        let from = |index: usize, samples: &VecDeque<Sample>| index.checked_sub(1).map_or(0, |before| samples[before].at);
        for index in open..self.samples.len() {
            let window = from(index, &self.samples)..self.samples[index].at;
            let times = dispatched.iter().filter(|(at, _)| window.contains(at)).map(|(_, seconds)| *seconds).collect();
            let Some(of) = first_token_quantiles(times) else { continue };
            // If the router has meanwhile forgotten some of these decisions, its earlier figures
            // knew more.
            let known = self.samples[index].first_tokens.map_or(0, |known| known.streams);
            if of.streams >= known {
                self.samples[index].first_tokens = Some(of);
            }
        }
    }
}

fn growth(before: u64, now: u64) -> u64 {
    if now >= before { now - before } else { now }
}

#[allow(clippy::cast_precision_loss, reason = "a rate that people read")]
fn per_second(count: u64, seconds: f64) -> f64 {
    count as f64 / seconds
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    fn counted(tokens: u64, served: u64) -> Counters {
        [("n/0".into(), ReplicaCounters { tokens, served })].into_iter().collect()
    }

    #[test]
    fn rates_cover_the_last_ten_seconds() {
        let mut samples = Samples::default();
        let start = UNIX_EPOCH + Duration::from_secs(1000);
        let rates = |samples: &Samples| samples.samples.back().map(|last| (last.tokens_per_second, last.requests_per_second)).unwrap();
        samples.add(counted(1_000_000, 5000), (3, 1), start);
        assert_eq!(rates(&samples), (0.0, 0.0), "what came before is not of these seconds");
        samples.add(counted(1_000_500, 5020), (3, 1), start + SAMPLE_INTERVAL);
        assert_eq!(rates(&samples), (50.0, 2.0));
        samples.add(counted(200, 5020), (0, 0), start + 2 * SAMPLE_INTERVAL);
        assert_eq!(rates(&samples), (20.0, 0.0), "another engine has begun at 0");
    }

    #[test]
    fn the_history_keeps_fifteen_minutes() {
        let mut samples = Samples::default();
        let start = UNIX_EPOCH + Duration::from_secs(1000);
        (0..200).for_each(|step| samples.add(Counters::default(), (0, 0), start + step * SAMPLE_INTERVAL));
        assert_eq!(samples.samples.len(), 90);
        assert_eq!(samples.samples[0].at, 1_000_000 + 110 * 10_000);
    }
}
