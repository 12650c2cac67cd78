//! Resources of a host for engines besides its GPUs, and whether they allow a separate process
//! around each model.
//!
//! vLLM runs the model of an engine on one GPU in its core's process. In a separate process
//! (`--distributed-executor-backend mp`, which it always uses with several GPUs or data
//! parallelism) the core plans the next step meanwhile. That gives 1.15 times the tokens a second
//! (eight pairs of loads, 1.07 to 1.20, without cache events, on two H200s with 512 streams each
//! and a model of 1.7 billion parameters; with events 1.24, seven pairs, 1.13 to 1.39). The factor
//! is 1.1 to 1.2 with 64 streams, and there is no change with one stream or if the GPU is the
//! limit. The slowest tokens come later then (28 and 36 ms, p99, of 512 streams). The process takes
//! 3.6 CPUs for each busy GPU instead of 1.7, since its threads spin while there is work, 0.6 GiB
//! more of memory, and some 10 s more to start. docs/gpus.md has the measurements.

use std::num::NonZero;
use std::path::Path;

use super::host_memory::{self, HostMemory, MemoryLimit};
use crate::mounts::{FileSystem, FileSystemKind};

/// CPUs per engine from which it may have the second process.
///
/// It keeps 3.6 of them busy, front-end included, and router and agent share one. With fewer CPUs
/// the spinning threads would take them from the front-end. Only 16 were measured.
pub(super) const CPUS_PER_ENGINE: usize = 8;

/// Shared memory for each engine. vLLM 0.32 refuses to start the second process with less free than
/// its queues could take at most (400 MiB).
///
/// It uses little of that unless there are images. A container has 64 MiB unless it was given more.
pub(super) const SHARED_BYTES_PER_ENGINE: u64 = 512 << 20;

#[derive(Debug, Clone, Copy)]
pub struct HostResources {
    pub cpus: usize,
    /// Size of `/dev/shm`, free or not.
    ///
    /// The free part changes, but an agent that restarts beside its engines must repeat the plan
    /// they were started with.
    pub shared_bytes: u64,
    /// Memory that the host, the control group or the job allows.
    ///
    /// The same for an agent that restarts, like the shared memory.
    pub memory: HostMemory,
    /// Room for files with KV blocks.
    pub file_room: FileRoom,
}

/// Size of the file system of `agent.file_cache_dir`, free or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileRoom {
    /// The folder does not exist.
    Missing,
    /// Other hosts share the file system.
    Shared,
    Disk(u64),
    /// The file system is in this host's memory.
    Memory(u64),
}

impl FileRoom {
    fn of(folder: &Path) -> Self {
        let found = folder
            .canonicalize()
            .ok()
            .filter(|folder| folder.is_dir())
            .and_then(|folder| Some((FileSystem::of(&folder)?.kind, size_of_file_system(&folder)?)));
        match found {
            None => Self::Missing,
            Some((FileSystemKind::Shared, _)) => Self::Shared,
            Some((FileSystemKind::Local, bytes)) => Self::Disk(bytes),
            Some((FileSystemKind::Memory, bytes)) => Self::Memory(bytes),
        }
    }
}

fn size_of_file_system(path: &Path) -> Option<u64> {
    rustix::fs::statvfs(path).ok().map(|found| found.f_blocks.saturating_mul(found.f_frsize))
}

impl HostResources {
    /// Resources of this host, with the folder of `agent.file_cache_dir`.
    #[must_use]
    pub fn detect(file_cache_dir: &Path) -> Self {
        Self {
            cpus: std::thread::available_parallelism().map_or(1, NonZero::get),
            shared_bytes: size_of_file_system(Path::new("/dev/shm")).unwrap_or(0),
            memory: host_memory::detect(),
            file_room: FileRoom::of(file_cache_dir),
        }
    }

    /// Unlimited resources, for a host that is only described.
    #[must_use]
    pub fn unlimited() -> Self {
        Self {
            cpus: usize::MAX,
            shared_bytes: u64::MAX,
            memory: HostMemory { bytes: 0, limit: MemoryLimit::Host },
            file_room: FileRoom::Disk(u64::MAX),
        }
    }

    /// Whether this many engines may each have one more process.
    pub(super) fn allows_workers(self, engines: usize) -> bool {
        self.cpus / CPUS_PER_ENGINE >= engines && self.shared_bytes / SHARED_BYTES_PER_ENGINE >= engines as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_need_eight_cpus_and_shared_memory_for_each_engine() {
        let room = |cpus, shared_bytes| HostResources { cpus, shared_bytes, ..HostResources::unlimited() };
        assert!(room(32, 2 << 30).allows_workers(4));
        assert!(!room(31, 2 << 30).allows_workers(4));
        assert!(!room(32, 1 << 30).allows_workers(4));
        assert!(!room(32, 64 << 20).allows_workers(1), "a container's default");
        assert!(HostResources::unlimited().allows_workers(64));
    }

    #[test]
    fn this_host_has_a_cpu() {
        let found = HostResources::detect(Path::new("/proc/self/nothing"));
        assert!(found.cpus > 0);
        assert_eq!(found.file_room, FileRoom::Missing);
    }
}
