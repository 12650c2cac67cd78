//! `hostler keeper`: the process between an agent and one of its engines. Agents start it; no list
//! of commands shows it.

use std::ffi::OsString;
use std::process::ExitCode;

/// Keeps one engine until nothing of it is left, or becomes its first process, if this process was
/// started for that.
///
/// Checked before the command line is built, which takes megabytes that each keeper would hold for
/// its engine's whole life.
pub(crate) fn keeper() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != "keeper" {
        return None;
    }
    Some(hostler_agent::keeper::run_subcommand(&arguments.collect::<Vec<OsString>>()))
}
