//! Processes of an engine whose agent or keeper is dead.
//!
//! They are found by the record in the engine's directory and by their environment, and ended.

use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::record::ProcessRecord;
use super::table::ProcessStat;
use super::{ENGINE_OF, KEEPER_OF, STUCK_AFTER};

/// Living processes of an engine whose agent is dead, found by the record in its directory and by
/// the environment that every engine gets.
pub(crate) fn orphans(directory: &Path) -> Vec<i32> {
    let mut found: Vec<i32> =
        ProcessRecord::read(directory).map_or_else(Vec::new, |record| record.members()).iter().map(|process| process.pid).collect();
    found.append(&mut marked(ENGINE_OF, directory));
    found.sort_unstable();
    found.dedup();
    found
}

/// Keepers of the engine with this directory; there should be at most one.
pub(crate) fn keepers_of(directory: &Path) -> Vec<i32> {
    marked(KEEPER_OF, directory)
}

/// Living processes in whose environment the variable has the engine's directory, or the one in
/// which the engine began as a spare.
fn marked(variable: &str, directory: &Path) -> Vec<i32> {
    let begun_in = ProcessRecord::read(directory).and_then(|record| record.begun_in);
    let marks = [Some(directory), begun_in.as_deref()].into_iter().flatten();
    let marks: Vec<_> = marks.map(|directory| format!("{variable}={}", directory.display())).collect();
    let mut found = ProcessStat::all();
    found.retain(|process| !process.is_zombie && marks.iter().any(|mark| process.has_environment(mark)));
    found.into_iter().map(|process| process.pid).collect()
}

/// Kills the processes of an engine whose agent or keeper is dead, and its keeper.
///
/// Blocks until none lives, `STUCK_AFTER` at most. Returns the number of processes found without
/// keepers, or the remaining ones.
#[expect(clippy::disallowed_methods, reason = "it runs where blocking is allowed, before the agent has any engine")]
pub(crate) fn end_orphans(directory: &Path) -> Result<usize, Vec<i32>> {
    let deadline = std::time::Instant::now() + STUCK_AFTER;
    let mut found = 0;
    loop {
        let orphans = orphans(directory);
        let keepers = keepers_of(directory);
        if orphans.is_empty() && keepers.is_empty() {
            return Ok(found);
        }
        if std::time::Instant::now() >= deadline {
            return Err([orphans, keepers].concat());
        }
        found = found.max(orphans.len());
        // Kill the engine first: when a keeper dies, only the engine's first process dies with it.
        for pid in orphans.into_iter().chain(keepers) {
            if let Some(pid) = Pid::from_raw(pid) {
                // A process that is already gone is fine.
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[cfg(test)]
mod tests;
