//! The latest decisions with all their inputs, so that anybody can ask *why here?* and check the
//! arithmetic by hand.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::SystemTime;

use hostler_placement::cost::{ChoiceReason, Decision, Scored};
use parking_lot::Mutex;

use super::{ChosenReplica, Prompt};
use crate::cache_level::CacheLevel;
use crate::client_text::cut;
use crate::resume_tier::{NotResumed, ResumeTier};

#[derive(Debug)]
pub(crate) struct PlacementDecision {
    pub id: u64,
    /// The client's `x-request-id`.
    pub client_id: Option<Arc<str>>,
    pub path: Arc<str>,
    pub model: Option<Arc<str>>,
    pub decided_at: SystemTime,
    pub attempt: u32,
    /// Seconds that the request was queued in the router before.
    pub queued_seconds: f32,
    pub level: CacheLevel,
    /// How the stream is resumed if the engine dies.
    pub resume: ResumeTier,
    /// Why the prompt's tokens are unknown; empty when they are known or not needed.
    pub fallback_reason: &'static str,
    pub prompt_tokens: u32,
    pub expected_output_tokens: f64,
    /// Tokens that the answer is unlikely to exceed.
    pub long_output_tokens: f64,
    /// The decision, with the candidates that are kept and their costs.
    pub decision: Decision,
    /// The candidates' names, in the same order.
    pub replica_names: Vec<Arc<str>>,
    /// Seconds since the last report about each candidate.
    pub report_ages: Vec<f32>,
    pub outcome: Mutex<PlacementOutcome>,
}

/// The known outcome of a decision.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct PlacementOutcome {
    /// Seconds from the dispatch to a stream's first token.
    pub first_token_seconds: Option<f64>,
    /// Seconds between two tokens of the stream, once it is complete.
    pub between_tokens_seconds: Option<f64>,
    /// Seconds from the dispatch to the end of the answer, or of what this engine gave of it.
    pub total_seconds: Option<f64>,
    /// Tokens of the answer, once it is complete.
    pub answer_tokens: Option<u64>,
    /// The longest time between two pieces of the stream, and when it began, in seconds from the
    /// dispatch.
    pub longest_gap_seconds: Option<(f64, f64)>,
    /// Prompt tokens that were cached, and those of the whole prompt, as the engine reports.
    pub cached_tokens: Option<u32>,
    pub told_prompt_tokens: Option<u32>,
    /// The status of the engine's answer.
    pub status: Option<u16>,
    /// How the answer ended, or why there was none or no more of it: the name of an `AnswerOutcome`
    /// or of a `LossCause`.
    pub end: Option<&'static str>,
}

impl PlacementDecision {
    #[must_use]
    pub(crate) fn new(id: u64, prompt: &Prompt, chosen: ChosenReplica) -> Self {
        let ChosenReplica { decision, view, chosen_at, level, expected_output_tokens, long_output_tokens, .. } = chosen;
        let replicas = || decision.scored.iter().map(|scored| &view.replicas[scored.candidate.replica]);
        let replica_names = replicas().map(|replica| replica.id.clone()).collect();
        let report_ages = replicas().map(|replica| chosen_at.saturating_duration_since(replica.last_report).as_secs_f32()).collect();
        Self {
            id,
            client_id: None,
            path: cut(prompt.path()).into(),
            model: prompt.model().map(Arc::from),
            decided_at: SystemTime::now(),
            attempt: 1,
            queued_seconds: 0.0,
            level,
            resume: ResumeTier::None(NotResumed::NoStream),
            fallback_reason: prompt.fallback_reason,
            prompt_tokens: prompt.token_count(),
            expected_output_tokens,
            long_output_tokens,
            decision,
            replica_names,
            report_ages,
            outcome: Mutex::default(),
        }
    }

    #[must_use]
    pub(crate) fn reason(&self) -> &'static str {
        match self.decision.why {
            ChoiceReason::Only => "only",
            ChoiceReason::Cheapest => "cheapest",
            ChoiceReason::NearTie => "near_tie",
            ChoiceReason::EndsFirst => "ends_first",
            ChoiceReason::LastResort => "last_resort",
        }
    }

    #[must_use]
    pub(crate) fn choice(&self) -> (&str, &Scored) {
        (self.choice_name(), self.decision.choice())
    }

    /// The chosen replica's name.
    #[must_use]
    pub(crate) fn choice_name(&self) -> &Arc<str> {
        &self.replica_names[self.decision.chosen]
    }

    /// The reason in one line, for a response header.
    ///
    /// Without `caches` the line has nothing that depends on cached blocks. Even the reason is left
    /// out: a near tie counts as none if one of the replicas has part of the prompt, so it would
    /// reveal the caches.
    #[must_use]
    pub(crate) fn line(&self, caches: bool) -> String {
        let (name, choice) = self.choice();
        let (matched, costs) = if caches {
            let (why, terms) = (self.reason(), &choice.terms);
            let costs = format!("why={why} ttft={:.4} cost={:.4} ", terms.first_token(), terms.total());
            let of = |name: &str, tokens: u32| if tokens > 0 { format!("{name}={tokens} ") } else { String::new() };
            let (loaded, read) = (of("loaded", choice.candidate.loaded), of("read", choice.candidate.read));
            (format!("matched={} {loaded}{read}", choice.candidate.matched), costs)
        } else {
            Default::default()
        };
        format!(
            "replica={name} {matched}of={} level={} {costs}candidates={} attempt={} queued={:.3} resume={}",
            self.prompt_tokens,
            self.level.as_str(),
            self.decision.candidates,
            self.attempt,
            self.queued_seconds,
            self.resume,
        )
    }
}

#[derive(Debug)]
pub(crate) struct DecisionLog {
    capacity: usize,
    /// The decisions, the oldest first.
    decisions: Mutex<VecDeque<Arc<PlacementDecision>>>,
}

impl DecisionLog {
    #[must_use]
    pub(crate) fn new(most: usize) -> Self {
        Self { capacity: most.max(1), decisions: Mutex::default() }
    }

    pub(crate) fn push(&self, record: Arc<PlacementDecision>) {
        let mut records = self.decisions.lock();
        let forgotten = if records.len() >= self.capacity { records.pop_front() } else { None };
        records.push_back(record);
        drop(records);
        // Drop this outside the lock: it may be the last reference.
        drop(forgotten);
    }

    /// The decisions about a request, the latest first. `name` is the router's number in
    /// hexadecimal or the client's id.
    #[must_use]
    pub(crate) fn find(&self, name: &str) -> Vec<Arc<PlacementDecision>> {
        let id = u64::from_str_radix(name, 16).ok();
        let is_meant = |record: &&Arc<PlacementDecision>| Some(record.id) == id || record.client_id.as_deref() == Some(name);
        self.decisions.lock().iter().rev().filter(is_meant).cloned().collect()
    }

    /// The latest decisions, the newest first.
    #[must_use]
    pub(crate) fn latest(&self, most: usize) -> Vec<Arc<PlacementDecision>> {
        self.decisions.lock().iter().rev().take(most).cloned().collect()
    }
}

#[cfg(test)]
pub(super) mod tests;
