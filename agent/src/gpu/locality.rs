//! CPU cores next to a GPU, according to the driver or sysfs.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct GpuLocality {
    pub(super) cpus: BTreeSet<u32>,
}

impl GpuLocality {
    /// CPUs that the driver names, or those of sysfs if it names none.
    pub(super) fn of(pci: &str, named: Vec<u32>) -> Self {
        let list = Path::new("/sys/bus/pci/devices").join(pci).join("local_cpulist");
        let listed = || fs::read_to_string(list).ok().filter(|_| !pci.is_empty()).map(|list| parse_cpu_list(&list)).unwrap_or_default();
        let cpus = if named.is_empty() { listed() } else { named };
        Self { cpus: cpus.into_iter().collect() }
    }
}

/// Parses a list in the kernel's format: `0-3,8,10-11`.
pub(super) fn parse_cpu_list(text: &str) -> Vec<u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse::<u32>().ok()?..=last.trim().parse::<u32>().ok()?)
    };
    text.split(',').filter_map(range).flatten().collect()
}
