//! What jobs have printed last, for who waits for them.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::controller_process::last_lines;

/// The last line that a job has printed since then.
pub(super) fn last_words(logs: &Path, since: SystemTime) -> Option<String> {
    last_words_of(fs::read_dir(logs).ok()?.filter_map(|entry| entry.ok().map(|entry| entry.path())), since)
}

/// The last line of the file that was written last, since then.
pub(super) fn last_words_of(files: impl IntoIterator<Item = PathBuf>, since: SystemTime) -> Option<String> {
    let dated = files.into_iter().filter_map(|path| Some((path.metadata().ok()?.modified().ok()?, path)));
    let (_, newest) = dated.filter(|(changed, _)| *changed >= since).max()?;
    last_lines(&newest).ok()?.into_iter().rfind(|line| !line.trim().is_empty())
}
