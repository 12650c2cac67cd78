//! The one task that writes the affinity index: it applies the agents' cache reports, checks each against its digest, and asks for
//! the whole cache again where the two differ. A replica's blocks count only while they are known whole.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hostler_placement::affinity::{Digest, Index, Seat};
use rustc_hash::FxHashMap;
use tokio::sync::mpsc;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout_at};

use super::cache::{Cache, CacheFigures};
use super::directives::Directives;
use super::writer::{Fleet, Update};
use crate::background::BackgroundTasks;

/// Updates that may wait; a report that does not fit is dropped, and the whole cache asked for later.
const QUEUE: usize = 256;

/// Keys that are applied between two chances for other tasks: about a millisecond.
const KEYS_AT_ONCE: usize = 4096;

/// Entries that a sweep looks at between two reports.
const SWEPT_AT_ONCE: usize = 16 * 1024;

/// How long the writer rests between two sweeps.
const SWEEP_PAUSE: Duration = Duration::from_millis(5);

/// Resyncs in a row that end in yet another difference before an agent's reports are not believed any more.
const BELIEVED: u32 = 3;

/// What has changed in a replica's cache since its last report.
#[derive(Debug, Clone, Default)]
pub(super) struct CacheReport {
    /// Index of the replica on its node.
    pub(super) index: u32,
    /// Life of its engine.
    pub(super) epoch: u64,
    /// All that it has cached begins here.
    pub(super) snapshot: bool,
    /// More of the same change follows.
    pub(super) partial: bool,
    /// Keys of the blocks that it has now.
    pub(super) stored: Vec<u64>,
    /// Keys of those that it has no more.
    pub(super) removed: Vec<u64>,
    /// How many it has then.
    pub(super) count: u64,
    /// All their keys, combined by exclusive or.
    pub(super) digest: u64,
}

/// What a session tells the writer of the index.
#[derive(Debug)]
pub(super) enum CacheUpdate {
    /// A report has come.
    Reported {
        /// From which attachment.
        attachment: u64,
        /// How to ask it for more.
        directives: Directives,
        /// What it says.
        report: CacheReport,
    },
    /// An attachment has ended.
    Gone {
        /// Which one.
        attachment: u64,
    },
}

/// The sessions' handle on the writer of the index. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Caches(mpsc::Sender<CacheUpdate>);

impl Caches {
    /// Starts the writer.
    #[must_use]
    pub fn start(index: Arc<Index>, fleet: Fleet, tasks: &BackgroundTasks) -> Self {
        let (updates, received) = mpsc::channel(QUEUE);
        let writer = Writer { index, fleet, known: FxHashMap::default() };
        tasks.spawn(writer.run(received));
        Self(updates)
    }

    /// Hands an update over if there is a place for it.
    #[must_use]
    pub(super) fn offer(&self, update: CacheUpdate) -> bool {
        self.0.try_send(update).is_ok()
    }

    /// Whether the writer has caught up.
    pub(super) fn has_room(&self) -> bool {
        self.0.capacity() > QUEUE / 2
    }

    /// Hands an update over, waiting while the queue is full. After the writer's end it does nothing.
    pub(super) async fn update(&self, update: CacheUpdate) {
        if self.0.send(update).await.is_err() {
            tracing::debug!("the index's writer has ended; an update is dropped");
        }
    }
}

struct Writer {
    index: Arc<Index>,
    fleet: Fleet,
    /// By attachment and index of the replica on its node.
    known: FxHashMap<(u64, u32), Known>,
}

/// One life of one replica's cache.
#[derive(Debug)]
struct Known {
    epoch: u64,
    seat: Seat,
    /// Readers have been told of the seat.
    published: bool,
    /// A snapshot was asked for and has not begun.
    asked: bool,
    /// Differences in a row.
    differences: u32,
    figures: Arc<CacheFigures>,
}

impl Writer {
    async fn run(mut self, mut updates: mpsc::Receiver<CacheUpdate>) {
        let (mut leftovers, mut next_sweep) = (false, Instant::now());
        loop {
            // Also while reports keep coming: a seat is used again only when nothing of its last life is left.
            if leftovers && next_sweep <= Instant::now() {
                leftovers = self.index.sweep(SWEPT_AT_ONCE);
                next_sweep = Instant::now() + SWEEP_PAUSE;
            }
            let update = if leftovers { timeout_at(next_sweep, updates.recv()).await } else { Ok(updates.recv().await) };
            match update {
                Ok(Some(CacheUpdate::Reported { attachment, directives, report })) => {
                    leftovers |= report.snapshot;
                    self.report(attachment, &directives, report).await;
                }
                Ok(Some(CacheUpdate::Gone { attachment })) => {
                    leftovers = true;
                    self.known.retain(|(of, _), known| {
                        if *of == attachment {
                            self.index.close(known.seat);
                        }
                        *of != attachment
                    });
                }
                Ok(None) => return,
                Err(_) => {}
            }
        }
    }

    async fn report(&mut self, attachment: u64, directives: &Directives, report: CacheReport) {
        let key = (attachment, report.index);
        if report.snapshot {
            self.begin(key, report.epoch).await;
        }
        let Some(known) = self.known.get_mut(&key).filter(|known| known.epoch == report.epoch) else {
            directives.resync_cache(vec![report.index]);
            return;
        };
        // What was asked for anew is on its way; what comes before it is of no use.
        if known.asked || known.figures.distrusted.load(Ordering::Relaxed) {
            return;
        }
        for keys in report.stored.chunks(KEYS_AT_ONCE) {
            self.index.store(known.seat, keys);
            yield_now().await;
        }
        for keys in report.removed.chunks(KEYS_AT_ONCE) {
            self.index.remove(known.seat, keys);
            yield_now().await;
        }
        if report.partial {
            return;
        }
        let digest = self.index.digest(known.seat);
        let matches = digest == Digest { count: report.count, xor: report.digest };
        known.figures.blocks.store(digest.count, Ordering::Relaxed);
        known.figures.matches.store(matches, Ordering::Relaxed);
        if matches {
            known.differences = 0;
        } else {
            known.differ(report.index, digest, directives);
        }
        // A wrong index still mostly helps while the right one is on its way; only what contradicts itself is not used at all.
        let usable = !known.figures.distrusted.load(Ordering::Relaxed);
        if usable != known.published {
            known.published = usable;
            let cache = Cache { seat: usable.then_some(known.seat), figures: known.figures.clone() };
            self.fleet.update(Update::Cached { attachment, index: report.index, epoch: report.epoch, cache }).await;
        }
    }

    /// Another life, or the same one told from its beginning: what was known counts no longer.
    async fn begin(&mut self, key: (u64, u32), epoch: u64) {
        let seat = self.index.open();
        let mut next = Known { epoch, seat, published: false, asked: false, differences: 0, figures: Arc::default() };
        if let Some(known) = self.known.remove(&key) {
            if known.epoch == epoch {
                (next.differences, next.figures) = (known.differences, known.figures);
            }
            if known.published {
                let cache = Cache { seat: None, figures: next.figures.clone() };
                self.fleet.update(Update::Cached { attachment: key.0, index: key.1, epoch, cache }).await;
            }
            self.index.close(known.seat);
        }
        self.known.insert(key, next);
    }
}

impl Known {
    fn differ(&mut self, index: u32, ours: Digest, directives: &Directives) {
        self.differences += 1;
        if self.differences > BELIEVED {
            self.figures.distrusted.store(true, Ordering::Relaxed);
            tracing::warn!(
                index,
                "an agent's reports of cached blocks contradict themselves; its replica is placed on by text until it starts anew"
            );
            return;
        }
        tracing::info!(index, blocks = ours.count, "the index differs from what an agent reports: asking for the whole cache");
        self.figures.resyncs.fetch_add(1, Ordering::Relaxed);
        // Where the order could not be sent, the next report shows the difference again.
        self.asked = directives.resync_cache(vec![index]);
    }
}

#[cfg(test)]
mod tests;
