//! Recorded traces as workloads: real lengths, reuse and times.

use std::path::Path;

use rustc_hash::FxHashMap;

use super::{Arrival, ArrivalTime};
use crate::request::{Request, Segment, keys};
use crate::trace::{TraceError, read_requests};

/// Reads the first `most` requests, sped up by the factor `rate`.
pub(super) fn read(file: &Path, rate: f64, most: usize) -> Result<Vec<Arrival>, TraceError> {
    let mut sessions = SessionIds::default();
    let mut arrivals = Vec::new();
    for recorded in read_requests(file)?.take(most) {
        let recorded = recorded?;
        let number = arrivals.len() as u64;
        let mut segments: Vec<Segment> = recorded.blocks().map(|(name, tokens)| Segment { name, tokens }).collect();
        // Answers are not in the trace's ids: no later prompt has them.
        segments.push(Segment { name: u64::MAX - number, tokens: recorded.output });
        let session = sessions.of(number, &recorded.ids);
        let request = Request { keys: keys(&segments), prompt: recorded.input, output: recorded.output, session };
        arrivals.push(Arrival { request, start: ArrivalTime::At(recorded.timestamp / 1000.0 / rate) });
    }
    if arrivals.is_empty() { Err(TraceError::Empty(file.to_owned())) } else { Ok(arrivals) }
}

/// Detection of conversations.
///
/// Traces do not name them, but a prompt that begins like an earlier one, beyond the first 512
/// tokens that all prompts of an application share, is its continuation.
#[derive(Debug, Default)]
struct SessionIds {
    first: FxHashMap<u64, u64>,
}

impl SessionIds {
    fn of(&mut self, number: u64, ids: &[u64]) -> u64 {
        let known = ids.iter().skip(1).rev().find_map(|id| self.first.get(id).copied());
        let session = known.unwrap_or(number);
        for id in ids {
            self.first.entry(*id).or_insert(session);
        }
        session
    }
}
