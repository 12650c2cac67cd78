//! Reads the end of a file that may be long, such as a log.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// At most `most` of a file's last bytes, as text.
///
/// # Errors
/// When the file cannot be read.
pub(crate) fn read_end(path: &Path, most: u64) -> io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(most)))?;
    let mut end = Vec::new();
    file.take(most).read_to_end(&mut end)?;
    Ok(String::from_utf8_lossy(&end).into_owned())
}
