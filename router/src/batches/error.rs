//! Why a call of the Batch API is refused, or a batch cannot go on.

use std::io;
use std::path::Path;

use super::object_id::ObjectKind;
use super::private_files::is_full;

#[derive(Debug, thiserror::Error)]
pub(crate) enum BatchesError {
    #[error("{}", absent(*.0, .1))]
    NotFound(ObjectKind, String),
    #[error("{message}")]
    Invalid {
        message: String,
        /// The field that is wrong.
        param: Option<&'static str>,
    },
    #[error("{0}")]
    TooLarge(String),
    /// The caller has as much as it may have.
    #[error("{0}")]
    Quota(String),
    /// The caller's other uploads have to end first.
    #[error("{0}")]
    Busy(String),
    #[error("{0}")]
    Conflict(String),
    #[error("router.batches_dir has no more room (its disk, or router.batches_max_bytes): nothing is lost; try again when there is some")]
    DiskFull,
    #[error("the files of batches cannot be used: {0}")]
    Disk(String),
}

impl BatchesError {
    pub(crate) fn invalid(param: &'static str, message: impl Into<String>) -> Self {
        Self::Invalid { message: message.into(), param: Some(param) }
    }

    /// `verb` says what failed.
    pub(super) fn disk(verb: &'static str, path: &Path, error: &io::Error) -> Self {
        if is_full(error) { Self::DiskFull } else { Self::Disk(format!("cannot {verb} {}: {error}", path.display())) }
    }
}

fn absent(kind: ObjectKind, id: &str) -> String {
    let id: String = id.chars().take(100).collect();
    match kind {
        ObjectKind::File => format!("No such File object: {id}"),
        ObjectKind::Batch => format!("No batch found with id '{id}'."),
    }
}

/// Adds what was done to an error of the disk.
pub(super) trait DiskResult<T> {
    fn or_disk(self, verb: &'static str, path: &Path) -> Result<T, BatchesError>;
}

impl<T> DiskResult<T> for io::Result<T> {
    fn or_disk(self, verb: &'static str, path: &Path) -> Result<T, BatchesError> {
        self.map_err(|error| BatchesError::disk(verb, path, &error))
    }
}
