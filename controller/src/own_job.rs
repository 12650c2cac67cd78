//! The batch job in which a controller runs itself, for sites that end long processes on login
//! nodes.
//!
//! It lists the fleet's controller jobs, lets `cluster` decide, and carries that out.

use std::time::{Duration, SystemTime};

use hostler_cluster::{ControllerJob, SuccessionAction, SuccessionMemory, decide_succession, find_successors};
use hostler_scheduler::{ScheduledJob, Scheduler, is_same_job};

use crate::ControllerSetup;
use crate::step_error::StepError;
use crate::submission::{JobProgram, build_controller_submission};

/// A controller's knowledge of its own job.
#[derive(Debug)]
pub(crate) struct OwnJob {
    id: String,
    predecessor: Option<String>,
    /// How long the job may run, followed by the end of that time by this clock. Until the list
    /// gives both, the requested time counts from the start of this process.
    limit: Duration,
    ends_at: SystemTime,
    drain_timeout: Duration,
    memory: SuccessionMemory,
    /// Whether the job was ending when nothing was left to do last; `None` while something is.
    settled: Option<bool>,
}

impl OwnJob {
    /// The job in which this setup's controller runs; `None` if it runs in none.
    pub(crate) fn of(setup: &ControllerSetup) -> Option<Self> {
        let limit = setup.jobs.cluster.controller_walltime;
        Some(Self {
            id: setup.endpoint.job.clone()?,
            predecessor: setup.predecessor.clone(),
            limit,
            ends_at: setup.began + limit,
            drain_timeout: setup.drain_timeout,
            memory: SuccessionMemory::default(),
            settled: None,
        })
    }

    /// When the job ends, as far as is known.
    pub(crate) fn ends_at(&self) -> SystemTime {
        self.ends_at
    }

    /// Whether the controller has to end by the known time of its job, even if the scheduler does
    /// not answer.
    pub(crate) fn is_over(&self, now: SystemTime) -> bool {
        self.describe(now, None).is_over()
    }

    /// Whether the scheduler need not be queried now.
    pub(crate) fn is_settled(&self, now: SystemTime) -> bool {
        self.settled == Some(self.describe(now, None).is_ending())
    }

    /// Keeps one successor. Returns `true` when the controller is to end and leave its place to it.
    pub(crate) async fn step(&mut self, setup: &ControllerSetup) -> Result<bool, StepError> {
        let listed = list_jobs(setup).await?;
        // A list without this job is no basis for a decision.
        let Some(own) = listed.iter().find(|job| is_same_job(&job.id, &self.id)) else { return Ok(false) };
        let now = SystemTime::now();
        self.note_end(own, now);
        let standby = setup.folder.standby()?;
        let described = self.describe(now, standby.as_deref());
        let (action, memory) = decide_succession(&described, &listed, &self.memory, now);
        self.settled = action.is_none().then_some(described.is_ending());
        self.memory = memory;
        match action {
            None => Ok(false),
            Some(SuccessionAction::Leave) => {
                tracing::info!(job = self.id, standby, "the controller leaves its place to the next one");
                Ok(true)
            }
            Some(SuccessionAction::Cancel { jobs }) => {
                tracing::info!(?jobs, "cancelling jobs of controllers that nobody needs");
                setup.scheduler.cancel(&jobs).await?;
                Ok(false)
            }
            Some(SuccessionAction::Submit { after_own_end }) => {
                self.submit(setup, after_own_end).await?;
                Ok(false)
            }
        }
    }

    async fn submit(&mut self, setup: &ControllerSetup, after_own_end: bool) -> Result<(), StepError> {
        let after = after_own_end.then_some(self.id.as_str());
        let submission =
            setup.scheduler.render(&build_controller_submission(&setup.jobs.cluster, &setup.folder, &JobProgram::of(&setup.jobs), after));
        if let Some(file) = &submission.script_file {
            setup.folder.write_script(file, &submission.script)?;
        }
        setup.check_place()?;
        let job = Scheduler::submit(submission).await?;
        tracing::info!(job, after, "submitted the controller's next job");
        self.memory.note_submitted(job);
        Ok(())
    }

    /// Cancels the jobs that would follow this one, because there is nothing left to keep.
    pub(crate) async fn end_successors(&self, setup: &ControllerSetup) -> Result<(), StepError> {
        let listed = list_jobs(setup).await?;
        let jobs: Vec<String> =
            find_successors(&self.describe(SystemTime::now(), None), &listed).iter().map(|job| job.id.clone()).collect();
        Ok(setup.scheduler.cancel(&jobs).await?)
    }

    /// Notes the listed times of this job. Times missing from the list stay as they were.
    fn note_end(&mut self, own: &ScheduledJob, now: SystemTime) {
        let Some((run, started)) = own.run_time.zip(own.started) else { return };
        let Some(ends_at) = run.end(started, now) else { return };
        (self.limit, self.ends_at) = (run.limit, ends_at);
    }

    fn describe<'a>(&'a self, now: SystemTime, standby: Option<&'a str>) -> ControllerJob<'a> {
        ControllerJob {
            id: &self.id,
            predecessor: self.predecessor.as_deref(),
            limit: self.limit,
            left: self.ends_at.duration_since(now).unwrap_or_default(),
            drain_timeout: self.drain_timeout,
            standby,
        }
    }
}

async fn list_jobs(setup: &ControllerSetup) -> Result<Vec<ScheduledJob>, StepError> {
    Ok(setup.scheduler.list(&setup.folder.controller_job_name()).await?)
}

#[cfg(test)]
mod tests {
    use hostler_scheduler::{JobState, RunTime};

    use super::*;
    use crate::observation::tests::job;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn a_jobs_end_is_the_schedulers_latest_word() {
        let limit = Duration::from_secs(3600);
        let mut own = OwnJob {
            id: "12.head".into(),
            predecessor: None,
            limit,
            ends_at: at(10_000) + limit,
            drain_timeout: Duration::from_secs(30),
            memory: SuccessionMemory::default(),
            settled: None,
        };
        assert!(!own.is_over(at(13_554)) && own.is_over(at(13_555)), "nobody has said anything");
        let silent = job("12.head", JobState::Running);
        own.note_end(&silent, at(10_000));
        assert_eq!(own.ends_at, at(13_600));
        // The job waited for its place for half of its time, which this process does not know.
        let listed = ScheduledJob { started: Some(at(8_200)), run_time: Some(RunTime { limit, used: None }), ..silent.clone() };
        own.note_end(&listed, at(10_000));
        own.note_end(&silent, at(11_000));
        assert_eq!(own.describe(at(11_000), None).left, Duration::from_secs(800));
        own.settled = Some(false);
        assert!(own.is_settled(at(10_899)) && !own.is_settled(at(10_900)), "the last quarter asks for the next one at once");
        assert!(!own.is_over(at(11_754)) && own.is_over(at(11_755)) && own.is_over(at(20_000)));
    }
}
