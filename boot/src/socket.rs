//! A Unix socket that only this user and root can call.
//!
//! It is made where nobody else can put anything in its place. It is taken over from a dead process
//! but never from a living one, and removed by the process that made it. The router's operators use
//! such a socket, and so do the agent's pages.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fd::OwnedFd;
use rustix::fs::{FlockOperation, Mode, OFlags, flock, fstat, open};
use rustix::io::Errno;
use rustix::process::geteuid;
use tokio::net::{UnixListener, UnixSocket, UnixStream};
use tokio::time::{Instant, sleep, timeout};

use crate::listen::ACCEPT_RETRY_DELAY;

/// Longest path of a Unix socket on Linux in bytes, without the closing zero.
pub const MAX_PATH_BYTES: usize = 107;

/// Connections that may wait to be accepted.
const BACKLOG: u32 = 128;

/// How long to wait for a process that binds in the same folder at the same moment. Binding takes
/// only a few system calls.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// How often a socket's file is checked.
const FILE_CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// How long connecting to a living process's socket may take. The kernel connects without that
/// process.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// Reason why there is no socket. Each variant says what is wrong with the path, so that another
/// can be chosen.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Other users could place a socket there.
    #[error(
        "other users could change what is in {} (owner {owner}, mode {mode:o}): a socket belongs into a folder of your own with mode 700",
        path.display()
    )]
    Open { path: PathBuf, owner: u32, mode: u32 },
    /// The path is too long for the kernel.
    #[error("the path {} is too long for a Unix socket by {excess} bytes: they have {MAX_PATH_BYTES} at most", path.display())]
    TooLong { path: PathBuf, excess: usize },
    /// The socket belongs to a living process.
    #[error("{} is in use by another process: stop it, or choose another path", path.display())]
    InUse { path: PathBuf },
    /// A file that is no socket has this name.
    #[error("{} is there and is no socket: remove it, or choose another path", path.display())]
    NotASocket { path: PathBuf },
    #[error("cannot listen on {}: {source}", path.display())]
    Other { path: PathBuf, source: io::Error },
}

/// A listening socket, whose file is removed on drop.
#[derive(Debug)]
pub struct PrivateSocket {
    listener: UnixListener,
    file: SocketFile,
    /// Path of the socket until it takes its name.
    unnamed: Option<PathBuf>,
}

/// A socket's file, recognized even if another file has taken its name.
#[derive(Debug, Clone)]
pub struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

/// State of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PathState {
    Nothing,
    /// The socket of a process that has ended.
    Dead,
    Live,
}

impl PrivateSocket {
    /// Listens on `path`, in a folder that is made if needed.
    ///
    /// # Errors
    /// When others could reach the socket or change the folder, when the path is in use, or when it
    /// is too long for the kernel.
    pub async fn bind(path: &Path) -> Result<Self, SocketError> {
        let other = |source| SocketError::Other { path: path.to_owned(), source };
        let path = std::path::absolute(path).map_err(other)?;
        let excess = path.as_os_str().as_bytes().len().saturating_sub(MAX_PATH_BYTES);
        if excess > 0 {
            return Err(SocketError::TooLong { path, excess });
        }
        let folder = path.parent().ok_or_else(|| other(io::ErrorKind::InvalidInput.into()))?;
        // The lock keeps others from binding between this check of the path and our own `bind`.
        let _lock = lock_folder(folder, open_private_folder(folder)?).await?;
        match probe(&path).await? {
            PathState::Live => return Err(SocketError::InUse { path }),
            PathState::Dead => fs::remove_file(&path).map_err(other)?,
            PathState::Nothing => {}
        }
        let socket = UnixSocket::new_stream().map_err(other)?;
        socket.bind(&path).map_err(other)?;
        // Set the mode before `listen`, so nobody can connect earlier, whatever the umask is.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).map_err(other)?;
        let metadata = fs::symlink_metadata(&path).map_err(other)?;
        let listener = socket.listen(BACKLOG).map_err(other)?;
        Ok(Self { listener, file: SocketFile { path: path.clone(), device: metadata.dev(), inode: metadata.ino() }, unnamed: None })
    }

    /// Binds beside a path that another process holds and gives up soon. Nobody finds the socket
    /// until `take_name`.
    ///
    /// # Errors
    /// As for `bind`, and when a third process waits for the path.
    pub async fn bind_beside(path: &Path) -> Result<Self, SocketError> {
        let mut beside = path.as_os_str().to_owned();
        beside.push(".next");
        let mut socket = Self::bind(Path::new(&beside)).await?;
        let path = socket.file.path.with_extension("");
        socket.unnamed = Some(std::mem::replace(&mut socket.file.path, path));
        Ok(socket)
    }

    /// Takes the path from its holder. At every moment, a client reaches one socket or the other.
    ///
    /// # Errors
    /// When the folder does not allow it.
    pub fn take_name(&mut self) -> Result<(), SocketError> {
        let Some(beside) = self.unnamed.take() else { return Ok(()) };
        fs::rename(&beside, &self.file.path).map_err(|source| SocketError::Other { path: self.file.path.clone(), source })
    }

    /// The socket's file, to keep for when the socket has gone elsewhere.
    #[must_use]
    pub fn file(&self) -> &SocketFile {
        &self.file
    }

    /// Accepts the next connection of this user or of root. The file's mode keeps others out; this
    /// check holds even if somebody has changed the mode.
    pub async fn accept_trusted(&self) -> UnixStream {
        loop {
            match self.listener.accept().await.and_then(|(stream, _)| Ok((stream.peer_cred()?.uid(), stream))) {
                Ok((uid, stream)) if uid == geteuid().as_raw() || uid == 0 => return stream,
                Ok((uid, _)) => tracing::warn!(uid, socket = %self.file.path.display(), "another user's connection was refused"),
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
    }
}

impl Drop for PrivateSocket {
    fn drop(&mut self) {
        // At worst the file stays and is recognized as dead.
        if let Some(beside) = &self.unnamed {
            let _ = fs::remove_file(beside);
        } else if self.file.exists() {
            let _ = fs::remove_file(&self.file.path);
        }
    }
}

impl SocketFile {
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the file still exists. A logout removes `$XDG_RUNTIME_DIR`, and some people clean up
    /// `/tmp`.
    #[must_use]
    pub fn exists(&self) -> bool {
        fs::symlink_metadata(&self.path).is_ok_and(|found| found.dev() == self.device && found.ino() == self.inode)
    }

    /// Resolves when the file no longer exists.
    pub async fn wait_removed(&self) {
        while self.exists() {
            sleep(FILE_CHECK_INTERVAL).await;
        }
    }
}

pub async fn is_live(path: &Path) -> bool {
    matches!(probe(path).await, Ok(PathState::Live))
}

/// Whether this user trusts that user's sockets: a user trusts its own and root's, and root trusts
/// any.
#[must_use]
pub fn is_trusted_user(theirs: u32) -> bool {
    trusts(geteuid().as_raw(), theirs)
}

fn trusts(own: u32, theirs: u32) -> bool {
    own == 0 || theirs == 0 || own == theirs
}

/// Folders of other users' sockets, for root: `UID/hostler` in `logins` (`/run/user`) and
/// `hostler-UID` in `shared` (`/tmp`).
///
/// Anybody may create a folder with another user's number there. So a folder counts only if it
/// belongs to that user and nobody else can change it.
#[must_use]
pub fn folders_of_all_users(logins: &Path, shared: &Path) -> Vec<PathBuf> {
    let entries = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
    let named = |entry: fs::DirEntry, before: &str| {
        let user: u32 = entry.file_name().to_str()?.strip_prefix(before)?.parse().ok()?;
        Some((user, entry.path()))
    };
    let logins = entries(logins).filter_map(|entry| named(entry, "").map(|(user, path)| (user, path.join("hostler"))));
    let shared = entries(shared).filter_map(|entry| named(entry, "hostler-"));
    logins.chain(shared).filter(|(user, path)| is_folder_of(*user, path)).map(|(_, path)| path).collect()
}

/// Whether only this user can have put files into this folder. Another user may have made a folder
/// first where everybody may write.
#[must_use]
pub fn is_private_folder(path: &Path) -> bool {
    is_folder_of(geteuid().as_raw(), path)
}

fn is_folder_of(user: u32, path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_dir() && found.uid() == user && found.mode() & 0o022 == 0)
}

async fn probe(path: &Path) -> Result<PathState, SocketError> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(PathState::Nothing),
        Ok(metadata) if !metadata.file_type().is_socket() => return Err(SocketError::NotASocket { path: path.to_owned() }),
        _ => {}
    }
    match timeout(PROBE_TIMEOUT, UnixStream::connect(path)).await {
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(PathState::Dead),
        Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => Ok(PathState::Nothing),
        // A full queue belongs to a living process.
        Ok(Err(error)) if error.kind() != io::ErrorKind::WouldBlock => Err(SocketError::Other { path: path.to_owned(), source: error }),
        _ => Ok(PathState::Live),
    }
}

/// Opens a folder that no other user can change. A link is rejected, because its target may change.
fn open_private_folder(path: &Path) -> Result<OwnedFd, SocketError> {
    let other = |source| SocketError::Other { path: path.to_owned(), source };
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(other)?;
    let folder = open(path, OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()).map_err(|errno| other(errno.into()))?;
    let found = fstat(&folder).map_err(|errno| other(errno.into()))?;
    if found.st_uid != geteuid().as_raw() || found.st_mode & 0o022 != 0 {
        return Err(SocketError::Open { path: path.to_owned(), owner: found.st_uid, mode: found.st_mode & 0o7777 });
    }
    Ok(folder)
}

/// Locks the folder until the descriptor is dropped.
async fn lock_folder(path: &Path, folder: OwnedFd) -> Result<OwnedFd, SocketError> {
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(folder),
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => sleep(Duration::from_millis(10)).await,
            Err(errno) => return Err(SocketError::Other { path: path.to_owned(), source: errno.into() }),
        }
    }
}

#[cfg(test)]
mod tests;
