//! The blocks that an engine has cached, as sessions with routers read them: everything once, then what changed. One subscriber
//! writes; each reader has a cursor of its own and never holds up the writer or another reader.

use std::collections::VecDeque;
use std::sync::Arc;

use hostler_placement::keys::Key;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::sync::watch;

use super::mirror::{Change, Copies, Digest, Effects, Mirror};
use super::wire::Event;
use super::{CacheCounters, Watch};

/// Changes that are kept for readers; one that is further behind reads everything again. 16 bytes each.
const MOST_CHANGES: usize = 64 * 1024;

/// What one replica's engine has cached, over all its lives.
#[derive(Debug)]
pub struct CacheLog {
    inner: Mutex<Inner>,
    watch: watch::Sender<Watch>,
}

#[derive(Debug)]
struct Inner {
    /// The present life; 0 before the first.
    epoch: u64,
    /// Whether that life is not over.
    is_alive: bool,
    /// Something of this life was missed. Blocks that are still cached are not told again, and those that continue them cannot be placed
    /// without them, so the mirror stays incomplete until the engine clears its cache.
    is_incomplete: bool,
    mirror: Mirror,
    /// The latest changes, oldest first.
    changes: VecDeque<(Key, Direction)>,
    /// Number of the first of them, counted from the beginning of the log and never set back.
    first: u64,
    counters: CacheCounters,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Stored,
    Removed,
}

/// How far one reader has come. A new one reads everything first.
#[derive(Debug, Default)]
pub struct Cursor {
    place: Option<Place>,
    /// The part of a snapshot that was not read yet.
    snapshot: Option<Snapshot>,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    epoch: u64,
    /// Number of the next change to read.
    next: u64,
}

#[derive(Debug)]
struct Snapshot {
    keys: Vec<Key>,
    digest: Digest,
}

/// What a reader has to take over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delta {
    /// Which life of the engine.
    pub epoch: u64,
    /// Everything that was read before is void.
    pub snapshot: bool,
    /// The rest is to be read at once; until then the count and the digest say nothing.
    pub partial: bool,
    /// Blocks that are now cached.
    pub stored: Vec<Key>,
    /// Blocks that no longer are; none of them is among the stored.
    pub removed: Vec<Key>,
    /// Blocks cached after this delta.
    pub count: u64,
    /// The XOR of their keys.
    pub xor: u64,
}

impl Cursor {
    /// Makes the next read begin with everything.
    pub fn reset(&mut self) {
        *self = Self::default();
    }

    /// Whether the changes that the log holds continue what this cursor has read.
    fn follows(&self, inner: &Inner) -> bool {
        self.place.is_some_and(|place| place.epoch == inner.epoch && place.next >= inner.first)
    }
}

impl Default for CacheLog {
    fn default() -> Self {
        let inner = Inner {
            epoch: 0,
            is_alive: false,
            is_incomplete: false,
            mirror: Mirror::new(Copies::Counted),
            changes: VecDeque::new(),
            first: 0,
            counters: CacheCounters::default(),
        };
        Self { inner: Mutex::new(inner), watch: watch::Sender::new(Watch { reason: NOT_READY.to_owned(), ..Watch::default() }) }
    }
}

/// Why nothing is known of an engine that has not come to serve.
const NOT_READY: &str = "the engine is not ready";

impl CacheLog {
    /// How well the blocks are known, as it changes.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Watch> {
        self.watch.subscribe()
    }

    /// What is new since this cursor was read last, with at most `most` blocks; `None` when nothing is, or when the engine has not begun its
    /// first life.
    pub fn read(&self, cursor: &mut Cursor, most: usize) -> Option<Delta> {
        let most = most.max(1);
        let inner = self.inner.lock();
        if inner.epoch == 0 {
            return None;
        }
        let begins = !cursor.follows(&inner);
        if begins {
            cursor.snapshot = Some(Snapshot { keys: inner.mirror.keys().collect(), digest: inner.mirror.digest() });
            cursor.place = Some(Place { epoch: inner.epoch, next: inner.end() });
        }
        match cursor.snapshot.take() {
            Some(snapshot) => {
                drop(inner);
                Some(cursor.part(snapshot, begins, most))
            }
            None => inner.news(cursor.place.as_mut()?, most),
        }
    }

    /// What became of the events so far.
    #[must_use]
    pub fn counters(&self) -> CacheCounters {
        self.inner.lock().counters
    }

    /// Another life of the engine begins, with nothing cached. Only the writer returned last can write.
    pub(crate) fn begin(self: &Arc<Self>, epoch: u64) -> Writer {
        let mut inner = self.inner.lock();
        inner.epoch = epoch;
        inner.is_alive = true;
        inner.is_incomplete = false;
        inner.forget();
        inner.mirror = Mirror::new(Copies::Counted);
        self.publish(&inner, |watch| (watch.exact, watch.reason) = (false, NOT_READY.to_owned()));
        Writer { log: Arc::clone(self), epoch }
    }

    /// The engine has emptied its cache and will tell so later only: what it stores from now on is all there is.
    pub(crate) fn cleared(&self) {
        let mut inner = self.inner.lock();
        inner.forget();
        self.publish(&inner, |_| {});
    }

    /// The life is over, and what was cached with it.
    pub(crate) fn end(&self) {
        let mut inner = self.inner.lock();
        inner.is_alive = false;
        inner.forget();
        self.publish(&inner, |watch| (watch.exact, watch.reason) = (false, NOT_READY.to_owned()));
    }

    /// Tells the readers, while the lock is held: else an older state could be told last.
    fn publish(&self, inner: &Inner, change: impl FnOnce(&mut Watch)) {
        self.watch.send_if_modified(|watch| {
            let before = watch.clone();
            watch.epoch = inner.epoch;
            watch.block_size = inner.mirror.block_size();
            watch.has_holes = inner.mirror.has_holes();
            watch.version = inner.end();
            change(watch);
            *watch != before
        });
    }
}

/// Writes to a log for one life of the engine. A task may outlive that life by a moment; then nothing comes of what it writes.
#[derive(Debug)]
pub(crate) struct Writer {
    log: Arc<CacheLog>,
    epoch: u64,
}

impl Writer {
    /// From now on the blocks are known as they come and go, unless something was missed.
    pub(crate) fn is_exact(&self) {
        self.write(
            |_| {},
            |inner, watch| {
                if !inner.is_incomplete {
                    (watch.exact, watch.reason) = (true, String::new());
                }
            },
        );
    }

    /// The blocks are not known, and no longer told.
    pub(crate) fn is_unknown(&self, because: &str) {
        self.write(Inner::forget, |_, watch| (watch.exact, watch.reason) = (false, because.to_owned()));
    }

    /// Takes over what one message tells.
    pub(crate) fn apply(&self, events: &[Event]) {
        let has_cleared = events.iter().any(|event| matches!(event, Event::Cleared));
        let mut is_whole_again = false;
        let change = |inner: &mut Inner| {
            inner.apply(events);
            is_whole_again = has_cleared && std::mem::take(&mut inner.is_incomplete);
        };
        self.write(change, |_, _| {});
        if is_whole_again {
            self.is_exact();
        }
    }

    /// Forgets every block: the engine tells its cache from the beginning.
    pub(crate) fn restart(&self) {
        let restart = |inner: &mut Inner| {
            inner.forget();
            inner.counters.resets += 1;
        };
        self.write(restart, |_, _| {});
    }

    /// Forgets every block: what is known may be wrong, and what comes is not all.
    pub(crate) fn reset(&self, because: &str) {
        let reset = |inner: &mut Inner| {
            inner.forget();
            inner.counters.resets += 1;
            inner.is_incomplete = true;
        };
        self.write(reset, |_, watch| (watch.exact, watch.reason) = (false, because.to_owned()));
    }

    /// Changes the counters.
    pub(crate) fn count(&self, change: impl FnOnce(&mut CacheCounters)) {
        self.write(|inner| change(&mut inner.counters), |_, _| {});
    }

    fn write(&self, change: impl FnOnce(&mut Inner), tell: impl FnOnce(&Inner, &mut Watch)) {
        let mut inner = self.log.inner.lock();
        if inner.epoch == self.epoch && inner.is_alive {
            change(&mut inner);
            self.log.publish(&inner, |watch| tell(&inner, watch));
        }
    }
}

impl Inner {
    /// Number of the change that comes next.
    fn end(&self) -> u64 {
        self.first + self.changes.len() as u64
    }

    fn apply(&mut self, events: &[Event]) {
        let mut effects = Effects::default();
        for event in events {
            self.mirror.apply(event, &mut effects);
        }
        self.counters.events += effects.events;
        self.counters.orphans += effects.orphans;
        self.counters.ignored += effects.ignored;
        self.counters.malformed += effects.malformed;
        for change in effects.changes {
            match change {
                Change::Stored(key) => self.push(key, Direction::Stored),
                Change::Removed(key) => self.push(key, Direction::Removed),
                Change::Cleared => self.clear(),
            }
        }
    }

    fn push(&mut self, key: Key, direction: Direction) {
        if self.changes.len() == MOST_CHANGES {
            self.changes.pop_front();
            self.first += 1;
        }
        self.changes.push_back((key, direction));
    }

    /// Every reader begins again; that is shorter than one removal for each block.
    fn clear(&mut self) {
        self.first = self.end() + 1;
        self.changes.clear();
    }

    fn forget(&mut self) {
        self.mirror.clear();
        self.clear();
    }

    /// The net effect of the next changes.
    fn news(&self, place: &mut Place, most: usize) -> Option<Delta> {
        let begin = usize::try_from(place.next - self.first).unwrap_or(usize::MAX).min(self.changes.len());
        let end = begin.saturating_add(most).min(self.changes.len());
        if begin == end {
            return None;
        }
        place.next = self.first + end as u64;
        let mut net: FxHashMap<Key, Direction> = FxHashMap::default();
        for &(key, direction) in self.changes.range(begin..end) {
            // A block comes and goes in turns, so two changes in a row cancel each other.
            if net.remove(&key).is_none() {
                net.insert(key, direction);
            }
        }
        let all = |wanted| net.iter().filter(|&(_, &direction)| direction == wanted).map(|(&key, _)| key).collect();
        let digest = self.mirror.digest();
        Some(Delta {
            epoch: self.epoch,
            snapshot: false,
            partial: end < self.changes.len(),
            stored: all(Direction::Stored),
            removed: all(Direction::Removed),
            count: digest.count,
            xor: digest.xor,
        })
    }
}

impl Cursor {
    /// The next part of a snapshot; what is left of it stays here.
    fn part(&mut self, mut snapshot: Snapshot, first: bool, most: usize) -> Delta {
        let stored = snapshot.keys.split_off(snapshot.keys.len().saturating_sub(most));
        let digest = snapshot.digest;
        let partial = !snapshot.keys.is_empty();
        self.snapshot = partial.then_some(snapshot);
        let epoch = self.place.map_or(0, |place| place.epoch);
        Delta { epoch, snapshot: first, partial, stored, removed: Vec::new(), count: digest.count, xor: digest.xor }
    }
}

#[cfg(test)]
mod tests;
