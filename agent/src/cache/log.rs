//! Log of the blocks that an engine has cached, read by sessions with routers.
//!
//! A reader of a tier gets everything once, then only changes. One subscriber writes; each reader
//! has its own cursor and never holds up the writer or another reader.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;

use super::change_log::ChangeLog;
use super::cursor::{CacheDelta, Cursor, LoggedTier};
use super::file_log::FileLog;
use super::kv_event::KvEvent;
use super::mirror::{BlockMirror, Effects, FileBlocks};
use super::{CacheCounters, CacheStatus, CacheTier};

/// Blocks that one replica's engine has cached, over all its lives.
#[derive(Debug)]
pub struct CacheLog {
    inner: Mutex<Inner>,
    /// Log of the files that the engine writes for others too.
    files: Option<Arc<FileLog>>,
    watch: watch::Sender<CacheStatus>,
}

#[derive(Debug)]
struct Inner {
    /// The present life; 0 before the first.
    epoch: u64,
    is_alive: bool,
    /// Something of this life was missed.
    ///
    /// Blocks that are still cached are not reported again, and blocks that continue them cannot be
    /// placed, so the mirror stays incomplete until the engine clears its cache.
    is_incomplete: bool,
    mirror: BlockMirror,
    /// Changes of the GPU's tier.
    gpu: ChangeLog,
    /// Changes of the host's tier.
    host: ChangeLog,
    counters: CacheCounters,
}

const NOT_READY: &str = "the engine is not ready";

impl Default for CacheLog {
    fn default() -> Self {
        Self::new(None)
    }
}

impl CacheLog {
    /// Log of an engine, whose files go to the log of the node's if it has one.
    #[must_use]
    pub(crate) fn new(files: Option<Arc<FileLog>>) -> Self {
        let inner = Inner {
            epoch: 0,
            is_alive: false,
            is_incomplete: false,
            mirror: BlockMirror::new(),
            gpu: ChangeLog::default(),
            host: ChangeLog::default(),
            counters: CacheCounters::default(),
        };
        let watch = watch::Sender::new(CacheStatus { reason: NOT_READY.to_owned(), ..CacheStatus::default() });
        Self { inner: Mutex::new(inner), files, watch }
    }

    #[must_use]
    pub fn watch(&self) -> watch::Receiver<CacheStatus> {
        self.watch.subscribe()
    }

    /// Changes of a tier since this cursor was last read, with at most `most` blocks.
    ///
    /// `None` if nothing has changed, before the engine's first life, or while this life has shown
    /// nothing of the tier.
    pub(crate) fn read(&self, tier: CacheTier, cursor: &mut Cursor, most: usize) -> Option<CacheDelta> {
        let inner = self.inner.lock();
        if inner.epoch == 0 || !inner.mirror.has_tier(tier) {
            return None;
        }
        cursor.read(&LoggedTier { epoch: inner.epoch, blocks: inner.mirror.blocks(tier), changes: inner.changes(tier) }, most)
    }

    #[must_use]
    pub fn counters(&self) -> CacheCounters {
        self.inner.lock().counters
    }

    /// Begins another life of the engine, with nothing cached.
    ///
    /// Only the writer returned last can write.
    pub(crate) fn begin_life(self: &Arc<Self>, epoch: u64) -> CacheLogWriter {
        let mut inner = self.inner.lock();
        inner.epoch = epoch;
        inner.is_alive = true;
        inner.is_incomplete = false;
        inner.forget();
        inner.mirror = BlockMirror::new();
        self.publish(&inner, |watch| (watch.exact, watch.reason) = (false, NOT_READY.to_owned()));
        CacheLogWriter { log: Arc::clone(self), epoch }
    }

    /// The engine has emptied its cache but will report that later.
    ///
    /// From now on only blocks that it stores are cached.
    pub(crate) fn clear(&self) {
        let mut inner = self.inner.lock();
        inner.forget();
        self.publish(&inner, |_| {});
    }

    pub(crate) fn end_life(&self) {
        let mut inner = self.inner.lock();
        inner.is_alive = false;
        inner.forget();
        self.publish(&inner, |watch| (watch.exact, watch.reason) = (false, NOT_READY.to_owned()));
    }

    /// Notifies the readers while the lock is held.
    ///
    /// Otherwise an older state could be published last.
    fn publish(&self, inner: &Inner, change: impl FnOnce(&mut CacheStatus)) {
        self.watch.send_if_modified(|watch| {
            let before = watch.clone();
            watch.epoch = inner.epoch;
            watch.block_size = inner.mirror.block_size();
            watch.has_holes = inner.mirror.has_holes();
            watch.version = inner.gpu.next_number() + inner.host.next_number();
            change(watch);
            *watch != before
        });
    }
}

/// Writes one life's changes to the log. A task may outlive that life by a moment; its writes then
/// have no effect.
#[derive(Debug)]
pub(crate) struct CacheLogWriter {
    log: Arc<CacheLog>,
    epoch: u64,
}

impl CacheLogWriter {
    /// Marks the blocks as exactly known, unless something was missed.
    pub(crate) fn mark_exact(&self) {
        self.write(
            |_| {},
            |inner, watch| {
                if !inner.is_incomplete {
                    (watch.exact, watch.reason) = (true, String::new());
                }
            },
        );
    }

    /// Marks the blocks as unknown and no longer reported.
    pub(crate) fn mark_unknown(&self, because: &str) {
        self.write(Inner::forget, |_, watch| (watch.exact, watch.reason) = (false, because.to_owned()));
    }

    pub(crate) fn apply(&self, events: &[KvEvent]) {
        let has_cleared = events.iter().any(|event| matches!(event, KvEvent::Cleared));
        let (mut is_whole_again, mut files) = (false, Vec::new());
        let change = |inner: &mut Inner| {
            files = inner.apply(events);
            is_whole_again = has_cleared && std::mem::take(&mut inner.is_incomplete);
        };
        self.write(change, |_, _| {});
        if is_whole_again {
            self.mark_exact();
        }
        if let Some(log) = &self.log.files {
            log.add(files);
        }
    }

    /// Forgets every block, because the engine reports its cache from the beginning.
    pub(crate) fn restart(&self) {
        let restart = |inner: &mut Inner| {
            inner.forget();
            inner.counters.resets += 1;
        };
        self.write(restart, |_, _| {});
    }

    /// Forgets every block: known blocks may be wrong, and later events will be incomplete.
    pub(crate) fn reset(&self, because: &str) {
        let reset = |inner: &mut Inner| {
            inner.forget();
            inner.counters.resets += 1;
            inner.is_incomplete = true;
        };
        self.write(reset, |_, watch| (watch.exact, watch.reason) = (false, because.to_owned()));
    }

    pub(crate) fn count(&self, change: impl FnOnce(&mut CacheCounters)) {
        self.write(|inner| change(&mut inner.counters), |_, _| {});
    }

    fn write(&self, change: impl FnOnce(&mut Inner), tell: impl FnOnce(&Inner, &mut CacheStatus)) {
        let mut inner = self.log.inner.lock();
        if inner.epoch == self.epoch && inner.is_alive {
            change(&mut inner);
            self.log.publish(&inner, |watch| tell(&inner, watch));
        }
    }
}

impl Inner {
    fn changes(&self, tier: CacheTier) -> &ChangeLog {
        match tier {
            CacheTier::Gpu => &self.gpu,
            CacheTier::Host => &self.host,
        }
    }

    /// Applies a batch of events, and returns the files that it reports.
    fn apply(&mut self, events: &[KvEvent]) -> Vec<FileBlocks> {
        let mut effects = Effects::default();
        for event in events {
            self.mirror.apply(event, &mut effects);
        }
        self.mirror.end_batch(&mut effects);
        self.counters.events += effects.events;
        self.counters.orphans += effects.orphans;
        self.counters.ignored += effects.ignored;
        self.counters.malformed += effects.malformed;
        self.gpu.apply(effects.changes, self.mirror.blocks(CacheTier::Gpu).digest().count);
        self.host.apply(effects.host_changes, self.mirror.blocks(CacheTier::Host).digest().count);
        effects.files
    }

    fn forget(&mut self) {
        self.mirror.clear();
        self.gpu.clear();
        self.host.clear();
    }
}

#[cfg(test)]
mod tests;
