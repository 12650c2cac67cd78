//! Shared memory that a killed engine leaves behind: segments and semaphores that Python's resource
//! tracker would have removed, had it not been killed with the others.
//!
//! The keeper records the mappings of the engine's processes while they live, and removes them once
//! none does.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

const SHARED_MEMORY: &str = "/dev/shm";

/// Prefixes of names that only libraries generate, for one group of processes: segments and
/// semaphores of Python, segments of NCCL and PyTorch, vLLM's copies of KV blocks.
///
/// Other files may be a user's model, or a cache that engines share.
const GENERATED_PREFIXES: [&str; 5] = ["psm_", "sem.mp-", "nccl-", "torch_", "vllm_offload_"];

/// How much older than the engine a file may seem, because the kernel's clock for files goes in
/// ticks.
const CLOCK_TICK: Duration = Duration::from_millis(20);

/// Recorded shared memory of one life of an engine.
#[derive(Debug, Clone)]
pub(crate) struct SharedMemoryLeftovers {
    directory: PathBuf,
    since: SystemTime,
    /// Inodes, because a semaphore is first mapped under a temporary name.
    seen: Arc<Mutex<BTreeSet<u64>>>,
}

impl SharedMemoryLeftovers {
    pub(crate) fn new() -> Self {
        Self::in_directory(Path::new(SHARED_MEMORY))
    }

    fn in_directory(directory: &Path) -> Self {
        Self { directory: directory.to_owned(), since: SystemTime::now(), seen: Arc::default() }
    }

    /// Records the mappings of these processes.
    ///
    /// Runs on its own thread and waits for it for `patience`: the kernel lets nobody read the
    /// mappings of a process while a driver holds it.
    pub(crate) fn record_mappings(&self, pids: Vec<i32>, patience: Duration) {
        let (done, looked) = channel::<()>();
        let leftovers = self.clone();
        let thread = std::thread::Builder::new().name("leftovers".to_owned()).spawn(move || {
            for pid in pids {
                let found = mapped_inodes(pid, &leftovers.directory);
                leftovers.seen.lock().extend(found);
            }
            drop(done);
        });
        if thread.is_ok() {
            // Either outcome is fine: only files recorded by then are removed.
            let (Ok(()) | Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected)) = looked.recv_timeout(patience);
        }
    }

    /// Removes the recorded files that this user owns and that were made during this life, and
    /// returns their number.
    ///
    /// Call it when no process is left.
    pub(crate) fn remove(&self) -> usize {
        let seen = std::mem::take(&mut *self.seen.lock());
        if seen.is_empty() {
            return 0;
        }
        let Ok(entries) = fs::read_dir(&self.directory) else { return 0 };
        let paths = entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| has_generated_name(path));
        paths.filter(|path| self.is_ours(path, &seen) && fs::remove_file(path).is_ok()).count()
    }

    fn is_ours(&self, path: &Path, seen: &BTreeSet<u64>) -> bool {
        let Ok(metadata) = fs::symlink_metadata(path) else { return false };
        let changed = u64::try_from(metadata.ctime()).unwrap_or_default();
        let nanoseconds = u32::try_from(metadata.ctime_nsec()).unwrap_or_default();
        let changed = UNIX_EPOCH + Duration::new(changed, nanoseconds) + CLOCK_TICK;
        metadata.is_file()
            && seen.contains(&metadata.ino())
            && metadata.uid() == rustix::process::geteuid().as_raw()
            && changed >= self.since
    }
}

fn has_generated_name(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| GENERATED_PREFIXES.iter().any(|beginning| name.starts_with(beginning)))
}

/// Inodes of the files directly in this directory that a process has mapped.
fn mapped_inodes(pid: i32, directory: &Path) -> BTreeSet<u64> {
    let Ok(maps) = fs::File::open(format!("/proc/{pid}/maps")) else { return BTreeSet::new() };
    BufReader::new(maps).lines().map_while(Result::ok).filter_map(|line| parse_inode(&line, directory)).collect()
}

/// Parses `address rights offset device inode path`.
fn parse_inode(line: &str, directory: &Path) -> Option<u64> {
    let mut words = line.split_ascii_whitespace();
    let inode = words.nth(4)?.parse().ok()?;
    let path = Path::new(words.next()?);
    (path.parent() == Some(directory)).then_some(inode)
}

#[cfg(test)]
mod tests;
