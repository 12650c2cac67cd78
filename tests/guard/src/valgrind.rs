//! Runs a case under callgrind and reads the cost of its counted thread.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

use crate::budget::OperationCost;
use crate::cases::Case;

/// Setting that makes all machines use the functions for any x86-64. glibc chooses `memcpy` and
/// similar functions by the CPU, which moved an event's instructions by 10 % from one machine to
/// another.
const SAME_LIBC: &str = "glibc.cpu.hwcaps=-AVX2,-AVX,-AVX_Fast_Unaligned_Load,-ERMS,-FSRM";

/// Cost of one operation of `case`. Callgrind's files stay in `folder`.
pub(crate) fn count(case: Case, folder: &Path) -> anyhow::Result<OperationCost> {
    let out = folder.join(format!("{}.callgrind", case.name()));
    let ran = Command::new("valgrind")
        .args(["--tool=callgrind", "-q", "--fair-sched=try", "--separate-threads=yes", "--collect-systime=yes"])
        .args(["--zero-before=hostler_guard::counted::counting_begins", "--dump-before=hostler_guard::counted::counting_ends"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(std::env::current_exe()?)
        .args(["--case", case.name()])
        .env("GLIBC_TUNABLES", SAME_LIBC)
        .stdin(Stdio::null())
        .output()
        .context("cannot run valgrind: install Debian's package `valgrind`")?;
    if !ran.status.success() {
        bail!("{} failed under valgrind ({}):\n{}", case.name(), ran.status, String::from_utf8_lossy(&ran.stderr));
    }
    // Find the file that was written at the mark. The other threads' files cover their whole life,
    // which is uncounted.
    let mut counted = None;
    let prefix = format!("{}.callgrind", case.name());
    for file in fs::read_dir(folder)? {
        let path = file?.path();
        if !path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix)) {
            continue;
        }
        let text = fs::read_to_string(&path)?;
        if text.lines().take(30).any(|line| line.starts_with("desc: Trigger: --dump-before")) {
            counted = Some(totals(&text).with_context(|| format!("{} is not as callgrind writes it", path.display()))?);
            fs::rename(&path, &out)?;
        } else {
            fs::remove_file(&path)?;
        }
    }
    let totals = counted.with_context(|| format!("{} reached no mark: is this a build without symbols?", case.name()))?;
    Ok(totals.each(f64::from(case.operations())))
}

/// Totals of a file.
///
/// There is no vDSO under valgrind, so each reading of the clock is a system call, and is counted
/// separately here.
fn totals(text: &str) -> Option<OperationCost> {
    let words = |name| text.lines().find_map(|line: &str| line.strip_prefix(name)).map(|rest| rest.split_whitespace().collect::<Vec<_>>());
    // The line `totals` includes calls before the mark.
    let (events, summary) = (words("events:")?, words("summary:")?);
    let figure = |event| summary.get(events.iter().position(|name| *name == event)?)?.parse::<f64>().ok();
    let clock = clock_readings(text);
    Some(OperationCost { instructions: figure("Ir")?, calls: (figure("sysCount").unwrap_or(0.0) - clock).max(0.0), clock })
}

/// How often the clock was read, over all callers.
///
/// A function has its name where it first occurs, and a number from then on.
fn clock_readings(text: &str) -> f64 {
    let (mut number, mut is_called, mut readings) = (None, false, 0.0);
    for line in text.lines() {
        let called = line.strip_prefix("cfn=");
        if let Some(function) = called.or_else(|| line.strip_prefix("fn=")) {
            let (id, name) = function.split_once(' ').unwrap_or((function, ""));
            if name.starts_with("clock_gettime") {
                number = Some(id);
            }
            is_called = called.is_some() && number == Some(id);
        } else if let Some(calls) = line.strip_prefix("calls=").filter(|_| is_called) {
            readings += calls.split(' ').next().and_then(|calls| calls.parse().ok()).unwrap_or(0.0);
        }
    }
    readings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_and_clock_calls_are_found_by_name() {
        let function = "fn=(1) main\ncfn=(7) clock_gettime@@GLIBC_2.17\ncalls=3 0\n0 30 3\ncfn=(8) write\ncalls=9 0\n0 90 9\n";
        let other = "fn=(2) other\ncfn=(7)\ncalls=2 0\n0 20 2\n";
        let text = format!("events: Ir sysCount sysTime\nsummary: 4200 17 12\n{function}{other}totals: 4300 99 12\n");
        assert_eq!(totals(&text), Some(OperationCost { instructions: 4200.0, calls: 12.0, clock: 5.0 }));
        assert_eq!(totals("events: Ir\nsummary: 5\n"), Some(OperationCost { instructions: 5.0, calls: 0.0, clock: 0.0 }));
        assert_eq!(totals("events: Ir\n"), None);
    }
}
