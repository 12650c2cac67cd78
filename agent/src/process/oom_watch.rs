//! Whether the kernel has killed a process of an engine for want of memory. Its SIGKILL looks like
//! anybody's, so its counters are read when the engine begins and when it has ended. The supervisor
//! asks, for the diagnosis and to know whether a request may be to blame.

use std::fs;
use std::path::{Path, PathBuf};

/// The host's own counter, which counts the kills in all cgroups.
const HOST_COUNTERS: &str = "/proc/vmstat";

/// What the kernel had counted when an engine began.
#[derive(Debug, Clone, Default)]
pub(crate) struct OomWatch {
    /// Of the cgroup that the engine is in, where that has a counter: the file, and the count.
    cgroup: Option<(PathBuf, u64)>,
    host: Option<u64>,
}

impl OomWatch {
    /// For an engine of which no process is known yet: counts the kills on the whole host.
    pub(crate) fn of_host() -> Self {
        Self { cgroup: None, host: read_count(Path::new(HOST_COUNTERS)) }
    }

    /// For the engine whose first process this is.
    pub(crate) fn of_process(pid: u32) -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let files = counter_files(&read(&format!("/proc/{pid}/cgroup")), &read("/proc/self/mountinfo"));
        Self { cgroup: files.into_iter().find_map(|file| read_count(&file).map(|count| (file, count))), ..Self::of_host() }
    }

    /// Whether the kernel has killed since then: in the cgroup, or anywhere on the host where the
    /// cgroup does not tell, so that a kill that cannot be attributed counts. `None` where neither
    /// tells. The kernel counts a kill before it sends the signal.
    pub(crate) fn has_killed(&self) -> Option<bool> {
        let in_cgroup = self.cgroup.as_ref().and_then(|(file, before)| Some(read_count(file)? > *before));
        in_cgroup.or_else(|| Some(read_count(Path::new(HOST_COUNTERS))? > self.host?))
    }
}

fn read_count(file: &Path) -> Option<u64> {
    parse_count(&fs::read_to_string(file).ok()?)
}

/// The line is the same in `/proc/vmstat`, in `memory.events` of cgroup v2 and, since Linux 4.13,
/// in `memory.oom_control` of v1.
fn parse_count(counters: &str) -> Option<u64> {
    counters.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

/// The files that may count the kills of a process, given its `/proc/PID/cgroup` and the mounts;
/// the first that is there does. In v2 a kill counts in each cgroup above, too, so that one without
/// a memory controller leaves it to the next. In v1 it counts in its own alone.
fn counter_files(cgroups: &str, mounts: &str) -> Vec<PathBuf> {
    let of_v1 = cgroups.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        controllers.split(',').any(|name| name == "memory").then_some(path)
    });
    if let Some(path) = of_v1 {
        let folder = mounts.lines().find_map(|mount| folder_in(mount, "cgroup", "memory", path));
        return folder.map(|(folder, _)| folder.join("memory.oom_control")).into_iter().collect();
    }
    let Some(path) = cgroups.lines().find_map(|line| line.strip_prefix("0::")) else { return Vec::new() };
    let Some((folder, mount)) = mounts.lines().find_map(|mount| folder_in(mount, "cgroup2", "", path)) else { return Vec::new() };
    folder.ancestors().take_while(|above| above.starts_with(&mount)).map(|above| above.join("memory.events")).collect()
}

/// The folder of a cgroup below a line of `/proc/self/mountinfo`, and where that is mounted, if it
/// is a mount of this type with this option.
fn folder_in(mount: &str, kind: &str, option: &str, cgroup: &str) -> Option<(PathBuf, PathBuf)> {
    let (place, source) = mount.split_once(" - ")?;
    let source: Vec<&str> = source.split(' ').collect();
    let (Some(found), Some(options)) = (source.first(), source.last()) else { return None };
    if *found != kind || !(option.is_empty() || options.split(',').any(|one| one == option)) {
        return None;
    }
    let mut place = place.split(' ').skip(3);
    let (root, point) = (place.next()?, Path::new(place.next()?));
    // Outside of this cgroup namespace, or not below what is mounted here.
    let below = Path::new(cgroup).strip_prefix(root).ok().filter(|below| below.components().all(|part| part.as_os_str() != ".."))?;
    Some((point.join(below), point.to_owned()))
}

#[cfg(test)]
mod tests;
