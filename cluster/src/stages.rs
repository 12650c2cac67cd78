//! Jobs of an entry by stage: waiting, starting, serving, away or leaving. Jobs in each stage are
//! sorted by how soon the entry can do without them.

use std::cmp::Reverse;
use std::time::SystemTime;

use hostler_scheduler::JobState;

use crate::memory::Memory;
use crate::observation::{Observation, ObservedJob};

pub(crate) struct Stages<'a> {
    /// Queued jobs, latest submission first.
    pub(crate) waiting: Vec<&'a ObservedJob>,
    /// Started jobs that have not been ready yet, latest start first.
    pub(crate) starting: Vec<&'a ObservedJob>,
    /// Jobs that have been ready, though their agent may be away for a moment. The job that ends
    /// first comes first.
    pub(crate) serving: Vec<&'a ObservedJob>,
    /// Jobs that are suspended for longer than moments, or on hosts that may be dead. They do not
    /// count until they go on. The job that ends first comes first.
    pub(crate) away: Vec<&'a ObservedJob>,
    /// Jobs that no longer count, but have not ended.
    pub(crate) leaving: Vec<&'a ObservedJob>,
}

impl<'a> Stages<'a> {
    pub(crate) fn sort(observation: &'a Observation, memory: &Memory, now: SystemTime) -> Self {
        let Observation { jobs, form, .. } = observation;
        let mut stages = Self { waiting: Vec::new(), starting: Vec::new(), serving: Vec::new(), away: Vec::new(), leaving: Vec::new() };
        let mut silent = Vec::new();
        for job in jobs {
            let record = memory.record(job);
            let stage = if !job.has_started() && record.is_outdated(*form) {
                &mut stages.leaving
            } else if !job.has_started() {
                &mut stages.waiting
            } else if job.state == JobState::Ending || record.leaving_since.is_some() || job.has_failed() || record.is_lost(now) {
                &mut stages.leaving
            } else if record.is_suspended(now) {
                &mut stages.away
            } else if record.is_away(now) {
                &mut silent
            } else if record.ready.is_some() || job.in_flight > 0 {
                &mut stages.serving
            } else {
                &mut stages.starting
            };
            stage.push(job);
        }
        stages.count_silent(silent);
        stages.waiting.sort_by_key(|job| Reverse((job.submitted, &job.id)));
        stages.starting.sort_by_key(|job| Reverse((job.started, &job.id)));
        for stage in [&mut stages.serving, &mut stages.away] {
            stage.sort_by_key(|job| {
                let ends_at = memory.record(job).ends_at;
                (ends_at.is_none(), ends_at, job.in_flight, &job.id)
            });
        }
        stages
    }

    /// Treats jobs without an agent as dead if most other jobs have theirs.
    ///
    /// If most have none, the router or the network is at fault. Then only one job is replaced,
    /// which shows what new jobs can do, and none if the router knows no job at all.
    fn count_silent(&mut self, silent: Vec<&'a ObservedJob>) {
        let dead = match (silent.len(), self.serving.len()) {
            (silent, serving) if silent <= serving.max(1) => silent,
            (_, serving) => serving.min(1),
        };
        let (dead, others) = silent.split_at(dead);
        self.away.extend_from_slice(dead);
        self.serving.extend_from_slice(others);
    }

    /// Number of jobs that count.
    pub(crate) fn live(&self) -> usize {
        self.coming() + self.serving.len()
    }

    /// Number of jobs that do not serve yet.
    pub(crate) fn coming(&self) -> usize {
        self.waiting.len() + self.starting.len()
    }
}
