//! Files with secrets: written whole and readable by their owner alone, and refused if others may
//! read them.

use std::fs::{self, DirBuilder, Metadata};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;

use tempfile::NamedTempFile;

use crate::TlsError;

/// Largest file with a key, a certificate or a token that is read, in bytes.
///
/// A chain of a few certificates has some kilobytes.
const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// Creates a folder and its parents, for their owner alone.
pub(crate) fn make_folder(path: &Path) -> Result<(), TlsError> {
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(|source| TlsError::Write { path: path.to_owned(), source })
}

/// Writes a file that only its owner may read, atomically. Replaces an existing file.
///
/// # Errors
/// When the file cannot be written.
pub fn write_private(path: &Path, content: &[u8]) -> Result<(), TlsError> {
    write(path, content, 0o600, true)
}

pub(crate) fn write_public(path: &Path, content: &[u8]) -> Result<(), TlsError> {
    write(path, content, 0o644, true)
}

/// Creates a file that only its owner may read.
///
/// # Errors
/// When the file already exists, or cannot be written.
pub fn write_new(path: &Path, content: &[u8]) -> Result<(), TlsError> {
    write(path, content, 0o600, false)
}

fn write(path: &Path, content: &[u8], mode: u32, replace: bool) -> Result<(), TlsError> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let written = (|| {
        let mut file = NamedTempFile::new_in(folder)?;
        // Set the mode independently of the user's umask.
        file.as_file().set_permissions(fs::Permissions::from_mode(mode))?;
        file.write_all(content)?;
        file.as_file().sync_all()?;
        let placed = if replace { file.persist(path) } else { file.persist_noclobber(path) };
        placed.map(drop).map_err(|failed| failed.error)
    })();
    written.map_err(|source| TlsError::Write { path: path.to_owned(), source })
}

/// Reads a regular file of at most [`MAX_FILE_BYTES`]. A pipe would be waited for without end, and
/// a router reads its certificates again and again.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    let found = inspect(path)?;
    if !found.is_file() {
        return Err(TlsError::Content { path: path.to_owned(), what: "not a regular file".into() });
    }
    read_whole(path, &found)
}

fn inspect(path: &Path) -> Result<Metadata, TlsError> {
    fs::metadata(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })
}

fn read_whole(path: &Path, found: &Metadata) -> Result<Vec<u8>, TlsError> {
    if found.len() > MAX_FILE_BYTES {
        return Err(TlsError::Content { path: path.to_owned(), what: "larger than a megabyte, so no key, certificate or token".into() });
    }
    fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })
}

/// Reads a file with a secret, or the pipe by which a shell passes one on.
///
/// # Errors
/// When the file cannot be read, or others than its owner may read it.
pub fn read_private(path: &Path) -> Result<Vec<u8>, TlsError> {
    let found = inspect(path)?;
    let mode = found.permissions().mode() & 0o777;
    if found.is_file() && mode & 0o077 != 0 {
        return Err(TlsError::Exposed { path: path.to_owned(), mode });
    }
    read_whole(path, &found)
}
