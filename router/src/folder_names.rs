//! What a folder has.

use std::io::{self, ErrorKind};
use std::path::Path;

/// The names in a folder, in order; none if it does not exist. Blocks.
pub(crate) fn folder_names(folder: &Path) -> io::Result<Vec<String>> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect::<io::Result<Vec<_>>>()?;
    names.sort_unstable();
    Ok(names)
}
