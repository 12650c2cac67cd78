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
use super::replica_cache::{CacheStats, ReplicaCache};
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

/// Changes in a replica's cache since its last report.
#[derive(Debug, Clone, Default)]
pub(super) struct CacheReport {
    pub(super) index: u32,
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
        let writer = IndexWriter { index, fleet, replicas: FxHashMap::default() };
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
    /// Keyed by attachment and by the replica's index on its node.
    replicas: FxHashMap<(u64, u32), ReportedCache>,
}

/// The known cache of one life of a replica's engine.
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
                    self.replicas.retain(|(of, _), known| {
                        if *of == attachment {
                            self.index.close(known.slot);
                        }
                        *of != attachment
                    });
                }
                Ok(None) => return,
                Err(_) => {}
            }
        }
    }

    async fn apply_report(&mut self, attachment: u64, directives: &Directives, report: CacheReport) {
        let key = (attachment, report.index);
        if report.snapshot {
            self.begin_snapshot(key, report.epoch).await;
        }
        let Some(known) = self.replicas.get_mut(&key).filter(|known| known.epoch == report.epoch) else {
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
            known.record_mismatch(report.index, digest, directives);
        }
        // A slightly wrong index still mostly helps until the snapshot comes. Only reports that
        // contradict themselves are not used at all.
        let usable = !known.stats.distrusted.load(Ordering::Relaxed);
        if usable != known.is_published {
            known.is_published = usable;
            let cache = ReplicaCache { slot: usable.then_some(known.slot), stats: known.stats.clone() };
            self.fleet.update(FleetUpdate::CacheChanged { attachment, index: report.index, epoch: report.epoch, cache }).await;
        }
    }

    /// Begins a new life, or the same one reported from its beginning. Earlier knowledge no longer
    /// counts.
    async fn begin_snapshot(&mut self, key: (u64, u32), epoch: u64) {
        let slot = self.index.open();
        let mut next =
            ReportedCache { epoch, slot, is_published: false, awaits_snapshot: false, consecutive_mismatches: 0, stats: Arc::default() };
        if let Some(known) = self.replicas.remove(&key) {
            if known.epoch == epoch {
                (next.consecutive_mismatches, next.stats) = (known.consecutive_mismatches, known.stats);
            }
            if known.is_published {
                let cache = ReplicaCache { slot: None, stats: next.stats.clone() };
                self.fleet.update(FleetUpdate::CacheChanged { attachment: key.0, index: key.1, epoch, cache }).await;
            }
            self.index.close(known.slot);
        }
        self.replicas.insert(key, next);
    }
}

impl ReportedCache {
    fn record_mismatch(&mut self, index: u32, ours: KeySetDigest, directives: &Directives) {
        self.consecutive_mismatches += 1;
        if self.consecutive_mismatches > MAX_FAILED_RESYNCS {
            self.stats.distrusted.store(true, Ordering::Relaxed);
            tracing::warn!(
                index,
                "an agent's reports of cached blocks contradict themselves; its replica is placed on by text until it starts anew"
            );
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
