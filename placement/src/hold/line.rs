//! The requests of one tenant in one band, in the order of their turns.

use std::cmp::Ordering;
use std::collections::VecDeque;

use super::Waiting;

/// After this many seconds a request counts as much as two that just came; from there its weight grows with the square of its wait.
const PATIENCE_SECONDS: f64 = 4.0;

/// The order is that of at most so long ago: what changes it is how long requests have waited, and that changes slowly.
const REORDER_SECONDS: f64 = 0.1;

/// See the module.
#[derive(Debug)]
pub(super) struct Line<T> {
    /// In the order of their turns at `at`.
    entries: VecDeque<Entry<T>>,
    at: f64,
    /// Its tenant's weight, as the last one that came had it.
    pub(super) weight: f64,
    /// Prompt tokens to be computed.
    pub(super) uncached: u64,
    /// Those, and the tokens of the answers.
    pub(super) tokens: f64,
}

/// A request that waits.
#[derive(Debug)]
pub(super) struct Entry<T> {
    pub(super) number: u64,
    pub(super) waiting: Waiting,
    pub(super) value: T,
}

impl<T> Line<T> {
    pub(super) fn new(now: f64) -> Self {
        Self { entries: VecDeque::new(), at: now, weight: 1.0, uncached: 0, tokens: 0.0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The first one, as of when it was last put in order.
    pub(super) fn first(&self) -> Option<&Entry<T>> {
        self.entries.front()
    }

    /// How two first ones of different lines compare.
    pub(super) fn compare(&self, other: &Self, now: f64) -> Ordering {
        match (self.first(), other.first()) {
            (Some(one), Some(other)) => one.order(other, now),
            (one, other) => other.is_some().cmp(&one.is_some()),
        }
    }

    pub(super) fn push(&mut self, entry: Entry<T>) {
        self.weight = super::weight(entry.waiting.weight);
        self.uncached += u64::from(entry.waiting.uncached);
        self.tokens += entry.waiting.tokens();
        let index = self.entries.partition_point(|other| other.order(&entry, self.at).is_lt());
        self.entries.insert(index, entry);
    }

    /// Brings it into the order of this moment, if the last time is too long ago.
    pub(super) fn put_in_order(&mut self, now: f64) {
        // Also where a time is not a number.
        let is_recent = (now - self.at).abs() <= REORDER_SECONDS;
        if !is_recent && self.entries.len() > 1 {
            self.entries.make_contiguous().sort_by(|one, other| one.order(other, now));
        }
        if !is_recent {
            self.at = now;
        }
    }

    /// Takes out the first of at most `looked_at` that may go, and puts those whose tokens were corrected where they belong.
    pub(super) fn take_where(
        &mut self,
        looked_at: usize,
        may_go: &mut impl FnMut(&mut Waiting, &mut T) -> bool,
    ) -> (usize, Option<Entry<T>>) {
        let upto = looked_at.min(self.entries.len());
        let mut found = None;
        let mut corrected = 0;
        for index in 0..upto {
            let Entry { waiting, value, .. } = &mut self.entries[index];
            let before = (waiting.uncached, waiting.tokens());
            let goes = may_go(waiting, value);
            if waiting.uncached != before.0 {
                self.uncached = self.uncached - u64::from(before.0) + u64::from(waiting.uncached);
                self.tokens += waiting.tokens() - before.1;
                corrected = index + 1;
            }
            if goes {
                found = Some(index);
                break;
            }
        }
        let looked = found.map_or(upto, |index| index + 1);
        let entry = found.and_then(|index| self.take(index));
        // What stands before the last one that was corrected, itself included unless it has gone.
        let displaced: Vec<Entry<T>> = self.entries.drain(..corrected.min(found.unwrap_or(corrected))).collect();
        for entry in displaced {
            let index = self.entries.partition_point(|other| other.order(&entry, self.at).is_lt());
            self.entries.insert(index, entry);
        }
        (looked, entry)
    }

    /// Takes out the request of this number.
    pub(super) fn remove(&mut self, number: u64) -> Option<Entry<T>> {
        let index = self.entries.iter().position(|entry| entry.number == number)?;
        self.take(index)
    }

    fn take(&mut self, index: usize) -> Option<Entry<T>> {
        let entry = self.entries.remove(index)?;
        self.uncached -= u64::from(entry.waiting.uncached);
        self.tokens -= entry.waiting.tokens();
        Some(entry)
    }

    /// Prompt tokens, and all tokens, of those whose turn comes before that of one like this.
    pub(super) fn before(&self, waiting: &Waiting, now: f64) -> (u64, f64) {
        let own = Key::of(waiting, now);
        let before = self.entries.iter().map(|entry| &entry.waiting).filter(|other| Key::of(other, now).order(&own).is_lt());
        before.fold((0, 0.0), |(uncached, tokens), other| (uncached + u64::from(other.uncached), tokens + other.tokens()))
    }
}

impl<T> Entry<T> {
    fn order(&self, other: &Self, now: f64) -> Ordering {
        let order = Key::of(&self.waiting, now).order(&Key::of(&other.waiting, now));
        order.then(self.number.cmp(&other.number))
    }
}

/// What two requests of one tenant are compared by.
struct Key {
    urgency: f64,
    since: f64,
}

impl Key {
    fn of(waiting: &Waiting, now: f64) -> Self {
        let wait = (now - waiting.since).max(0.0) / PATIENCE_SECONDS;
        Self { urgency: (1.0 + wait * wait) / f64::from(waiting.uncached.max(1)), since: waiting.since }
    }

    fn order(&self, other: &Self) -> Ordering {
        other.urgency.total_cmp(&self.urgency).then_with(|| self.since.total_cmp(&other.since))
    }
}
