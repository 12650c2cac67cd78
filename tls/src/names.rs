//! Whose a node's name is: the key that was first admitted by it, as `NAME.json` in the folder `nodes` beside the fleet's authority. Another key gets the
//! name only by an operator's word, so that nobody takes it while its owner is away. Files are written as those of tokens are.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::files::{make_folder, read, write_new};
use crate::{Fingerprint, TlsError, check_name, write_private};

/// See the module.
#[derive(Debug, Clone)]
pub(crate) struct Names {
    folder: PathBuf,
}

/// What `NAME.json` holds.
#[derive(Debug, Deserialize)]
struct Owner {
    /// Its SHA-256.
    key: String,
}

impl Names {
    pub(crate) fn beside(authority: &Path) -> Self {
        Self { folder: authority.join("nodes") }
    }

    /// Whether another key has this name.
    pub(crate) fn is_of_another(&self, node: &str, key: Fingerprint) -> Result<bool, TlsError> {
        let path = self.file(node)?;
        let text = match read(&path) {
            Err(TlsError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => return Ok(false),
            text => text?,
        };
        let owner: Owner = serde_json::from_slice(&text).map_err(|error| TlsError::Content {
            path,
            what: format!("it is damaged ({error}); remove it, and the next to join has the name"),
        })?;
        Ok(owner.key != key.to_string())
    }

    /// Gives a name that nobody has to this key; `false` where another has it.
    pub(crate) fn claim(&self, node: &str, key: Fingerprint) -> Result<bool, TlsError> {
        let path = self.file(node)?;
        // A node that renews its certificate finds its own; this is looked at first, so that the folder is written to once for each node.
        if path.exists() {
            return Ok(!self.is_of_another(node, key)?);
        }
        make_folder(&self.folder)?;
        match write_new(&path, &content(key)) {
            Err(TlsError::Write { source, .. }) if source.kind() == std::io::ErrorKind::AlreadyExists => {
                Ok(!self.is_of_another(node, key)?)
            }
            written => written.map(|()| true),
        }
    }

    /// Gives a name to this key, whoever has it.
    pub(crate) fn hand_over(&self, node: &str, key: Fingerprint) -> Result<(), TlsError> {
        make_folder(&self.folder)?;
        write_private(&self.file(node)?, &content(key))
    }

    fn file(&self, node: &str) -> Result<PathBuf, TlsError> {
        check_name(node)?;
        Ok(self.folder.join(format!("{node}.json")))
    }
}

fn content(key: Fingerprint) -> Vec<u8> {
    serde_json::json!({ "key": key.to_string() }).to_string().into_bytes()
}
