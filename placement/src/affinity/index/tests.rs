use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use proptest::prelude::*;

use super::*;
use crate::block_keys::{KeyChain, token_keys};

/// A chain that shares its first blocks with all others, and has a unique tail.
fn chain(shared: usize, own: usize, tail: u32) -> Vec<BlockKey> {
    let tokens: Vec<u32> = (0..shared).map(|_| 0).chain((0..own).map(|_| tail)).collect();
    token_keys(KeyChain::new("", ""), &tokens, 1)
}

fn seats_without_holes(slots: &[ReplicaSlot]) -> Vec<(ReplicaSlot, ChainGaps)> {
    slots.iter().map(|slot| (*slot, ChainGaps::None)).collect()
}

fn sweep_all(index: &CacheIndex) {
    while index.sweep(64) {}
}

#[test]
fn a_match_is_the_leading_blocks_that_a_slot_holds() {
    let index = CacheIndex::new();
    let (whole, part, other) = (index.open(), index.open(), index.open());
    let (mine, others) = (chain(10, 20, 1), chain(10, 20, 2));
    index.store(whole, &mine);
    index.store(part, &mine[..7]);
    index.store(other, &others);
    let slots = seats_without_holes(&[whole, part, other, whole]);
    assert_eq!(index.matched_blocks(&mine, &slots), [30, 7, 10, 30]);
    assert_eq!(index.matched_blocks(&others, &slots), [10, 7, 30, 10]);
    assert_eq!(index.matched_blocks(&mine[..5], &slots), [5, 5, 5, 5]);
    assert_eq!(index.matched_blocks(&[], &slots), [0, 0, 0, 0]);
    assert_eq!(index.matched_blocks(&mine, &[]), [0; 0]);
    assert!(index.has(mine[29]) && index.has(others[29]) && !index.has(chain(10, 20, 3)[10]));
}

#[test]
fn a_repeated_block_counts_once_and_unknown_removals_are_ignored() {
    let index = CacheIndex::new();
    let (one, two) = (index.open(), index.open());
    index.store(one, &[1, 2, 2]);
    index.store(one, &[1, 2]);
    index.store(two, &[2]);
    index.remove(two, &[1, 7]);
    assert_eq!(index.digest(one), KeySetDigest { count: 2, xor: 1 ^ 2 });
    assert_eq!(index.digest(two), KeySetDigest { count: 1, xor: 2 });
    index.remove(one, &[2, 2]);
    assert_eq!(index.digest(one), KeySetDigest { count: 1, xor: 1 });
    assert_eq!(index.len(), 2);
}

#[test]
fn a_closed_slot_matches_and_stores_nothing() {
    let index = CacheIndex::new();
    let slot = index.open();
    let keys = chain(0, 10, 1);
    index.store(slot, &keys);
    index.close(slot);
    index.close(slot);
    index.store(slot, &keys);
    index.remove(slot, &keys);
    assert_eq!(index.matched_blocks(&keys, &[(slot, ChainGaps::None)]), [0]);
    assert_eq!(index.matched_blocks(&keys, &[(slot, ChainGaps::Possible)]), [0]);
    assert_eq!(index.digest(slot), KeySetDigest::default());
    assert_eq!(index.len(), 10, "what is left waits for the sweep");
}

#[test]
fn a_slot_is_reused_once_its_blocks_are_swept() {
    let index = CacheIndex::new();
    let old = index.open();
    let keys = chain(0, 100, 1);
    index.store(old, &keys);
    index.close(old);
    let meanwhile = index.open();
    assert_ne!(meanwhile, old);
    assert!(index.sweep(1), "one look is not enough for a hundred blocks in many tables");
    assert_ne!(index.open(), old);
    sweep_all(&index);
    assert!(index.is_empty());
    let new = index.open();
    assert_eq!(new, old);
    assert_eq!(index.matched_blocks(&keys, &[(new, ChainGaps::None)]), [0]);
    assert_eq!(index.digest(new), KeySetDigest::default());
}

#[test]
fn an_empty_slot_is_reused_without_a_sweep() {
    let index = CacheIndex::new();
    let slot = index.open();
    index.close(slot);
    assert_eq!(index.open(), slot);
    assert!(!index.sweep(1));
}

#[test]
fn a_slot_with_holes_matches_up_to_the_first() {
    let index = CacheIndex::new();
    let (holed, whole) = (index.open(), index.open());
    let keys = chain(0, 100, 1);
    index.store(holed, &keys);
    index.store(whole, &keys);
    index.remove(holed, &keys[40..60]);
    assert_eq!(index.matched_blocks(&keys, &[(holed, ChainGaps::Possible), (whole, ChainGaps::None)]), [40, 100]);
    index.remove(holed, &keys[..1]);
    assert_eq!(index.matched_blocks(&keys, &[(holed, ChainGaps::Possible), (whole, ChainGaps::Possible)]), [0, 100]);
}

#[test]
fn a_match_costs_nothing_for_slots_not_asked_about() {
    let index = CacheIndex::new();
    let slots: Vec<ReplicaSlot> = (0..300).map(|_| index.open()).collect();
    let keys = chain(0, 50, 1);
    for (slot, length) in slots.iter().zip((0..50).cycle()) {
        index.store(*slot, &keys[..length]);
    }
    assert_eq!(index.matched_blocks(&keys, &[(slots[7], ChainGaps::None)]), [7]);
    let all: Vec<u32> = (0..50).cycle().take(300).collect();
    assert_eq!(index.matched_blocks(&keys, &seats_without_holes(&slots)), all);
}

#[test]
fn a_block_takes_at_most_64_bytes_for_each_holder() {
    // Sizes just above and just below those at which the tables grow.
    for blocks in [100_000, 115_000, 125_000, 200_000] {
        let index = CacheIndex::new();
        let slot = index.open();
        index.store(slot, &chain(0, blocks, 1));
        let bytes = index.bytes();
        assert!(bytes <= 64 * blocks, "{bytes} bytes for {blocks} blocks");
    }
    let index = CacheIndex::new();
    let slots: Vec<ReplicaSlot> = (0..1000).map(|_| index.open()).collect();
    let keys = chain(0, 30_000, 1);
    for slot in &slots[996..] {
        index.store(*slot, &keys);
    }
    let bytes = index.bytes();
    assert!(bytes <= 64 * 4 * keys.len(), "{bytes} bytes for {} blocks on four replicas of a thousand", keys.len());
}

#[test]
fn memory_shrinks_when_the_largest_holders_are_gone() {
    let index = CacheIndex::new();
    let (leaves, stays) = (index.open(), index.open());
    index.store(leaves, &chain(0, 200_000, 1));
    index.store(stays, &chain(0, 1000, 2));
    let before = index.bytes();
    index.close(leaves);
    sweep_all(&index);
    assert!(index.bytes() < before / 4, "{} bytes of {before}", index.bytes());
    assert_eq!(index.len(), 1000);
}

#[test]
fn concurrent_readers_never_see_more_than_was_stored() {
    const MOST: usize = 300;
    let index = CacheIndex::new();
    let keys = chain(0, 1000, 1);
    let (still, moving) = (index.open(), index.open());
    index.store(still, &keys[..100]);
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    let matched =
                        index.matched_blocks(&keys, &[(still, ChainGaps::None), (moving, ChainGaps::None), (moving, ChainGaps::Possible)]);
                    assert_eq!(matched[0], 100);
                    assert!(matched[1] <= 300 && matched[2] <= 300, "{matched:?}");
                }
            });
        }
        for round in 0..300 {
            let length = (round * 7) % MOST + 1;
            index.store(moving, &keys[..length]);
            let backwards: Vec<BlockKey> = keys[..length].iter().rev().copied().collect();
            index.remove(moving, &backwards);
            let passing = index.open();
            index.store(passing, &keys);
            index.close(passing);
            index.sweep(200);
        }
        ended.store(true, Ordering::Relaxed);
    });
    sweep_all(&index);
    assert_eq!(index.len(), 100);
}

/// Changes to an index; slots are numbers of the model.
#[derive(Debug, Clone)]
enum Change {
    Open,
    Close(usize),
    Store { slot: usize, chain: usize, length: usize },
    Evict { slot: usize, chain: usize, from: usize },
    Punch { slot: usize, chain: usize, block: usize },
    Resync { slot: usize, chain: usize, length: usize },
    Sweep(usize),
}

fn change() -> impl Strategy<Value = Change> {
    let (slot, chain, block) = (0..8usize, 0..CHAINS.len(), 0..=LENGTH);
    prop_oneof![
        2 => Just(Change::Open),
        1 => slot.clone().prop_map(Change::Close),
        8 => (slot.clone(), chain.clone(), block.clone()).prop_map(|(slot, chain, length)| Change::Store { slot, chain, length }),
        4 => (slot.clone(), chain.clone(), block.clone()).prop_map(|(slot, chain, from)| Change::Evict { slot, chain, from }),
        2 => (slot.clone(), chain.clone(), block.clone()).prop_map(|(slot, chain, block)| Change::Punch { slot, chain, block }),
        1 => (slot, chain, block).prop_map(|(slot, chain, length)| Change::Resync { slot, chain, length }),
        2 => (1..40usize).prop_map(Change::Sweep),
    ]
}

/// Number of blocks that each chain shares with the others.
const CHAINS: [usize; 5] = [0, 3, 10, 10, 24];
const LENGTH: usize = 24;

/// An index, and the model of its expected contents.
struct Pair {
    index: CacheIndex,
    chains: Vec<Vec<BlockKey>>,
    lives: Vec<(ReplicaSlot, BTreeSet<BlockKey>)>,
    holes: ChainGaps,
}

impl Pair {
    fn new(unused_seats: usize, holes: ChainGaps) -> Self {
        let index = CacheIndex::new();
        for _ in 0..unused_seats {
            index.open();
        }
        let chains = CHAINS.iter().zip(1..).map(|(shared, tail)| chain(*shared, LENGTH - shared, tail)).collect();
        Self { index, chains, lives: Vec::new(), holes }
    }

    fn apply(&mut self, change: &Change) {
        if let Change::Open = change {
            let slot = self.index.open();
            assert!(self.lives.iter().all(|life| life.0 != slot), "a slot was given twice");
            self.lives.push((slot, BTreeSet::new()));
            return;
        }
        if let Change::Sweep(most) = change {
            self.index.sweep(*most);
            return;
        }
        let (&Change::Close(number)
        | &Change::Store { slot: number, .. }
        | &Change::Evict { slot: number, .. }
        | &Change::Punch { slot: number, .. }
        | &Change::Resync { slot: number, .. }) = change
        else {
            return;
        };
        if number >= self.lives.len() {
            return;
        }
        let (slot, held) = &mut self.lives[number];
        match *change {
            Change::Open | Change::Sweep(_) => {}
            Change::Close(_) => {
                self.index.close(*slot);
                self.lives.swap_remove(number);
            }
            Change::Store { chain, length, .. } => {
                self.index.store(*slot, &self.chains[chain][..length]);
                held.extend(&self.chains[chain][..length]);
            }
            Change::Evict { chain, from, .. } => {
                let Some(first) = self.chains[chain].get(from) else { return };
                for chain in self.chains.iter().filter(|chain| chain[from] == *first) {
                    self.index.remove(*slot, &chain[from..]);
                    held.retain(|key| !chain[from..].contains(key));
                }
            }
            Change::Punch { chain, block, .. } => {
                if let (Some(key), ChainGaps::Possible) = (self.chains[chain].get(block), self.holes) {
                    self.index.remove(*slot, &[*key]);
                    held.remove(key);
                }
            }
            Change::Resync { chain, length, .. } => {
                self.index.close(*slot);
                let keys = &self.chains[chain][..length];
                *slot = self.index.open();
                self.index.store(*slot, keys);
                *held = keys.iter().copied().collect();
            }
        }
    }

    fn check(&self) {
        let slots: Vec<_> = self.lives.iter().map(|life| (life.0, self.holes)).collect();
        for chain in &self.chains {
            let walked =
                |held: &BTreeSet<BlockKey>| chain.iter().zip(0..).find(|(key, _)| !held.contains(key)).map_or(24, |(_, block)| block);
            let expected: Vec<u32> = self.lives.iter().map(|life| walked(&life.1)).collect();
            assert_eq!(self.index.matched_blocks(chain, &slots), expected);
        }
        for (slot, held) in &self.lives {
            let digest = KeySetDigest { count: held.len() as u64, xor: held.iter().fold(0, |xor, key| xor ^ key) };
            assert_eq!(self.index.digest(*slot), digest);
        }
    }

    fn run(mut self, changes: &[Change]) {
        for change in changes {
            self.apply(change);
            self.check();
        }
        sweep_all(&self.index);
        self.check();
        let all: BTreeSet<&BlockKey> = self.lives.iter().flat_map(|life| &life.1).collect();
        assert_eq!(self.index.len(), all.len());
    }
}

proptest! {
    #[test]
    fn any_history_matches_one_plain_set_for_each_life(
        unused in prop_oneof![Just(0usize), Just(61), Just(200)],
        changes in prop::collection::vec(change(), 1..60),
    ) {
        Pair::new(unused, ChainGaps::None).run(&changes);
    }

    #[test]
    fn any_history_with_holes_matches_a_walk_of_the_chain(changes in prop::collection::vec(change(), 1..60)) {
        Pair::new(0, ChainGaps::Possible).run(&changes);
    }
}
