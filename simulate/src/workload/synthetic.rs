//! Workloads out of a random generator.
//!
//! Their lengths are log-normal, like lengths of prompts and answers in practice, and bounded, so
//! that a single request cannot decide a run.

use std::ops::Range;

use super::{Arrival, ArrivalTime, WorkloadShape};
use crate::random::{Random, whole};
use crate::request::{Request, Segment, keys};

/// First name of segments that only one request has; names of shared ones are below.
const OWN_NAMES: u64 = 1 << 32;

/// Conversations that begin at random (a Poisson process) and continue some time after their last
/// answer.
pub(super) fn agentic(shape: &WorkloadShape, rate: f64) -> Vec<Arrival> {
    let mut random = Random::new(shape.seed);
    // System prompt and tools: from 1,500 to 10,000 tokens, as many short as long ones on a
    // logarithmic scale.
    let systems: Vec<u32> = (0..shape.applications).map(|_| whole(1500.0 * (10_000.0_f64 / 1500.0).powf(random.unit()))).collect();
    let popularity: Vec<f64> = (1..=shape.applications).map(|rank| 1.0 / f64::from(rank)).collect();
    let mut arrivals: Vec<Arrival> = Vec::with_capacity(shape.requests);
    let mut begins = 0.0;
    let mut session = 0;
    while arrivals.len() < shape.requests {
        begins += random.exponential(1.0 / rate);
        session += 1;
        let application = random.one_of(&popularity);
        let turns = random.log_normal(shape.turns, 0.7, 1.0, 50.0);
        let mut segments = vec![Segment { name: application as u64, tokens: systems[application] }];
        let mut lengths = Vec::new();
        for turn in 0..u64::from(turns) {
            // The user's message or a tool's result, then the model's answer.
            for (part, mean, spread) in [(0, 900.0, 1.0), (1, 220.0, 0.8)] {
                let name = OWN_NAMES + (session << 10) + 2 * turn + part;
                segments.push(Segment { name, tokens: random.log_normal(mean, spread, 8.0, 8000.0) });
            }
            let total: u32 = segments.iter().map(|segment| segment.tokens).sum();
            lengths.push((total, segments[segments.len() - 1].tokens));
        }
        let keys = keys(&segments);
        for (turn, (total, output)) in lengths.into_iter().enumerate().take(shape.requests - arrivals.len()) {
            let start =
                if turn == 0 { ArrivalTime::At(begins) } else { ArrivalTime::After(arrivals.len() - 1, random.exponential(shape.think)) };
            arrivals.push(Arrival { request: Request { keys: keys.clone(), prompt: total - output, output, session }, start });
        }
    }
    arrivals
}

/// Requests of which some begin with the same 6,000 tokens, the others with 1,500 of one out of 199
/// applications.
pub(super) fn hot_prefix(shape: &WorkloadShape, rate: f64) -> Vec<Arrival> {
    let mut random = Random::new(shape.seed);
    let mut at = 0.0;
    let mut arrival = |number: usize| {
        at += random.exponential(1.0 / rate);
        let prefix = if random.unit() < shape.hot { 0 } else { 1 + u64::from(whole(random.unit() * 198.0)) };
        let own = random.log_normal(1000.0, 0.8, 16.0, 8000.0);
        let output = random.log_normal(300.0, 0.7, 8.0, 2000.0);
        single(number, Segment { name: prefix, tokens: if prefix == 0 { 6000 } else { 1500 } }, own, output, at)
    };
    (0..shape.requests).map(&mut arrival).collect()
}

pub(super) fn bursts(shape: &WorkloadShape, rate: f64) -> Vec<Arrival> {
    let mut random = Random::new(shape.seed);
    let mut arrivals = Vec::with_capacity(shape.requests);
    let mut at = 0.0;
    while arrivals.len() < shape.requests {
        at += random.exponential(1.0 / rate);
        let prompt = Segment { name: arrivals.len() as u64, tokens: random.log_normal(6000.0, 0.6, 256.0, 30_000.0) };
        for _ in 0..shape.burst.min(u32::try_from(shape.requests - arrivals.len()).unwrap_or(u32::MAX)) {
            let output = random.log_normal(200.0, 0.7, 8.0, 2000.0);
            arrivals.push(single(arrivals.len(), prompt, 0, output, at));
        }
    }
    arrivals
}

pub(super) fn no_sharing(shape: &WorkloadShape, rate: f64) -> Vec<Arrival> {
    unrelated(&mut Random::new(shape.seed), 0..shape.requests, 0.0, rate, (2500.0, 200.0))
}

/// Requests with these numbers and mean tokens of prompts and answers, after `begins`.
pub(crate) fn unrelated(random: &mut Random, numbers: Range<usize>, begins: f64, rate: f64, (prompt, output): (f64, f64)) -> Vec<Arrival> {
    let mut at = begins;
    let mut arrival = |number: usize| {
        at += random.exponential(1.0 / rate);
        let prompt = random.log_normal(prompt, 1.0, 16.0, 30_000.0);
        let output = random.log_normal(output, 0.7, 8.0, 2000.0);
        single(number, Segment { name: 0, tokens: 0 }, prompt, output, at)
    };
    numbers.map(&mut arrival).collect()
}

/// A conversation of one turn: a segment that may be shared, then a unique one.
fn single(number: usize, shared: Segment, own: u32, output: u32, at: f64) -> Arrival {
    let name = OWN_NAMES + ((number as u64) << 1);
    let keys = keys(&[shared, Segment { name, tokens: own }, Segment { name: name + 1, tokens: output }]);
    // Session affinity sticks to the shared segment, if there is one.
    let session = if shared.tokens > 0 { shared.name } else { name };
    Arrival { request: Request { keys, prompt: shared.tokens + own, output, session }, start: ArrivalTime::At(at) }
}
