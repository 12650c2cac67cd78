//! Reasons why a batch ended without an answer to each request, and the exit code for each.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Text for `--help` and the manual.
pub const EXIT_CODES: &str = "Exit codes:\n  \
    0  every request was answered with a status of 2xx\n  \
    1  nothing more could be done; the error says what to change\n  \
    2  the command line is wrong\n  \
    3  the output is complete, and some of its requests failed\n  \
    4  stopped by a signal before the end; the same command goes on";

#[derive(Debug, Error)]
pub enum BatchError {
    #[error("cannot {verb} {}: {source}", path.display())]
    File {
        /// Operation that failed.
        verb: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("nothing was sent: {} is no batch of requests:\n{problems}", path.display())]
    Input {
        path: PathBuf,
        /// Problems, one per line.
        problems: String,
    },
    #[error("{} has no request", .0.display())]
    Empty(PathBuf),
    #[error("line {line} of {} has changed since the batch began: put the file back, or begin anew with another output", path.display())]
    InputChanged { path: PathBuf, line: u32 },
    #[error("{} is there already: move it away, or name another output", .0.display())]
    OutputExists(PathBuf),
    #[error(
        "{} holds answers to another input: give the input of then, or remove this file to lose those answers and begin anew",
        .0.display()
    )]
    OtherInput(PathBuf),
    #[error("{} was not written by this program: move it away, or name another output", .0.display())]
    NoJournal(PathBuf),
    #[error("another process writes {}: wait for it, or name another output", .0.display())]
    InUse(PathBuf),
    #[error("the target refuses the key (401: {message}): set OPENAI_API_KEY or --key-file; answers so far are kept in {}", journal.display())]
    KeyRefused { message: String, journal: PathBuf },
    #[error("stopped with {answered} of {total} requests answered; the answers are in {}: the same command goes on", journal.display())]
    Stopped { answered: usize, total: usize, journal: PathBuf },
    #[error("{failed} of {total} requests failed; their lines in {} say why", output.display())]
    SomeFailed { failed: usize, total: usize, output: PathBuf },
}

impl BatchError {
    /// Exit code as listed in [`EXIT_CODES`].
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::SomeFailed { .. } => 3,
            Self::Stopped { .. } => 4,
            _ => 1,
        }
    }
}
