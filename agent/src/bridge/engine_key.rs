//! The API key of engines that somebody else runs. It is in its file and in the requests to them
//! only: not in a command line, not in a log, not in a report.

use std::fmt;
use std::path::{Path, PathBuf};

use hostler_tls::read_private;

/// Longest key, in bytes. OpenAI's have some 160.
const MAX_KEY_BYTES: usize = 4096;

/// A key, for the header `Authorization: Bearer KEY`.
#[derive(Clone, PartialEq, Eq)]
pub struct EngineKey(String);

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineKeyError {
    #[error("the engines' key cannot be read (agent.attach_key_file): {0}")]
    Unreadable(String),
    #[error("{} has no key: write it there as one line of visible ASCII, {MAX_KEY_BYTES} bytes at most", .0.display())]
    NoKey(PathBuf),
}

impl EngineKey {
    /// Reads the key's file, a line.
    ///
    /// # Errors
    /// When the file cannot be read, others than its owner may read it, or its content is no key.
    pub fn read(path: &Path) -> Result<Self, EngineKeyError> {
        let text =
            String::from_utf8(read_private(path).map_err(|error| EngineKeyError::Unreadable(error.to_string()))?).unwrap_or_default();
        let key = text.trim();
        let is_key = (1..=MAX_KEY_BYTES).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic());
        if is_key { Ok(Self(key.to_owned())) } else { Err(EngineKeyError::NoKey(path.to_owned())) }
    }

    /// The line of a request's head that carries the key.
    pub(super) fn header_line(&self) -> String {
        format!("authorization: Bearer {}\r\n", self.0)
    }
}

impl fmt::Debug for EngineKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("EngineKey(hidden)")
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_key_is_a_line_that_only_its_owner_reads() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let read = |text: &str, mode: u32| {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            EngineKey::read(&path)
        };
        let key = read("sk-secret\n", 0o600).unwrap();
        assert_eq!(key.header_line(), "authorization: Bearer sk-secret\r\n");
        assert!(!format!("{key:?}").contains("secret"));
        assert!(matches!(read("sk-secret", 0o644), Err(EngineKeyError::Unreadable(_))));
        for none in ["", "\n", "two words", "a\r\nx-other: 1", "schl\u{fc}ssel", &"x".repeat(MAX_KEY_BYTES + 1)] {
            let error = read(none, 0o600).unwrap_err();
            assert!(matches!(error, EngineKeyError::NoKey(_)) && (none.trim().is_empty() || !error.to_string().contains(none)), "{none:?}");
        }
        assert!(EngineKey::read(&folder.path().join("absent")).is_err());
    }
}
