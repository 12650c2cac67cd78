//! Batch jobs of the user's fleet, as its controller last saw them. The router knows only those
//! whose agent has come.

use hostler_controller::{FleetFolder, FleetStatus, JobStatus};
use serde::Serialize;

use crate::admin::{AdminArgs, AdminEndpoint};
use crate::output::time_in_words;
use crate::output::{Side, table};
use crate::settings::cluster_config;

/// A job of the fleet without a node in the router's list, or not yet.
#[derive(Debug, Serialize)]
pub(super) struct FleetJob {
    /// Name of the job's entry.
    fleet: String,
    #[serde(flatten)]
    job: JobStatus,
}

/// Folder of the fleet whose router is asked; `None` for another router, or if the fleet's
/// controller is gone.
pub(super) fn find_folder(admin: &AdminArgs) -> anyhow::Result<Option<FleetFolder>> {
    let Some(folder) = FleetFolder::find(&cluster_config(admin.config.as_deref())?)? else { return Ok(None) };
    let Some(endpoint) = folder.endpoint()? else { return Ok(None) };
    let is_asked = AdminEndpoint::may_be(admin, &endpoint.operators_socket) && !folder.is_controller_gone()?;
    Ok(Some(folder).filter(|_| is_asked))
}

/// Jobs of the fleet, as its controller last saw them.
pub(super) fn read(folder: &FleetFolder) -> anyhow::Result<Vec<FleetJob>> {
    Ok(folder.status()?.map(list).unwrap_or_default())
}

fn list(status: FleetStatus) -> Vec<FleetJob> {
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
    use std::fs::File;
    use std::time::SystemTime;

    use hostler_controller::EntryStatus;

    use super::*;
    use crate::env::tests::endpoint;

    fn job(id: &str, state: &str, comment: &str) -> JobStatus {
        JobStatus { id: id.into(), state: state.into(), comment: comment.into(), host: String::new(), starts_in: Some(720), ends_in: None }
    }

    fn status() -> FleetStatus {
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
            given_up: false,
            asked: 0,
            limited: None,
            budget: None,
            refusal: String::new(),
            cold_start: std::collections::BTreeMap::new(),
        };
        FleetStatus { at: SystemTime::UNIX_EPOCH, entries: vec![entry], trouble: String::new() }
    }

    #[test]
    fn waiting_jobs_show_the_schedulers_comment() {
        let jobs = list(status());
        assert_eq!(
            job_lines(&jobs),
            ["qwen  job 13.head  queued  starts in 12m  Not Running: Insufficient amount of resource: ngpus", "qwen  job 14.head  held"]
        );
        let json = serde_json::to_value(&jobs).unwrap();
        assert_eq!((&json[1]["fleet"], &json[1]["id"], &json[1]["state"]), (&"qwen".into(), &"13.head".into(), &"queued".into()));
    }

    #[test]
    fn the_status_of_a_gone_controller_is_not_shown() {
        let place = tempfile::tempdir().unwrap();
        let settings = place.path().join("hostler.toml");
        let state = place.path().join("fleet");
        std::fs::write(&settings, format!("[cluster]\nstate_dir = \"{}\"\n", state.display())).unwrap();
        let folder = FleetFolder::at(&state).unwrap();
        folder.write_endpoint(&endpoint("login1", 1)).unwrap();
        folder.write_status(&status()).unwrap();
        let admin = AdminArgs::of_settings(&settings);
        assert_eq!(read(&find_folder(&admin).unwrap().unwrap()).unwrap().len(), 3, "its last step may take long");
        File::open(folder.path().join("endpoint.json")).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
        assert!(find_folder(&admin).unwrap().is_none());
    }
}
