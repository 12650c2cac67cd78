//! Memory that this process and its engines may use: the host's, or less if a control group or the
//! batch job allows less.

use std::fs;

use crate::process::oom_watch::memory_limit_files;

/// Slurm's limit of a job on each node, in MiB; 0 means all of the node's memory.
const SLURM_LIMIT: &str = "SLURM_MEM_PER_NODE";

/// Bytes that may be used; 0 if not even the host's memory is known.
pub(super) fn detect() -> u64 {
    let total = fs::read_to_string("/proc/meminfo").ok().and_then(|text| parse_total(&text));
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let files = memory_limit_files(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"));
    let of_groups = files.iter().filter_map(|file| parse_limit(&fs::read_to_string(file).ok()?));
    let of_job = std::env::var(SLURM_LIMIT).ok().and_then(|text| parse_slurm(&text));
    total.map_or(0, |total| of_groups.chain(of_job).fold(total, u64::min))
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
    fn this_host_has_memory() {
        assert!(detect() > 0);
    }
}
