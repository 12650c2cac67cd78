//! Keeps bundles on disk, so that a restarted router need not ask for them again. An unusable
//! folder is reported once and then ignored. Blocking. A bundle counts only if its hash is right,
//! so nobody need trust the folder.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use hostler_tls::{hex, parse_hex, write_private};
use parking_lot::Mutex;
use rustc_hash::FxHashSet;

use super::FilesHash;
use super::bundle::{self, MAX_BUNDLE_BYTES};
use super::encoder_table::MAX_MODELS;

/// The beginning of the name of a bundle that is still being written.
const TEMP_PREFIX: &str = ".tmp";

/// Age at which an unfinished bundle was surely left by a router that died.
const TEMP_FILE_TTL: Duration = Duration::from_secs(60 * 60);

/// The folder, and its content when it was last listed.
#[derive(Debug)]
pub(super) struct DiskCache {
    folder: PathBuf,
    hashes: Mutex<FxHashSet<FilesHash>>,
    has_warned: AtomicBool,
}

impl DiskCache {
    /// Lists the folder `prompt` of `cache_dir`. It need not exist.
    pub(super) fn open(cache_dir: &Path) -> Self {
        let folder = cache_dir.join("prompt");
        let known = list_folder(&folder).iter().filter_map(|(path, _)| parse_name(path)).collect();
        Self { folder, hashes: Mutex::new(known), has_warned: AtomicBool::new(false) }
    }

    /// Whether reading is worth trying. Does not access the disk.
    pub(super) fn may_have(&self, hash: &FilesHash) -> bool {
        self.hashes.lock().contains(hash)
    }

    /// The bundle, if it is there and whole. Otherwise it is not looked for again until it is
    /// written.
    pub(super) fn read(&self, hash: &FilesHash) -> Option<Vec<u8>> {
        let path = self.path(hash);
        let bundle = match read_bounded(&path) {
            Ok(bundle) if bundle::bundle_hash(&bundle) == *hash => Some(bundle),
            Ok(_) => {
                tracing::warn!(path = %path.display(), "a kept bundle is damaged: it will be asked for again");
                None
            }
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    self.warn_once("read", &error);
                }
                None
            }
        };
        if bundle.is_none() {
            self.hashes.lock().remove(hash);
        }
        bundle
    }

    /// Stores the bundle, and removes the least recently used ones if there are too many.
    pub(super) fn write(&self, hash: &FilesHash, bundle: &[u8]) {
        match self.try_write(hash, bundle) {
            Ok(()) => {
                self.hashes.lock().insert(*hash);
                self.prune();
            }
            Err(error) => self.warn_once("write", &error),
        }
    }

    fn try_write(&self, hash: &FilesHash, bundle: &[u8]) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.folder)?;
        write_private(&self.path(hash), bundle).map_err(io::Error::other)
    }

    /// Removes surplus files. Files that cannot be removed stay, which only makes the folder
    /// larger.
    fn prune(&self) {
        let (mut bundles, mut others) = (Vec::new(), Vec::new());
        for (path, used) in list_folder(&self.folder) {
            if parse_name(&path).is_some() { bundles.push((used, path)) } else { others.push((used, path)) }
        }
        bundles.sort();
        let surplus = bundles.len().saturating_sub(MAX_MODELS);
        for (_, path) in bundles.drain(..surplus) {
            let _ = fs::remove_file(path);
        }
        for (written, path) in others {
            let unfinished = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(TEMP_PREFIX.as_bytes()));
            if unfinished && written.elapsed().is_ok_and(|age| age > TEMP_FILE_TTL) {
                let _ = fs::remove_file(path);
            }
        }
    }

    fn path(&self, hash: &FilesHash) -> PathBuf {
        self.folder.join(hex(hash))
    }

    fn warn_once(&self, what: &str, error: &io::Error) {
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            let folder = self.folder.display();
            tracing::warn!(%folder, %error, "cannot {what} kept tokenizers: they are asked for after each start");
        }
    }
}

/// Paths and times of last use; empty if the folder cannot be read.
fn list_folder(folder: &Path) -> Vec<(PathBuf, SystemTime)> {
    let Ok(listing) = fs::read_dir(folder) else { return Vec::new() };
    let used = |entry: &fs::DirEntry| entry.metadata().and_then(|metadata| metadata.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    listing.flatten().map(|entry| (entry.path(), used(&entry))).collect()
}

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    // Anything but a plain file could block for ever.
    let metadata = fs::symlink_metadata(path)?;
    if !metadata.is_file() || metadata.len() > MAX_BUNDLE_BYTES as u64 {
        return Err(io::Error::other("it is not a plain file of at most 64 MiB"));
    }
    let file = File::open(path)?;
    // Mark the file as used, for `prune`. A read-only folder works too.
    let _ = file.set_modified(SystemTime::now());
    let mut bundle = Vec::new();
    file.take(MAX_BUNDLE_BYTES as u64 + 1).read_to_end(&mut bundle)?;
    Ok(bundle)
}

fn parse_name(path: &Path) -> Option<FilesHash> {
    parse_hex(path.file_name()?.to_str()?)
}

#[cfg(test)]
mod tests;
