//! Owners of nodes' names.
//!
//! A name belongs to the key that was first admitted by it, as `NAME.json` in the folder `nodes`
//! beside the fleet's authority. Only an operator can give a node's name to another key, so nobody
//! takes it while its owner is away. Files are written like those of tokens.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::files::{make_folder, read, write_new};
use crate::{Fingerprint, TlsError, check_name, write_private};

#[derive(Debug, Clone)]
pub(crate) struct NodeNames {
    folder: PathBuf,
}

/// Content of `NAME.json`.
#[derive(Debug, Deserialize)]
struct NameOwner {
    /// SHA-256 of the key.
    key: String,
    /// When the name became this key's: Unix time in seconds.
    ///
    /// If missing, later than any other time.
    #[serde(default = "never")]
    since: u64,
}

fn never() -> u64 {
    u64::MAX
}

/// Owner of a name, relative to one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NameHolder {
    Nobody,
    ThisKey,
    /// Another key has had the name since then.
    Another(u64),
}

impl NodeNames {
    pub(crate) fn in_folder(authority: &Path) -> Self {
        Self { folder: authority.join("nodes") }
    }

    pub(crate) fn holder(&self, node: &str, key: Fingerprint) -> Result<NameHolder, TlsError> {
        let path = self.file(node)?;
        let text = match read(&path) {
            Err(TlsError::Read { source, .. }) if source.kind() == ErrorKind::NotFound => return Ok(NameHolder::Nobody),
            text => text?,
        };
        let owner: NameOwner = serde_json::from_slice(&text).map_err(|error| TlsError::Content {
            path,
            what: format!("it is damaged ({error}); remove it, and the next to join has the name"),
        })?;
        Ok(if owner.key == key.to_string() { NameHolder::ThisKey } else { NameHolder::Another(owner.since) })
    }

    /// Gives a free name to this key, and returns the present owner: this key, or another.
    pub(crate) fn claim(&self, node: &str, key: Fingerprint, since: u64) -> Result<NameHolder, TlsError> {
        // A node that renews its certificate already has its name. Check that first, so that the
        // folder is written to once per node.
        match self.holder(node, key)? {
            NameHolder::Nobody => {}
            holder => return Ok(holder),
        }
        make_folder(&self.folder)?;
        match write_new(&self.file(node)?, &content(key, since)) {
            Err(error) if error.is_already_there() => self.holder(node, key),
            written => written.map(|()| NameHolder::ThisKey),
        }
    }

    /// Gives a name to this key, whoever has it.
    pub(crate) fn hand_over(&self, node: &str, key: Fingerprint, since: u64) -> Result<(), TlsError> {
        make_folder(&self.folder)?;
        write_private(&self.file(node)?, &content(key, since))
    }

    /// Makes a name free, whoever has it.
    pub(crate) fn release(&self, node: &str) -> Result<(), TlsError> {
        let path = self.file(node)?;
        match fs::remove_file(&path) {
            Err(source) if source.kind() != ErrorKind::NotFound => Err(TlsError::Write { path, source }),
            _ => Ok(()),
        }
    }

    fn file(&self, node: &str) -> Result<PathBuf, TlsError> {
        check_name(node)?;
        Ok(self.folder.join(format!("{node}.json")))
    }
}

fn content(key: Fingerprint, since: u64) -> Vec<u8> {
    serde_json::json!({ "key": key.to_string(), "since": since }).to_string().into_bytes()
}
