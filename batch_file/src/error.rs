//! Reasons why the files of a batch cannot be used.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::input::InputProblems;

#[derive(Debug, Error)]
pub enum FileError {
    #[error("cannot {verb} {}: {source}", path.display())]
    File {
        /// Operation that failed.
        verb: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("nothing was sent: {} is no batch of requests:\n{problems}", path.display())]
    Input { path: PathBuf, problems: InputProblems },
    #[error("{} has no request", .0.display())]
    Empty(PathBuf),
    #[error("line {line} of {} has changed since the batch began: put the file back, or begin anew with another output", path.display())]
    InputChanged { path: PathBuf, line: u32 },
    #[error(
        "{} holds answers to another input: give the input of then, or remove this file to lose those answers and begin anew",
        .0.display()
    )]
    OtherInput(PathBuf),
    #[error("{} was not written by this program: move it away, or name another output", .0.display())]
    NoJournal(PathBuf),
    #[error("another process writes {}: wait for it, or name another output", .0.display())]
    InUse(PathBuf),
}
