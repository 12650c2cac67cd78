//! Detection of processes of an engine that the kernel killed for lack of memory.
//!
//! Such a SIGKILL looks like any other, so the kernel's counters are read when the engine begins
//! and when it has ended. The supervisor asks, for the diagnosis and to know whether a request may
//! be to blame.

use std::fs;
use std::path::{Path, PathBuf};

/// Counter of the host, which counts the kills in all cgroups.
const HOST_COUNTERS: &str = "/proc/vmstat";

/// Counters of the kernel when an engine began.
#[derive(Debug, Clone, Default)]
pub(crate) struct OomWatch {
    /// Counter of the engine's cgroup, if it has one: the file, and the count.
    cgroup: Option<(PathBuf, u64)>,
    host: Option<u64>,
}

impl OomWatch {
    /// Watch for an engine without a known process, which counts the kills on the whole host.
    pub(crate) fn of_host() -> Self {
        Self { cgroup: None, host: read_count(Path::new(HOST_COUNTERS)) }
    }

    /// Watch for the engine with this first process.
    pub(crate) fn of_process(pid: u32) -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let files = counter_files(&read(&format!("/proc/{pid}/cgroup")), &read("/proc/self/mountinfo"));
        Self { cgroup: files.into_iter().find_map(|file| read_count(&file).map(|count| (file, count))), ..Self::of_host() }
    }

    /// Whether the kernel has killed since then: in the cgroup, or anywhere on the host if the
    /// cgroup does not tell, so that a kill that cannot be attributed counts.
    ///
    /// `None` if neither tells. The kernel counts a kill before it sends the signal.
    pub(crate) fn has_killed(&self) -> Option<bool> {
        let in_cgroup = self.cgroup.as_ref().and_then(|(file, before)| Some(read_count(file)? > *before));
        in_cgroup.or_else(|| Some(read_count(Path::new(HOST_COUNTERS))? > self.host?))
    }
}

fn read_count(file: &Path) -> Option<u64> {
    parse_count(&fs::read_to_string(file).ok()?)
}

/// Parses the count of kills.
///
/// The line is the same in `/proc/vmstat`, in `memory.events` of cgroup v2 and, since Linux 4.13,
/// in `memory.oom_control` of v1.
fn parse_count(counters: &str) -> Option<u64> {
    counters.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

/// Files that may count the kills of a process, given its `/proc/PID/cgroup` and the mounts; the
/// first existing one does.
///
/// In v2 a kill counts in each cgroup above, too, so a cgroup without a memory controller leaves it
/// to the next. In v1 a kill counts only in the process's own cgroup.
fn counter_files(cgroups: &str, mounts: &str) -> Vec<PathBuf> {
    match memory_group(cgroups, mounts) {
        Some(MemoryGroup::V1 { folders }) => folders.first().map(|own| own.join("memory.oom_control")).into_iter().collect(),
        Some(MemoryGroup::V2 { folders }) => folders.iter().map(|above| above.join("memory.events")).collect(),
        None => Vec::new(),
    }
}

/// Files with the limits of a process's memory, which hold in its own cgroup and in each above,
/// given its `/proc/PID/cgroup` and the mounts.
pub(crate) fn memory_limit_files(cgroups: &str, mounts: &str) -> Vec<PathBuf> {
    let (folders, name) = match memory_group(cgroups, mounts) {
        Some(MemoryGroup::V1 { folders }) => (folders, "memory.limit_in_bytes"),
        Some(MemoryGroup::V2 { folders }) => (folders, "memory.max"),
        None => return Vec::new(),
    };
    folders.iter().map(|folder| folder.join(name)).collect()
}

/// Folders of the cgroup that counts a process's memory and of those above it, from the own one on.
enum MemoryGroup {
    V1 { folders: Vec<PathBuf> },
    V2 { folders: Vec<PathBuf> },
}

fn memory_group(cgroups: &str, mounts: &str) -> Option<MemoryGroup> {
    let of_v1 = cgroups.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        controllers.split(',').any(|name| name == "memory").then_some(path)
    });
    if let Some(path) = of_v1 {
        let found = mounts.lines().find_map(|mount| folder_in(mount, "cgroup", "memory", path))?;
        return Some(MemoryGroup::V1 { folders: with_ancestors(&found) });
    }
    let path = cgroups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let found = mounts.lines().find_map(|mount| folder_in(mount, "cgroup2", "", path))?;
    Some(MemoryGroup::V2 { folders: with_ancestors(&found) })
}

/// A folder and those above it, up to its mount point.
fn with_ancestors((folder, mount): &(PathBuf, PathBuf)) -> Vec<PathBuf> {
    folder.ancestors().take_while(|above| above.starts_with(mount)).map(Path::to_owned).collect()
}

/// Folder of a cgroup below a line of `/proc/self/mountinfo`, and its mount point, if the line is a
/// mount of this type with this option.
fn folder_in(mount: &str, kind: &str, option: &str, cgroup: &str) -> Option<(PathBuf, PathBuf)> {
    let (place, source) = mount.split_once(" - ")?;
    let source: Vec<&str> = source.split(' ').collect();
    let (Some(found), Some(options)) = (source.first(), source.last()) else { return None };
    if *found != kind || !(option.is_empty() || options.split(',').any(|one| one == option)) {
        return None;
    }
    let mut place = place.split(' ').skip(3);
    let (root, point) = (place.next()?, Path::new(place.next()?));
    // `None` here means outside of this cgroup namespace, or not below the mounted part.
    let below = Path::new(cgroup).strip_prefix(root).ok().filter(|below| below.components().all(|part| part.as_os_str() != ".."))?;
    Some((point.join(below), point.to_owned()))
}

#[cfg(test)]
mod tests;
