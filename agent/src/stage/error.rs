//! Why a model is not staged. None of these stops service: the engine then reads the model where
//! it lies.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;

use crate::sizes::format_gib;

#[derive(Debug, thiserror::Error)]
pub(crate) enum StageError {
    #[error("no node-local place takes it: {0}; name one with agent.stage")]
    NoPlace(String),
    #[error("agent.stage names {0}, and no variable {1} is set here")]
    NoVariable(String, String),
    #[error("{} is no folder here: a single file, or a model that still has to be downloaded, is not staged", .0.display())]
    NoFolder(PathBuf),
    #[error("its folder has more than {0} files or folders in it")]
    TooManyFiles(usize),
    #[error("the name of {} is not UTF-8: rename it", .0.display())]
    NotUtf8(PathBuf),
    #[error("cannot read {}: {source}", path.display())]
    Source { path: PathBuf, source: io::Error },
    #[error("{} changed while it was copied", .0.display())]
    SourceChanged(PathBuf),
    #[error("it has {}, and staged models may have {} in all (agent.stage_bytes)", format_gib(*bytes), format_gib(*bound))]
    BeyondBound { bytes: u64, bound: u64 },
    #[error("it has {}, and {} has room for {}: make room, or lower agent.stage_bytes so that other models go first", format_gib(*bytes), place.display(), format_gib(*free))]
    NoRoom { bytes: u64, place: PathBuf, free: u64 },
    #[error("{} is full: make room, or lower agent.stage_bytes", .0.display())]
    DiskFull(PathBuf),
    #[error("cannot use {}: {source}", path.display())]
    Target { path: PathBuf, source: io::Error },
    #[error("nothing was read for {} s", .0.as_secs())]
    Stalled(Duration),
    #[error("it was not wanted any longer")]
    Cancelled,
}

impl StageError {
    /// A word for scripts.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::NoPlace(_) => "no-place",
            Self::NoVariable(..) => "no-variable",
            Self::NoFolder(_) => "no-folder",
            Self::TooManyFiles(_) => "too-many-files",
            Self::NotUtf8(_) => "not-utf8",
            Self::Source { .. } => "source",
            Self::SourceChanged(_) => "source-changed",
            Self::BeyondBound { .. } => "beyond-bound",
            Self::NoRoom { .. } => "no-room",
            Self::DiskFull(_) => "disk-full",
            Self::Target { .. } => "target",
            Self::Stalled(_) => "stalled",
            Self::Cancelled => "cancelled",
        }
    }

    pub(super) fn source(path: &Path, source: impl Into<io::Error>) -> Self {
        Self::Source { path: path.to_owned(), source: source.into() }
    }

    /// A failed write. A quota that is used up is a full disk.
    pub(super) fn target(path: &Path, source: impl Into<io::Error>) -> Self {
        let source = source.into();
        let is_full = [Errno::NOSPC, Errno::DQUOT].iter().any(|full| source.raw_os_error() == Some(full.raw_os_error()));
        if is_full { Self::DiskFull(path.to_owned()) } else { Self::Target { path: path.to_owned(), source } }
    }
}
