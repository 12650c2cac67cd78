//! Directory of one agent's sockets: private, and short enough for socket paths.
//!
//! The agent holds a lock on it for as long as it lives, so a later agent can tell what a dead one
//! left behind and clear it away. A site's cleaner may remove the directory under a living agent;
//! `held` makes it again.

mod held;

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hostler_boot::home::fallback_run_dir;
use hostler_boot::socket::MAX_PATH_BYTES;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::geteuid;

pub(crate) use self::held::HeldDirectories;
use crate::keeper::{AdoptionError, SurvivingEngine};
use crate::process::orphans::end_orphans;

/// Bytes after an agent's directory in the longest socket path below it: `/e999`, and in there `/`
/// and vLLM's own name of 36 bytes, or `/tmp/` and Python's of 32.
const MAX_PATH_BELOW: usize = 5 + 1 + 36;

/// How long to wait for another agent that starts at the same moment; it may be waiting for
/// processes to die.
const LOCK_TIMEOUT: Duration = Duration::from_secs(60);

/// Name of the lock, in the base directory and in each agent's.
const LOCK: &str = "lock";

/// Random characters after `a-` in the name of an agent's directory.
///
/// Nothing else below the base is ever touched, because a user may name any directory.
const RANDOM_CHARACTERS: usize = 4;

#[derive(Debug, thiserror::Error)]
pub enum RunDirError {
    /// Other users could reach the sockets.
    #[error(
        "the run directory {} is open to others (owner {owner}, mode {mode:o}): use one of your own with mode 700, or name another with --run-dir", path.display()
    )]
    Open { path: PathBuf, owner: u32, mode: u32 },
    /// Sockets below it could not be bound.
    #[error(
        "the run directory {} is too long by {excess} bytes for socket paths, which hold {MAX_PATH_BYTES}: name a shorter one with --run-dir", path.display()
    )]
    TooLong { path: PathBuf, excess: usize },
    #[error("cannot use the run directory {}: {source}; name another with --run-dir", path.display())]
    Unusable { path: PathBuf, source: io::Error },
    #[error("cannot use the log directory {}: {source}; name another with --log-dir", path.display())]
    UnusableLogs { path: PathBuf, source: io::Error },
    #[error("another agent has been starting in {} for {} s: end it, or name another directory with --run-dir", path.display(), LOCK_TIMEOUT.as_secs())]
    Busy { path: PathBuf },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ClearedRunDir {
    pub(crate) path: PathBuf,
    pub(crate) killed: usize,
    /// Processes that cannot be killed; their directory stays until the next start.
    pub(crate) unkillable: Vec<i32>,
}

/// Directory of this agent, removed on drop.
#[derive(Debug)]
pub(crate) struct RunDir {
    path: PathBuf,
    /// Cleared directories of dead agents, for the log.
    cleared: Vec<ClearedRunDir>,
    /// Directories of dead agents whose engines live on. They belong to this agent now.
    inherited_dirs: Vec<PathBuf>,
    survivors: Vec<SurvivingEngine>,
    held: Arc<HeldDirectories>,
}

impl RunDir {
    /// Creates this agent's directory below `configured`, or below the default if that is empty.
    ///
    /// The leftovers of dead agents there are cleared away, their engines first. Engines that a
    /// dead agent of the same node has left to the next one are kept; those of other nodes are left
    /// alone. Blocks, usually for milliseconds, but 10 s for each engine that does not die.
    pub(crate) fn open(configured: &Path, node: &str) -> Result<Self, RunDirError> {
        let base = locate_base(configured)?;
        make_private(&base)?;
        // Until an agent's own lock is held, only this lock distinguishes its directory from a dead
        // agent's.
        let _making = wait_for_lock(&base)?;
        let found = clear_dead_agents(&base, node)?;
        let path = make_unique(&base)?;
        let lock = lock_file(&path.join(LOCK))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|errno| unusable_error(&path.join(LOCK), errno.into()))?;
        let inherited_dirs = found.inherited.iter().map(|(path, _)| path.clone()).collect();
        let held = HeldDirectories::new(base, std::iter::once((path.clone(), lock)).chain(found.inherited));
        Ok(Self { path, cleared: found.cleared, inherited_dirs, survivors: found.survivors, held: Arc::new(held) })
    }

    /// Like `open`, on a thread of its own.
    pub(crate) async fn open_on_thread(configured: PathBuf, node: String) -> Result<Self, RunDirError> {
        let opened = tokio::task::spawn_blocking(move || Self::open(&configured, &node)).await;
        let run_dir = opened.expect("opening the run directory does not panic")?;
        for cleared in run_dir.cleared() {
            tracing::warn!(directory = %cleared.path.display(), killed = cleared.killed, left = ?cleared.unkillable, "cleared up after an agent that had died");
        }
        Ok(run_dir)
    }

    /// All directories that this agent holds, to be restored if somebody removes them.
    pub(crate) fn held(&self) -> &Arc<HeldDirectories> {
        &self.held
    }

    /// Takes the engines that a dead agent has left.
    ///
    /// Their directories stay until this one is removed.
    pub(crate) fn take_survivors(&mut self) -> Vec<SurvivingEngine> {
        std::mem::take(&mut self.survivors)
    }

    /// Cleared directories of dead agents, for the log.
    pub(crate) fn cleared(&self) -> &[ClearedRunDir] {
        &self.cleared
    }

    /// Directory of one engine; the engine creates it, and empties it before each life.
    pub(crate) fn engine(&self, index: u32) -> PathBuf {
        self.path.join(format!("e{index}"))
    }

    /// Directory of the files that spares need.
    pub(crate) fn spares(&self) -> PathBuf {
        self.path.join("spares")
    }

    /// Socket of the agent's own pages unless an address is given.
    pub(crate) fn admin_socket(&self) -> PathBuf {
        self.path.join("admin.sock")
    }

    /// Leaves the directory to the next agent, which ends the processes recorded in it.
    pub(crate) fn leave_to_successor(self) {
        // Forgetting the directory loses nothing: the kernel releases the locks when the process
        // ends.
        std::mem::forget(self);
    }

    /// Removes the directory.
    ///
    /// Call it once no engine is left. It also serves the exit that runs no destructors.
    pub(crate) fn remove(&self) {
        // Survivors that were not taken over wait for another agent.
        self.held.release();
        let inherited = self.inherited_dirs.iter().filter(|_| self.survivors.is_empty());
        for path in inherited.chain([&self.path]) {
            match fs::remove_dir_all(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(%error, path = %path.display(), "cannot remove the run directory");
                }
                _ => {}
            }
        }
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Directory for engine logs: the configured one, else `$XDG_STATE_HOME/hostler/logs`, else
/// `~/.local/state/hostler/logs`.
///
/// Created if it does not exist.
pub(crate) fn log_dir(configured: &Path) -> Result<PathBuf, RunDirError> {
    let path = if configured.as_os_str().is_empty() {
        match state_home() {
            Some(state) => state.join("hostler/logs"),
            // Without a home directory the logs go beside the sockets.
            None => {
                make_private(&fallback_run_dir())?;
                fallback_run_dir().join("logs")
            }
        }
    } else {
        std::path::absolute(configured).map_err(|source| RunDirError::UnusableLogs { path: configured.to_owned(), source })?
    };
    match DirBuilder::new().recursive(true).mode(0o700).create(&path) {
        Ok(()) => Ok(path),
        Err(source) => Err(RunDirError::UnusableLogs { path, source }),
    }
}

/// Name of an engine's log.
///
/// Logs may be in a home directory that many hosts share, where several may have a node of that
/// name.
pub(crate) fn log_name(host: &str, node: &str, index: u32) -> String {
    let place = if node.starts_with(host) { node.to_owned() } else { format!("{host}-{node}") };
    format!("{place}-e{index}.log")
}

/// Checks whether an agent could have its directory there, without creating anything.
pub(crate) fn check(configured: &Path) -> Result<PathBuf, RunDirError> {
    let base = locate_base(configured)?;
    if base.exists() {
        check_private(&base)?;
    }
    Ok(base)
}

fn locate_base(configured: &Path) -> Result<PathBuf, RunDirError> {
    let base = base_dir(configured)?;
    // Add the agent's own name, and the separator before it.
    let length = base.as_os_str().as_bytes().len() + 1 + 2 + RANDOM_CHARACTERS + MAX_PATH_BELOW;
    if length > MAX_PATH_BYTES {
        return Err(RunDirError::TooLong { excess: length - MAX_PATH_BYTES, path: base });
    }
    Ok(base)
}

/// Base directory for the agents' directories.
///
/// A relative path would only seem short enough, because engines make it absolute.
/// `$XDG_RUNTIME_DIR` is removed at logout, so an agent that outlives its login cannot use it.
fn base_dir(configured: &Path) -> Result<PathBuf, RunDirError> {
    if configured.as_os_str().is_empty() {
        return Ok(fallback_run_dir());
    }
    std::path::absolute(configured).map_err(|source| unusable_error(configured, source))
}

/// State directory: `$XDG_STATE_HOME`, else `~/.local/state`. Relative paths do not count.
pub(crate) fn state_home() -> Option<PathBuf> {
    absolute_variable("XDG_STATE_HOME").or_else(|| Some(absolute_variable("HOME")?.join(".local/state")))
}

fn absolute_variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// Creates a directory that only this user can enter, or checks that the existing one is private.
fn make_private(path: &Path) -> Result<(), RunDirError> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(|source| unusable_error(parent, source))?;
    }
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(unusable_error(path, error)),
        _ => check_private(path),
    }
}

/// Checks that a directory is private.
///
/// A link does not count: in a directory that is open to everybody, others could have placed it.
fn check_private(path: &Path) -> Result<(), RunDirError> {
    let metadata = fs::symlink_metadata(path).map_err(|source| unusable_error(path, source))?;
    if !metadata.is_dir() {
        return Err(unusable_error(path, io::ErrorKind::NotADirectory.into()));
    }
    let (owner, mode) = (metadata.uid(), metadata.mode() & 0o777);
    if owner != geteuid().as_raw() || mode & 0o077 != 0 {
        return Err(RunDirError::Open { path: path.to_owned(), owner, mode });
    }
    Ok(())
}

fn make_unique(base: &Path) -> Result<PathBuf, RunDirError> {
    loop {
        let random: String = std::iter::repeat_with(fastrand::alphanumeric).take(RANDOM_CHARACTERS).collect();
        let path = base.join(format!("a-{random}"));
        match DirBuilder::new().mode(0o700).create(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(unusable_error(&path, error)),
        }
    }
}

fn lock_file(path: &Path) -> Result<File, RunDirError> {
    OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path).map_err(|source| unusable_error(path, source))
}

#[expect(clippy::disallowed_methods, reason = "opening blocks by contract, before the agent has any engine")]
fn wait_for_lock(base: &Path) -> Result<File, RunDirError> {
    let file = lock_file(&base.join(LOCK))?;
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(Errno::WOULDBLOCK) => {
                return Err(RunDirError::Busy { path: base.to_owned() });
            }
            Err(errno) => return Err(unusable_error(&base.join(LOCK), errno.into())),
        }
    }
}

#[derive(Default)]
struct ClearedRunDirs {
    cleared: Vec<ClearedRunDir>,
    inherited: Vec<(PathBuf, File)>,
    survivors: Vec<SurvivingEngine>,
}

/// Clears away each directory whose lock nobody holds, unless engines live on in it.
fn clear_dead_agents(base: &Path, node: &str) -> Result<ClearedRunDirs, RunDirError> {
    let entries = fs::read_dir(base).map_err(|source| unusable_error(base, source))?;
    let mut found = ClearedRunDirs::default();
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        if let Some(lock) = lock_of_dead_agent(&path) {
            found.clear_or_inherit(path, lock, node);
        }
    }
    Ok(found)
}

/// Lock of a directory whose agent is dead.
///
/// The directory has an agent's name and a lock that nobody holds, or no lock at all if its agent
/// died between two steps.
fn lock_of_dead_agent(path: &Path) -> Option<Option<File>> {
    let name = path.file_name().unwrap_or_default().as_bytes();
    let is_ours =
        name.strip_prefix(b"a-").is_some_and(|rest| rest.len() == RANDOM_CHARACTERS && rest.iter().all(u8::is_ascii_alphanumeric));
    if !is_ours || !path.is_dir() || path.is_symlink() {
        return None;
    }
    match OpenOptions::new().write(true).open(path.join(LOCK)) {
        Ok(lock) => flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok().then_some(Some(lock)),
        Err(_) => fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none()).then_some(None),
    }
}

impl ClearedRunDirs {
    /// Handles the directory of a dead agent.
    ///
    /// Living engines of `node` are kept, those of other nodes left alone, all others ended.
    fn clear_or_inherit(&mut self, path: PathBuf, lock: Option<File>, node: &str) {
        let mut cleared = ClearedRunDir { path: path.clone(), killed: 0, unkillable: Vec::new() };
        let (mut kept, mut foreign) = (Vec::new(), false);
        let engines = fs::read_dir(&path).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
        for engine in engines.filter(|engine| engine.is_dir()) {
            match SurvivingEngine::find(&engine, node) {
                Err(AdoptionError::OtherNode(_) | AdoptionError::OtherPidNamespace) => {
                    foreign = true;
                    continue;
                }
                Ok(survivor) => {
                    kept.push(survivor);
                    continue;
                }
                Err(AdoptionError::NoKeeper(_)) => {}
                Err(why) => tracing::warn!(%why, engine = %engine.display(), "an engine that a dead agent left cannot be taken over"),
            }
            match end_orphans(&engine) {
                Ok(killed) => cleared.killed += killed,
                Err(mut left) => cleared.unkillable.append(&mut left),
            }
        }
        if foreign {
            return;
        }
        if !kept.is_empty() {
            self.survivors.append(&mut kept);
            self.inherited.extend(lock.map(|lock| (path, lock)));
            return;
        }
        if cleared.unkillable.is_empty()
            && let Err(error) = fs::remove_dir_all(&path)
        {
            tracing::warn!(%error, path = %path.display(), "cannot remove a dead agent's directory");
        }
        self.cleared.push(cleared);
    }
}

fn unusable_error(path: &Path, source: io::Error) -> RunDirError {
    RunDirError::Unusable { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests;
