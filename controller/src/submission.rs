//! Builds submissions: an entry's jobs with an agent in each, and the controller's own job.
//!
//! They set the program, its name and the site's settings. Controller and command line submit them,
//! and `hostler up --dry-run` shows them. Pure.

use std::hash::{Hash, Hasher};
use std::path::Path;
use std::time::Duration;

use hostler_cluster::FleetEntry;
use hostler_scheduler::{Scheduler, Submission};
use rustc_hash::FxHasher;

use crate::{ClusterConfig, FleetFolder, JobSettings};

/// Time before its end at which Slurm tells a job to leave: the defaults of `agent.drain_timeout`
/// and `agent.stop_grace`. Agents with longer ones leave by their own clock.
const DRAIN_LEAD: Duration = Duration::from_secs(40);

/// Shortest walltime for that signal, which Slurm sends up to a minute early. A job leaves at most
/// a quarter of its time unused, so shorter jobs rely on their own clock.
const SHORTEST_WITH_LEAD: Duration = Duration::from_secs(4 * (40 + 60));

/// How this program is started in jobs.
#[derive(Debug, Clone, Copy)]
pub struct JobProgram<'a> {
    /// Absolute path of the program, which compute nodes have too.
    pub program: &'a Path,
    /// Settings of the user, by an absolute path.
    pub config: Option<&'a Path>,
}

impl<'a> JobProgram<'a> {
    /// The program that these settings name.
    #[must_use]
    pub fn of(jobs: &'a JobSettings) -> Self {
        Self { program: &jobs.program, config: jobs.settings_file.as_deref() }
    }
}

/// Hash of what an entry's job is submitted with. Equal across restarts of the controller.
pub(crate) fn job_form(jobs: &JobSettings, entry: &FleetEntry, folder: &FleetFolder, scheduler: Scheduler) -> u64 {
    let submission = scheduler.render(&build_submission(entry, 1, &jobs.cluster, folder, &JobProgram::of(jobs)));
    let mut hasher = FxHasher::default();
    (submission.arguments, submission.script).hash(&mut hasher);
    hasher.finish()
}

/// A job of an entry, or an array of this many parts.
#[must_use]
pub fn build_submission(
    entry: &FleetEntry,
    parts: u32,
    config: &ClusterConfig,
    folder: &FleetFolder,
    agent: &JobProgram<'_>,
) -> Submission {
    let config = config.for_entry(entry);
    Submission {
        name: folder.job_name(&entry.name),
        parts,
        hosts: entry.nodes_per_replica,
        walltime: entry.walltime,
        account: config.account,
        queue: config.queue,
        resources: config.resources,
        after: None,
        options: config.options,
        log_dir: folder.job_logs(),
        script_dir: folder.scripts(&entry.name),
        setup: config.setup,
        program: command_line(entry, folder, agent),
        drain_lead: if entry.walltime < SHORTEST_WITH_LEAD { Duration::ZERO } else { DRAIN_LEAD },
    }
}

/// The controller's own job, which may start after the end of another one.
#[must_use]
pub fn build_controller_submission(
    config: &ClusterConfig,
    folder: &FleetFolder,
    program: &JobProgram<'_>,
    after: Option<&str>,
) -> Submission {
    let mut words = vec![program.program.display().to_string(), "controller".to_owned(), "--job".to_owned()];
    words.extend(program.config.iter().flat_map(|file| ["--config".to_owned(), file.display().to_string()]));
    Submission {
        name: folder.controller_job_name(),
        parts: 1,
        hosts: 1,
        walltime: config.controller_walltime,
        account: config.account.clone(),
        queue: String::new(),
        resources: String::new(),
        after: after.map(str::to_owned),
        options: config.controller_options.clone(),
        log_dir: folder.job_logs(),
        script_dir: folder.controller_scripts(),
        setup: config.setup.clone(),
        program: words,
        // The controller has its own clock, and knows whether another one is there.
        drain_lead: Duration::ZERO,
    }
}

fn command_line(entry: &FleetEntry, folder: &FleetFolder, agent: &JobProgram<'_>) -> Vec<String> {
    let mut words = vec![agent.program.display().to_string(), "agent".to_owned()];
    let (endpoint, token, identities) = (folder.endpoint_file(), folder.join_token(), folder.identities());
    let options = [
        ("--config", agent.config.map(|file| file.display().to_string())),
        ("--router-file", Some(endpoint.display().to_string())),
        ("--join-token-file", Some(token.display().to_string())),
        ("--identity-dir", Some(identities.display().to_string())),
        ("--model", Some(entry.model.clone())),
    ];
    words.extend(options.into_iter().filter_map(|(name, value)| Some([name.to_owned(), value?])).flatten());
    if entry.nodes_per_replica > 1 {
        words.extend(["--nodes-per-replica".to_owned(), entry.nodes_per_replica.to_string()]);
    }
    if !entry.engine_args.is_empty() {
        words.push("--".to_owned());
        words.extend_from_slice(&entry.engine_args);
    }
    words
}

#[cfg(test)]
mod tests;
