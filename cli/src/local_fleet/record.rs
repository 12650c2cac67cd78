//! What a running `hostler up` writes down for the other commands of its user: which process it is,
//! and how it is reached.
//!
//! The file is in the user's own folder for state, which hosts may share. A reader believes a file of
//! its own host while that very process answers at the router's socket.

use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use hostler_boot::home;
use hostler_boot::socket::is_private_folder;
use hostler_router::Router;
use hostler_tls::write_private;
use rustix::io::Errno;
use rustix::process::{Pid, geteuid, test_kill_process};
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;

use crate::host_names::this_host;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UpRecord {
    host: String,
    pub(crate) pid: i32,
    /// Base URL of the edge, as programs of this host reach it.
    pub(crate) base_url: String,
    pub(crate) operators_socket: PathBuf,
    /// Key of the user, if the edge wants keys.
    pub(crate) key_file: Option<PathBuf>,
    /// Certificate of the edge's authority, if that is the user's own.
    pub(crate) authority: Option<PathBuf>,
    /// Whether its engines are simulated, and answer with words that mean nothing.
    pub(crate) is_simulated: bool,
}

impl UpRecord {
    /// Describes this process. `None` if its router has no operators' socket, so that no other
    /// command reaches it.
    ///
    /// # Errors
    /// When there is no working directory to complete a path with.
    pub(crate) fn of_this_process(router: &Router, key_file: &Path, tls_dir: &Path, is_simulated: bool) -> anyhow::Result<Option<Self>> {
        let Some(socket) = router.operators_socket() else { return Ok(None) };
        let (scheme, mut edge) = (router.edge_scheme(), router.edge_address());
        if edge.ip().is_unspecified() {
            edge.set_ip(if edge.is_ipv4() { [127, 0, 0, 1].into() } else { std::net::Ipv6Addr::LOCALHOST.into() });
        }
        let key_file = router.requires_keys().then(|| std::path::absolute(key_file));
        let has_authority = scheme == "https" && !tls_dir.as_os_str().is_empty();
        let authority = has_authority.then(|| tls_dir.join("ca.crt")).filter(|file| file.is_file()).map(std::path::absolute);
        Ok(Some(Self {
            host: this_host(),
            pid: i32::try_from(std::process::id())?,
            base_url: format!("{scheme}://{edge}/v1"),
            operators_socket: std::path::absolute(socket)?,
            key_file: key_file.transpose()?,
            authority: authority.transpose()?,
            is_simulated,
        }))
    }

    /// Writes it, until the result is dropped.
    ///
    /// # Errors
    /// When there is no folder of the user's own, or it takes no file.
    pub(crate) fn publish(&self) -> anyhow::Result<PublishedRecord> {
        let folder = folder().context("there is no home folder: set XDG_STATE_HOME")?;
        DirBuilder::new().recursive(true).mode(0o700).create(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let file = folder.join(format!("{}-{}.json", self.host, self.pid));
        write_private(&file, &serde_json::to_vec(self)?)?;
        Ok(PublishedRecord(file))
    }

    /// Whether the process that wrote it serves its router's socket still.
    async fn is_current(&self) -> bool {
        let Ok(stream) = UnixStream::connect(&self.operators_socket).await else { return false };
        stream.peer_cred().is_ok_and(|peer| peer.uid() == geteuid().as_raw() && peer.pid() == Some(self.pid))
    }

    fn is_process_gone(&self) -> bool {
        Pid::from_raw(self.pid).is_none_or(|pid| test_kill_process(pid) == Err(Errno::SRCH))
    }
}

/// Removes the file when `hostler up` ends.
#[derive(Debug)]
pub(crate) struct PublishedRecord(PathBuf);

impl Drop for PublishedRecord {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0)
            && error.kind() != ErrorKind::NotFound
        {
            tracing::warn!(file = %self.0.display(), %error, "cannot remove it");
        }
    }
}

/// Finds the records of this user's running processes. One that a killed process has left is
/// removed.
pub(super) async fn find_records() -> Vec<UpRecord> {
    let (mut found, this_host) = (Vec::new(), this_host());
    let folder = folder().filter(|folder| is_private_folder(folder));
    let entries = folder.and_then(|folder| fs::read_dir(folder).ok()).into_iter().flatten();
    for file in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let Some(record) = fs::read(&file).ok().and_then(|text| serde_json::from_slice::<UpRecord>(&text).ok()) else { continue };
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

fn folder() -> Option<PathBuf> {
    Some(home::state_dir()?.join("hostler/up"))
}

#[cfg(test)]
pub(super) mod tests {
    use tokio::net::UnixListener;

    use super::*;

    pub(crate) fn record(pid: i32, socket: &Path) -> UpRecord {
        UpRecord {
            host: this_host(),
            pid,
            base_url: format!("http://127.0.0.1:{pid}/v1"),
            operators_socket: socket.to_owned(),
            key_file: None,
            authority: None,
            is_simulated: false,
        }
    }

    #[tokio::test]
    async fn a_record_holds_while_its_own_process_answers() {
        let place = tempfile::tempdir().unwrap();
        let socket = place.path().join("router-1.sock");
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(!record(own, &socket).is_current().await, "nobody listens");
        let _router = UnixListener::bind(&socket).unwrap();
        assert!(record(own, &socket).is_current().await);
        assert!(!record(1, &socket).is_current().await, "another process listens");
    }

    #[test]
    fn only_the_record_of_a_process_that_is_gone_may_be_removed() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(!record(own, Path::new("/s")).is_process_gone());
        assert!(!record(1, Path::new("/s")).is_process_gone(), "it is another user's");
        // No process has this number: the kernel's limit is 2^22.
        assert!(record(1 << 30, Path::new("/s")).is_process_gone());
    }
}
