//! Files with secrets: written whole and readable by their owner alone, and refused if others may
//! read them.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use crate::{TlsError, hex, provider};

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
pub(crate) fn write_new(path: &Path, content: &[u8]) -> Result<(), TlsError> {
    write(path, content, 0o600, false)
}

fn write(path: &Path, content: &[u8], mode: u32, replace: bool) -> Result<(), TlsError> {
    let failed = |source| TlsError::Write { path: path.to_owned(), source };
    let mut name = path.file_name().unwrap_or_default().to_owned();
    // Do not use the process id: in two containers that share the folder both may be 1, and each
    // would overwrite the other's draft.
    let mut random = [0; 8];
    provider().secure_random.fill(&mut random).map_err(|_| TlsError::Crypto("the system has no randomness for a file's name".into()))?;
    name.push(format!(".{}.new", hex(&random)));
    let unfinished = path.with_file_name(name);
    let written = (|| {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&unfinished)?;
        // Set the mode independently of the user's umask.
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        file.write_all(content)?;
        file.sync_all()?;
        // A hard link never replaces a file, even on a file system that hosts share.
        if replace { fs::rename(&unfinished, path) } else { fs::hard_link(&unfinished, path) }
    })();
    if !replace || written.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    written.map_err(failed)
}

/// Reads a file of at most [`MAX_FILE_BYTES`].
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    let failed = |source| TlsError::Read { path: path.to_owned(), source };
    if fs::metadata(path).map_err(failed)?.len() > MAX_FILE_BYTES {
        return Err(TlsError::Content { path: path.to_owned(), what: "larger than a megabyte, so no key, certificate or token".into() });
    }
    fs::read(path).map_err(failed)
}

/// Reads a file with a secret.
///
/// # Errors
/// When the file cannot be read, or others than its owner may read it.
pub fn read_private(path: &Path) -> Result<Vec<u8>, TlsError> {
    let found = fs::metadata(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })?;
    let mode = found.permissions().mode() & 0o777;
    if found.is_file() && mode & 0o077 != 0 {
        return Err(TlsError::Exposed { path: path.to_owned(), mode });
    }
    read(path)
}
