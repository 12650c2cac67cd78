//! Simulated scheduler and nodes. A job's fate is drawn when it is submitted.

use std::ops::Range;
use std::time::Duration;

use fastrand::Rng;
use hostler_scheduler::{JobState, RunTime};

use super::{Climate, Clock, HOUR};
use crate::{NodeState, ObservedJob};

/// Time after which a resumed job has its agent back.
const ATTACHES_AGAIN: u64 = 20;

/// Time before a job's end at which its agent leaves.
pub(super) const LEAVES_EARLY: u64 = 40;

#[derive(Debug, Default)]
pub(super) struct SimulatedScheduler {
    pub(super) jobs: Vec<SimulatedJob>,
    submitted: u64,
    /// Load as a number of busy nodes.
    load: f64,
    clock: Clock,
    advanced: u64,
}

#[derive(Debug, Clone)]
pub(super) struct SimulatedJob {
    id: String,
    submitted: u64,
    /// Lists lag behind submissions.
    listed: u64,
    starts: u64,
    ready: u64,
    ends: u64,
    dies: Option<(u64, Death)>,
    /// When a drained or cancelled job is over.
    is_over: Option<u64>,
    is_cancelled: bool,
    suspensions: Vec<Range<u64>>,
    /// Seconds for which the job has been suspended.
    suspended: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Death {
    Vanishes,
    LosesAgent,
    LosesReplicas,
}

/// Counts of what ended in a step.
#[derive(Debug, Default)]
pub(super) struct Ends {
    pub(super) in_time: u64,
    pub(super) deaths: u64,
    /// Deaths that show only in the agent's long absence.
    pub(super) absences: u64,
    /// Suspensions that began or ended.
    pub(super) suspensions: u64,
}

impl SimulatedScheduler {
    pub(super) fn new(clock: Clock) -> Self {
        Self { clock, ..Self::default() }
    }

    pub(super) fn submit(&mut self, rng: &mut Rng, climate: &Climate, now: u64) {
        self.submitted += 1;
        let starts = now + climate.draw_queue_wait(rng, now);
        let ready = starts + rng.u64(climate.cold_start.clone());
        let ends = starts + climate.walltime;
        let death = [Death::Vanishes, Death::Vanishes, Death::LosesAgent, Death::LosesReplicas][rng.usize(..4)];
        let dies = if climate.is_broken(now) {
            Some((rng.u64(starts..ready), Death::Vanishes))
        } else {
            (rng.f64() < climate.death)
                .then(|| (rng.u64(now..ends), death))
                .filter(|(dies, how)| *how == Death::Vanishes || *dies >= starts)
        };
        let listed = if climate.death > 0.0 { now + rng.u64(..100) } else { now };
        let id = format!("{}.head", self.submitted);
        let count = if climate.suspension > 0.0 && rng.f64() < climate.suspension { rng.usize(1..4) } else { 0 };
        let mut draw = || {
            let (from, longest) = (rng.u64(starts..ends), [90, 1800, 6 * HOUR][rng.usize(..3)]);
            from..from + rng.u64(10..longest)
        };
        let suspensions = (0..count).map(|_| draw()).collect();
        self.jobs.push(SimulatedJob {
            id,
            submitted: now,
            listed,
            starts,
            ready,
            ends,
            dies,
            is_over: None,
            is_cancelled: false,
            suspensions,
            suspended: 0,
        });
    }

    /// Drains a job. One drain in twenty never ends.
    pub(super) fn drain(&mut self, rng: &mut Rng, id: &str, now: u64) {
        let over = if rng.u32(..20) == 0 { u64::MAX } else { now + rng.u64(10..60) };
        let job = self.jobs.iter_mut().find(|job| job.id == id).expect("only listed jobs are drained");
        job.is_over.get_or_insert(over);
    }

    pub(super) fn cancel(&mut self, id: &str, now: u64) {
        let job = self.jobs.iter_mut().find(|job| job.id == id).expect("only listed jobs are cancelled");
        if !job.is_cancelled {
            job.is_cancelled = true;
            job.is_over = Some(now + 20);
        }
    }

    pub(super) fn advance(&mut self, now: u64) -> Ends {
        let mut ends = Ends::default();
        let before = std::mem::replace(&mut self.advanced, now);
        for job in &mut self.jobs {
            ends.suspensions += job.changes(before + 1..now + 1);
            job.stand_still(before..now);
        }
        self.jobs.retain_mut(|job| {
            if let Some((_, how)) = job.dies.filter(|(dies, _)| *dies <= now && job.is_live(now)) {
                match how {
                    Death::Vanishes => ends.deaths += 1,
                    Death::LosesAgent if !job.is_absent_at(now - 20) => (ends.deaths, ends.absences) = (ends.deaths + 1, ends.absences + 1),
                    Death::LosesAgent => {}
                    Death::LosesReplicas => ends.deaths += 1,
                }
                if how == Death::Vanishes {
                    return false;
                }
            }
            if job.is_over.is_none() && !job.is_live(now) {
                job.is_over = Some(job.ends);
                ends.in_time += 1;
            }
            job.ends > now && job.is_over.is_none_or(|over| over > now)
        });
        ends
    }

    pub(super) fn list(&self, now: u64, knows_nodes: bool) -> Vec<ObservedJob> {
        let mut free = self.load;
        let listed = self.jobs.iter().filter(|job| job.listed <= now);
        listed
            .map(|job| {
                let mut seen = job.observe(now, self.clock);
                if !knows_nodes {
                    seen.node = NodeState::NotAttached;
                }
                if seen.is_ready() && free > 0.0 {
                    seen.in_flight = 8;
                    free -= 1.0;
                }
                seen
            })
            .collect()
    }

    pub(super) fn set_load(&mut self, nodes: f64) {
        self.load = nodes;
    }

    /// Nodes that take requests.
    pub(super) fn ready(&self, now: u64) -> u32 {
        u32::try_from(self.jobs.iter().filter(|job| job.is_serving(now)).count()).expect("a few jobs")
    }

    /// Jobs that nobody has asked to leave.
    pub(super) fn live(&self, now: u64) -> usize {
        self.jobs.iter().filter(|job| job.is_live(now)).count()
    }

    /// Live jobs that have become ready and end within this time.
    pub(super) fn old(&self, now: u64, within: u64) -> usize {
        self.jobs.iter().filter(|job| job.is_live(now) && job.ready <= now && job.ends - now <= within).count()
    }

    /// Live jobs that are suspended or have lost their agent, or were so shortly before.
    pub(super) fn away(&self, now: u64, lately: u64) -> usize {
        let is_suspended = |job: &SimulatedJob| job.suspensions.iter().any(|time| (time.start..time.end + lately).contains(&now));
        let is_absent = |job: &SimulatedJob| job.dies.is_some_and(|(dies, how)| how == Death::LosesAgent && dies <= now);
        self.jobs.iter().filter(|job| job.is_live(now) && (is_suspended(job) || is_absent(job))).count()
    }

    pub(super) fn has_absent_agent(&self, now: u64) -> bool {
        self.jobs.iter().any(|job| job.dies.is_some_and(|(dies, how)| how == Death::LosesAgent && dies <= now))
    }

    /// Nodes that are held.
    pub(super) fn running(&self, now: u64) -> u32 {
        u32::try_from(self.jobs.iter().filter(|job| job.starts <= now).count()).expect("a few jobs")
    }
}

impl SimulatedJob {
    fn is_live(&self, now: u64) -> bool {
        self.is_over.is_none() && now < self.ends - LEAVES_EARLY
    }

    fn has_died(&self, now: u64) -> bool {
        self.dies.is_some_and(|(dies, _)| dies <= now)
    }

    fn is_absent_at(&self, moment: u64) -> bool {
        self.has_died(moment)
    }

    fn is_serving(&self, now: u64) -> bool {
        self.is_live(now) && self.ready <= now && !self.has_died(now) && !self.is_unreachable(now)
    }

    fn is_suspended(&self, now: u64) -> bool {
        self.suspensions.iter().any(|time| time.contains(&now))
    }

    /// How often the job is suspended or resumed within this time.
    fn changes(&self, time: Range<u64>) -> u64 {
        let is_within = |moment: &&u64| time.contains(*moment) && self.is_live(**moment);
        self.suspensions.iter().map(|one| [one.start, one.end].iter().filter(is_within).count() as u64).sum()
    }

    /// Whether the job's agent is suspended, or about to attach again.
    fn is_unreachable(&self, now: u64) -> bool {
        self.suspensions.iter().any(|time| (time.start..time.end + ATTACHES_AGAIN).contains(&now))
    }

    /// Delays the job's events and end by the time for which it was suspended within this range.
    fn stand_still(&mut self, time: Range<u64>) {
        let was_ready = self.ready <= time.start;
        let seconds = time.filter(|second| self.is_suspended(*second)).count() as u64;
        if self.is_over.is_none() {
            self.suspended += seconds;
            self.ends += seconds;
            self.ready += if was_ready { 0 } else { seconds };
        }
    }

    /// Used time as PBS reports it: missing for a run that has just begun, and then up to two
    /// minutes late.
    fn used(&self, now: u64, clock: Clock) -> Option<Duration> {
        let used = (now - self.starts).saturating_sub(self.suspended) / 120 * 120;
        Some(Duration::from_secs(used)).filter(|used| clock.tells_use && !used.is_zero())
    }

    fn observe(&self, now: u64, clock: Clock) -> ObservedJob {
        let has_started = self.starts <= now;
        let state = match (self.is_cancelled, has_started) {
            (true, true) => JobState::Ending,
            (_, true) if self.is_suspended(now) => JobState::Suspended,
            (_, true) => JobState::Running,
            (_, false) => JobState::Queued,
        };
        let node = if !has_started || self.is_unreachable(now) {
            NodeState::NotAttached
        } else if let Some((_, how)) = self.dies.filter(|(dies, _)| *dies <= now) {
            if how == Death::LosesAgent { NodeState::NotAttached } else { NodeState::Failed }
        } else if !self.is_live(now) {
            NodeState::Draining
        } else if self.ready <= now {
            NodeState::Ready
        } else {
            NodeState::Loading
        };
        // Slurm adds suspended time to the limit, while PBS does not count it.
        let limit = self.ends - self.starts - if clock.tells_use { self.suspended } else { 0 };
        ObservedJob {
            id: self.id.clone(),
            state,
            submitted: Some(clock.show(self.submitted)),
            started: has_started.then(|| clock.show(self.starts)),
            run_time: has_started.then(|| RunTime { limit: Duration::from_secs(limit), used: self.used(now, clock) }),
            node,
            in_flight: 0,
            served: 0,
            start_parts: Vec::new(),
        }
    }
}
