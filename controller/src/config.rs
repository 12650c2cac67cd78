//! Settings of a site's batch jobs: one field each, documented here and nowhere else.
//! `hostler init --site` fills them in.

use std::path::PathBuf;
use std::time::Duration;

use hostler_cluster::FleetEntry;
use hostler_scheduler::{NoScheduler, Scheduler, UnknownScheduler};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Default run time of the controller's job. Most queues for jobs without GPUs take it.
const CONTROLLER_WALLTIME: Duration = Duration::from_secs(24 * 3600);

/// Default interval of queries while the fleet is quiet: users do it as often by hand.
const POLL_INTERVAL: Duration = Duration::from_secs(60);

/// Where the controller and its router run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ControllerPlace {
    /// On the host on which `hostler up` is called.
    #[default]
    Login,
    /// In a batch job of their own, which another one follows before its end: for sites that end
    /// long processes on login nodes.
    Job,
}

/// The settings of the fleet's batch jobs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ClusterConfig {
    /// Which scheduler the fleet's jobs are submitted to: `pbs` or `slurm`; empty means the one
    /// whose commands this host has.
    pub scheduler: String,
    /// Whose time jobs are charged to; empty where the site does not ask.
    pub account: String,
    /// The queue, or Slurm's partition; empty means the site's default.
    pub queue: String,
    /// What each job, which is one node, gets. For PBS the chunk to select, such as
    /// `1:ncpus=16:ngpus=4`; for Slurm words for `sbatch`, such as
    /// `--gpus-per-node=4 --cpus-per-task=16`.
    pub resources: String,
    /// Further words for `qsub` or `sbatch`, unchanged, such as `-l` and `filesystems=home:eagle`.
    pub options: Vec<String>,
    /// Lines for a login shell before the agent starts, such as `module load cuda` or
    /// `. ~/vllm/bin/activate`. They may hold a secret: `ps`, `qstat` and `squeue` do not show them
    /// to others. PBS's jobs find them in a file of mode 0600 in `cluster.state_dir`.
    pub setup: Vec<String>,
    /// Where the controller and its router run: `login` is the host on which `hostler up` is
    /// called, `job` a batch job of their own.
    pub controller: ControllerPlace,
    /// Words for `qsub` or `sbatch` that the controller's job has instead of `cluster.queue`,
    /// `cluster.resources` and `cluster.options`, such as `-q`, `small`, `-l` and
    /// `select=1:ncpus=2:mem=4gb`. It needs no GPU.
    pub controller_options: Vec<String>,
    /// How long each of the controller's jobs may run. It looks for the next one when a quarter of
    /// that is left, or six hours.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub controller_walltime: Duration,
    /// How often the scheduler is asked while nothing changes. While jobs wait, start or leave it
    /// is asked every 5 s.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub poll_interval: Duration,
    /// The name by which other hosts reach the one where the controller and its router run; empty
    /// means that host's own.
    pub router_host: String,
    /// Where the fleet's state is kept: what is wanted, the endpoint, the jobs' logs. Compute nodes
    /// have to see it too. Empty means `$XDG_STATE_HOME/hostler/fleet`, else
    /// `~/.local/state/hostler/fleet`.
    pub state_dir: PathBuf,
}

impl Default for ClusterConfig {
    fn default() -> Self {
        Self {
            scheduler: String::new(),
            account: String::new(),
            queue: String::new(),
            resources: String::new(),
            options: Vec::new(),
            setup: Vec::new(),
            controller: ControllerPlace::Login,
            controller_options: Vec::new(),
            controller_walltime: CONTROLLER_WALLTIME,
            poll_interval: POLL_INTERVAL,
            router_host: String::new(),
            state_dir: PathBuf::new(),
        }
    }
}

/// Reason why the jobs' scheduler is unknown.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SchedulerError {
    #[error("cluster.scheduler: {0}")]
    Unknown(#[from] UnknownScheduler),
    #[error("{0}; cluster.scheduler says which")]
    Ambiguous(NoScheduler),
    #[error(transparent)]
    Absent(NoScheduler),
}

/// Error for jobs of several nodes: all but one would be idle.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "{setting}: `{words}` asks for more than one node a job, and a replica is on one node: say `--nodes N` to `hostler up` for N jobs of one node"
)]
pub struct SeveralNodes {
    setting: &'static str,
    words: String,
}

impl ClusterConfig {
    /// Checks that a job gets one node, because an agent serves only from the node on which it
    /// starts.
    ///
    /// # Errors
    /// When the settings give a job more than one node.
    pub fn check_one_node(&self, scheduler: Scheduler) -> Result<(), SeveralNodes> {
        let several = |setting, words: &str| Err(SeveralNodes { setting, words: words.to_owned() });
        match scheduler {
            Scheduler::Pbs if has_several_chunks(&self.resources) => several("cluster.resources", &self.resources),
            Scheduler::Pbs => match self.options.iter().find(|word| word.strip_prefix("select=").is_some_and(has_several_chunks)) {
                Some(word) => several("cluster.options", word),
                None => Ok(()),
            },
            Scheduler::Slurm => {
                let resources: Vec<String> = self.resources.split_whitespace().map(str::to_owned).collect();
                for (setting, words) in [("cluster.resources", &resources), ("cluster.options", &self.options)] {
                    if let Some(word) = find_node_count(words).filter(|count| *count != "1" && *count != "1-1") {
                        return several(setting, &format!("--nodes={word}"));
                    }
                }
                Ok(())
            }
        }
    }

    /// These settings with the queue, account and resources that an entry has for itself.
    #[must_use]
    pub fn for_entry(&self, entry: &FleetEntry) -> Self {
        let own = |given: &String, configured: &String| if given.is_empty() { configured.clone() } else { given.clone() };
        Self {
            queue: own(&entry.queue, &self.queue),
            account: own(&entry.account, &self.account),
            resources: own(&entry.resources, &self.resources),
            ..self.clone()
        }
    }

    /// The configured scheduler, else the one whose commands this host has.
    ///
    /// # Errors
    /// When there is none, or the choice is ambiguous.
    pub fn find_scheduler(&self) -> Result<Scheduler, SchedulerError> {
        if !self.scheduler.is_empty() {
            return Ok(self.scheduler.parse()?);
        }
        Scheduler::find().map_err(|error| match error {
            NoScheduler::Ambiguous => SchedulerError::Ambiguous(error),
            NoScheduler::Absent { .. } => SchedulerError::Absent(error),
        })
    }
}

/// Whether a PBS selection has more than one chunk: `2:ngpus=4`, or `1:ngpus=4+1:ncpus=1`.
fn has_several_chunks(select: &str) -> bool {
    let count = select.split(':').next().unwrap_or_default();
    select.contains('+') || count.parse::<u64>().is_ok_and(|count| count > 1)
}

/// Number of nodes among words for `sbatch`: `--nodes=2`, `--nodes 2`, `-N 2`, `-N2`.
fn find_node_count(words: &[String]) -> Option<&str> {
    words.iter().enumerate().rev().find_map(|(at, word)| match word.as_str() {
        "-N" | "--nodes" => words.get(at + 1).map(String::as_str),
        word => word.strip_prefix("--nodes=").or_else(|| word.strip_prefix("-N").filter(|count| !count.is_empty())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_of_several_nodes_are_refused() {
        let check = |scheduler, resources: &str, options: &[&str]| {
            let options = options.iter().map(|word| (*word).to_owned()).collect();
            ClusterConfig { resources: resources.into(), options, ..ClusterConfig::default() }
                .check_one_node(scheduler)
                .map_err(|error| error.to_string())
        };
        for (resources, options) in [("", &[][..]), ("1:ncpus=16:ngpus=4", &[]), ("ncpus=16", &[]), ("", &["-l", "select=1:ngpus=4"])] {
            assert_eq!(check(Scheduler::Pbs, resources, options), Ok(()), "{resources} {options:?}");
        }
        for (resources, options) in [("2:ngpus=4", &[][..]), ("1:ngpus=4+1:ncpus=2", &[]), ("", &["-l", "select=2:ngpus=4"])] {
            assert!(check(Scheduler::Pbs, resources, options).unwrap_err().contains("one node"), "{resources} {options:?}");
        }
        for (resources, options) in
            [("--gpus-per-node=4", &[][..]), ("--nodes=1 --exclusive", &[]), ("", &["-N", "1"]), ("", &["--nodes=1-1"])]
        {
            assert_eq!(check(Scheduler::Slurm, resources, options), Ok(()), "{resources} {options:?}");
        }
        for (resources, options) in [("--nodes=2", &[][..]), ("-N 2", &[]), ("", &["-N2"]), ("", &["--nodes", "1-4"])] {
            assert!(check(Scheduler::Slurm, resources, options).unwrap_err().contains("--nodes="), "{resources} {options:?}");
        }
    }
}
