//! Requests of one tenant in one band, in the order of their turns.

use std::cmp::Ordering;
use std::collections::VecDeque;

use super::TurnFactors;

/// Seconds after which a request counts as much as two new ones.
///
/// Its weight grows with the square of its wait.
const PATIENCE_SECONDS: f64 = 4.0;

/// Age limit of the order: only the length of waits changes it, and that is slow.
const REORDER_SECONDS: f64 = 0.1;

#[derive(Debug)]
pub(super) struct TenantQueue<T> {
    /// Entries in the order of their turns at `at`.
    entries: VecDeque<Entry<T>>,
    sorted_at: f64,
    /// Weight of the tenant, from its latest request.
    pub(super) weight: f64,
    pub(super) uncached_tokens: u64,
    /// Uncached prompt tokens, and the expected tokens of the answers.
    pub(super) tokens: f64,
}

#[derive(Debug)]
pub(super) struct Entry<T> {
    pub(super) number: u64,
    pub(super) factors: TurnFactors,
    pub(super) value: T,
}

impl<T> TenantQueue<T> {
    pub(super) fn new(now: f64) -> Self {
        Self { entries: VecDeque::new(), sorted_at: now, weight: 1.0, uncached_tokens: 0, tokens: 0.0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// First request, as of the last sort.
    pub(super) fn first(&self) -> Option<&Entry<T>> {
        self.entries.front()
    }

    /// Compares the first requests of two tenants.
    pub(super) fn cmp_first(&self, other: &Self, now: f64) -> Ordering {
        match (self.first(), other.first()) {
            (Some(one), Some(other)) => one.cmp_turn(other, now),
            (one, other) => other.is_some().cmp(&one.is_some()),
        }
    }

    pub(super) fn push(&mut self, entry: Entry<T>) {
        self.weight = super::clamp_weight(entry.factors.weight);
        self.uncached_tokens += u64::from(entry.factors.uncached_tokens);
        self.tokens += entry.factors.tokens();
        let index = self.entries.partition_point(|other| other.cmp_turn(&entry, self.sorted_at).is_lt());
        self.entries.insert(index, entry);
    }

    /// Sorts again if the last time is too long ago.
    pub(super) fn resort(&mut self, now: f64) {
        // Also false if a time is not a number.
        let is_recent = (now - self.sorted_at).abs() <= REORDER_SECONDS;
        if !is_recent && self.entries.len() > 1 {
            self.entries.make_contiguous().sort_by(|one, other| one.cmp_turn(other, now));
        }
        if !is_recent {
            self.sorted_at = now;
        }
    }

    /// Removes the first of at most `looked_at` that may go, and moves those whose tokens were
    /// corrected to their new positions.
    pub(super) fn take_first_where(
        &mut self,
        looked_at: usize,
        may_go: &mut impl FnMut(&mut TurnFactors, &mut T) -> bool,
    ) -> (usize, Option<Entry<T>>) {
        let upto = looked_at.min(self.entries.len());
        let mut found = None;
        let mut corrected = 0;
        for index in 0..upto {
            let Entry { factors: waiting, value, .. } = &mut self.entries[index];
            let before = (waiting.uncached_tokens, waiting.tokens());
            let goes = may_go(waiting, value);
            if waiting.uncached_tokens != before.0 {
                self.uncached_tokens = self.uncached_tokens - u64::from(before.0) + u64::from(waiting.uncached_tokens);
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
        // Drain all entries up to the last corrected one, which is included unless it has gone.
        let displaced: Vec<Entry<T>> = self.entries.drain(..corrected.min(found.unwrap_or(corrected))).collect();
        for entry in displaced {
            let index = self.entries.partition_point(|other| other.cmp_turn(&entry, self.sorted_at).is_lt());
            self.entries.insert(index, entry);
        }
        (looked, entry)
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<Entry<T>> {
        let index = self.entries.iter().position(|entry| entry.number == number)?;
        self.take(index)
    }

    fn take(&mut self, index: usize) -> Option<Entry<T>> {
        let entry = self.entries.remove(index)?;
        self.uncached_tokens -= u64::from(entry.factors.uncached_tokens);
        self.tokens -= entry.factors.tokens();
        Some(entry)
    }

    /// Prompt tokens, and all tokens, of the requests whose turn comes before one like this.
    pub(super) fn tokens_before(&self, waiting: &TurnFactors, now: f64) -> (u64, f64) {
        let own = TurnKey::of(waiting, now);
        let before = self.entries.iter().map(|entry| &entry.factors).filter(|other| TurnKey::of(other, now).cmp_turn(&own).is_lt());
        before.fold((0, 0.0), |(uncached, tokens), other| (uncached + u64::from(other.uncached_tokens), tokens + other.tokens()))
    }
}

impl<T> Entry<T> {
    fn cmp_turn(&self, other: &Self, now: f64) -> Ordering {
        let order = TurnKey::of(&self.factors, now).cmp_turn(&TurnKey::of(&other.factors, now));
        order.then(self.number.cmp(&other.number))
    }
}

struct TurnKey {
    urgency: f64,
    queued_at: f64,
}

impl TurnKey {
    fn of(waiting: &TurnFactors, now: f64) -> Self {
        let wait = (now - waiting.queued_at).max(0.0) / PATIENCE_SECONDS;
        Self { urgency: (1.0 + wait * wait) / f64::from(waiting.uncached_tokens.max(1)), queued_at: waiting.queued_at }
    }

    fn cmp_turn(&self, other: &Self) -> Ordering {
        other.urgency.total_cmp(&self.urgency).then_with(|| self.queued_at.total_cmp(&other.queued_at))
    }
}
