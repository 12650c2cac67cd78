//! The controller's knowledge of an entry beyond the scheduler's list.
//!
//! It holds which jobs were asked to leave, their queue waits and cold starts, and a submission
//! that is not listed yet. All of it may be lost: then estimates are worse, but nothing is
//! submitted twice.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use hostler_scheduler::{JobState, is_same_job};
use serde::{Deserialize, Serialize};

use crate::budget::BudgetLeft;
use crate::estimates::{RecentParts, RecentTimes};
use crate::failures::Failures;
use crate::node_time::{NodeLedger, NodeUse};
use crate::observation::{GoneAgent, NodeState, Observation, ObservedJob};
use crate::pace::Pace;
use crate::{FleetEntry, since};

/// Time within which a submitted job is listed, if there is one. The controller's deadline for a
/// submission is shorter.
const LISTED_WITHIN: Duration = Duration::from_secs(120);

/// Time after which a running job without an agent is given up. An agent gives up after 5 minutes
/// (`agent.attach_timeout`), and PBS notices a dead host after 7. The rest is for a job's own setup
/// lines, such as copying weights.
const ABSENT_LIMIT: Duration = Duration::from_secs(30 * 60);

/// Time after which a job that has served is replaced if its agent is away. Agents find a router
/// again within seconds, so the host may be dead: PBS and Slurm say so after one to seven minutes,
/// if at all.
const AWAY_LIMIT: Duration = Duration::from_secs(180);

/// Suspension after which a job is replaced. Slurm's gang scheduler suspends jobs in turns of 30 s
/// (`SchedulerTimeSlice`).
const SUSPENDED_LIMIT: Duration = Duration::from_secs(60);

/// Serving time that shows that the model can start.
const SERVES_WELL_AFTER: Duration = Duration::from_secs(600);

/// Serving time after which a job's end does not count as a failed start.
const SERVED_AFTER: Duration = Duration::from_secs(60);

/// Quarters of a job's time, counted from its end, in which it may be replaced.
///
/// No job is replaced in its first quarter, whatever queue wait is expected: an estimate that is
/// too long would have each job replaced as soon as it serves. A queue that really takes longer
/// than three quarters leaves a gap, which a longer walltime closes.
const LONGEST_LEAD_QUARTERS: u32 = 3;

/// Longest interval between steps that still tells when a node became ready and whether its agent
/// was absent throughout.
const LONGEST_STEP: Duration = Duration::from_secs(60);

/// Expected queue wait until the first job has started.
const PRIOR_QUEUE_WAIT: Duration = Duration::from_secs(3600);

/// Expected cold start until the first job becomes ready: weights of 100 GB from a parallel file
/// system.
const PRIOR_COLD_START: Duration = Duration::from_secs(600);

/// Time before its end at which a job stops serving. An agent leaves 40 s early, and Slurm's signal
/// comes up to a minute early.
const LEAVES_BEFORE_END: Duration = Duration::from_secs(120);

/// State of an entry between two steps. The controller writes it down before it carries out the
/// step's actions.
///
/// `Memory::default()` belongs to a new entry for which nothing was ever submitted.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Memory {
    jobs: BTreeMap<String, JobRecord>,
    submission: Option<Submission>,
    /// Until then, jobs submitted by an unknown controller may appear in the list.
    recovers_until: Option<SystemTime>,
    failures: Failures,
    pace: Pace,
    queue_waits: RecentTimes,
    cold_starts: RecentTimes,
    cold_start_parts: RecentParts,
    /// The size of an elastic entry; `None` before its first step.
    pub(crate) size: Option<u32>,
    pub(crate) pressure_since: Option<SystemTime>,
    stepped: Option<SystemTime>,
    /// The entry's `asked` as of the last step.
    asked: u64,
    node_time: NodeLedger,
    /// `asked` of the entry's budget, and the node seconds that had been used before it.
    budget: (u64, f64),
}

/// Memory of one listed job.
///
/// All times are by the controller's own clock. The scheduler's may differ by minutes: Slurm allows
/// five (the lifetime of what munge signs), and PBS any number.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct JobRecord {
    /// When the job was submitted; `None` if unknown.
    submitted: Option<SystemTime>,
    /// Form with which the job was submitted; `None` if unknown.
    form: Option<u64>,
    /// When the job was first listed.
    listed: Option<SystemTime>,
    /// When the job was last known to have no present run.
    waited: Option<SystemTime>,
    /// When the present run began.
    started: Option<SystemTime>,
    pub(crate) ends_at: Option<SystemTime>,
    /// When the job was first seen ready.
    pub(crate) ready: Option<SystemTime>,
    /// When a request was last seen there, in flight or since the step before.
    pub(crate) busy: Option<SystemTime>,
    /// Requests that the node had taken in the last step.
    served: Option<u64>,
    /// Since when the job runs without an agent.
    absent_since: Option<SystemTime>,
    suspended_since: Option<SystemTime>,
    /// Until when the present run is in the node time, and what its nodes did then.
    counted_until: Option<SystemTime>,
    pub(crate) leaving_since: Option<SystemTime>,
    /// Whether the job was watched from its start, so its cold start is known.
    start_is_watched: bool,
    /// Whether the queue wait has been learned, or says nothing.
    wait_is_known: bool,
    serves_well: bool,
    /// Whether the job ends before a replacement could be ready. The flag stays set, or a shorter
    /// estimate would cancel a replacement that has waited.
    pub(crate) is_due: bool,
    /// Whether a job found beyond the desired size was taken as this one's replacement. That job is
    /// kept, and no other is submitted.
    pub(crate) is_adopted: bool,
    /// Whether the job's end no longer counts as a failure: the controller wants it, or has given
    /// the job up.
    is_given_up: bool,
}

/// A submission with parts that are not listed yet.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Submission {
    parts: usize,
    at: SystemTime,
    #[serde(default)]
    form: Option<u64>,
    /// Whether the scheduler has reported the job's id. From then on, its jobs are listed until
    /// they end.
    #[serde(default)]
    is_confirmed: bool,
}

impl Memory {
    /// Memory of an entry that may have unknown jobs.
    ///
    /// Nothing is submitted for two minutes: a submission begun by an earlier controller is listed
    /// by then.
    #[must_use]
    pub fn lost(now: SystemTime) -> Self {
        Self { recovers_until: Some(now + LISTED_WITHIN), pace: Pace::unknown(now), ..Self::default() }
    }

    /// Notes that the scheduler refused the last step's submission. Do not call it if the outcome
    /// is unknown.
    pub fn record_refusal(&mut self, now: SystemTime) {
        self.submission = None;
        self.failures.note(None, now);
    }

    /// Notes that the scheduler accepted the last step's submission. Parts missing from the next
    /// list have ended by then.
    pub fn confirm_submission(&mut self) {
        if let Some(submission) = &mut self.submission {
            submission.is_confirmed = true;
        }
    }

    /// Expected wait of jobs in the queue.
    #[must_use]
    pub fn queue_wait(&self) -> Duration {
        self.queue_waits.estimate().unwrap_or(PRIOR_QUEUE_WAIT)
    }

    /// Expected time from a job's start until it is ready.
    #[must_use]
    pub fn cold_start(&self) -> Duration {
        self.cold_starts.estimate().unwrap_or(PRIOR_COLD_START)
    }

    /// Learned queue wait; `None` until a job has started.
    #[must_use]
    pub fn learned_queue_wait(&self) -> Option<Duration> {
        self.queue_waits.estimate()
    }

    /// Learned cold start; `None` until a job has become ready.
    #[must_use]
    pub fn learned_cold_start(&self) -> Option<Duration> {
        self.cold_starts.estimate()
    }

    /// Learned parts of a cold start, by name, with the expected time of each.
    pub fn learned_parts(&self) -> impl Iterator<Item = (&str, Duration)> {
        self.cold_start_parts.estimates()
    }

    /// When a job was submitted, by the controller's own clock; `None` if unknown.
    #[must_use]
    pub fn submitted(&self, job: &str) -> Option<SystemTime> {
        self.jobs.get(job)?.submitted
    }

    /// When a job's present run began, by the controller's own clock.
    #[must_use]
    pub fn started(&self, job: &str) -> Option<SystemTime> {
        self.jobs.get(job)?.started
    }

    /// When a job's present run ends, by the controller's own clock; `None` if it has no time
    /// limit.
    #[must_use]
    pub fn ends_at(&self, job: &str) -> Option<SystemTime> {
        self.jobs.get(job)?.ends_at
    }

    /// Whether the next step decides the same if only time passes, within a minute or so.
    #[must_use]
    pub fn is_settled(&self, now: SystemTime) -> bool {
        self.submission.is_none() && !self.is_recovering() && self.failures.pause(now).is_none() && self.pressure_since.is_none()
    }

    /// Desired number of nodes in the last step.
    #[must_use]
    pub fn desired_jobs(&self) -> u32 {
        self.size.unwrap_or_default()
    }

    /// Whether the entry has no jobs left: none is listed, and none may still appear.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.jobs.is_empty() && !self.awaits_jobs() && !self.is_recovering()
    }

    /// Failures since a job last served for a while. Jobs submitted together count once.
    #[must_use]
    pub fn failures(&self) -> u32 {
        self.failures.in_a_row()
    }

    /// Time left until the entry may submit again, if it has submitted all that its size allows in
    /// a quarter of an hour. Zero if it may now.
    #[must_use]
    pub fn submission_delay(&self, entry: &FleetEntry, now: SystemTime) -> Duration {
        self.pace.delay(entry, now)
    }

    /// Time left until submissions continue after the last failure.
    #[must_use]
    pub fn pause(&self, now: SystemTime) -> Option<Duration> {
        self.failures.pause(now)
    }

    /// Node time of the entry's jobs.
    #[must_use]
    pub fn node_time(&self) -> &NodeLedger {
        &self.node_time
    }

    /// Notes what is served, and over how many nodes each job runs. An entry that was removed does
    /// not say it.
    pub(crate) fn note_entry(&mut self, entry: &FleetEntry) {
        if !entry.model.is_empty() {
            (self.node_time.nodes, self.node_time.model) = (entry.nodes_per_replica, entry.model.clone());
        }
        if self.budget.0 != entry.budget.asked {
            self.budget = (entry.budget.asked, self.node_time.total());
        }
    }

    /// What is left of the entry's budget; `None` if it has none.
    #[must_use]
    pub fn budget_left(&self, entry: &FleetEntry, now: SystemTime) -> Option<BudgetLeft> {
        let used = Duration::try_from_secs_f64(self.node_time.total() - self.budget.1).unwrap_or_default();
        let at_work = self.jobs.values().filter(|record| record.started.is_some()).count();
        let nodes = u32::try_from(at_work).unwrap_or(u32::MAX).saturating_mul(entry.nodes_per_replica.max(1));
        entry.budget.left(used, nodes, now)
    }

    /// Counts the time since the last step of each job that has nodes.
    fn count_node_time(&mut self, jobs: &[ObservedJob], now: SystemTime) {
        let ready = jobs.iter().filter(|job| job.is_ready()).count();
        let has_surplus = self.size.is_some_and(|size| ready > size as usize);
        for job in jobs.iter().filter(|job| job.has_started()) {
            let Some(record) = self.jobs.get_mut(&job.id) else { continue };
            let is_replaced = has_surplus && record.may_be_replaced();
            let used = NodeUse::of(job, (record.ready, record.busy), is_replaced, now);
            let from = record.counted_until.max(record.started).unwrap_or(now);
            self.node_time.count(used, from, now);
            record.counted_until = Some(now);
        }
    }

    /// Updates the memory from a job list: jobs that ended, appeared or became ready.
    pub(crate) fn observe(&mut self, Observation { jobs, gone, .. }: &Observation, now: SystemTime) {
        let is_late = self.stepped.replace(now).is_none_or(|stepped| since(now, stepped) > LONGEST_STEP);
        self.recovers_until = self.recovers_until.filter(|until| *until > now);
        self.note_gone_jobs(jobs, gone, now);
        for job in jobs {
            let submission = &mut self.submission;
            let record = self.jobs.entry(job.id.clone()).or_insert_with(|| JobRecord::new(job, list_one(submission), now));
            if is_late {
                (record.absent_since, record.start_is_watched) = (None, false);
            }
            record.note(job, now);
            if job.is_ready() && record.ready.is_none() {
                record.ready = Some(now);
                self.failures.note_ready(record.known_since());
                if let Some(started) = record.started.filter(|_| record.start_is_watched) {
                    job.start_parts.iter().for_each(|(part, took)| self.cold_start_parts.push(part, *took));
                    self.cold_starts.push(since(now, started));
                }
            }
            if job.has_started() && !record.wait_is_known {
                record.wait_is_known = true;
                if let (Some(submitted), Some(started)) = (job.submitted, job.started) {
                    self.queue_waits.push(since(started, submitted));
                }
            }
            if !record.serves_well && record.ready.is_some_and(|ready| job.is_ready() && since(now, ready) >= SERVES_WELL_AFTER) {
                record.serves_well = true;
                self.failures.forgive();
            }
            if !record.is_given_up && (job.has_failed() || record.is_lost(now)) {
                record.is_given_up = true;
                if job.has_failed() || !record.has_served(now) {
                    self.failures.note(record.known_since(), now);
                }
            }
        }
        self.count_node_time(jobs, now);
        let is_gone = |submission: &mut Submission| submission.is_confirmed || since(now, submission.at) >= LISTED_WITHIN;
        if let Some(gone) = self.submission.take_if(is_gone) {
            self.failures.note(Some(gone.at).filter(|_| gone.is_confirmed), now);
        }
    }

    /// Forgets jobs that are no longer listed, and counts a failure for each that should be.
    fn note_gone_jobs(&mut self, jobs: &[ObservedJob], gone: &[GoneAgent], now: SystemTime) {
        let (failures, node_time) = (&mut self.failures, &mut self.node_time);
        let listed: BTreeSet<&str> = jobs.iter().map(|job| job.id.as_str()).collect();
        self.jobs.retain(|id, record| {
            let is_listed = listed.contains(id.as_str());
            let agents = || gone.iter().filter(|gone| is_same_job(&gone.job, id));
            if !is_listed && !agents().any(|agent| agent.has_drained) && !record.may_be_over(now) {
                failures.note(record.known_since(), now);
            }
            if !is_listed && let Some(from) = record.counted_until {
                let latest = record.ends_at.map_or(now, |ends| ends.min(now));
                // It has ended when its agent went, else somewhere between two steps.
                let seen = agents().map(|agent| agent.at).max().filter(|at| *at >= from);
                node_time.count(NodeUse::Leaving, from, seen.map_or(from + since(latest, from) / 2, |at| at.min(now)));
            }
            is_listed
        });
    }

    /// Marks serving jobs that end before a replacement submitted now would be ready.
    pub(crate) fn mark_due(&mut self, serving: &[&ObservedJob], waiting: &[&ObservedJob], now: SystemTime) {
        let queued = waiting.iter().filter(|job| job.state == JobState::Queued);
        let waits = queued.filter_map(|job| Some(since(now, self.record(job).known_since()?))).max().unwrap_or_default();
        let lead = self.queue_wait().max(waits) + self.cold_start() + LEAVES_BEFORE_END;
        for job in serving {
            self.mark(&job.id, |record| {
                record.is_due |= record.ends_at.is_some_and(|ends| since(ends, now) < record.longest_lead(ends).min(lead));
            });
        }
    }

    pub(crate) fn mark(&mut self, id: &str, change: impl FnOnce(&mut JobRecord)) {
        if let Some(record) = self.jobs.get_mut(id) {
            change(record);
        }
    }

    /// Notes that a job was asked to leave or cancelled. Its end is no failure, and it no longer
    /// counts unless it is seen to go on.
    pub(crate) fn give_up(&mut self, id: &str, now: SystemTime) {
        self.mark(id, |record| {
            record.is_given_up = true;
            record.leaving_since = record.leaving_since.or(Some(now));
        });
    }

    pub(crate) fn record(&self, job: &ObservedJob) -> &JobRecord {
        self.jobs.get(&job.id).expect("observe has made a record of each listed job")
    }

    pub(crate) fn is_recovering(&self) -> bool {
        self.recovers_until.is_some()
    }

    /// How many of `missing` jobs to submit now, without repeating a submission or causing a storm.
    ///
    /// `coming` is the number of jobs on their way.
    pub(crate) fn allow_submission(&self, missing: usize, (entry, coming): (&FleetEntry, usize), now: SystemTime) -> usize {
        let may_submit =
            self.submission.is_none() && !self.is_recovering() && self.failures.pause(now).is_none() && !self.failures.is_final();
        let most = match self.failures.is_probing() {
            _ if !may_submit => 0,
            true => 1_usize.saturating_sub(coming),
            false => missing,
        };
        self.pace.allowed(missing.min(most), entry, now)
    }

    pub(crate) fn note_submission(&mut self, parts: usize, form: u64, now: SystemTime) {
        self.submission = Some(Submission { parts, at: now, form: Some(form), is_confirmed: false });
        self.pace.note(parts, now);
    }

    /// Whether submissions have ended because too many jobs failed in a row.
    #[must_use]
    pub fn has_given_up(&self) -> bool {
        self.failures.is_final()
    }

    /// Forgets failures if somebody has asked for the entry since: they may have fixed the cause.
    pub(crate) fn note_request(&mut self, asked: u64) {
        if std::mem::replace(&mut self.asked, asked) != asked {
            self.failures = Failures::default();
        }
    }

    /// Whether both memories know the same jobs, and which of them have been ready.
    ///
    /// A memory that differs is written down at once. If the controller died before that, its
    /// successor could wait for jobs that have already ended.
    #[must_use]
    pub fn has_jobs_of(&self, earlier: &Self) -> bool {
        let known = |memory: &Self| memory.jobs.iter().map(|(id, record)| (id.clone(), record.ready.is_some())).collect::<Vec<_>>();
        self.submission == earlier.submission && known(self) == known(earlier)
    }

    /// Whether a submission is not fully listed yet.
    pub(crate) fn awaits_jobs(&self) -> bool {
        self.submission.is_some()
    }
}

/// Takes one part off a submission because it is listed, and returns when and in which form it was
/// submitted. `None` if no known submission is open.
fn list_one(submission: &mut Option<Submission>) -> (Option<SystemTime>, Option<u64>) {
    let Some(listed) = submission else { return (None, None) };
    let known = (Some(listed.at), listed.form);
    listed.parts -= 1;
    submission.take_if(|submission| submission.parts == 0);
    known
}

impl JobRecord {
    fn new(job: &ObservedJob, (submitted, form): (Option<SystemTime>, Option<u64>), now: SystemTime) -> Self {
        // The length of the suspension is unknown. If the job counted, its replacement could be
        // cancelled.
        let suspended_since = (job.state == JobState::Suspended).then(|| now - SUSPENDED_LIMIT);
        Self { submitted, form, listed: Some(now), waited: submitted, suspended_since, ..Self::default() }
    }

    /// Since when the job is known to exist.
    fn known_since(&self) -> Option<SystemTime> {
        self.submitted.or(self.listed)
    }

    fn note(&mut self, job: &ObservedJob, now: SystemTime) {
        let is_absent = job.state == JobState::Running && job.node == NodeState::NotAttached;
        self.absent_since = self.absent_since.or(Some(now)).filter(|_| is_absent);
        self.suspended_since = self.suspended_since.or(Some(now)).filter(|_| job.state == JobState::Suspended);
        match job.state {
            // A preempted job waits again. From its submission to its next start it has also run,
            // or was held.
            JobState::Queued if self.wait_is_known => self.forget_run(),
            JobState::Held => self.forget_run(),
            JobState::Ending => self.leaving_since = self.leaving_since.or(Some(now)),
            JobState::Running if job.node == NodeState::Draining => self.leaving_since = self.leaving_since.or(Some(now)),
            JobState::Running if [NodeState::Loading, NodeState::Ready].contains(&job.node) => self.leaving_since = None,
            JobState::Queued | JobState::Running | JobState::Suspended => {}
        }
        self.note_run(job, now);
        let took_requests = self.served.replace(job.served).is_some_and(|before| job.served > before);
        if job.in_flight > 0 || took_requests {
            self.busy = Some(now);
        }
    }

    /// Notes whether the job runs, since when and until when.
    fn note_run(&mut self, job: &ObservedJob, now: SystemTime) {
        if !job.has_started() {
            self.waited = Some(now);
            return;
        }
        if self.started.is_none() {
            self.start_is_watched = self.waited.is_some_and(|waited| since(now, waited) <= LONGEST_STEP);
            // The start lies between these two. Within them the scheduler's time is more exact if
            // the clocks agree.
            let earliest = self.waited.map_or(SystemTime::UNIX_EPOCH, |waited| waited.min(now));
            self.started = Some(job.started.unwrap_or(now).clamp(earliest, now));
        }
        let ends_at = job.run_time.zip(self.started).and_then(|(run_time, started)| run_time.end(started, now));
        self.ends_at = ends_at.or(self.ends_at);
    }

    fn forget_run(&mut self) {
        *self = Self {
            submitted: self.submitted,
            form: self.form,
            listed: self.listed,
            is_given_up: self.is_given_up,
            wait_is_known: true,
            ..Self::default()
        };
    }

    /// Whether the job was submitted in another form.
    pub(crate) fn is_outdated(&self, form: u64) -> bool {
        self.form.is_some_and(|own| own != form)
    }

    /// Whether the job may have a replacement.
    pub(crate) fn may_be_replaced(&self) -> bool {
        self.is_due || self.is_adopted
    }

    /// Whether the agent is gone for good.
    pub(crate) fn is_lost(&self, now: SystemTime) -> bool {
        self.absent_since.is_some_and(|absent| since(now, absent) >= ABSENT_LIMIT)
    }

    /// Whether the job is suspended for an unknown time.
    pub(crate) fn is_suspended(&self, now: SystemTime) -> bool {
        self.suspended_since.is_some_and(|suspended| since(now, suspended) >= SUSPENDED_LIMIT)
    }

    /// Whether the job has served and its host may be dead.
    pub(crate) fn is_away(&self, now: SystemTime) -> bool {
        self.ready.is_some() && self.absent_since.is_some_and(|absent| since(now, absent) >= AWAY_LIMIT)
    }

    /// Whether the job's end is no failed start: the controller ended it, or the job served for a
    /// while or until its end.
    fn may_be_over(&self, now: SystemTime) -> bool {
        self.is_given_up
            || self.has_served(now)
            || (self.ready.is_some() && self.ends_at.is_some_and(|ends| since(ends, now) <= LEAVES_BEFORE_END))
    }

    fn has_served(&self, now: SystemTime) -> bool {
        self.ready.is_some_and(|ready| since(now, ready) >= SERVED_AFTER)
    }

    /// The longest time before its end at which the job may be replaced.
    fn longest_lead(&self, ends: SystemTime) -> Duration {
        self.started.map_or(Duration::MAX, |started| since(ends, started) / 4 * LONGEST_LEAD_QUARTERS)
    }
}
