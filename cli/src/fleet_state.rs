//! Describes the state of the user's fleet of batch jobs, for commands that find no router, or no
//! serving node.

use hostler_boot::socket::is_live;
use hostler_cluster::{BudgetLeft, FleetSize};
use hostler_controller::{Endpoint, EntryStatus, FleetFolder, FolderError};

use crate::host_names::this_host;
use crate::output::time_in_words;

/// Finds the fleet's router, if it runs. A router on another host, or in a job, is known by its
/// controller's heartbeat.
///
/// # Errors
/// When the folder cannot be read.
pub(crate) async fn find_router(folder: &FleetFolder) -> Result<Option<Endpoint>, FolderError> {
    let Some(endpoint) = folder.endpoint()? else { return Ok(None) };
    let is_alive = if is_process_here(&endpoint) { is_live(&endpoint.operators_socket).await } else { !folder.is_controller_gone()? };
    Ok(Some(endpoint).filter(|_| is_alive))
}

/// Whether the controller is a process of this host, and not a job.
pub(crate) fn is_process_here(endpoint: &Endpoint) -> bool {
    endpoint.job.is_none() && endpoint.host == this_host()
}

/// What commands say where nothing is up, neither in jobs nor on this machine.
pub(crate) const NOTHING_UP: &str = "nothing is up, and no fleet of yours runs: `hostler up MODEL` starts one on this machine, with --nodes 1 --walltime 1:00:00 in a batch job";

/// Whether this folder's fleet has jobs, or is to have some. Where it has none, commands mean what
/// `hostler up` serves from this machine.
///
/// # Errors
/// When the folder cannot be read.
pub(crate) fn has_jobs(folder: Option<&FleetFolder>) -> Result<bool, FolderError> {
    let Some(folder) = folder else { return Ok(false) };
    Ok(folder.endpoint()?.is_some() || !folder.entries()?.is_empty() || !folder.remembered()?.is_empty())
}

/// Says why no controller of this folder's fleet answers.
///
/// # Errors
/// When the folder cannot be read.
pub(crate) fn describe_absence(folder: Option<&FleetFolder>) -> Result<String, FolderError> {
    let entries = folder.map(FleetFolder::entries).transpose()?.unwrap_or_default();
    let names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
    Ok(match &names[..] {
        [] => NOTHING_UP.to_owned(),
        names => format!(
            "the controller of your fleet ({}) has ended: `hostler wait` starts it again, and the fleet's jobs come back to it",
            names.join(", ")
        ),
    })
}

/// Why an entry that lacks jobs submits none for a while, without how long.
pub(crate) const LIMITED: &str = "all jobs that its size allows in a quarter of an hour are submitted";

/// A line for each entry that has fewer nodes than it wants, or wants none, and one for each
/// budget.
///
/// # Errors
/// When the folder cannot be read.
pub(crate) fn describe_entries(folder: &FleetFolder) -> Result<Vec<String>, FolderError> {
    let Some(status) = folder.status()? else { return Ok(Vec::new()) };
    let desired = folder.entries()?;
    let size = |name: &str| desired.iter().find(|entry| entry.name == name).map(|entry| entry.size);
    let lines = |entry: &EntryStatus| [describe_shortfall(entry, size(&entry.name)), describe_budget(entry)];
    Ok(status.entries.iter().flat_map(lines).flatten().collect())
}

/// What is left of an entry's budget.
pub(crate) fn describe_budget(entry: &EntryStatus) -> Option<String> {
    let left = entry.budget.as_ref()?;
    let ends = match left.ends_in {
        _ if left.is_over() => "; it has ended, and its nodes leave".to_owned(),
        Some(ends) => format!("; ends in {}", time_in_words(ends.as_secs())),
        None => String::new(),
    };
    Some(format!("{}: {}{ends}", entry.name, left.describe()))
}

fn describe_shortfall(entry: &EntryStatus, size: Option<FleetSize>) -> Option<String> {
    let EntryStatus { name, wanted, ready, jobs, failures, .. } = entry;
    let is_over = entry.budget.as_ref().is_some_and(BudgetLeft::is_over);
    if is_over || ready >= wanted && *wanted > 0 {
        return None;
    }
    let cause = if entry.given_up {
        format!("{failures} jobs in a row have failed: mend the cause, and `hostler up` or `hostler scale` tries again")
    } else if !entry.refusal.is_empty() {
        format!("the scheduler refuses its jobs: {}", entry.refusal.trim())
    } else if let Some(pause) = entry.pause.filter(|_| *failures > 0) {
        format!("failed {failures} times in a row; submitted again in {}", time_in_words(pause))
    } else if let Some(seconds) = entry.limited {
        format!("{LIMITED}; the next in {}", time_in_words(seconds))
    } else {
        match (size, jobs.len()) {
            (None, _) => "it ends".to_owned(),
            (Some(FleetSize::Elastic { .. }), 0) if *wanted == 0 => {
                "nobody has asked for it lately: the next request has a job submitted".to_owned()
            }
            (Some(_), 0) if *wanted == 0 => format!("`hostler scale {name} --nodes 1` starts it"),
            (Some(_), 0) => "no job is submitted yet".to_owned(),
            (Some(_), 1) => format!("its job is {}", jobs[0].state),
            (Some(_), several) => format!("{several} jobs are there"),
        }
    };
    Some(format!("{name}: {ready} of {wanted} nodes serve; {cause}"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn entry() -> EntryStatus {
        EntryStatus {
            name: "qwen".into(),
            model: "Qwen/Qwen3-8B".into(),
            asked: 0,
            wanted: 2,
            ready: 0,
            jobs: Vec::new(),
            failures: 0,
            pause: None,
            given_up: false,
            limited: None,
            budget: None,
            refusal: String::new(),
            cold_start: std::collections::BTreeMap::new(),
        }
    }

    fn describe(entry: &EntryStatus) -> Option<String> {
        describe_shortfall(entry, Some(FleetSize::Fixed(2)))
    }

    #[test]
    fn an_entry_says_why_fewer_nodes_serve_than_are_wanted() {
        assert_eq!(describe(&EntryStatus { ready: 2, ..entry() }), None);
        assert_eq!(describe(&entry()).unwrap(), "qwen: 0 of 2 nodes serve; no job is submitted yet");
        let refused = EntryStatus { refusal: "qsub ended with 1: no such queue".into(), failures: 2, pause: Some(30), ..entry() };
        assert_eq!(
            describe(&refused).unwrap(),
            "qwen: 0 of 2 nodes serve; the scheduler refuses its jobs: qsub ended with 1: no such queue"
        );
        let failing = EntryStatus { failures: 2, pause: Some(30), ready: 1, ..entry() };
        assert_eq!(describe(&failing).unwrap(), "qwen: 1 of 2 nodes serve; failed 2 times in a row; submitted again in 30s");
        let limited = EntryStatus { limited: Some(240), ready: 1, ..entry() };
        assert!(describe(&limited).unwrap().ends_with("; the next in 4m"));
        let given_up = EntryStatus { failures: 10, given_up: true, ..entry() };
        assert!(describe(&given_up).unwrap().contains("10 jobs in a row have failed: mend the cause"));
    }

    #[test]
    fn an_entry_at_zero_says_what_starts_it() {
        let zero = EntryStatus { wanted: 0, ..entry() };
        let elastic = FleetSize::Elastic { min: 0, max: 2, idle_after: Duration::from_secs(60) };
        assert_eq!(
            describe_shortfall(&zero, Some(elastic)).unwrap(),
            "qwen: 0 of 0 nodes serve; nobody has asked for it lately: the next request has a job submitted"
        );
        assert_eq!(describe(&zero).unwrap(), "qwen: 0 of 0 nodes serve; `hostler scale qwen --nodes 1` starts it");
        assert_eq!(describe_shortfall(&zero, None).unwrap(), "qwen: 0 of 0 nodes serve; it ends");
    }
}
