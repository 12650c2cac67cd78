//! The last decisions, with everything they were made from, so that anybody can ask *why here?* and check the arithmetic by hand.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use hostler_placement::cost::{Decision, Scored, Why};
use parking_lot::Mutex;

use super::{Chosen, Level, Prompt};

/// Bytes of a path that are remembered. It is the client's, and may be long.
const REMEMBERED_PATH: usize = 128;

/// One decision and what came of it.
#[derive(Debug)]
pub struct Record {
    /// The router's own number of the request.
    pub id: u64,
    /// What the client called it (`x-request-id`).
    pub client_id: Option<Arc<str>>,
    /// Path of the request.
    pub path: Arc<str>,
    /// The model that it names.
    pub model: Option<Arc<str>>,
    /// When it was decided.
    pub at: SystemTime,
    /// Which attempt of the request this was, from 1.
    pub attempt: u32,
    /// Seconds for which it was held in the router before.
    pub held: f32,
    /// How the chosen replica's cache is known.
    pub level: Level,
    /// Why the prompt's tokens are not known; empty when they are or are not needed.
    pub fallback: &'static str,
    /// Tokens of the prompt.
    pub tokens: u32,
    /// Tokens that the answer was expected to have.
    pub output: f64,
    /// What was decided, with the candidates that are remembered and their costs.
    pub decision: Decision,
    /// Their names, in the same order.
    pub names: Vec<Arc<str>>,
    /// Seconds since the last report about each.
    pub ages: Vec<f32>,
    /// What came of it.
    pub outcome: Mutex<Outcome>,
}

/// What came of a decision, as far as is known.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Outcome {
    /// Seconds from its dispatch to the first token of a stream.
    pub first_token: Option<f64>,
    /// Prompt tokens that the engine says it had cached.
    pub cached: Option<u32>,
}

impl Record {
    /// The record of `chosen`.
    #[must_use]
    pub fn new(id: u64, prompt: &Prompt, chosen: Chosen) -> Self {
        let Chosen { decision, view, at, level, output, .. } = chosen;
        let replicas = || decision.scored.iter().map(|scored| &view.replicas[scored.candidate.replica]);
        let names = replicas().map(|replica| replica.id.clone()).collect();
        let ages = replicas().map(|replica| at.saturating_duration_since(replica.heard).as_secs_f32()).collect();
        Self {
            id,
            client_id: None,
            path: prompt.path()[..prompt.path().floor_char_boundary(REMEMBERED_PATH)].into(),
            model: prompt.model().map(Arc::from),
            at: SystemTime::now(),
            attempt: 1,
            held: 0.0,
            level,
            fallback: prompt.fallback,
            tokens: prompt.tokens(),
            output,
            decision,
            names,
            ages,
            outcome: Mutex::default(),
        }
    }

    /// Why that one, in a word.
    #[must_use]
    pub fn why(&self) -> &'static str {
        match self.decision.why {
            Why::Only => "only",
            Why::Cheapest => "cheapest",
            Why::NearTie => "near_tie",
            Why::LastResort => "last_resort",
        }
    }

    /// The chosen candidate and its name.
    #[must_use]
    pub fn choice(&self) -> (&str, &Scored) {
        (&self.names[self.decision.chosen], self.decision.choice())
    }
}

/// The reason in a line, for a response header.
impl fmt::Display for Record {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, choice) = self.choice();
        let why = self.why();
        write!(
            formatter,
            "replica={name} matched={} of={} level={} why={why} ttft={:.4} cost={:.4} candidates={} attempt={} held={:.3}",
            choice.candidate.matched,
            self.tokens,
            self.level.word(),
            choice.terms.first_token(),
            choice.terms.total(),
            self.decision.candidates,
            self.attempt,
            self.held,
        )
    }
}

/// The last decisions.
#[derive(Debug)]
pub struct Ring {
    most: usize,
    /// In the order in which they were made.
    records: Mutex<VecDeque<Arc<Record>>>,
}

impl Ring {
    /// A ring of this many decisions.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { most: most.max(1), records: Mutex::default() }
    }

    /// Remembers a decision and forgets the oldest.
    pub fn record(&self, record: Arc<Record>) {
        let mut records = self.records.lock();
        let forgotten = if records.len() >= self.most { records.pop_front() } else { None };
        records.push_back(record);
        drop(records);
        // Outside the lock, as it may be the last to hold it.
        drop(forgotten);
    }

    /// The decisions of a request, by our number in hexadecimal or by what the client called it; the latest first.
    #[must_use]
    pub fn find(&self, name: &str) -> Vec<Arc<Record>> {
        let id = u64::from_str_radix(name, 16).ok();
        let is_meant = |record: &&Arc<Record>| Some(record.id) == id || record.client_id.as_deref() == Some(name);
        self.records.lock().iter().rev().filter(is_meant).cloned().collect()
    }

    /// The latest decisions, the newest first.
    #[must_use]
    pub fn latest(&self, most: usize) -> Vec<Arc<Record>> {
        self.records.lock().iter().rev().take(most).cloned().collect()
    }
}

#[cfg(test)]
mod tests;
