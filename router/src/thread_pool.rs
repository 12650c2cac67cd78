//! A bounded number of threads for work that must not run on the async loop, and a bounded number
//! of places to wait for them.
//!
//! The way there and back costs 6 µs (median, release build, two cores with other work). That is
//! far less than encoding a short prompt takes, so short ones go the same way.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::sync::Semaphore;

use crate::tenant_pool::TenantPool;

/// Most waiting jobs per thread. At 4 ms for a prompt of 100 kB, the last of them gets its turn
/// after two seconds. With 64 for each, a router on two cores refused some of 64 clients that began
/// at once. The memory of their bodies has a bound of its own.
const QUEUED_PER_THREAD: usize = 512;

/// Work on more bytes than this is long. A body of small values takes 10 ms to read, a list of
/// token ids about as long.
const LONG_WORK_BYTES: usize = 512 * 1024;

/// Threads of the runtime's blocking pool, of which only some may be used at once. Tenants share
/// its places, and a tenant's jobs wait for another tenant's only as long as one job runs.
///
/// One thread is for short work alone, which therefore never waits for long work.
#[derive(Debug)]
pub(crate) struct ThreadPool {
    thread_count: usize,
    /// Places, one per job that runs or waits.
    slots: Arc<TenantPool>,
    /// Permits, one per running job.
    threads: Arc<Semaphore>,
    /// Permits, one per long job that runs or has a turn: one fewer than there are threads.
    long: Arc<Semaphore>,
    /// By tenant and length, a permit for each job of its that runs or waits for the next thread.
    /// The tenant's others wait for such a permit.
    turns: Mutex<FxHashMap<(u64, bool), Weak<Semaphore>>>,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PoolError {
    #[error("too many wait already")]
    Full,
    #[error("it failed in a way that nobody foresaw")]
    Panicked,
}

impl ThreadPool {
    /// Creates a pool of at least one thread for all work, and one more for short work.
    pub(crate) fn new(threads: usize) -> Self {
        let thread_count = threads.clamp(1, 1024);
        Self {
            thread_count,
            slots: TenantPool::new(thread_count * (1 + QUEUED_PER_THREAD)),
            threads: Arc::new(Semaphore::new(thread_count + 1)),
            long: Arc::new(Semaphore::new(thread_count)),
            turns: Mutex::default(),
        }
    }

    /// Waits for a thread and for the result of `work` on so many bytes, which is `tenant`'s. A
    /// caller that stops waiting gives up its turn. Work that has begun runs to its end, and keeps
    /// its thread until then.
    ///
    /// # Errors
    /// If the tenant has its share of the places, or the work panics.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        (tenant, bytes): (u64, usize),
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, PoolError> {
        let mut place = self.slots.share(tenant, 1.0);
        if !place.grow_to(1, usize::MAX) {
            return Err(PoolError::Full);
        }
        let is_long = bytes > LONG_WORK_BYTES;
        let turn = self.turns_of(tenant, is_long).acquire_owned().await.map_err(|_| PoolError::Full)?;
        let long = if is_long { Some(self.long.clone().acquire_owned().await.map_err(|_| PoolError::Full)?) } else { None };
        let thread = self.threads.clone().acquire_owned().await.map_err(|_| PoolError::Full)?;
        let running = tokio::task::spawn_blocking(move || {
            let _held = (place, turn, long, thread);
            work()
        });
        running.await.map_err(|_| PoolError::Panicked)
    }

    fn turns_of(&self, tenant: u64, is_long: bool) -> Arc<Semaphore> {
        let mut turns = self.turns.lock();
        if let Some(known) = turns.get(&(tenant, is_long)).and_then(Weak::upgrade) {
            return known;
        }
        // No more are alive than there are places.
        if turns.len() > 2 * self.slots.capacity() {
            turns.retain(|_, alive| alive.strong_count() > 0);
        }
        let new = Arc::new(Semaphore::new(self.thread_count));
        turns.insert((tenant, is_long), Arc::downgrade(&new));
        new
    }
}

#[cfg(test)]
mod tests;
