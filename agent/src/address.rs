//! How agents find other processes: a file into which such a process writes its address, and the
//! name service.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use hostler_boot::socket::is_trusted_user;
use rustix::fs::OFlags;
use tokio::time::timeout;

const LOOKUP_TIMEOUT: Duration = Duration::from_secs(10);

/// Largest file that is read. A controller writes less than a kilobyte, and a head less.
const MAX_FILE_BYTES: u64 = 64 * 1024;

/// Content of a file that only this user, or root, can have written.
pub(crate) fn read_trusted(path: &Path) -> io::Result<Vec<u8>> {
    // Opening a pipe would wait for its writer.
    let file = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(path)?;
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(io::Error::other("no plain file"));
    }
    let (owner, mode) = (found.uid(), found.mode() & 0o7777);
    if !is_trusted_user(owner) || mode & 0o022 != 0 {
        return Err(io::Error::other(format!(
            "others may change the file (owner {owner}, mode {mode:o}), so it is not believed: it has to be your own, with mode 600"
        )));
    }
    let mut text = Vec::new();
    file.take(MAX_FILE_BYTES).read_to_end(&mut text)?;
    Ok(text)
}

/// Addresses of a name as `HOST:PORT`.
pub(crate) async fn look_up(name: &str) -> io::Result<Vec<SocketAddr>> {
    let late = |_| io::Error::new(io::ErrorKind::TimedOut, "the name service does not answer");
    Ok(timeout(LOOKUP_TIMEOUT, tokio::net::lookup_host(name)).await.map_err(late)??.collect())
}
