//! How jobs are submitted, as the command had it that said last what is wanted. The controller takes it from there in each step, so that settings count
//! when they are written, whatever they were when it started.

use std::hash::{Hash, Hasher};
use std::path::PathBuf;

use hostler_cluster::FleetEntry;
use hostler_scheduler::Scheduler;
use rustc_hash::FxHasher;
use serde::{Deserialize, Serialize};

use crate::submission::{JobProgram, build_submission};
use crate::{ClusterConfig, FleetFolder};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSettings {
    /// The program that runs in jobs, by an absolute path that compute nodes have too.
    pub program: PathBuf,
    /// The user's settings, by an absolute path, for the agents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings_file: Option<PathBuf>,
    /// What these settings tell the engines of entries that have no arguments of their own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub engine_args: Vec<String>,
    pub cluster: ClusterConfig,
}

impl JobSettings {
    /// The program, as jobs start it.
    #[must_use]
    pub fn job_program(&self) -> JobProgram<'_> {
        JobProgram { program: &self.program, config: self.settings_file.as_deref() }
    }

    /// Names what a job of an entry is submitted with, alike in all lives of a controller.
    pub(crate) fn form(&self, entry: &FleetEntry, folder: &FleetFolder, scheduler: Scheduler) -> u64 {
        let submission = scheduler.render(&build_submission(entry, 1, &self.cluster, folder, &self.job_program()));
        let mut hasher = FxHasher::default();
        (submission.arguments, submission.script).hash(&mut hasher);
        hasher.finish()
    }
}
