//! Runs the schedulers' commands, each with a deadline. No other module does.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use hostler_boot::program::{ProgramLookup, find_program, run_to_end};
use tokio::process::Command;

/// Deadline of a query. Schedulers answer within a second unless they are overloaded.
const ASK_TIMEOUT: Duration = Duration::from_secs(10);

/// Deadline of a command that changes something. It has more time, because nobody knows what a
/// killed command has changed.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(60);

/// Most characters quoted from a command's output.
const MAX_QUOTED_CHARS: usize = 200;

/// Reason why a scheduler's command failed.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error("there is no program `{program}`; looked for {searched}")]
    Missing { program: &'static str, searched: String },
    #[error("cannot run {}: {source}", program.display())]
    Run { program: PathBuf, source: std::io::Error },
    #[error("{} did not end within {} s and was killed", program.display(), deadline.as_secs())]
    Late { program: PathBuf, deadline: Duration },
    #[error("{} ended with {status}: {words}", program.display())]
    Failed { program: PathBuf, status: String, words: String },
    #[error("{} printed {what}: {words}", program.display())]
    Unreadable { program: PathBuf, what: &'static str, words: String },
}

/// A command to run.
pub(crate) struct Call {
    program: &'static str,
    arguments: Vec<String>,
    input: String,
    deadline: Duration,
    environment: &'static [(&'static str, &'static str)],
    tolerated: &'static [&'static str],
}

/// Output of a command.
#[derive(Debug)]
pub(crate) struct Printed {
    program: PathBuf,
    pub(crate) text: String,
    /// Whether the command succeeded, rather than failed in a tolerated way.
    pub(crate) succeeded: bool,
}

impl Call {
    /// A query whose output has readable times: qstat prints local ones without a zone, and squeue
    /// uses the requested format.
    pub(crate) fn ask<'a>(program: &'static str, arguments: impl IntoIterator<Item = &'a str>) -> Self {
        let arguments = arguments.into_iter().map(str::to_owned).collect();
        let environment = &[("TZ", "UTC"), ("SLURM_TIME_FORMAT", "%s")];
        Self { deadline: ASK_TIMEOUT, environment, ..Self::change(program, arguments) }
    }

    /// A command that submits or ends jobs, in this process's own environment.
    pub(crate) fn change(program: &'static str, arguments: Vec<String>) -> Self {
        Self { program, arguments, input: String::new(), deadline: CHANGE_TIMEOUT, environment: &[], tolerated: &[] }
    }

    pub(crate) fn with_input(self, input: String) -> Self {
        Self { input, ..self }
    }

    /// Tolerates a failure if each line of standard error contains one of these texts.
    pub(crate) fn tolerate(self, tolerated: &'static [&'static str]) -> Self {
        Self { tolerated, ..self }
    }
}

impl Printed {
    /// Parses the output, and blames the command if that fails.
    pub(crate) fn read<T>(self, read: impl FnOnce(&str) -> Result<T, &'static str>) -> Result<T, CommandError> {
        read(&self.text).map_err(|what| CommandError::Unreadable { program: self.program, what, words: shorten(&self.text) })
    }
}

/// Runs a command to its end.
pub(crate) async fn run(call: Call) -> Result<Printed, CommandError> {
    let lookup = find(call.program);
    let Some(program) = lookup.found else { return Err(CommandError::Missing { program: call.program, searched: lookup.searched }) };
    let mut command = Command::new(&program);
    command.args(&call.arguments).envs(call.environment.iter().copied());
    match run_to_end(command, call.input.as_bytes(), call.deadline).await {
        Err(source) => Err(CommandError::Run { program, source }),
        Ok(None) => Err(CommandError::Late { program, deadline: call.deadline }),
        Ok(Some(output)) => judge(program, &output, call.tolerated),
    }
}

/// Output of a command that succeeded, or failed in a tolerated way.
fn judge(program: PathBuf, output: &Output, tolerated: &[&str]) -> Result<Printed, CommandError> {
    let complaints = String::from_utf8_lossy(&output.stderr);
    let mut lines = complaints.lines().filter(|line| !line.trim().is_empty()).peekable();
    let is_tolerated = lines.peek().is_some() && lines.all(|line| tolerated.iter().any(|words| line.contains(words)));
    if output.status.success() || is_tolerated {
        Ok(Printed { program, text: String::from_utf8_lossy(&output.stdout).into_owned(), succeeded: output.status.success() })
    } else {
        Err(CommandError::Failed { program, status: output.status.to_string(), words: shorten(&complaints) })
    }
}

/// Looks for a scheduler's program.
pub(crate) fn find(program: &str) -> ProgramLookup {
    find_program(Path::new(program), Some(&search_path()))
}

/// Folders in which schedulers' programs are looked for, as a value of `PATH`.
pub(crate) fn search_path() -> OsString {
    join_folders(env::var_os("PATH"), pbs_folders())
}

/// Output of a command as one short line.
fn shorten(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.is_empty() { "nothing".to_owned() } else { line.chars().take(MAX_QUOTED_CHARS).collect() }
}

/// PATH, followed by the folders of PBS: tasks started by `pbsdsh` have only `/bin:/usr/bin`.
fn join_folders(path: Option<OsString>, more: Vec<PathBuf>) -> OsString {
    let path = path.unwrap_or_default();
    let folders = env::split_paths(&path).filter(|folder| folder.is_absolute()).chain(more);
    // Only a folder with a colon in its name cannot be joined.
    env::join_paths(folders).unwrap_or(path)
}

fn pbs_folders() -> Vec<PathBuf> {
    let file = env::var_os("PBS_CONF_FILE").unwrap_or_else(|| "/etc/pbs.conf".into());
    let configured = fs::read_to_string(file).ok().and_then(|text| parse_pbs_exec(&text));
    let installed = [env::var_os("PBS_EXEC").map(PathBuf::from), configured, Some("/opt/pbs".into())];
    installed.into_iter().flatten().map(|folder| folder.join("bin")).collect()
}

/// Folder of PBS according to `/etc/pbs.conf`.
fn parse_pbs_exec(text: &str) -> Option<PathBuf> {
    let value = text.lines().find_map(|line| line.trim().strip_prefix("PBS_EXEC="))?;
    Some(PathBuf::from(value.trim())).filter(|path| path.is_absolute())
}

#[cfg(test)]
mod tests;
