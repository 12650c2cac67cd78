//! Machine on which a load is made, for the report.

use std::fs;
use std::thread::available_parallelism;

use crate::report::Machine;

pub(super) fn machine() -> Machine {
    let read = |file: &str| fs::read_to_string(file).unwrap_or_default();
    let (processors, release, kernel) = (read("/proc/cpuinfo"), read("/etc/os-release"), read("/proc/sys/kernel/osrelease"));
    let system = field(&release, "PRETTY_NAME", '=').map_or(std::env::consts::OS, |name| name.trim_matches('"'));
    Machine {
        processor: field(&processors, "model name", ':').unwrap_or(std::env::consts::ARCH).to_owned(),
        cores: available_parallelism().map_or(1, usize::from),
        system: format!("{system} {}", kernel.trim()).trim_end().to_owned(),
        hostler: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

/// Value of the first line with this name.
fn field<'a>(text: &'a str, name: &str, between: char) -> Option<&'a str> {
    text.lines().filter_map(|line| line.split_once(between)).find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim())
}
