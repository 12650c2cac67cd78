//! The batch job in which a controller runs itself, where sites end long processes on login nodes. It asks the scheduler for the jobs of the fleet's
//! controllers, has `cluster` decide, and carries that out.

use std::time::{Duration, Instant, SystemTime};

use hostler_cluster::{ControllerJob, SuccessionAction, SuccessionMemory, decide_succession, find_successors};
use hostler_scheduler::{ScheduledJob, Scheduler, is_same_job};

use crate::ControllerSetup;
use crate::step_error::StepError;
use crate::submission::build_controller_submission;

/// The job, as its controller knows it.
#[derive(Debug)]
pub(crate) struct OwnJob {
    id: String,
    predecessor: Option<String>,
    /// When this process began, which is a moment after the job did.
    began: Instant,
    /// What was asked for, until the list says what the job has.
    walltime: Duration,
    memory: SuccessionMemory,
}

impl OwnJob {
    pub(crate) fn new(id: String, predecessor: Option<String>, walltime: Duration) -> Self {
        Self { id, predecessor, began: Instant::now(), walltime, memory: SuccessionMemory::default() }
    }

    /// Keeps one successor; `true` when the controller is to end and leave its place to that one.
    pub(crate) async fn step(&mut self, setup: &ControllerSetup) -> Result<bool, StepError> {
        let listed = list_jobs(setup).await?;
        // A list without this job is not the one that it can decide by.
        let Some(own) = listed.iter().find(|job| is_same_job(&job.id, &self.id)) else { return Ok(false) };
        let limit = own.run_time.map_or(self.walltime, |run| run.limit);
        let standby = setup.folder.standby()?;
        let own = self.describe(limit, standby.as_deref());
        let (action, memory) = decide_succession(&own, &listed, &self.memory, SystemTime::now());
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
        let submission = setup.scheduler.render(&build_controller_submission(&setup.config, &setup.folder, &setup.job_program(), after));
        if let Some(file) = &submission.script_file {
            setup.folder.write_script(file, &submission.script)?;
        }
        setup.check_place()?;
        let job = Scheduler::submit(submission).await?;
        tracing::info!(job, after, "submitted the controller's next job");
        self.memory.note_submitted(job);
        Ok(())
    }

    /// Ends the jobs that would go on after this one, for there is nothing left to keep.
    pub(crate) async fn end_successors(&self, setup: &ControllerSetup) -> Result<(), StepError> {
        let listed = list_jobs(setup).await?;
        let jobs: Vec<String> = find_successors(&self.describe(self.walltime, None), &listed).iter().map(|job| job.id.clone()).collect();
        Ok(setup.scheduler.cancel(&jobs).await?)
    }

    fn describe<'a>(&'a self, limit: Duration, standby: Option<&'a str>) -> ControllerJob<'a> {
        let left = limit.saturating_sub(self.began.elapsed());
        ControllerJob { id: &self.id, predecessor: self.predecessor.as_deref(), limit, left, standby }
    }
}

async fn list_jobs(setup: &ControllerSetup) -> Result<Vec<ScheduledJob>, StepError> {
    Ok(setup.scheduler.list(&setup.folder.controller_job_name()).await?)
}
