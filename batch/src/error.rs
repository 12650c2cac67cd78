//! Reasons why a batch ended without an answer to each request, and the exit code for each.

use std::path::PathBuf;

use hostler_batch_file::FileError;
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
    #[error(transparent)]
    Files(#[from] FileError),
    #[error("{} is there already: move it away, or name another output", .0.display())]
    OutputExists(PathBuf),
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
