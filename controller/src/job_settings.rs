//! How jobs are submitted, as set by the last command that changed what is wanted.
//!
//! The controller reads this in each step, so settings count once they are written, whatever they
//! were when the controller started.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::ClusterConfig;
use hostler_cluster::FleetEntry;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSettings {
    /// Program that runs in jobs, by an absolute path that compute nodes have too.
    pub program: PathBuf,
    /// Settings file of the user for the agents, by an absolute path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings_file: Option<PathBuf>,
    /// Engine arguments for entries that have none of their own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub engine_args: Vec<String>,
    pub cluster: ClusterConfig,
}

impl JobSettings {
    /// Whether jobs of these entries would be submitted otherwise with `later` settings. Only
    /// entries without arguments of their own take those of the settings.
    pub(crate) fn changes_jobs_of(&self, entries: &[FleetEntry], later: &Self) -> bool {
        let are_args_used = entries.iter().any(|entry| entry.engine_args.is_empty());
        let compared = |settings: &Self| Self { engine_args: Vec::new(), ..settings.clone() };
        compared(self) != compared(later) || (are_args_used && self.engine_args != later.engine_args)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use hostler_cluster::FleetSize;

    use super::*;

    #[test]
    fn engine_arguments_of_another_model_change_no_job() {
        let entry = |engine_args: &[&str]| FleetEntry {
            name: "chat".to_owned(),
            model: "org/model".to_owned(),
            size: FleetSize::Fixed(1),
            walltime: Duration::from_secs(3600),
            engine_args: engine_args.iter().map(|argument| (*argument).to_owned()).collect(),
            nodes_per_replica: 1,
            queue: String::new(),
            account: String::new(),
            resources: String::new(),
            budget: hostler_cluster::Budget::default(),
            asked: 0,
        };
        let settings = |args: &[&str], queue: &str| JobSettings {
            program: "/opt/hostler".into(),
            settings_file: None,
            engine_args: args.iter().map(|argument| (*argument).to_owned()).collect(),
            cluster: ClusterConfig { queue: queue.to_owned(), ..ClusterConfig::default() },
        };
        let (before, own) = (settings(&["--a"], "q"), [entry(&["--own"])]);
        assert!(!before.changes_jobs_of(&own, &settings(&["--b"], "q")));
        assert!(before.changes_jobs_of(&[entry(&[])], &settings(&["--b"], "q")));
        assert!(before.changes_jobs_of(&own, &settings(&["--a"], "other")));
    }
}
