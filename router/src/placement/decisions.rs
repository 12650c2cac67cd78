//! The last decisions, with everything they were made from, so that anybody can ask *why here?* and check the arithmetic by hand.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use hostler_placement::cost::{ChoiceReason, Decision, Scored};
use parking_lot::Mutex;

use super::{ChosenReplica, Prompt};
use crate::cache_level::CacheLevel;

/// Bytes of a path that are remembered. It is the client's, and may be long.
const MAX_PATH_BYTES: usize = 128;

/// One decision and what came of it.
#[derive(Debug)]
pub struct PlacementDecision {
    /// The router's own number of the request.
    pub id: u64,
    /// What the client called it (`x-request-id`).
    pub client_id: Option<Arc<str>>,
    /// Path of the request.
    pub path: Arc<str>,
    /// The model that it names.
    pub model: Option<Arc<str>>,
    /// When it was decided.
    pub decided_at: SystemTime,
    /// Which attempt of the request this was, from 1.
    pub attempt: u32,
    /// Seconds for which it was queued in the router before.
    pub queued_seconds: f32,
    /// How the chosen replica's cache is known.
    pub level: CacheLevel,
    /// Why the prompt's tokens are not known; empty when they are or are not needed.
    pub fallback_reason: &'static str,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens that the answer was expected to have.
    pub expected_output_tokens: f64,
    /// What was decided, with the candidates that are remembered and their costs.
    pub decision: Decision,
    /// Their names, in the same order.
    pub replica_names: Vec<Arc<str>>,
    /// Seconds since the last report about each.
    pub report_ages: Vec<f32>,
    /// What came of it.
    pub outcome: Mutex<PlacementOutcome>,
}

/// What came of a decision, as far as is known.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PlacementOutcome {
    /// Seconds from its dispatch to the first token of a stream.
    pub first_token_seconds: Option<f64>,
    /// Prompt tokens that the engine says it had cached.
    pub cached_tokens: Option<u32>,
}

impl PlacementDecision {
    /// The record of `chosen`.
    #[must_use]
    pub fn new(id: u64, prompt: &Prompt, chosen: ChosenReplica) -> Self {
        let ChosenReplica { decision, view, chosen_at, level, expected_output_tokens, .. } = chosen;
        let replicas = || decision.scored.iter().map(|scored| &view.replicas[scored.candidate.replica]);
        let replica_names = replicas().map(|replica| replica.id.clone()).collect();
        let report_ages = replicas().map(|replica| chosen_at.saturating_duration_since(replica.last_report).as_secs_f32()).collect();
        Self {
            id,
            client_id: None,
            path: prompt.path()[..prompt.path().floor_char_boundary(MAX_PATH_BYTES)].into(),
            model: prompt.model().map(Arc::from),
            decided_at: SystemTime::now(),
            attempt: 1,
            queued_seconds: 0.0,
            level,
            fallback_reason: prompt.fallback_reason,
            prompt_tokens: prompt.token_count(),
            expected_output_tokens,
            decision,
            replica_names,
            report_ages,
            outcome: Mutex::default(),
        }
    }

    /// Why that one, in a word.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self.decision.why {
            ChoiceReason::Only => "only",
            ChoiceReason::Cheapest => "cheapest",
            ChoiceReason::NearTie => "near_tie",
            ChoiceReason::LastResort => "last_resort",
        }
    }

    /// The chosen candidate and its name.
    #[must_use]
    pub fn choice(&self) -> (&str, &Scored) {
        (&self.replica_names[self.decision.chosen], self.decision.choice())
    }
}

/// The reason in a line, for a response header.
impl fmt::Display for PlacementDecision {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, choice) = self.choice();
        let why = self.reason();
        write!(
            formatter,
            "replica={name} matched={} of={} level={} why={why} ttft={:.4} cost={:.4} candidates={} attempt={} queued={:.3}",
            choice.candidate.matched,
            self.prompt_tokens,
            self.level.as_str(),
            choice.terms.first_token(),
            choice.terms.total(),
            self.decision.candidates,
            self.attempt,
            self.queued_seconds,
        )
    }
}

/// The last decisions.
#[derive(Debug)]
pub struct DecisionLog {
    capacity: usize,
    /// In the order in which they were made.
    decisions: Mutex<VecDeque<Arc<PlacementDecision>>>,
}

impl DecisionLog {
    /// A ring of this many decisions.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { capacity: most.max(1), decisions: Mutex::default() }
    }

    /// Remembers a decision and forgets the oldest.
    pub fn push(&self, record: Arc<PlacementDecision>) {
        let mut records = self.decisions.lock();
        let forgotten = if records.len() >= self.capacity { records.pop_front() } else { None };
        records.push_back(record);
        drop(records);
        // Outside the lock, as it may be the last to hold it.
        drop(forgotten);
    }

    /// The decisions of a request, by our number in hexadecimal or by what the client called it; the latest first.
    #[must_use]
    pub fn find(&self, name: &str) -> Vec<Arc<PlacementDecision>> {
        let id = u64::from_str_radix(name, 16).ok();
        let is_meant = |record: &&Arc<PlacementDecision>| Some(record.id) == id || record.client_id.as_deref() == Some(name);
        self.decisions.lock().iter().rev().filter(is_meant).cloned().collect()
    }

    /// The latest decisions, the newest first.
    #[must_use]
    pub fn latest(&self, most: usize) -> Vec<Arc<PlacementDecision>> {
        self.decisions.lock().iter().rev().take(most).cloned().collect()
    }
}

#[cfg(test)]
mod tests;
