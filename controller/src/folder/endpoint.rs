//! Where clients, operators and agents reach the fleet: what stands in `endpoint.json`.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::tag::draw_word;

/// Where clients and operators reach the fleet. It holds no secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// The host on which the controller and its router run.
    pub host: String,
    pub pid: u32,
    /// A word that no other start of a controller has: hosts use their process ids again.
    pub instance: String,
    /// The controller's own batch job; `None` where it has none.
    #[serde(default)]
    pub job: Option<String>,
    /// `https://127.0.0.1:PORT`, for that host alone; of a controller in a job `https://HOST:PORT`.
    pub edge: String,
    /// A socket of the edge on that host, which other users cannot reach, for programs without TLS; `None` where it could not be had.
    #[serde(default)]
    pub edge_socket: Option<PathBuf>,
    /// The operators' socket, on that host.
    pub operators_socket: PathBuf,
    /// What agents dial, as `HOST:PORT`. Those of the fleet's jobs read it here, whenever no router has them.
    pub agents: String,
    /// Address of the admin listener: `127.0.0.1:PORT`, and of a controller in a job `HOST:PORT`, where it speaks TLS.
    pub admin: String,
    /// The file with the user's key, 0600.
    pub key_file: PathBuf,
    /// The authority's certificate, by which clients know the router, and operators that of a controller in a job; `None` where the settings name
    /// another certificate.
    #[serde(default)]
    pub authority: Option<PathBuf>,
    /// What a controller runs that a command has started, and that `hostler up` of another program replaces.
    #[serde(default)]
    pub program: Option<ProgramFile>,
}

/// The program of a process. One that was installed anew in the same place is another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramFile {
    pub path: PathBuf,
    pub version: String,
    bytes: u64,
    modified: SystemTime,
}

impl ProgramFile {
    /// That of this process, also where its file was replaced meanwhile.
    ///
    /// # Errors
    /// When the system does not tell.
    pub fn of_this_process(version: &str) -> io::Result<Self> {
        let found = fs::metadata("/proc/self/exe")?;
        Ok(Self { path: std::env::current_exe()?, version: version.to_owned(), bytes: found.len(), modified: found.modified()? })
    }
}

impl Endpoint {
    /// A word for `instance`.
    #[must_use]
    pub fn draw_instance() -> String {
        draw_word(12)
    }

    /// Whether both are of the same start of a controller.
    #[must_use]
    pub fn is_same_start(&self, other: &Self) -> bool {
        (&self.host, self.pid, &self.instance) == (&other.host, other.pid, &other.instance)
    }
}
