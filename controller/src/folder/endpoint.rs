//! Where clients, operators and agents reach the fleet: the content of `endpoint.json`.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::tag::draw_word;

/// Where clients and operators reach the fleet. The file holds no secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// The host on which the controller and its router run.
    pub host: String,
    pub pid: u32,
    /// Random word of one start of a controller: hosts reuse their process ids.
    pub instance: String,
    /// The controller's own batch job; `None` if it has none.
    #[serde(default)]
    pub job: Option<String>,
    /// `https://127.0.0.1:PORT`, for that host alone; for a controller in a job
    /// `https://HOST:PORT`.
    pub edge: String,
    /// The edge's Unix socket on that host, for programs without TLS. Other users cannot reach it.
    /// `None` if the socket could not be bound.
    #[serde(default)]
    pub edge_socket: Option<PathBuf>,
    /// The operators' socket, on that host.
    pub operators_socket: PathBuf,
    /// Address that agents dial, as `HOST:PORT`. The fleet's agents read it here whenever they have
    /// no router.
    pub agents: String,
    /// Address of the admin listener: `127.0.0.1:PORT`; for a controller in a job `HOST:PORT`, with
    /// TLS.
    pub admin: String,
    /// File with the user's key, mode 0600.
    pub key_file: PathBuf,
    /// The authority's certificate, by which clients verify the router, and operators a controller
    /// in a job. `None` if the settings name another certificate.
    #[serde(default)]
    pub authority: Option<PathBuf>,
    /// Program of a controller that a command has started. `hostler up` of another program replaces
    /// it.
    #[serde(default)]
    pub program: Option<ProgramFile>,
}

/// The program of a process. A program installed anew in the same place is a different one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramFile {
    pub path: PathBuf,
    pub version: String,
    bytes: u64,
    modified: SystemTime,
}

impl ProgramFile {
    /// Program of this process, even if its file has been replaced meanwhile.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn of_this_process(version: &str) -> io::Result<Self> {
        let found = fs::metadata("/proc/self/exe")?;
        Ok(Self { path: std::env::current_exe()?, version: version.to_owned(), bytes: found.len(), modified: found.modified()? })
    }
}

impl Endpoint {
    /// Draws a word for `instance`.
    #[must_use]
    pub fn draw_instance() -> String {
        draw_word(12)
    }

    /// Whether both belong to the same start of a controller.
    #[must_use]
    pub fn is_same_start(&self, other: &Self) -> bool {
        (&self.host, self.pid, &self.instance) == (&other.host, other.pid, &other.instance)
    }
}
