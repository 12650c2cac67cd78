//! End of the batch job, read repeatedly because users shorten jobs, and the time when the agent
//! has to leave, so that it is gone before.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use hostler_boot::Shutdown;
use hostler_scheduler::{CommandError, JobReading, Scheduler};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::{GRACE_MARGIN, Job, MIN_GRACE, default_grace};

/// Overtime after which the end reported by the scheduler counts as wrong.
///
/// Slurm may let jobs go on (`OverTimeLimit`), and PBS may not say how long a job was suspended.
/// Otherwise both end a job within a minute.
const MAX_OVERTIME: Duration = Duration::from_secs(10 * 60);

/// Divisor of the time left that gives the pause between readings.
///
/// An hour before its end a job is read each minute, twelve hours before it each twelve minutes.
const READINGS_LEFT: u32 = 60;

/// Longest pause between readings. Users shorten jobs, and an agent should soon know.
const LONGEST_PAUSE: Duration = Duration::from_secs(15 * 60);

/// Ends that differ by less are the same, read by clocks one of which was set.
const SAME_END: Duration = Duration::from_secs(1);

/// Facts about a job's present run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct JobFacts {
    /// Number of the run, counted from 1.
    pub(crate) run: u32,
    /// When the scheduler ends the job, as far as known.
    pub(crate) ends_at: Option<Instant>,
    /// When the agent begins to leave.
    pub(crate) leaves_at: Option<Instant>,
    /// How long the job waited in the queue, as far as known.
    pub(crate) queued: Option<Duration>,
}

/// The job, its scheduler's grace and the facts about its end.
#[derive(Debug)]
pub(crate) struct JobClock {
    job: Job,
    /// How long the agent may live after the scheduler's SIGTERM.
    pub(crate) grace: Duration,
    time_to_leave: Duration,
    /// Time that the job had left when its end was first read.
    first_left: OnceLock<Duration>,
    facts: watch::Sender<JobFacts>,
    /// Run that the scheduler named first, which is this process's run.
    ///
    /// A later run has another agent, even if this one still asks.
    run: OnceLock<u32>,
    /// The scheduler did not answer last time, and the log says so.
    is_failing: AtomicBool,
}

impl JobClock {
    /// Clock of the batch job that this process runs in.
    ///
    /// `time_to_leave` is how long before the job's end the agent begins to leave.
    pub(crate) async fn of_environment(time_to_leave: Duration) -> Option<Arc<Self>> {
        let job = Job::detect(|name| std::env::var(name).ok())?;
        Some(Arc::new(Self::start(job, time_to_leave).await))
    }

    /// Asks the scheduler about the job.
    async fn start(job: Job, time_to_leave: Duration) -> Self {
        let (grace, reading) = tokio::join!(read_grace(job.scheduler), job.scheduler.read_job(&job.id));
        let unknown = JobFacts { run: job.run, ends_at: None, leaves_at: None, queued: None };
        let clock = Self {
            job,
            grace,
            time_to_leave,
            first_left: OnceLock::new(),
            facts: watch::Sender::new(unknown),
            run: OnceLock::new(),
            is_failing: AtomicBool::new(false),
        };
        clock.take(reading);
        let JobFacts { run, ends_at, .. } = *clock.facts.borrow();
        tracing::info!(job = clock.job.id, run, ends_in_s = ends_at.map(seconds_until), grace = ?clock.grace, "runs in a batch job");
        clock
    }

    pub(crate) fn job(&self) -> &Job {
        &self.job
    }

    pub(crate) fn facts(&self) -> watch::Receiver<JobFacts> {
        self.facts.subscribe()
    }

    /// Waits until the agent has to leave, and reads the job's end again at every `interval`.
    async fn wait_to_leave(&self, interval: Duration) {
        // The agents of an array start together, and should not all query the scheduler together
        // ever after.
        let mut next_reading = Instant::now() + interval.mul_f64(fastrand::f64());
        loop {
            let leaves_at = self.facts.borrow().leaves_at;
            sleep_until(leaves_at.map_or(next_reading, |leaves_at| leaves_at.min(next_reading))).await;
            let now = Instant::now();
            let is_due = leaves_at.is_some_and(|leaves_at| leaves_at <= now);
            // An agent that was suspended has missed readings, and its job may end later now.
            if is_due && now < next_reading + interval {
                let ends_in = self.facts.borrow().ends_at.map_or(0, seconds_until);
                tracing::warn!(event = "job_ends", job = self.job.id, "the {} ends in {ends_in} s: leaving it", self.job);
                return;
            }
            let read = tokio::select! {
                read = self.job.scheduler.read_job(&self.job.id) => Some(read),
                // A slow scheduler does not delay the agent.
                () = wait_until(leaves_at), if !is_due => None,
            };
            if let Some(read) = read {
                self.take(read);
                let left = self.facts.borrow().ends_at.map(|ends_at| ends_at.saturating_duration_since(now));
                next_reading = Instant::now() + pause_between_readings(interval, left);
            }
        }
    }

    /// Applies a reading. Without a new end the last known one stays.
    fn take(&self, read: Result<JobReading, CommandError>) {
        let reading = match read {
            Ok(reading) => reading,
            Err(error) => {
                if !self.is_failing.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        event = "job_end_unknown",
                        job = self.job.id, %error,
                        "cannot read when the job ends; what was read before stays"
                    );
                }
                return;
            }
        };
        self.is_failing.store(false, Ordering::Relaxed);
        let reading = JobReading { run: reading.run.map(|run| *self.run.get_or_init(|| run)), ..reading };
        let now = (Instant::now(), SystemTime::now());
        let left = reading.ends_at.and_then(|ends_at| ends_at.duration_since(now.1).ok());
        let time_to_leave = left.map_or(self.time_to_leave, |left| cap(self.time_to_leave, *self.first_left.get_or_init(|| left)));
        let facts = JobFacts::of(reading, self.facts.borrow().run, now, time_to_leave);
        self.facts.send_if_modified(|known| {
            let changed = !facts.is_same_as(known);
            if changed {
                tracing::debug!(job = self.job.id, ends_in_s = facts.ends_at.map(seconds_until), "the job's end");
                *known = facts;
            }
            changed
        });
    }
}

/// Pause before the end of a job with this time left is read again.
///
/// `left` is `None` if the job has no end, or none is known.
fn pause_between_readings(interval: Duration, left: Option<Duration>) -> Duration {
    left.map_or(interval, |left| (left / READINGS_LEFT).min(LONGEST_PAUSE).max(interval))
}

/// Drains before the job ends, if there is a job with an end.
pub(crate) async fn drain_in_time(clock: Option<Arc<JobClock>>, interval: Duration, shutdown: Shutdown) {
    if let Some(clock) = clock {
        clock.wait_to_leave(interval).await;
        shutdown.drain();
    }
}

impl JobFacts {
    /// Converts a reading to the clocks of this host.
    fn of(reading: JobReading, known_run: u32, now: (Instant, SystemTime), time_to_leave: Duration) -> Self {
        let ends_at = reading.ends_at.and_then(|ends_at| match ends_at.duration_since(now.1) {
            Ok(left) => now.0.checked_add(left),
            Err(past) if past.duration() > MAX_OVERTIME => None,
            Err(past) => Some(now.0.checked_sub(past.duration()).unwrap_or(now.0)),
        });
        // A clock that has just begun has no earlier moment.
        let leaves_at = ends_at.map(|ends_at| ends_at.checked_sub(time_to_leave).unwrap_or(now.0));
        let run = reading.run.unwrap_or(known_run);
        // The wait of a later run is not known: schedulers keep the time of the first submission.
        Self { run, ends_at, leaves_at, queued: reading.queued.filter(|_| run == 1) }
    }

    fn is_same_as(&self, other: &Self) -> bool {
        let apart = |one: Instant, other: Instant| one.saturating_duration_since(other) + other.saturating_duration_since(one);
        self.run == other.run
            && self.queued == other.queued
            && match (self.ends_at, other.ends_at) {
                (Some(ends), Some(other)) => apart(ends, other) < SAME_END,
                (ends, other) => ends == other,
            }
    }
}

/// Caps the time to leave at a quarter of the job's time at the start, so that a short job serves,
/// too.
fn cap(time_to_leave: Duration, first_left: Duration) -> Duration {
    time_to_leave.min(first_left / 4)
}

/// How long the scheduler lets the agent live after SIGTERM.
pub(crate) async fn read_grace(scheduler: Scheduler) -> Duration {
    match scheduler.read_kill_wait().await {
        Ok(Some(kill_wait)) => kill_wait.saturating_sub(GRACE_MARGIN).max(MIN_GRACE),
        Ok(None) => default_grace(scheduler),
        Err(error) => {
            tracing::warn!(%error, "cannot read Slurm's KillWait; its default counts");
            default_grace(scheduler)
        }
    }
}

async fn wait_until(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

fn seconds_until(moment: Instant) -> u64 {
    moment.saturating_duration_since(Instant::now()).as_secs()
}

#[cfg(test)]
mod tests;
