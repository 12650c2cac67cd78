//! Limits how many clients watch the router's health, because they have no keys.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Most simultaneous calls of `Watch`. A client that checks health has one for each of its
/// connections.
pub(crate) const MAX_WATCHES: usize = 1024;

#[derive(Debug, Clone)]
pub(crate) struct HealthWatchPermits(Arc<Semaphore>);

impl Default for HealthWatchPermits {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_WATCHES)))
    }
}

impl HealthWatchPermits {
    pub(crate) fn try_begin(&self) -> Option<OwnedSemaphorePermit> {
        self.0.clone().try_acquire_owned().ok()
    }

    #[cfg(test)]
    pub(crate) fn free(&self) -> usize {
        self.0.available_permits()
    }
}
