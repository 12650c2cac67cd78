//! Follows the key file. Changes take effect a second later, and an unreadable file changes
//! nothing.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use tokio_util::sync::CancellationToken;

use super::file::{self, FileVersion, KeyEntry, KeyFileError};
use super::ring::KeyRing;
use super::{KeyStore, Keys};
use crate::metrics::RouterMetrics;

/// How often the file is checked. A kernel notification would come sooner, but not from a network
/// file system.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) async fn watch_file(keys: Keys, metrics: Arc<RouterMetrics>, end: CancellationToken) {
    let Keys(Some(kept)) = keys else { return };
    let mut seen = kept.initial_version;
    loop {
        tokio::select! {
            () = end.cancelled() => return,
            () = tokio::time::sleep(POLL_INTERVAL) => {}
        }
        let (looked, metrics) = (kept.clone(), metrics.clone());
        // A hanging file system must not hold up the router.
        let look = tokio::task::spawn_blocking(move || reload_if_changed(&looked, seen, &metrics));
        tokio::select! {
            () = end.cancelled() => return,
            now = look => seen = now.unwrap_or(seen),
        }
    }
}

/// Reads the file again if its version is not the one that was `seen`. Returns the present version.
fn reload_if_changed(kept: &KeyStore, seen: Option<FileVersion>, metrics: &RouterMetrics) -> Option<FileVersion> {
    let now = FileVersion::now(&kept.path);
    if now == seen {
        return now;
    }
    let read = read_replacement(kept);
    kept.is_file_usable.store(read.is_ok(), Ordering::Relaxed);
    match read {
        Ok((entries, stamp)) => {
            let ring = KeyRing::new(entries);
            tracing::info!(
                event = "keys_loaded",
                path = %kept.path.display(), valid = ring.count_valid(SystemTime::now()),
                "the keys were read again"
            );
            kept.ring.store(Arc::new(ring));
            metrics.count_key_file_read(true);
            Some(stamp)
        }
        Err(error) => {
            tracing::warn!(event = "keys_refused", %error, "the keys stay as they were");
            metrics.count_key_file_read(false);
            now
        }
    }
}

/// Reads the file that takes the place of the keys in use.
///
/// A file without a single key is no change that anybody asks for: a full disk, or a program that
/// deploys files, leaves an empty one. `hostler keys revoke` keeps what it revokes.
fn read_replacement(kept: &KeyStore) -> Result<(Vec<KeyEntry>, FileVersion), KeyFileError> {
    let (entries, stamp) = file::read(&kept.path)?;
    if entries.is_empty() && !kept.ring.load().is_empty() {
        let message = "it has no key any more, which would lock everybody out: to do that, revoke each with `hostler keys revoke ID`, \
                       or restart the router with this file"
            .into();
        return Err(KeyFileError::Invalid { path: kept.path.clone(), message });
    }
    Ok((entries, stamp))
}

#[cfg(test)]
mod tests;
