//! Memory that this process and its engines may use: the host's, or less if a control group or the
//! batch job allows less.

use std::{fmt, fs};

use crate::process::oom_watch::memory_limit_files;
use crate::sizes::format_gib;

/// Slurm's limit of a job on each node, in MiB; 0 means all of the node's memory.
const SLURM_LIMIT: &str = "SLURM_MEM_PER_NODE";

/// Memory that may be used, and what limits it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostMemory {
    /// 0 if not even the host's memory is known.
    pub bytes: u64,
    pub limit: MemoryLimit,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryLimit {
    Host,
    ControlGroup,
    Job,
}

impl fmt::Display for HostMemory {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = format_gib(self.bytes);
        match self.limit {
            MemoryLimit::Host => write!(formatter, "the {bytes} that the host has"),
            MemoryLimit::ControlGroup => write!(formatter, "the {bytes} that the control group allows"),
            MemoryLimit::Job => write!(formatter, "the {bytes} that the job has on this node"),
        }
    }
}

pub(super) fn detect() -> HostMemory {
    let total = fs::read_to_string("/proc/meminfo").ok().and_then(|text| parse_total(&text));
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let files = memory_limit_files(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"));
    let of_groups = files.iter().filter_map(|file| parse_limit(&fs::read_to_string(file).ok()?)).min();
    least(total.unwrap_or(0), of_groups, std::env::var(SLURM_LIMIT).ok().and_then(|text| parse_slurm(&text)))
}

/// The least of the host's memory and the limits that are known.
fn least(total: u64, of_group: Option<u64>, of_job: Option<u64>) -> HostMemory {
    let limits = [(of_group, MemoryLimit::ControlGroup), (of_job, MemoryLimit::Job)];
    let limits = limits.into_iter().filter_map(|(bytes, limit)| Some(HostMemory { bytes: bytes?, limit }));
    limits.fold(HostMemory { bytes: total, limit: MemoryLimit::Host }, |least, limit| if limit.bytes < least.bytes { limit } else { least })
}

fn parse_total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Limit of a control group; `None` for `max`. Version 1 writes a huge number in its place.
fn parse_limit(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

fn parse_slurm(text: &str) -> Option<u64> {
    text.trim().parse::<u64>().ok().filter(|mebibytes| *mebibytes > 0)?.checked_mul(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_as_the_kernel_and_slurm_write_them() {
        assert_eq!(parse_total("MemFree: 1 kB\nMemTotal:       16384 kB\n"), Some(16 << 20));
        assert_eq!(
            (parse_limit("1048576\n"), parse_limit("max\n"), parse_limit("9223372036854771712\n")),
            (Some(1 << 20), None, Some(9_223_372_036_854_771_712))
        );
        assert_eq!((parse_slurm("2048"), parse_slurm("0"), parse_slurm("unlimited")), (Some(2 << 30), None, None));
    }

    #[test]
    fn the_least_memory_counts_and_says_what_limits_it() {
        let said = |of_group, of_job| least(100 << 30, of_group, of_job).to_string();
        assert_eq!(said(None, None), "the 100.0 GiB that the host has");
        assert_eq!(said(Some(1 << 63), None), "the 100.0 GiB that the host has");
        assert_eq!(said(Some(32 << 30), Some(48 << 30)), "the 32.0 GiB that the control group allows");
        assert_eq!(said(Some(1 << 63), Some(48 << 30)), "the 48.0 GiB that the job has on this node");
        assert_eq!(least(0, Some(32 << 30), None).bytes, 0, "a host that says nothing");
    }

    #[test]
    fn this_host_has_memory() {
        assert!(detect().bytes > 0);
    }
}
