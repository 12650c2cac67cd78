//! How jobs are submitted, as set by the last command that changed what is wanted.
//!
//! The controller reads this in each step, so settings count once they are written, whatever they
//! were when the controller started.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::ClusterConfig;

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
