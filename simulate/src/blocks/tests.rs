use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

#[test]
fn cleared_blocks_are_reported_removed_and_free_again() {
    let mut blocks = Blocks::new(4);
    let held = blocks.take(1);
    blocks.take(2);
    blocks.give_back(held);
    blocks.changes();
    blocks.take(3);
    blocks.clear();
    let mut changes = blocks.changes();
    changes.removed.sort_unstable();
    assert_eq!((changes.stored, changes.removed), (Vec::new(), vec![1, 2]), "nobody has heard of the third");
    assert_eq!((blocks.free(), blocks.matched(&[1])), (4, 0));
}

/// A chain of keys: equal for equal names and lengths, and a prefix of every longer one.
fn chain(name: u64, length: u64) -> Vec<BlockKey> {
    (0..length).map(|position| name * 1_000 + position).collect()
}

fn hold(blocks: &mut Blocks, keys: &[BlockKey]) -> Vec<Slot> {
    keys.iter().map(|key| blocks.take(*key)).collect()
}

fn leave(blocks: &mut Blocks, slots: &[Slot]) {
    slots.iter().rev().for_each(|slot| blocks.give_back(*slot));
}

#[test]
fn blocks_outlive_their_sequence_and_old_ends_are_evicted_first() {
    let mut blocks = Blocks::new(6);
    let first = hold(&mut blocks, &chain(1, 3));
    leave(&mut blocks, &first);
    let second = hold(&mut blocks, &chain(2, 2));
    leave(&mut blocks, &second);
    assert_eq!((blocks.matched(&chain(1, 3)), blocks.free()), (3, 6));
    hold(&mut blocks, &chain(3, 2));
    assert_eq!((blocks.matched(&chain(1, 3)), blocks.matched(&chain(2, 2))), (2, 2));
}

#[test]
fn sequences_with_equal_prompts_share_blocks() {
    let mut blocks = Blocks::new(4);
    let first = hold(&mut blocks, &chain(1, 3));
    let second = hold(&mut blocks, &chain(1, 3));
    assert_eq!((blocks.free(), &first), (1, &second));
    leave(&mut blocks, &first);
    assert_eq!((blocks.free(), blocks.unheld(&chain(1, 3))), (1, 0));
    leave(&mut blocks, &second);
    assert_eq!((blocks.free(), blocks.unheld(&chain(1, 3))), (4, 3));
}

#[test]
fn a_block_filled_by_two_sequences_is_kept_once() {
    let mut blocks = Blocks::new(4);
    let (one, two) = (blocks.take_unnamed(), blocks.take_unnamed());
    let one = blocks.assign_key(one, 7);
    assert_eq!((blocks.assign_key(two, 7), blocks.free()), (one, 3));
}

#[test]
fn lasting_changes_are_reported_once() {
    let mut blocks = Blocks::new(2);
    let slots = hold(&mut blocks, &chain(1, 2));
    leave(&mut blocks, &slots);
    let delta = blocks.changes();
    assert_eq!((delta.stored.len(), delta.removed.len()), (2, 0));
    let slots = hold(&mut blocks, &chain(2, 2));
    leave(&mut blocks, &slots);
    hold(&mut blocks, &chain(3, 2));
    let mut delta = blocks.changes();
    delta.stored.sort_unstable();
    delta.removed.sort_unstable();
    assert_eq!((delta.stored, delta.removed), (chain(3, 2), chain(1, 2)));
    assert!(blocks.changes().stored.is_empty());
}

proptest! {
    #[test]
    fn blocks_are_never_lost_and_prefixes_stay_closed(steps in prop::collection::vec((0_u64..5, 1_u64..8, any::<bool>()), 1..200)) {
        let mut blocks = Blocks::new(16);
        let mut sequences: Vec<Vec<Slot>> = Vec::new();
        let mut mirror: BTreeSet<BlockKey> = BTreeSet::new();
        for (name, length, arrives) in steps {
            let keys = chain(name, length);
            if arrives && blocks.free() >= keys.len() {
                sequences.push(hold(&mut blocks, &keys));
            } else if !sequences.is_empty() {
                let left = sequences.remove(0);
                leave(&mut blocks, &left);
            }
            let held: BTreeSet<Slot> = sequences.iter().flatten().copied().collect();
            prop_assert_eq!(held.len() + blocks.free(), 16);
            let mut listed = 0;
            let mut slot = blocks.front;
            while slot != NONE {
                prop_assert_eq!(blocks.slots[slot as usize].holders, 0);
                listed += 1;
                slot = blocks.slots[slot as usize].after;
            }
            prop_assert_eq!(listed, blocks.free());
            for name in 0..5 {
                let resident: Vec<bool> = chain(name, 8).iter().map(|key| blocks.cached.contains_key(key)).collect();
                prop_assert!(resident.is_sorted_by(|before, after| before >= after), "a hole in {:?}", resident);
            }
            let changes = blocks.changes();
            changes.removed.iter().for_each(|key| { mirror.remove(key); });
            mirror.extend(changes.stored);
            prop_assert_eq!(&mirror, &blocks.cached.keys().copied().collect::<BTreeSet<_>>());
        }
    }
}
