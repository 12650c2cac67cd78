//! A bounded number of threads for work that must not run on the async loop, and a bounded number
//! of places to wait for them.
//!
//! The way there and back costs 6 µs (median, release build, two cores with other work). That is
//! far less than encoding a short prompt takes, so short ones go the same way.

use std::sync::Arc;

use tokio::sync::Semaphore;

/// Most waiting jobs per thread. At a few milliseconds per prompt, the last of them gets its turn
/// within a fraction of a second.
const QUEUED_PER_THREAD: usize = 64;

/// Threads of the runtime's blocking pool, of which only some may be used at once.
#[derive(Debug)]
pub(crate) struct ThreadPool {
    /// Permits, one per job that runs or waits.
    slots: Arc<Semaphore>,
    /// Permits, one per running job.
    threads: Arc<Semaphore>,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PoolError {
    #[error("too many wait already")]
    Full,
    #[error("it failed in a way that nobody foresaw")]
    Panicked,
}

impl ThreadPool {
    /// Creates a pool of at least one thread.
    pub(crate) fn new(threads: usize) -> Self {
        let threads = threads.clamp(1, 1024);
        Self { slots: Arc::new(Semaphore::new(threads * (1 + QUEUED_PER_THREAD))), threads: Arc::new(Semaphore::new(threads)) }
    }

    /// Waits for a thread and for the result of `work`. A caller that stops waiting gives up its
    /// turn. Work that has begun runs to its end, and keeps its thread until then.
    pub(crate) async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, PoolError> {
        let place = self.slots.clone().try_acquire_owned().map_err(|_| PoolError::Full)?;
        let thread = self.threads.clone().acquire_owned().await.map_err(|_| PoolError::Full)?;
        let running = tokio::task::spawn_blocking(move || {
            let _held = (place, thread);
            work()
        });
        running.await.map_err(|_| PoolError::Panicked)
    }
}

#[cfg(test)]
mod tests;
