//! Hands a secret made here to its user, once: into a file that only they can read, or to standard
//! output, with a warning if others can read that file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use hostler_tls::write_private;

use crate::output::complain;

/// Destination of a secret. It is opened before the secret is made, because a key that nobody has
/// seen is useless.
#[derive(Debug)]
pub(crate) enum SecretOutput {
    Standard,
    /// A file of mode 0600.
    File(PathBuf),
}

impl SecretOutput {
    /// Opens a file or standard output. An existing file is replaced only with `force`.
    ///
    /// # Errors
    /// When the file exists, or cannot be made.
    pub(crate) fn prepare(out: Option<&Path>, force: bool) -> anyhow::Result<Self> {
        let Some(path) = out else { return Ok(Self::Standard) };
        let mut options = OpenOptions::new();
        options.write(true).mode(0o600);
        match if force { options.create(true) } else { options.create_new(true) }.open(path) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                let shown = path.display();
                anyhow::bail!("{shown} is there already, and may hold a key that somebody uses: name another file, or say --force")
            }
            Err(error) => return Err(error).with_context(|| format!("cannot write {}", path.display())),
        }
        Ok(Self::File(path.to_owned()))
    }

    /// Undoes `prepare`, because there is no secret after all.
    pub(crate) fn withdraw(&self) {
        if let Self::File(path) = self
            && fs::metadata(path).is_ok_and(|metadata| metadata.len() == 0)
        {
            // An empty file does no harm.
            let _ = fs::remove_file(path);
        }
    }

    /// Writes the secret on a line of its own.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn write(&self, secret: &str) -> anyhow::Result<()> {
        match self {
            Self::File(path) => Ok(write_private(path, format!("{secret}\n").as_bytes())?),
            Self::Standard => {
                warn_of_readers();
                Ok(writeln!(io::stdout(), "{secret}")?)
            }
        }
    }
}

/// Warns if standard output is a file that others can read: with the usual mask, `> FILE` has mode
/// 644.
pub(crate) fn warn_of_readers() {
    let opened = io::stdout().as_fd().try_clone_to_owned().map(File::from);
    let Ok(metadata) = opened.and_then(|file| file.metadata()) else { return };
    let mode = metadata.permissions().mode() & 0o777;
    if metadata.is_file() && mode & 0o044 != 0 {
        complain(&format!(
            "warning: standard output is a file that others can read (mode {mode:o}): `chmod 600` it; `--out FILE` makes one that they cannot"
        ));
    }
}
