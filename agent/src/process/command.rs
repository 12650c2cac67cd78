//! Runs a short program to its end, within a deadline and a bound on its output: vLLM's version, a scheduler's word on the job.

use std::io;
use std::process::{Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::AsyncReadExt;
use tokio::process::Command;

/// How many bytes of standard output, and of standard error, are read; the rest is not.
const OUTPUT_CAP: u64 = 1024 * 1024;

/// Runs it in a process group of its own. `None` when it has not ended within `deadline`: then it is
/// killed, with all that it has started and left in its group.
///
/// # Errors
/// When it cannot be started, or its output not be read.
pub(crate) async fn run_to_end(mut command: Command, deadline: Duration) -> io::Result<Option<Output>> {
    let mut child =
        command.process_group(0).kill_on_drop(true).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let group = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    let mut stdout = child.stdout.take().expect("standard output was piped").take(OUTPUT_CAP);
    let mut stderr = child.stderr.take().expect("standard error was piped").take(OUTPUT_CAP);
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let finished = tokio::time::timeout(deadline, async {
        let reads = tokio::join!(stdout.read_to_end(&mut out), stderr.read_to_end(&mut err));
        reads.0.and(reads.1)?;
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
