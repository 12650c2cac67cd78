//! Finds other programs, and runs them to their end within a deadline and a bound on their output.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;

/// Most bytes read of standard output, and of standard error; the rest is ignored. A PBS job with
/// its environment is 6 KB, so this is more than 2,000 jobs.
const OUTPUT_CAP: u64 = 16 * 1024 * 1024;

#[derive(Debug, Clone)]
pub struct ProgramLookup {
    pub name: PathBuf,
    /// Where the name was looked for, in words.
    pub searched: String,
    /// The program, if it exists and is executable.
    pub found: Option<PathBuf>,
}

/// Looks for a program: a path as it is, a name in each directory of `search_path` (the value of
/// `PATH`).
#[must_use]
pub fn find_program(name: &Path, search_path: Option<&OsStr>) -> ProgramLookup {
    let runnable = |path: &PathBuf| fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0);
    if name.components().count() > 1 {
        return ProgramLookup {
            name: name.to_owned(),
            searched: "a program at that path".to_owned(),
            found: Some(name.to_owned()).filter(runnable),
        };
    }
    let search_path = search_path.unwrap_or_default();
    ProgramLookup {
        name: name.to_owned(),
        searched: format!("that name in PATH={}", search_path.display()),
        found: env::split_paths(search_path).map(|directory| directory.join(name)).find(runnable),
    }
}

/// Runs a command in a process group of its own, with `input` on its standard input.
///
/// Returns `None` if it has not ended within `deadline`. In that case it is killed, with everything
/// that it has started and left in its group.
///
/// # Errors
/// When the command cannot be started, its input cannot be written, or its output cannot be read. A
/// program that leaves its input unread is no error.
pub async fn run_to_end(mut command: Command, input: &[u8], deadline: Duration) -> io::Result<Option<Output>> {
    let stdin = if input.is_empty() { Stdio::null() } else { Stdio::piped() };
    let mut child = command.process_group(0).kill_on_drop(true).stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let group = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    let stdin = child.stdin.take();
    let mut stdout = child.stdout.take().expect("standard output was piped").take(OUTPUT_CAP);
    let mut stderr = child.stderr.take().expect("standard error was piped").take(OUTPUT_CAP);
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let finished = tokio::time::timeout(deadline, async {
        let write = async {
            let Some(mut stdin) = stdin else { return Ok(()) };
            match stdin.write_all(input).await {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
                written => written,
            }
        };
        let (written, read, read_errors) = tokio::join!(write, stdout.read_to_end(&mut out), stderr.read_to_end(&mut err));
        written.and(read).and(read_errors)?;
        child.wait().await
    })
    .await;
    match finished {
        Ok(ended) => Ok(Some(Output { status: ended?, stdout: out, stderr: err })),
        Err(_) => {
            if let Some(group) = group {
                // The group may be gone already.
                let _ = kill_process_group(group, Signal::KILL);
            }
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests;
