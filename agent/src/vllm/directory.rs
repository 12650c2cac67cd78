//! Directory of an engine: its socket, its temporary files, and the files it needs at its start.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::plugin;

pub(crate) fn socket_path(directory: &Path) -> PathBuf {
    directory.join("engine.sock")
}

pub(crate) fn temporary_path(directory: &Path) -> PathBuf {
    directory.join("tmp")
}

/// Empties the directory.
///
/// Sockets of an earlier life would make vLLM fail, and vLLM never removes its temporary files.
/// Leaves a folder for new ones, and the plugin if the engine's environment names it.
pub(crate) fn prepare(directory: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut builder = fs::DirBuilder::new();
    builder.mode(0o700).create(directory)?;
    builder.create(temporary_path(directory))?;
    plugin::write(directory)
}

#[cfg(test)]
mod tests;
