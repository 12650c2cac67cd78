//! The socket on which operators need no key: only the router's own user and root can reach it. It
//! is made before the router runs, served until it ends, and made anew if its file is removed. The
//! subcommands that ask a router find it here.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::Router;
use hostler_boot::socket::{folders_of_all_users, is_live, is_private_folder};
use hostler_boot::{PrivateSocket, SocketError, admin, home};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::CLOSE_TIMEOUT;

/// How soon a failed bind of the socket is retried.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

#[derive(Debug, Clone)]
pub(crate) struct OperatorsSocket {
    /// `router.operators_socket`; empty for the usual folders.
    pub(crate) configured: PathBuf,
    /// The admin listener's port, which tells the routers of one user apart.
    pub(crate) port: u16,
}

impl OperatorsSocket {
    /// Where this user's routers of this port may have their socket.
    pub(crate) fn usual_paths(&self) -> Vec<PathBuf> {
        self.paths(&home::run_dirs())
    }

    /// The paths, the preferred one first; at least one.
    fn paths(&self, folders: &[PathBuf]) -> Vec<PathBuf> {
        if self.is_configured() {
            return vec![self.configured.clone()];
        }
        folders.iter().map(|folder| folder.join(format!("router-{}.sock", self.port))).collect()
    }

    fn is_configured(&self) -> bool {
        !self.configured.as_os_str().is_empty()
    }

    /// Listens on one of the paths. An error is about the last path, which does not depend on a
    /// login.
    async fn bind(&self, has_predecessor: bool) -> Result<PrivateSocket, SocketError> {
        let mut refused = None;
        for path in self.usual_paths() {
            let bound = if has_predecessor { PrivateSocket::bind_beside(&path).await } else { PrivateSocket::bind(&path).await };
            match bound {
                Ok(socket) => return Ok(socket),
                Err(error) => refused = Some(error),
            }
        }
        Err(refused.expect("there is a path"))
    }

    /// Listens before the router runs.
    ///
    /// A configured path must work. If none of the usual paths does, the router still serves its
    /// clients, and operators need a key. A predecessor's path becomes this socket's when it takes
    /// the name.
    ///
    /// # Errors
    /// If the configured path cannot be used.
    pub(crate) async fn open(&self, has_predecessor: bool) -> Result<Option<PrivateSocket>, SocketError> {
        match self.bind(has_predecessor).await {
            Ok(socket) => Ok(Some(socket)),
            Err(error) if self.is_configured() => Err(error),
            Err(error) => {
                let setting = "router.operators_socket";
                tracing::warn!(setting, %error, "there is no socket for operators: name another path, or they need an admin key");
                Ok(None)
            }
        }
    }

    pub(crate) async fn serve(self, first: Option<PrivateSocket>, pages: Router, end: CancellationToken) {
        let mut next = first;
        while !end.is_cancelled() {
            let Some(socket) = next.take() else {
                tokio::select! {
                    () = end.cancelled() => {}
                    () = sleep(RETRY_INTERVAL) => next = self.bind(false).await.ok(),
                }
                continue;
            };
            let (file, leaving) = (socket.file().clone(), end.child_token());
            let mut serving = Box::pin(admin::serve_socket(socket, pages.clone(), leaving.clone()));
            tokio::select! {
                () = &mut serving => {}
                () = file.wait_removed() => {
                    tracing::warn!(socket = %file.path().display(), "the operators' socket was removed; it is made anew");
                    leaving.cancel();
                    next = self.bind(false).await.ok();
                    // Running calls on the old socket get as much time as at the router's end.
                    let _ = timeout(CLOSE_TIMEOUT, serving).await;
                }
            }
        }
    }
}

/// Finds the sockets of running routers in the usual folders, for a program of the same user; for
/// root, those of all users.
pub async fn find_operators_sockets() -> Vec<PathBuf> {
    let mut found = find_private_sockets(&home::run_dirs()).await;
    if rustix::process::geteuid().is_root() {
        found.extend(find_live_sockets(folders_of_all_users(Path::new("/run/user"), Path::new("/tmp"))).await);
        found.sort();
        found.dedup();
    }
    found
}

/// Finds sockets only in folders of this user, because answers from there are believed.
async fn find_private_sockets(folders: &[PathBuf]) -> Vec<PathBuf> {
    find_live_sockets(folders.iter().filter(|folder| is_private_folder(folder)).cloned().collect()).await
}

async fn find_live_sockets(folders: Vec<PathBuf>) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for folder in folders {
        let entries = fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
        for path in entries.filter(|path| is_router_socket(path)) {
            if is_live(&path).await {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn is_router_socket(path: &Path) -> bool {
    let port = path.file_name().and_then(|name| name.to_str()?.strip_prefix("router-")?.strip_suffix(".sock"));
    port.is_some_and(|port| port.parse::<u16>().is_ok())
}

#[cfg(test)]
mod tests;
