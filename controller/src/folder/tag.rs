//! The fleet's tag: a few letters in the names of all its jobs, drawn once.
//!
//! The tag tells them from jobs of the user's other fleets, whose entries may have the same names.

use std::hash::{BuildHasher, RandomState};
use std::path::Path;

use hostler_tls::write_new;

use super::{FolderError, read};

/// Number of letters: a million tags for one user's few fleets, in names of which older PBS
/// releases show 15 characters.
const TAG_LETTERS: usize = 4;

/// Letters with no special meaning to schedulers, files or shells. `l` and `o`, which look like
/// digits, are left out.
const LETTERS: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";

const FILE: &str = "tag";

/// Draws this many random letters.
pub(super) fn draw_word(letters: usize) -> String {
    // `RandomState` takes its keys from the system's randomness.
    let drawn = RandomState::new().hash_one(letters);
    (0..letters).map(|place| char::from(LETTERS[(drawn >> (5 * place) & 31) as usize])).collect()
}

/// Tag of a folder; `None` if it has none yet.
pub(super) fn find_tag(folder: &Path) -> Result<Option<String>, FolderError> {
    let path = folder.join(FILE);
    let Some(text) = read(&path)? else { return Ok(None) };
    let tag = text.trim();
    if tag.is_empty() || !tag.bytes().all(|letter| LETTERS.contains(&letter)) {
        return Err(FolderError::Unreadable { path, message: "no letters and digits for the names of jobs".into() });
    }
    Ok(Some(tag.to_owned()))
}

/// Tag of a folder, drawn if missing.
///
/// If two commands draw one at the same time, the second takes the first one's: a file is created
/// only once, even on file systems whose locks do not hold between hosts.
pub(super) fn take_tag(folder: &Path) -> Result<String, FolderError> {
    if let Some(tag) = find_tag(folder)? {
        return Ok(tag);
    }
    let path = folder.join(FILE);
    let drawn = draw_word(TAG_LETTERS);
    match write_new(&path, format!("{drawn}\n").as_bytes()) {
        Ok(()) => Ok(drawn),
        Err(error) if error.is_already_there() => Ok(find_tag(folder)?.ok_or(error)?),
        Err(error) => Err(error.into()),
    }
}
