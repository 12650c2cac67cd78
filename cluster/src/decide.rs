//! A step of the controller: computes the actions that bring an entry's fleet nearer to its size.
//!
//! The inputs are the entry, its jobs, the demand and the memory of earlier steps.
//!
//! Replacements are not marked as such. An entry may have as many jobs as it wants nodes, plus one
//! for each serving job that ends before a replacement could be ready. Jobs that serve beyond the
//! desired size drain, in the order in which they end. So the same jobs lead to the same actions,
//! whoever submitted them, and a restarted controller continues where the last one stopped.

use std::time::{Duration, SystemTime};

use hostler_scheduler::JobState;

use crate::entry::FleetEntry;
use crate::memory::Memory;
use crate::observation::{NodeState, Observation, ObservedJob};
use crate::since;
use crate::size::resize;
use crate::stages::Stages;

/// Time after which a draining job that has not ended is cancelled. Agents leave within 40 s unless
/// `agent.drain_timeout` says otherwise.
const DRAIN_LIMIT: Duration = Duration::from_secs(600);

/// Action of the controller.
///
/// Every action except a submission may be repeated in the next step, until the job list shows that
/// it worked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Submit an array of this many one-node jobs; one part is a plain job.
    Submit {
        parts: u32,
    },
    /// Have the router drain the job's node: its agent leaves, and the job ends by itself.
    Drain {
        job: String,
    },
    Cancel {
        job: String,
    },
}

/// Decides one step.
///
/// Write the returned memory down before carrying out the actions, and pass it to the next step.
#[must_use]
pub fn decide(entry: &FleetEntry, observation: &Observation, memory: &Memory, now: SystemTime) -> (Vec<Action>, Memory) {
    let mut memory = memory.clone();
    memory.note_request(entry.asked);
    memory.note_entry(entry);
    memory.observe(observation, now);
    let stages = Stages::sort(observation, &memory, now);
    memory.mark_due(&stages.serving, &stages.waiting, now);
    let desired = resize(entry, &stages, &observation.demand, &mut memory, now);
    if memory.is_recovering() {
        adopt_replacements(&stages, desired, &mut memory);
    }
    let may_come = count_places(&stages, desired, |job| memory.record(job).may_be_replaced());
    let mut actions = end_what_stays(&stages, &memory, now);
    actions.extend(cancel_beyond(&stages, may_come));
    actions.extend(cancel_away(&stages, desired));
    actions.extend(retire(&stages, desired, &memory));
    for action in &actions {
        if let Action::Drain { job } | Action::Cancel { job } = action {
            memory.give_up(job, now);
        }
    }
    let missing = count_places(&stages, desired, |job| memory.record(job).is_due).saturating_sub(stages.coming());
    let budget_ends_in = memory.budget_left(entry, now).and_then(|left| left.ends_in);
    // A node that would still load when the budget ends serves nobody.
    let is_in_vain = budget_ends_in.is_some_and(|left| left <= memory.learned_cold_start().unwrap_or_default());
    let missing = if is_in_vain { 0 } else { missing };
    let parts = memory.allow_submission(missing, (entry, stages.coming()), now);
    if parts > 0 {
        memory.note_submission(parts, observation.form, now);
        actions.push(Action::Submit { parts: u32::try_from(parts).expect("entries have 1000 nodes at most") });
    }
    (actions, memory)
}

/// Number of jobs that may be on their way to serving.
///
/// These are the desired jobs that do not serve yet, plus one replacement for each replaced job
/// among those that stay. The jobs that end last stay.
fn count_places(stages: &Stages, desired: usize, is_replaced: impl Fn(&ObservedJob) -> bool) -> usize {
    let to_stay = stages.serving.iter().rev().take(desired);
    desired.saturating_sub(stages.serving.len()) + to_stay.filter(|job| is_replaced(job)).count()
}

/// Takes jobs beyond the desired size as replacements of those that end first. Whoever submitted
/// them knew better when those are due.
fn adopt_replacements(stages: &Stages, desired: usize, memory: &mut Memory) {
    let may_come = count_places(stages, desired, |job| memory.record(job).may_be_replaced());
    let to_stay = stages.serving.iter().skip(stages.serving.len().saturating_sub(desired));
    let replaced = to_stay.filter(|job| !memory.record(job).may_be_replaced()).take(stages.coming().saturating_sub(may_come));
    for job in replaced.collect::<Vec<_>>() {
        memory.mark(&job.id, |record| record.is_adopted = true);
    }
}

/// Cancels jobs that wait with outdated settings, and jobs that hold a node in vain. The latter
/// have failed, have no agent, or were drained and have not ended.
fn end_what_stays(stages: &Stages, memory: &Memory, now: SystemTime) -> Vec<Action> {
    let stays = stages.leaving.iter().filter(|job| {
        let record = memory.record(job);
        let is_stuck = record.leaving_since.is_some_and(|leaving| since(now, leaving) >= DRAIN_LIMIT);
        job.state != JobState::Ending && (is_stuck || !job.has_started() || job.has_failed() || record.is_lost(now))
    });
    stays.map(|job| Action::Cancel { job: job.id.clone() }).collect()
}

/// Cancels surplus jobs on their way, waiting ones first.
fn cancel_beyond(stages: &Stages, may_come: usize) -> impl Iterator<Item = Action> {
    let beyond = stages.coming().saturating_sub(may_come);
    stages.waiting.iter().chain(&stages.starting).take(beyond).map(|job| Action::Cancel { job: job.id.clone() })
}

/// Cancels absent jobs beyond the desired size: more could never serve together.
fn cancel_away(stages: &Stages, desired: usize) -> impl Iterator<Item = Action> {
    let beyond = stages.away.len().saturating_sub(desired);
    stages.away.iter().take(beyond).map(|job| Action::Cancel { job: job.id.clone() })
}

/// Ends jobs that serve beyond the desired size: replaced ones first, then those without an agent,
/// then those that end first.
///
/// As many as are desired stay ready, so a job is not drained while its replacement is away for a
/// moment.
fn retire(stages: &Stages, desired: usize, memory: &Memory) -> Vec<Action> {
    let is_replaced = |job: &ObservedJob| desired > 0 && memory.record(job).may_be_replaced();
    let mut dispensable = stages.serving.clone();
    dispensable.sort_by_key(|job| (!is_replaced(job), job.is_ready()));
    let surplus = stages.serving.len().saturating_sub(desired);
    let mut ready = stages.serving.iter().filter(|job| job.is_ready()).count();
    let mut actions = Vec::new();
    for job in dispensable.into_iter().take(surplus) {
        let id = job.id.clone();
        if job.is_ready() && ready > desired {
            ready -= 1;
            actions.push(Action::Drain { job: id });
        } else if !job.is_ready() && !is_replaced(job) {
            // Without an agent, nobody would receive a drain request.
            let has_agent = job.state == JobState::Running && job.node != NodeState::NotAttached;
            actions.push(if has_agent { Action::Drain { job: id } } else { Action::Cancel { job: id } });
        }
    }
    actions
}

#[cfg(test)]
mod tests;
