//! How jobs are submitted, as the command had it that said last what is wanted. The controller takes it from there in each step, so that settings count
//! when they are written, whatever they were when it started.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::ClusterConfig;

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
