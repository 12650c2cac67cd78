//! Node time of the fleet's entries, one file for each life of an entry, beside the tokens that its
//! routers have counted.

use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

use hostler_cluster::NodeLedger;
use serde::{Deserialize, Serialize};

use super::{FleetFolder, FolderError, make};

/// Node time of an entry from its first job to its last.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeUsage {
    pub entry: String,
    pub node_time: NodeLedger,
}

impl FleetFolder {
    /// Folder of the usage of nodes and tokens.
    #[must_use]
    pub fn usage(&self) -> PathBuf {
        self.path.join("usage")
    }

    /// # Errors
    /// When the file cannot be written.
    pub(crate) fn write_node_usage(&self, entry: &str, node_time: &NodeLedger) -> Result<(), FolderError> {
        if node_time.began == 0 {
            return Ok(());
        }
        make(&self.usage().join("nodes"))?;
        let usage = NodeUsage { entry: entry.to_owned(), node_time: node_time.clone() };
        self.write_json(&format!("usage/nodes/{entry}-{}.json", node_time.began), &usage)
    }

    /// All node time that was ever written down.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn node_usage(&self) -> Result<Vec<NodeUsage>, FolderError> {
        let path = self.usage().join("nodes");
        let failed = |source| FolderError::File { what: "read", path: path.clone(), source };
        let files = match fs::read_dir(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            files => files.map_err(failed)?.collect::<Result<Vec<_>, _>>().map_err(failed)?,
        };
        let mut names: Vec<String> = files.iter().filter_map(|file| file.file_name().into_string().ok()).collect();
        names.retain(|name| name.ends_with(".json"));
        names.sort_unstable();
        names.iter().filter_map(|name| self.read_json(&format!("usage/nodes/{name}")).transpose()).collect()
    }
}
