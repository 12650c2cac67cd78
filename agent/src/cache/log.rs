//! Log of the blocks that an engine has cached, read by sessions with routers.
//!
//! A reader of a tier gets everything once, then only changes. One subscriber writes; each reader
//! has its own cursor and never holds up the writer or another reader.

use std::sync::Arc;

use hostler_placement::block_keys::BlockKey;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::change_log::ChangeLog;
use super::kv_event::KvEvent;
use super::mirror::{BlockMirror, CacheDigest, Effects};
use super::{CacheCounters, CacheStatus, CacheTier};

/// Blocks that one replica's engine has cached, over all its lives.
#[derive(Debug)]
pub struct CacheLog {
    inner: Mutex<Inner>,
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

/// Position of one reader of a tier. A new reader reads everything first.
#[derive(Debug, Default)]
pub struct Cursor {
    tier: CacheTier,
    position: Option<LogPosition>,
    /// Part of a snapshot that was not read yet.
    snapshot: Option<Snapshot>,
}

#[derive(Debug, Clone, Copy)]
struct LogPosition {
    epoch: u64,
    next: u64,
}

#[derive(Debug)]
struct Snapshot {
    keys: Vec<BlockKey>,
    digest: CacheDigest,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheDelta {
    pub epoch: u64,
    /// Everything read before is void.
    pub is_snapshot: bool,
    /// The reader must read the rest at once. Until then the count and the digest do not hold.
    pub is_partial: bool,
    pub stored: Vec<BlockKey>,
    /// Blocks that are no longer cached; none of them is among the stored.
    pub removed: Vec<BlockKey>,
    /// Blocks cached after this delta.
    pub count: u64,
    /// XOR of the block keys.
    pub xor: u64,
}

impl Cursor {
    pub(crate) fn of(tier: CacheTier) -> Self {
        Self { tier, ..Self::default() }
    }

    pub(crate) fn tier(&self) -> CacheTier {
        self.tier
    }

    pub fn reset(&mut self) {
        *self = Self::of(self.tier);
    }

    /// Whether the log's changes continue what this cursor has read.
    fn is_current(&self, inner: &Inner) -> bool {
        self.position.is_some_and(|place| place.epoch == inner.epoch && inner.changes(self.tier).reaches(place.next))
    }
}

impl Default for CacheLog {
    fn default() -> Self {
        let inner = Inner {
            epoch: 0,
            is_alive: false,
            is_incomplete: false,
            mirror: BlockMirror::new(),
            gpu: ChangeLog::default(),
            host: ChangeLog::default(),
            counters: CacheCounters::default(),
        };
        Self { inner: Mutex::new(inner), watch: watch::Sender::new(CacheStatus { reason: NOT_READY.to_owned(), ..CacheStatus::default() }) }
    }
}

const NOT_READY: &str = "the engine is not ready";

impl CacheLog {
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<CacheStatus> {
        self.watch.subscribe()
    }

    /// Changes since this cursor was last read, with at most `most` blocks.
    ///
    /// `None` if nothing has changed, before the engine's first life, or while this life has shown
    /// nothing of the tier.
    pub fn read(&self, cursor: &mut Cursor, most: usize) -> Option<CacheDelta> {
        let most = most.max(1);
        let inner = self.inner.lock();
        let tier = cursor.tier;
        if inner.epoch == 0 || !inner.mirror.has_tier(tier) {
            return None;
        }
        let begins = !cursor.is_current(&inner);
        if begins {
            cursor.snapshot = Some(Snapshot { keys: inner.mirror.keys(tier).collect(), digest: inner.mirror.digest(tier) });
            cursor.position = Some(LogPosition { epoch: inner.epoch, next: inner.changes(tier).next_number() });
        }
        match cursor.snapshot.take() {
            Some(snapshot) => {
                drop(inner);
                Some(cursor.next_part(snapshot, begins, most))
            }
            None => inner.next_changes(tier, cursor.position.as_mut()?, most),
        }
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
        let mut is_whole_again = false;
        let change = |inner: &mut Inner| {
            inner.apply(events);
            is_whole_again = has_cleared && std::mem::take(&mut inner.is_incomplete);
        };
        self.write(change, |_, _| {});
        if is_whole_again {
            self.mark_exact();
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

    fn apply(&mut self, events: &[KvEvent]) {
        let mut effects = Effects::default();
        for event in events {
            self.mirror.apply(event, &mut effects);
        }
        self.mirror.end_batch(&mut effects);
        self.counters.events += effects.events;
        self.counters.orphans += effects.orphans;
        self.counters.ignored += effects.ignored;
        self.counters.malformed += effects.malformed;
        self.gpu.apply(effects.changes, self.mirror.digest(CacheTier::Gpu).count);
        self.host.apply(effects.host_changes, self.mirror.digest(CacheTier::Host).count);
    }

    fn forget(&mut self) {
        self.mirror.clear();
        self.gpu.clear();
        self.host.clear();
    }

    /// Net effect of the next changes.
    fn next_changes(&self, tier: CacheTier, place: &mut LogPosition, most: usize) -> Option<CacheDelta> {
        let net = self.changes(tier).read(&mut place.next, most)?;
        let digest = self.mirror.digest(tier);
        Some(CacheDelta {
            epoch: self.epoch,
            is_snapshot: false,
            is_partial: net.is_partial,
            stored: net.stored,
            removed: net.removed,
            count: digest.count,
            xor: digest.xor,
        })
    }
}

impl Cursor {
    /// Next part of a snapshot; the rest stays at the cursor.
    fn next_part(&mut self, mut snapshot: Snapshot, first: bool, most: usize) -> CacheDelta {
        let stored = snapshot.keys.split_off(snapshot.keys.len().saturating_sub(most));
        let digest = snapshot.digest;
        let is_partial = !snapshot.keys.is_empty();
        self.snapshot = is_partial.then_some(snapshot);
        let epoch = self.position.map_or(0, |place| place.epoch);
        CacheDelta { epoch, is_snapshot: first, is_partial, stored, removed: Vec::new(), count: digest.count, xor: digest.xor }
    }
}

#[cfg(test)]
mod tests;
