//! The fleet's tag: a few letters in the names of all its jobs, drawn once. By it they are told from the jobs of the user's other fleets, whose
//! entries may have the same names.

use std::hash::{BuildHasher, RandomState};
use std::path::Path;

use hostler_tls::write_new;

use super::{FolderError, read};

/// A million tags for the few fleets of one user, in names that older releases of PBS show 15 characters of.
const TAG_LETTERS: usize = 4;

/// What no scheduler, file or shell takes for anything else, without the two that look like digits.
const LETTERS: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";

const FILE: &str = "tag";

/// So many letters by chance.
pub(super) fn draw_word(letters: usize) -> String {
    // Its keys are the system's randomness.
    let drawn = RandomState::new().hash_one(letters);
    (0..letters).map(|place| char::from(LETTERS[(drawn >> (5 * place) & 31) as usize])).collect()
}

/// The tag of a folder; `None` where it has none yet.
pub(super) fn find_tag(folder: &Path) -> Result<Option<String>, FolderError> {
    let path = folder.join(FILE);
    let Some(text) = read(&path)? else { return Ok(None) };
    let tag = text.trim();
    if tag.is_empty() || !tag.bytes().all(|letter| LETTERS.contains(&letter)) {
        return Err(FolderError::Unreadable { path, message: "no letters and digits for the names of jobs".into() });
    }
    Ok(Some(tag.to_owned()))
}

/// The tag of a folder, drawn where it has none. Of two commands that draw one at the same time, the second takes the first one's: a name is given to
/// a file once, also on file systems whose locks do not hold between hosts.
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
