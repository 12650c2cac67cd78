//! Longest match of each of many slots along one chain of keys, with as few lookups as possible.
//!
//! `lookup(block, among, out)` writes those of `among` that hold a block of the chain into `out`.
//! For [`CacheIndex`](super::CacheIndex) only.
//!
//! If no slot has gaps, the set of slots that hold a block only shrinks along the chain, so
//! bisection finds where the set changes. A prompt of 6,250 blocks takes about thirteen lookups for
//! each place where some slot's match ends.

use super::holders::set_bits;

/// Raises `matched` of each slot in `slots` from 0 to the number of leading blocks that it holds,
/// out of `blocks`.
///
/// Requires that no slot has gaps. While a batch of changes is being written that may not hold;
/// then only this answer may be off.
pub(super) fn bisect(blocks: usize, slots: &[u64], matched: &mut [u32], lookup: impl FnMut(usize, &[u64], &mut [u64])) {
    let width = slots.len();
    let mut search = Bisection { width, sets: slots.to_vec(), matched, lookup };
    if blocks == 0 || slots.iter().all(|word| *word == 0) {
        return;
    }
    // Most slots hold nothing of a prompt, so the first block decides about most of them.
    let held = search.look_up(0, 0);
    search.ended(0, held, 0);
    if search.set(held).iter().all(|word| *word == 0) {
        return;
    }
    let last = search.look_up(blocks - 1, held);
    for slot in set_bits(&search.sets[last * width..(last + 1) * width]) {
        search.matched[slot as usize] = count(blocks);
    }
    search.between(0, held, blocks - 1, last);
}

/// Raises `matched` of each slot in `slots` from 0 to the number of leading blocks that it holds,
/// by walking them.
///
/// A block after a missing one does not count.
pub(super) fn walk(blocks: usize, slots: &[u64], matched: &mut [u32], mut lookup: impl FnMut(usize, &[u64], &mut [u64])) {
    let mut alive = slots.to_vec();
    let mut held = vec![0; slots.len()];
    for block in 0..blocks {
        if alive.iter().all(|word| *word == 0) {
            return;
        }
        lookup(block, &alive, &mut held);
        if alive != held {
            alive.iter_mut().zip(&held).for_each(|(alive, held)| *alive &= !held);
            set_bits(&alive).for_each(|slot| matched[slot as usize] = count(block));
            alive.copy_from_slice(&held);
        }
    }
    set_bits(&alive).for_each(|slot| matched[slot as usize] = count(blocks));
}

/// Converts a number of blocks to the type of matches.
pub(super) fn count(blocks: usize) -> u32 {
    u32::try_from(blocks).unwrap_or(u32::MAX)
}

/// Sets on the way down, one after another in one allocation: as many as there are halvings.
struct Bisection<'a, L> {
    width: usize,
    sets: Vec<u64>,
    matched: &'a mut [u32],
    lookup: L,
}

impl<L: FnMut(usize, &[u64], &mut [u64])> Bisection<'_, L> {
    fn set(&self, number: usize) -> &[u64] {
        &self.sets[number * self.width..(number + 1) * self.width]
    }

    /// Looks up which slots of set `among` hold a block, and returns the number of the new set.
    fn look_up(&mut self, block: usize, among: usize) -> usize {
        let number = self.sets.len() / self.width;
        self.sets.resize(self.sets.len() + self.width, 0);
        let (before, new) = self.sets.split_at_mut(number * self.width);
        (self.lookup)(block, &before[among * self.width..(among + 1) * self.width], new);
        number
    }

    /// Records that the slots of set `before` that are not in `after` hold `blocks` blocks.
    fn ended(&mut self, before: usize, after: usize, blocks: usize) {
        for word in 0..self.width {
            let gone = self.sets[before * self.width + word] & !self.sets[after * self.width + word];
            set_bits(&[gone]).for_each(|slot| self.matched[word * 64 + slot as usize] = count(blocks));
        }
    }

    /// Finds the ends of the slots that hold block `low` (set `held`) but not block `high` (set
    /// `left`).
    fn between(&mut self, low: usize, held: usize, high: usize, left: usize) {
        // Do not test for equality: between two lookups a block may have been stored, and a slot
        // that has ended already stays ended.
        if (0..self.width).all(|word| self.sets[held * self.width + word] & !self.sets[left * self.width + word] == 0) {
            return;
        }
        if high - low <= 1 {
            self.ended(held, left, high);
            return;
        }
        let middle = low.midpoint(high);
        let kept = self.look_up(middle, held);
        self.between(low, held, middle, kept);
        self.between(middle, kept, high, left);
        self.sets.truncate(kept * self.width);
    }
}
