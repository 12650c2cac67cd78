//! Succession of a controller that is itself a batch job: when it submits a successor, and when it
//! leaves its place to it. Pure.
//!
//! Until its end is near, one job waits that may start when this one has ended, so the scheduler
//! replaces a controller that dies. Later, the controller submits a job that may start at once,
//! because that job's wait in the queue must be over before this job's time is. The waiting job is
//! cancelled once the scheduler lists the new one, so a refused submission costs no successor.

use std::time::{Duration, SystemTime};

use hostler_scheduler::{JobState, ScheduledJob, is_same_job};

use crate::since;

/// Longest time before its end at which a job looks for the next one.
///
/// The next job takes its place at once, so submitting too early costs no node time. It costs
/// clients a new address, so the lead is no more than most queues take for a job without GPUs.
const LONGEST_LEAD: Duration = Duration::from_secs(6 * 3600);

/// Margin before the router must have drained, for a job whose successor did not come in time. A
/// step and the end of the process take a while.
const LEAVE_MARGIN: Duration = Duration::from_secs(15);

/// Fractions of a short job's time. The job looks for its successor when 1/`SEARCH_PARTS` is left,
/// and leaves when 1/`LEAVE_PARTS` is left.
const SEARCH_PARTS: u32 = 4;
const LEAVE_PARTS: u32 = 16;

/// Pause after a submission, which may not be listed yet, was refused, or has failed at once.
const SUBMIT_PAUSE: Duration = Duration::from_secs(120);

/// The job in which the controller runs.
#[derive(Debug, Clone, Copy)]
pub struct ControllerJob<'a> {
    pub id: &'a str,
    /// The job whose place this one took, which may still be leaving.
    pub predecessor: Option<&'a str>,
    /// How long its run may last.
    pub limit: Duration,
    /// Time left of the limit.
    pub left: Duration,
    /// How long the router may take to finish running answers.
    pub drain_timeout: Duration,
    /// The job whose controller runs and waits for this one's place.
    pub standby: Option<&'a str>,
}

impl ControllerJob<'_> {
    /// Whether the job's end is near, so that the next one may start before it.
    #[must_use]
    pub fn is_ending(&self) -> bool {
        self.left <= LONGEST_LEAD.min(self.limit / SEARCH_PARTS)
    }

    /// Whether the controller has to leave now, whether or not a successor has come.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.left <= self.drain_timeout.saturating_add(LEAVE_MARGIN).min(self.limit / LEAVE_PARTS)
    }
}

/// Action of a controller for its succession.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SuccessionAction {
    /// Submit a job that may start at once, or when this one has ended.
    Submit { after_own_end: bool },
    /// Cancel jobs that nobody needs.
    Cancel { jobs: Vec<String> },
    /// End, and leave the place to whoever waits for it.
    Leave,
}

/// A controller's memory of its succession. If it is lost, unknown jobs are submitted anew.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SuccessionMemory {
    /// The job that may start at once.
    successor: Option<String>,
    /// When a job was last submitted, and whether it may start at once.
    submitted: Option<(SystemTime, bool)>,
}

impl SuccessionMemory {
    /// Notes the id of the submitted job.
    pub fn note_submitted(&mut self, job: String) {
        if self.submitted.is_some_and(|(_, at_once)| at_once) {
            self.successor = Some(job);
        }
    }

    fn may_submit(&self, at_once: bool, now: SystemTime) -> bool {
        self.submitted.is_none_or(|(when, was_at_once)| was_at_once != at_once || since(now, when) >= SUBMIT_PAUSE)
    }
}

/// Decides one step, from the scheduler's list of the fleet's controller jobs.
#[must_use]
pub fn decide_succession(
    own: &ControllerJob<'_>,
    listed: &[ScheduledJob],
    memory: &SuccessionMemory,
    now: SystemTime,
) -> (Option<SuccessionAction>, SuccessionMemory) {
    let mut memory = memory.clone();
    if own.is_over() {
        return (Some(SuccessionAction::Leave), memory);
    }
    let others = find_successors(own, listed);
    let is_ending = own.is_ending();
    let is_successor = |job: &&ScheduledJob| memory.successor.as_deref().is_some_and(|id| is_same_job(id, &job.id));
    let next = if is_ending { others.iter().copied().find(is_successor) } else { None };
    let kept = next.or_else(|| others.iter().copied().find(|job| !job.state.has_started()));
    let surplus: Vec<String> = others.iter().filter(|job| kept.is_none_or(|kept| kept.id != job.id)).map(|job| job.id.clone()).collect();
    if !surplus.is_empty() {
        return (Some(SuccessionAction::Cancel { jobs: surplus }), memory);
    }
    let action = match if is_ending { next } else { kept } {
        Some(job) => {
            let waits_here = is_ending && job.state.has_started() && own.standby.is_some_and(|standby| is_same_job(standby, &job.id));
            waits_here.then_some(SuccessionAction::Leave)
        }
        None => memory.may_submit(is_ending, now).then(|| {
            memory = SuccessionMemory { successor: None, submitted: Some((now, is_ending)) };
            SuccessionAction::Submit { after_own_end: !is_ending }
        }),
    };
    (action, memory)
}

/// Listed jobs that are neither this one nor its predecessor.
#[must_use]
pub fn find_successors<'a>(own: &ControllerJob<'_>, listed: &'a [ScheduledJob]) -> Vec<&'a ScheduledJob> {
    let is_known = |id: &str| is_same_job(own.id, id) || own.predecessor.is_some_and(|predecessor| is_same_job(predecessor, id));
    listed.iter().filter(|job| job.state != JobState::Ending && !is_known(&job.id)).collect()
}

#[cfg(test)]
mod tests;
