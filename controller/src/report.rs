//! Builds an entry's part of the status file from one step. Pure.

use std::time::SystemTime;

use hostler_cluster::NodeState;
use hostler_scheduler::{JobState, ScheduledJob};

use crate::observation::{EntryView, find_node, node_state};
use crate::status::{EntryStatus, JobStatus};

pub(crate) fn report(view: &EntryView<'_>, now: SystemTime) -> EntryStatus {
    let is_ready = |job: &&ScheduledJob| job.state == JobState::Running && node_state(find_node(view.nodes, &job.id)) == NodeState::Ready;
    let is_counted = |job: &&ScheduledJob| job.state != JobState::Ending;
    let lacks_jobs = view.jobs.iter().filter(is_counted).count() < view.memory.desired_jobs() as usize;
    let delay = view.memory.submission_delay(view.entry, now);
    let in_nodes = |jobs: u32| jobs.saturating_mul(view.entry.nodes_per_replica.max(1));
    EntryStatus {
        name: view.entry.name.clone(),
        model: view.entry.model.clone(),
        asked: view.entry.asked,
        wanted: in_nodes(view.memory.desired_jobs()),
        ready: in_nodes(u32::try_from(view.jobs.iter().filter(is_ready).count()).unwrap_or(u32::MAX)),
        jobs: view.jobs.iter().map(|job| report_job(view, job, now)).collect(),
        failures: view.memory.failures(),
        pause: view.memory.pause(now).map(|pause| pause.as_secs()),
        given_up: view.memory.has_given_up(),
        limited: (lacks_jobs && !delay.is_zero()).then_some(delay.as_secs()),
        budget: view.memory.budget_left(view.entry, now),
        refusal: view.refusal.to_owned(),
        cold_start: view.memory.learned_parts().map(|(part, took)| (part.to_owned(), took.as_secs())).collect(),
    }
}

fn report_job(view: &EntryView<'_>, job: &ScheduledJob, now: SystemTime) -> JobStatus {
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
        starts_in: view.estimated_wait(job, now).map(|left| left.as_secs()),
        ends_in: view.memory.ends_at(&job.id).map(|end| end.duration_since(now).unwrap_or_default().as_secs()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use hostler_cluster::{FleetSize, Memory, decide};
    use hostler_proto::agent::v1::Phase;
    use hostler_proto::fleet::v1::ListResponse;
    use hostler_scheduler::RunTime;

    use super::*;
    use crate::observation::observe;
    use crate::observation::tests::{at, entry, job, node};

    #[test]
    fn each_job_is_reported_with_scheduler_and_router_facts() {
        let estimated = ScheduledJob { estimated_start: Some(at(520)), comment: "ngpus".into(), ..job("11.head", JobState::Queued) };
        let limit = Duration::from_secs(3600);
        let ready = ScheduledJob { run_time: Some(RunTime { limit, used: None }), host: "x1".into(), ..job("12.head", JobState::Running) };
        let jobs = [
            estimated,
            ready,
            job("13.head", JobState::Running),
            job("14.head", JobState::Running),
            job("15.head", JobState::Held),
            job("16.head", JobState::Ending),
        ];
        let nodes =
            [node("12.head", &[(Phase::Ready, 0)]), node("13.head", &[(Phase::Draining, 0)]), node("16.head", &[(Phase::Ready, 0)])];
        let entry = entry(FleetSize::Fixed(3));
        let (_, memory) = decide(&entry, &observe(&jobs, &ListResponse::default(), &[], at(450)), &Memory::default(), at(450));
        let view = EntryView { entry: &entry, names: &[], memory: &memory, jobs: &jobs, nodes: &nodes, refusal: "no such queue" };
        let status = report(&view, at(500));
        let states: Vec<&str> = status.jobs.iter().map(|job| job.state.as_str()).collect();
        assert_eq!(states, ["queued", "ready", "draining", "waiting for its agent", "held", "ending"]);
        assert_eq!((status.ready, status.refusal.as_str(), status.jobs[0].comment.as_str()), (1, "no such queue", "ngpus"));
        assert_eq!((status.jobs[0].starts_in, status.jobs[1].ends_in, status.jobs[1].host.as_str()), (Some(20), Some(3500), "x1"));
        let spread = hostler_cluster::FleetEntry { nodes_per_replica: 2, ..entry.clone() };
        let status = report(&EntryView { entry: &spread, ..view }, at(500));
        assert_eq!((status.wanted, status.ready), (6, 2), "nodes are counted, of which a job has two");
    }
}
