//! Batch jobs as agents report them, and as operators get them.

use hostler_proto::agent::v1 as wire;
use tokio::time::Instant;

use crate::fleet::job::{Job, Scheduler};

/// The job that an agent says it runs in, or nothing if it cannot be one.
pub(super) fn parse_job(job: wire::Job, now: Instant) -> Option<Job> {
    let wire::Job { scheduler, id, array_index, run, ends_in_ms, leaves_in_ms } = job;
    let scheduler = Scheduler::parse(&scheduler).filter(|_| Job::is_id(&id))?;
    let ends_at = ends_in_ms.map(|left| Job::moment(now, left));
    let leaves_at = leaves_in_ms.or(ends_in_ms).map(|left| Job::moment(now, left.min(ends_in_ms.unwrap_or(u64::MAX))));
    Some(Job { scheduler, id, array_index, run: run.max(1), ends_at, leaves_at })
}

/// A job in the agent's words for operators, with the time that was left at that moment.
pub(crate) fn job_message(job: &Job, at: Instant) -> wire::Job {
    let left = |moment: Instant| u64::try_from(moment.saturating_duration_since(at).as_millis()).unwrap_or(u64::MAX);
    wire::Job {
        scheduler: job.scheduler.as_str().to_owned(),
        id: job.id.clone(),
        array_index: job.array_index,
        run: job.run,
        ends_in_ms: job.ends_at.map(left),
        leaves_in_ms: job.leaves_at.map(left),
    }
}
