//! What a running `hostler up` writes down for the other commands of its user: which process it is,
//! what it serves, and how its router is reached.
//!
//! The file is in the user's own folder for state, which hosts may share. A reader believes a file
//! of its own host while that very process runs and the router answers at its socket.

use std::fs::{self, DirBuilder};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use hostler_agent::process_start;
use hostler_boot::socket::is_private_folder;
use hostler_boot::{home, reachable_here};
use hostler_router::Router;
use hostler_tls::write_private;
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;

use crate::host_names::this_host;

/// Ending of a record's name; a log beside it has another.
const RECORD_EXTENSION: &str = "json";

/// Most bytes of a record. One has some 400.
const MAX_RECORD_BYTES: u64 = 64 * 1024;

/// Room for a record and the first lines of a log.
const ROOM_BYTES: usize = 16 * 1024;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UpRecord {
    host: String,
    pub(crate) pid: i32,
    /// When the process began, in the kernel's ticks since the host's start. With the number it
    /// names one process.
    started: u64,
    /// What it serves, as its command named it; empty for the simulated engine without a name.
    pub(crate) name: String,
    pub(crate) router: UpRouter,
    /// Its agent's node, if its router had other agents when it began; empty elsewhere.
    #[serde(default)]
    pub(crate) node: String,
    /// `None` if the router is this process's own.
    pub(crate) joined: Option<JoinedAgent>,
    /// Whether it finishes what runs there and ends.
    #[serde(default)]
    pub(crate) is_leaving: bool,
    /// Whether its engines are simulated, and answer with words that mean nothing.
    pub(crate) is_simulated: bool,
}

/// How a router that `hostler up` has started is reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UpRouter {
    /// Base URL of the edge, as programs of this host reach it.
    pub(crate) base_url: String,
    /// Address of the edge's listener; empty in a record of an earlier version.
    #[serde(default)]
    pub(crate) listen: String,
    pub(crate) operators_socket: PathBuf,
    /// Address that agents of this host dial.
    pub(crate) agents: String,
    /// Address of the admin listener; empty in a record of an earlier version.
    #[serde(default)]
    pub(crate) admin: String,
    /// Whether agents join by a token, and speak TLS.
    pub(crate) wants_token: bool,
    /// Key of the user, if the edge wants keys.
    pub(crate) key_file: Option<PathBuf>,
    /// Certificate of the edge's authority, if that is the user's own.
    pub(crate) authority: Option<PathBuf>,
}

/// An agent beside that of the router's own process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct JoinedAgent {
    /// Its node, which no other process of this router has.
    pub(crate) node: String,
    /// UUIDs of the GPUs that it was given; empty if it needs none.
    pub(crate) gpus: Vec<String>,
}

impl UpRouter {
    /// `None` if the router has no operators' socket, so that no other command reaches it.
    ///
    /// # Errors
    /// When there is no working directory to complete a path with.
    pub(crate) fn of(router: &Router, key_file: &Path, tls_dir: &Path, wants_token: bool) -> anyhow::Result<Option<Self>> {
        let Some(socket) = router.operators_socket() else { return Ok(None) };
        let (scheme, edge) = (router.edge_scheme(), reachable_here(router.edge_address()));
        let key_file = router.requires_keys().then(|| std::path::absolute(key_file));
        let has_authority = scheme == "https" && !tls_dir.as_os_str().is_empty();
        let authority = has_authority.then(|| tls_dir.join("ca.crt")).filter(|file| file.is_file()).map(std::path::absolute);
        Ok(Some(Self {
            base_url: format!("{scheme}://{edge}/v1"),
            listen: router.edge_address().to_string(),
            operators_socket: std::path::absolute(socket)?,
            agents: reachable_here(router.agents_address()).to_string(),
            admin: router.admin_address().to_string(),
            wants_token,
            key_file: key_file.transpose()?,
            authority: authority.transpose()?,
        }))
    }
}

impl UpRecord {
    /// Describes this process.
    ///
    /// # Errors
    /// When the kernel does not describe it.
    pub(crate) fn of_this_process(name: String, router: UpRouter, joined: Option<JoinedAgent>, is_simulated: bool) -> anyhow::Result<Self> {
        let pid = i32::try_from(std::process::id())?;
        let started = process_start(pid).context("/proc does not show this process")?;
        Ok(Self { host: this_host(), pid, started, name, node: String::new(), router, joined, is_leaving: false, is_simulated })
    }

    /// Writes it, until the result is dropped.
    ///
    /// # Errors
    /// When there is no folder of the user's own, or it takes no file.
    pub(crate) fn publish(&self) -> anyhow::Result<PublishedRecord> {
        let file = make_folder()?.join(format!("{}-{}.{RECORD_EXTENSION}", self.host, self.pid));
        write_private(&file, &serde_json::to_vec(self)?)?;
        Ok(PublishedRecord { file, record: self.clone() })
    }

    /// Whether the process that wrote it runs, and the router answers.
    async fn is_current(&self) -> bool {
        let is_router = |pid| self.joined.is_some() || pid == Some(self.pid);
        let is_ours = match UnixStream::connect(&self.router.operators_socket).await {
            Ok(stream) => stream.peer_cred().is_ok_and(|peer| peer.uid() == geteuid().as_raw() && is_router(peer.pid())),
            // A full queue belongs to a living process.
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        };
        is_ours && !self.is_process_gone()
    }

    /// Whether its process has ended, also where another one has its number.
    pub(crate) fn is_process_gone(&self) -> bool {
        process_start(self.pid) != Some(self.started)
    }
}

/// Removes the file when `hostler up` ends.
#[derive(Debug)]
pub(crate) struct PublishedRecord {
    file: PathBuf,
    record: UpRecord,
}

impl PublishedRecord {
    /// Says that the process leaves.
    pub(crate) fn mark_leaving(&self) {
        let record = UpRecord { is_leaving: true, ..self.record.clone() };
        let written = serde_json::to_vec(&record).map(|text| write_private(&self.file, &text));
        if !matches!(written, Ok(Ok(()))) {
            tracing::debug!(file = %self.file.display(), "other commands do not see that this process leaves");
        }
    }
}

impl Drop for PublishedRecord {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.file)
            && error.kind() != ErrorKind::NotFound
        {
            tracing::warn!(file = %self.file.display(), %error, "cannot remove it");
        }
    }
}

/// Finds the records of this user's running processes. One that a killed process has left is
/// removed.
pub(crate) async fn find_records() -> Vec<UpRecord> {
    let (mut found, this_host) = (Vec::new(), this_host());
    let folder = folder().filter(|folder| is_private_folder(folder));
    let entries = folder.and_then(|folder| fs::read_dir(folder).ok()).into_iter().flatten();
    for file in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let Some(record) = read(&file) else { continue };
        if record.host != this_host {
            continue;
        }
        if record.is_current().await {
            found.push(record);
        } else if record.is_process_gone() {
            let _ = fs::remove_file(&file);
        }
    }
    found.sort_by_key(|record| record.pid);
    found
}

/// Reads a record. The folder has logs of any size, too, and nothing but a plain file is opened: a
/// pipe would wait for its writer.
fn read(file: &Path) -> Option<UpRecord> {
    let about = fs::symlink_metadata(file).ok()?;
    let may_be_one = file.extension()? == RECORD_EXTENSION && about.is_file() && about.len() <= MAX_RECORD_BYTES;
    may_be_one.then(|| fs::read(file).ok().and_then(|text| serde_json::from_slice(&text).ok())).flatten()
}

/// The folder of records and logs, which is made where it is missing.
pub(crate) fn make_folder() -> anyhow::Result<PathBuf> {
    let folder = folder().context("there is no home folder: set XDG_STATE_HOME")?;
    DirBuilder::new().recursive(true).mode(0o700).create(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    ensure!(
        is_private_folder(&folder),
        "other users could change what is in {0}, so no command believes it: `chmod 700 {0}`",
        folder.display()
    );
    Ok(folder)
}

/// Checks that the folder takes a record, before anything is started that needs one.
///
/// # Errors
/// When it does not, such as on a full disk.
pub(crate) fn check_room() -> anyhow::Result<()> {
    check_room_in(&make_folder()?)
}

fn check_room_in(folder: &Path) -> anyhow::Result<()> {
    let written = tempfile::NamedTempFile::new_in(folder).and_then(|mut file| {
        file.write_all(&[b' '; ROOM_BYTES])?;
        file.as_file().sync_all()
    });
    written.with_context(|| format!("cannot write into {}, where a process in the background says how it is found", folder.display()))
}

fn folder() -> Option<PathBuf> {
    Some(home::state_dir()?.join("hostler/up"))
}

#[cfg(test)]
pub(crate) mod tests {
    use tokio::net::UnixListener;

    use super::*;

    /// One of a process of this test's own number and start, unless `pid` is another's.
    pub(crate) fn record(pid: i32, socket: &Path) -> UpRecord {
        let router = UpRouter {
            base_url: format!("http://127.0.0.1:{pid}/v1"),
            listen: format!("127.0.0.1:{pid}"),
            operators_socket: socket.to_owned(),
            agents: "127.0.0.1:1".into(),
            admin: "127.0.0.1:2".into(),
            wants_token: false,
            key_file: None,
            authority: None,
        };
        UpRecord {
            host: this_host(),
            pid,
            started: process_start(pid).unwrap_or(0),
            name: String::new(),
            node: String::new(),
            router,
            joined: None,
            is_leaving: false,
            is_simulated: false,
        }
    }

    fn own() -> i32 {
        i32::try_from(std::process::id()).unwrap()
    }

    #[test]
    fn only_plain_files_of_a_records_size_are_read() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name);
        let text = serde_json::to_string(&record(7, Path::new("/s"))).unwrap();
        fs::write(path("a.json"), &text).unwrap();
        assert_eq!(read(&path("a.json")).map(|record| record.pid), Some(7));
        fs::write(path("a.log"), &text).unwrap();
        fs::write(path("large.json"), text + &" ".repeat(1 << 20)).unwrap();
        std::os::unix::fs::symlink("/dev/zero", path("endless.json")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, path("pipe.json"), rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
        for other in ["a.log", "large.json", "endless.json", "pipe.json", "none.json"] {
            assert_eq!(read(&path(other)), None, "{other}");
        }
    }

    #[test]
    fn a_folder_that_takes_no_record_is_known_before_anything_starts() {
        let place = tempfile::tempdir().unwrap();
        check_room_in(place.path()).unwrap();
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0, "nothing is left there");
        let refused = check_room_in(&place.path().join("none")).unwrap_err().to_string();
        assert!(refused.starts_with("cannot write into "), "{refused}");
    }

    #[tokio::test]
    async fn a_record_holds_while_its_own_process_answers() {
        let place = tempfile::tempdir().unwrap();
        let socket = place.path().join("router-1.sock");
        assert!(!record(own(), &socket).is_current().await, "nobody listens");
        let _router = UnixListener::bind(&socket).unwrap();
        assert!(record(own(), &socket).is_current().await);
        assert!(!record(1, &socket).is_current().await, "another process listens");
    }

    #[tokio::test]
    async fn the_record_of_a_joined_agent_holds_while_it_runs_and_the_router_answers() {
        let place = tempfile::tempdir().unwrap();
        let socket = place.path().join("router-1.sock");
        let joined = Some(JoinedAgent { node: "n.b".into(), gpus: Vec::new() });
        // The first process runs, and another one listens.
        let beside = UpRecord { joined, ..record(1, &socket) };
        assert!(!beside.is_current().await, "the router is gone");
        let _router = UnixListener::bind(&socket).unwrap();
        assert!(beside.is_current().await);
        assert!(!UpRecord { started: beside.started + 1, ..beside }.is_current().await, "its number is another process's");
    }

    #[test]
    fn only_the_record_of_a_process_that_is_gone_may_be_removed() {
        assert!(!record(own(), Path::new("/s")).is_process_gone());
        assert!(UpRecord { started: 1, ..record(own(), Path::new("/s")) }.is_process_gone());
        // No process has this number: the kernel's limit is 2^22.
        assert!(record(1 << 30, Path::new("/s")).is_process_gone());
    }
}
