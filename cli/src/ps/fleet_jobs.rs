//! The batch jobs of the user's fleet, as its controller last saw them. The router knows only those whose agent has come.

use std::time::{Duration, SystemTime};

use hostler_controller::{FleetFolder, FleetStatus, JobStatus};
use serde::Serialize;

use crate::admin::{AdminArgs, AdminEndpoint};
use crate::output::{Side, table};
use crate::ps::time_in_words;
use crate::settings::cluster_config;

/// After this time without a step the controller is gone, and what it saw says nothing.
const STATUS_LIFETIME: Duration = Duration::from_secs(60);

/// A job of the fleet that has no node of the router's list, or not yet.
#[derive(Debug, Serialize)]
pub(super) struct FleetJob {
    /// The name of the entry that it is for.
    fleet: String,
    #[serde(flatten)]
    job: JobStatus,
}

/// The jobs of the fleet whose router is asked; none of another one.
pub(super) fn read(admin: &AdminArgs) -> anyhow::Result<Vec<FleetJob>> {
    let Some(folder) = FleetFolder::find(&cluster_config(admin.config.as_deref())?)? else { return Ok(Vec::new()) };
    let (Some(endpoint), Some(status)) = (folder.endpoint()?, folder.status()?) else { return Ok(Vec::new()) };
    let is_asked = AdminEndpoint::may_be(admin, &endpoint.operators_socket);
    Ok(if is_asked { list(status, SystemTime::now()) } else { Vec::new() })
}

fn list(status: FleetStatus, now: SystemTime) -> Vec<FleetJob> {
    if now.duration_since(status.at).is_ok_and(|age| age > STATUS_LIFETIME) {
        return Vec::new();
    }
    let of_entry = |entry: hostler_controller::EntryStatus| {
        let name = entry.name;
        entry.jobs.into_iter().map(move |job| FleetJob { fleet: name.clone(), job })
    };
    status.entries.into_iter().flat_map(of_entry).collect()
}

/// A line for each job that serves nothing yet.
pub(super) fn job_lines(jobs: &[FleetJob]) -> Vec<String> {
    let shown = jobs.iter().filter(|FleetJob { job, .. }| !["ready", "loading", "draining"].contains(&job.state.as_str()));
    let row = |FleetJob { fleet, job }: &FleetJob| {
        let starts = job.starts_in.filter(|_| job.state == "queued").map(|left| format!("starts in {}", time_in_words(left)));
        [fleet.clone(), format!("job {}", job.id), job.state.clone(), starts.unwrap_or_default(), job.comment.clone()]
    };
    table([Side::Left; 5], &shown.map(row).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use hostler_controller::EntryStatus;

    use super::*;

    fn job(id: &str, state: &str, comment: &str) -> JobStatus {
        JobStatus { id: id.into(), state: state.into(), comment: comment.into(), host: String::new(), starts_in: Some(720), ends_in: None }
    }

    fn status(at: SystemTime) -> FleetStatus {
        let comment = "Not Running: Insufficient amount of resource: ngpus";
        let jobs = vec![job("12.head", "ready", "Job run"), job("13.head", "queued", comment), job("14.head", "held", "")];
        let entry = EntryStatus {
            name: "qwen".into(),
            model: "Qwen/Qwen3-8B".into(),
            wanted: 3,
            ready: 1,
            jobs,
            failures: 0,
            pause: None,
            refusal: String::new(),
        };
        FleetStatus { at, entries: vec![entry], trouble: String::new() }
    }

    #[test]
    fn jobs_that_wait_are_shown_with_the_schedulers_words() {
        let now = SystemTime::now();
        let jobs = list(status(now), now);
        assert_eq!(
            job_lines(&jobs),
            ["qwen  job 13.head  queued  starts in 12m  Not Running: Insufficient amount of resource: ngpus", "qwen  job 14.head  held"]
        );
        let json = serde_json::to_value(&jobs).unwrap();
        assert_eq!((&json[1]["fleet"], &json[1]["id"], &json[1]["state"]), (&"qwen".into(), &"13.head".into(), &"queued".into()));
    }

    #[test]
    fn what_a_controller_saw_that_is_gone_is_not_shown() {
        let now = SystemTime::now();
        assert!(list(status(now - Duration::from_secs(61)), now).is_empty());
        assert_eq!(list(status(now), now).len(), 3);
    }
}
