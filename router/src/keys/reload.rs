//! Follows the key file. Changes take effect a second later, and an unreadable file changes
//! nothing.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use tokio_util::sync::CancellationToken;

use super::file::{self, FileVersion};
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
    let read = file::read(&kept.path);
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

#[cfg(test)]
mod tests;
