//! The only task that writes the affinity index.
//!
//! It applies the agents' cache reports, checks each against its digest, and asks for the whole
//! cache again if the two differ. A replica's blocks count only while they are completely known.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hostler_placement::affinity::{CacheIndex, KeySetDigest, ReplicaSlot};
use rustc_hash::FxHashMap;
use tokio::sync::mpsc;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout_at};

use super::directives::Directives;
use super::fleet_writer::{Fleet, FleetUpdate};
use super::replica_cache::{CacheStats, CacheTier, ReplicaCache};
use crate::background::BackgroundTasks;

/// Most queued updates. A report that does not fit is dropped, and the whole cache is asked for
/// later.
const MAX_QUEUED_UPDATES: usize = 256;

/// Keys applied between two yields to other tasks: about a millisecond.
const KEYS_PER_YIELD: usize = 4096;

/// Entries that one sweep looks at.
const ENTRIES_PER_SWEEP: usize = 16 * 1024;

const SWEEP_INTERVAL: Duration = Duration::from_millis(5);

/// Failed resyncs in a row after which an agent's cache reports are no longer believed.
const MAX_FAILED_RESYNCS: u32 = 3;

/// Changes in one tier of a replica's cache since its last report.
#[derive(Debug, Clone, Default)]
pub(super) struct CacheReport {
    pub(super) index: u32,
    pub(super) tier: CacheTier,
    pub(super) epoch: u64,
    /// The report begins a snapshot of the whole cache.
    pub(super) snapshot: bool,
    /// More parts of the same change follow.
    pub(super) partial: bool,
    pub(super) stored: Vec<u64>,
    /// Keys of blocks that the replica no longer has.
    pub(super) removed: Vec<u64>,
    /// How many blocks the replica has after this change.
    pub(super) count: u64,
    /// All their keys, combined by XOR.
    pub(super) digest: u64,
}

#[derive(Debug)]
pub(super) enum CacheUpdate {
    Reported { attachment: u64, directives: Directives, report: CacheReport },
    Detached { attachment: u64 },
}

/// The sessions' handle on the index writer. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct CacheReportQueue(mpsc::Sender<CacheUpdate>);

impl CacheReportQueue {
    #[must_use]
    pub(crate) fn start(index: Arc<CacheIndex>, fleet: Fleet, tasks: &BackgroundTasks) -> Self {
        let (updates, received) = mpsc::channel(MAX_QUEUED_UPDATES);
        let writer = IndexWriter { index, fleet, caches: FxHashMap::default() };
        tasks.spawn(writer.run(received));
        Self(updates)
    }

    /// `false` when the queue is full.
    #[must_use]
    pub(super) fn try_send(&self, update: CacheUpdate) -> bool {
        self.0.try_send(update).is_ok()
    }

    /// Whether the queue has room again.
    pub(super) fn has_room(&self) -> bool {
        self.0.capacity() > MAX_QUEUED_UPDATES / 2
    }

    /// Queues an update, waiting while the queue is full. Does nothing once the writer has ended.
    pub(super) async fn send(&self, update: CacheUpdate) {
        if self.0.send(update).await.is_err() {
            tracing::debug!("the index's writer has ended; an update is dropped");
        }
    }
}

struct IndexWriter {
    index: Arc<CacheIndex>,
    fleet: Fleet,
    caches: FxHashMap<CacheId, ReportedCache>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct CacheId {
    attachment: u64,
    /// The replica's index on its node.
    index: u32,
    tier: CacheTier,
}

/// One tier of the known cache of one life of a replica's engine.
#[derive(Debug)]
struct ReportedCache {
    epoch: u64,
    slot: ReplicaSlot,
    /// Readers know the replica slot.
    is_published: bool,
    /// A snapshot was requested and has not begun.
    awaits_snapshot: bool,
    /// Reports in a row whose count or digest differed.
    consecutive_mismatches: u32,
    stats: Arc<CacheStats>,
}

impl IndexWriter {
    async fn run(mut self, mut updates: mpsc::Receiver<CacheUpdate>) {
        let (mut leftovers, mut next_sweep) = (false, Instant::now());
        loop {
            // Sweep even while reports keep coming: a replica slot is reused only when nothing of
            // its last life is left.
            if leftovers && next_sweep <= Instant::now() {
                leftovers = self.index.sweep(ENTRIES_PER_SWEEP);
                next_sweep = Instant::now() + SWEEP_INTERVAL;
            }
            let update = if leftovers { timeout_at(next_sweep, updates.recv()).await } else { Ok(updates.recv().await) };
            match update {
                Ok(Some(CacheUpdate::Reported { attachment, directives, report })) => {
                    leftovers |= report.snapshot;
                    self.apply_report(attachment, &directives, report).await;
                }
                Ok(Some(CacheUpdate::Detached { attachment })) => {
                    leftovers = true;
                    self.caches.retain(|id, known| {
                        if id.attachment == attachment {
                            self.index.close(known.slot);
                        }
                        id.attachment != attachment
                    });
                }
                Ok(None) => return,
                Err(_) => {}
            }
        }
    }

    async fn apply_report(&mut self, attachment: u64, directives: &Directives, report: CacheReport) {
        let id = CacheId { attachment, index: report.index, tier: report.tier };
        if report.snapshot {
            self.begin_snapshot(id, report.epoch).await;
        }
        let Some(known) = self.caches.get_mut(&id).filter(|known| known.epoch == report.epoch) else {
            directives.resync_cache(vec![report.index]);
            return;
        };
        // A snapshot is on its way, so reports before it are of no use.
        if known.awaits_snapshot || known.stats.distrusted.load(Ordering::Relaxed) {
            return;
        }
        for keys in report.stored.chunks(KEYS_PER_YIELD) {
            self.index.store(known.slot, keys);
            yield_now().await;
        }
        for keys in report.removed.chunks(KEYS_PER_YIELD) {
            self.index.remove(known.slot, keys);
            yield_now().await;
        }
        if report.partial {
            return;
        }
        let digest = self.index.digest(known.slot);
        let matches = digest == KeySetDigest { count: report.count, xor: report.digest };
        known.stats.blocks.store(digest.count, Ordering::Relaxed);
        known.stats.matches.store(matches, Ordering::Relaxed);
        if matches {
            known.consecutive_mismatches = 0;
        } else {
            known.record_mismatch(id, digest, directives);
        }
        // A slightly wrong index still mostly helps until the snapshot comes. Only reports that
        // contradict themselves are not used at all.
        let usable = !known.stats.distrusted.load(Ordering::Relaxed);
        if usable != known.is_published {
            known.is_published = usable;
            let cache = ReplicaCache { slot: usable.then_some(known.slot), stats: known.stats.clone() };
            self.publish(id, report.epoch, cache).await;
        }
    }

    /// Begins a new life, or the same one reported from its beginning. Earlier knowledge no longer
    /// counts.
    async fn begin_snapshot(&mut self, id: CacheId, epoch: u64) {
        self.close_former_host_tier(id, epoch);
        let slot = self.index.open();
        let mut next =
            ReportedCache { epoch, slot, is_published: false, awaits_snapshot: false, consecutive_mismatches: 0, stats: Arc::default() };
        if let Some(known) = self.caches.remove(&id) {
            if known.epoch == epoch {
                (next.consecutive_mismatches, next.stats) = (known.consecutive_mismatches, known.stats);
            }
            if known.is_published {
                let cache = ReplicaCache { slot: None, stats: next.stats.clone() };
                self.publish(id, epoch, cache).await;
            }
            self.index.close(known.slot);
        }
        self.caches.insert(id, next);
    }

    /// Forgets the host tier of a former life when the GPU's cache of another one begins. The new
    /// life may never have such a tier.
    fn close_former_host_tier(&mut self, id: CacheId, epoch: u64) {
        let host = CacheId { tier: CacheTier::Host, ..id };
        if id.tier == CacheTier::Gpu && self.caches.get(&host).is_some_and(|known| known.epoch != epoch) {
            self.caches.remove(&host).into_iter().for_each(|known| self.index.close(known.slot));
        }
    }

    async fn publish(&self, CacheId { attachment, index, tier }: CacheId, epoch: u64, cache: ReplicaCache) {
        self.fleet.update(FleetUpdate::CacheChanged { attachment, index, tier, epoch, cache }).await;
    }
}

impl ReportedCache {
    fn record_mismatch(&mut self, CacheId { index, tier, .. }: CacheId, ours: KeySetDigest, directives: &Directives) {
        self.consecutive_mismatches += 1;
        if self.consecutive_mismatches > MAX_FAILED_RESYNCS {
            self.stats.distrusted.store(true, Ordering::Relaxed);
            let until = match tier {
                CacheTier::Gpu => "its replica is placed on by text until it starts anew",
                CacheTier::Host => "its replica's copies in the host's memory are not counted until it starts anew",
                CacheTier::Files => "its node's files are not counted until it attaches anew",
            };
            tracing::warn!(index, until, "an agent's reports of cached blocks contradict themselves");
            return;
        }
        tracing::info!(index, blocks = ours.count, "the index differs from what an agent reports: asking for the whole cache");
        self.stats.resyncs.fetch_add(1, Ordering::Relaxed);
        // If the order could not be sent, the next report shows the difference again.
        self.awaits_snapshot = directives.resync_cache(vec![index]);
    }
}

#[cfg(test)]
mod tests;
