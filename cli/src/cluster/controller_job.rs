//! The fleet's controller as a batch job: finds or submits it, and shows its state while it waits
//! in the queue.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use hostler_controller::{Endpoint, JobProgram, build_controller_submission};
use hostler_scheduler::{JobState, RenderedSubmission, ScheduledJob, Scheduler};
use tokio::time::sleep;

use super::Fleet;
use super::controller_process::find_controller;
use super::job_logs::{last_words, last_words_of};
use crate::output::say;

const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// How often the scheduler is queried, as people do.
const ASK_INTERVAL: Duration = Duration::from_secs(5);

/// Time for which a job may be missing from the list after it was submitted, or as the follower of
/// another.
const LIST_LAG: Duration = Duration::from_secs(15);

/// Time in which the fleet's controller jobs end after the last one has left. Schedulers take up to
/// half a minute from SIGTERM to SIGKILL.
const END_TIMEOUT: Duration = Duration::from_secs(90);

/// Submits a job for the controller, unless there is one; returns its id.
pub(super) async fn ensure_job(fleet: &Fleet) -> anyhow::Result<String> {
    let folder = fleet.folder.clone();
    let _lock = tokio::task::spawn_blocking(move || folder.lock_submission()).await??;
    let scheduler = fleet.config.find_scheduler()?;
    if let Some(job) = list_jobs(fleet, scheduler).await?.first() {
        return Ok(job.id.clone());
    }
    let submission = render(fleet, scheduler)?;
    if let Some(file) = &submission.script_file {
        fleet.folder.write_script(file, &submission.script)?;
    }
    Scheduler::submit(submission).await.context("the controller's job was not submitted, as far as is known")
}

/// Submission of the controller's job if it follows no other controller.
pub(super) fn render(fleet: &Fleet, scheduler: Scheduler) -> anyhow::Result<RenderedSubmission> {
    let program = std::env::current_exe().context("this program does not know its own path")?;
    let program = JobProgram { program: &program, config: fleet.file.as_deref() };
    Ok(scheduler.render(&build_controller_submission(&fleet.config, &fleet.folder, &program, None)))
}

/// Shows what the controller's job waits for until the controller runs. A job that died is not
/// submitted again: it would die again.
pub(super) async fn wait_until_runs(fleet: &Fleet) -> anyhow::Result<Endpoint> {
    let scheduler = fleet.config.find_scheduler()?;
    let (mut printed, mut asked_at, mut listed) = (String::new(), None::<Instant>, Instant::now());
    loop {
        if let Some(endpoint) = find_controller(&fleet.folder).await? {
            return Ok(endpoint);
        }
        if asked_at.is_none_or(|asked_at| asked_at.elapsed() >= ASK_INTERVAL) {
            asked_at = Some(Instant::now());
            let line = match list_jobs(fleet, scheduler).await {
                Ok(jobs) => describe(&jobs),
                Err(error) => Some(format!("trouble   {error:#}")),
            };
            if let Some(line) = line {
                listed = Instant::now();
                if line != printed {
                    say(&line);
                    printed = line;
                }
            } else if listed.elapsed() >= LIST_LAG {
                let logs = fleet.folder.job_logs();
                let log = fleet.folder.controller_log();
                // A controller writes to its own log. The scheduler shows the output of a job that
                // did not get that far.
                let words = last_words_of([log.clone()], fleet.began).or_else(|| last_words(&logs, fleet.began));
                let cause = words.map(|words| format!(": {words}")).unwrap_or_default();
                bail!("the controller's job has ended{cause}; see {} and {}", log.display(), logs.display());
            }
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Ends all jobs of the fleet's controllers, first those that wait. A running one has a moment to
/// end by itself.
///
/// If another command wants something again, the jobs belong to that command and stay.
pub(super) async fn end_jobs(fleet: &Fleet, patience: Duration) -> anyhow::Result<()> {
    let (scheduler, began) = (fleet.config.find_scheduler()?, Instant::now());
    loop {
        let jobs = scheduler.list(&fleet.folder.controller_job_name()).await?;
        // The order matters: whoever submits one of these jobs has written down before what is
        // wanted.
        if jobs.is_empty() || !fleet.folder.entries()?.is_empty() {
            return Ok(());
        }
        let is_late = began.elapsed() >= patience;
        let ended = jobs.iter().filter(|job| job.state != JobState::Ending && (is_late || !job.state.has_started()));
        scheduler.cancel(&ended.map(|job| job.id.clone()).collect::<Vec<_>>()).await?;
        if began.elapsed() >= patience + END_TIMEOUT {
            let ids: Vec<String> = jobs.into_iter().map(|job| job.id).collect();
            bail!("the controller's own job does not end: cancel {} with the scheduler's own command", ids.join(", "));
        }
        sleep(POLL_INTERVAL * 2).await;
    }
}

/// Jobs that may still start a controller.
async fn list_jobs(fleet: &Fleet, scheduler: Scheduler) -> anyhow::Result<Vec<ScheduledJob>> {
    let mut jobs = scheduler.list(&fleet.folder.controller_job_name()).await?;
    jobs.retain(|job| job.state != JobState::Ending);
    // A running job is nearer than the one that follows it.
    jobs.sort_by_key(|job| !job.state.has_started());
    Ok(jobs)
}

fn describe(jobs: &[ScheduledJob]) -> Option<String> {
    let job = jobs.first()?;
    let word = match job.state {
        JobState::Queued => "queued",
        JobState::Held => "held",
        JobState::Running | JobState::Ending => "running",
        JobState::Suspended => "suspended",
    };
    let comment = match job.state {
        JobState::Queued | JobState::Held if !job.comment.is_empty() => format!(": {}", job.comment),
        JobState::Running => format!(" on {}: its controller is starting", job.host),
        _ => String::new(),
    };
    Some(format!("{word:<9} the controller's job {}{comment}", job.id))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(id: &str, state: JobState, comment: &str) -> ScheduledJob {
        ScheduledJob {
            id: id.into(),
            state,
            comment: comment.into(),
            submitted: None,
            started: None,
            run_time: None,
            estimated_start: None,
            host: if state.has_started() { "x1".into() } else { String::new() },
        }
    }

    #[test]
    fn a_waiting_user_sees_the_state_of_the_controllers_job() {
        let comment = "Not Running: Insufficient amount of resource: ncpus";
        let queued = describe(&[job("11.head", JobState::Queued, comment)]).unwrap();
        assert_eq!(queued, format!("queued    the controller's job 11.head: {comment}"));
        let running = describe(&[job("11.head", JobState::Running, "Job run"), job("12.head", JobState::Held, "")]).unwrap();
        assert_eq!(running, "running   the controller's job 11.head on x1: its controller is starting");
        assert_eq!(describe(&[]), None);
    }
}
