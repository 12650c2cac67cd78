//! What a step has seen of an entry, as the status file tells it. Pure.

use std::time::SystemTime;

use hostler_cluster::NodeState;
use hostler_scheduler::{JobState, ScheduledJob};

use crate::observation::{EntryView, find_node, node_state};
use crate::status::{EntryStatus, JobStatus};

pub(crate) fn report(view: &EntryView<'_>, now: SystemTime) -> EntryStatus {
    let is_ready = |job: &&ScheduledJob| job.state == JobState::Running && node_state(find_node(view.nodes, &job.id)) == NodeState::Ready;
    EntryStatus {
        name: view.entry.name.clone(),
        model: view.entry.model.clone(),
        wanted: view.memory.wanted(),
        ready: u32::try_from(view.jobs.iter().filter(is_ready).count()).unwrap_or(u32::MAX),
        jobs: view.jobs.iter().map(|job| report_job(view, job, now)).collect(),
        failures: view.memory.failures(),
        pause: view.memory.pause(now).map(|pause| pause.as_secs()),
        refusal: view.refusal.to_owned(),
    }
}

fn report_job(view: &EntryView<'_>, job: &ScheduledJob, now: SystemTime) -> JobStatus {
    let seconds_until = |moment: SystemTime| moment.duration_since(now).unwrap_or_default().as_secs();
    let state = match job.state {
        JobState::Queued => "queued",
        JobState::Held => "held",
        JobState::Suspended => "suspended",
        JobState::Ending => "ending",
        JobState::Running => match node_state(find_node(view.nodes, &job.id)) {
            NodeState::NotAttached => "waiting for its agent",
            NodeState::Loading => "loading",
            NodeState::Ready => "ready",
            NodeState::Draining => "draining",
            NodeState::Failed => "failed",
        },
    };
    JobStatus {
        id: job.id.clone(),
        state: state.to_owned(),
        comment: job.comment.clone(),
        host: job.host.clone(),
        starts_in: job.estimated_start.map(seconds_until),
        ends_in: job.ends.map(seconds_until),
    }
}
