//! `hostler keeper`: the process between an agent and one of its engines. Agents start it; it is in no list of commands.

use std::ffi::OsString;
use std::process::ExitCode;

/// Keeps one engine until nothing of it is left, or becomes its first process, if that is what this process was started for. Asked before the
/// command line is described: that takes megabytes, which each keeper would have for as long as its engine lives.
pub(crate) fn keeper() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != "keeper" {
        return None;
    }
    Some(hostler_agent::keeper::run_subcommand(&arguments.collect::<Vec<OsString>>()))
}
