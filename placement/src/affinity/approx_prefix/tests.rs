use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::block_keys::{KeyChain, token_keys};

fn chain(shared: usize, own: usize, tail: u32) -> Vec<BlockKey> {
    let tokens: Vec<u32> = (0..shared).map(|_| 0).chain((0..own).map(|_| tail)).collect();
    token_keys(KeyChain::new("", ""), &tokens, 1)
}

fn matched(guess: &ApproxPrefixIndex, slot: ReplicaSlot, keys: &[BlockKey]) -> u32 {
    guess.matched_blocks(keys, &[slot])[0]
}

#[test]
fn a_sent_prefix_is_guessed_cached_on_its_replica_alone() {
    let guess = ApproxPrefixIndex::default();
    let (one, two) = (guess.open(100), guess.open(100));
    let keys = chain(10, 10, 1);
    guess.record_sent(one, &keys);
    assert_eq!(guess.matched_blocks(&keys, &[two, one]), [0, 20]);
    assert_eq!(guess.matched_blocks(&chain(10, 10, 2), &[two, one]), [0, 10]);
    assert_eq!(guess.matched_blocks(&[], &[two, one]), [0, 0]);
}

#[test]
fn the_ends_of_least_recently_used_prefixes_are_evicted_first() {
    let guess = ApproxPrefixIndex::default();
    let slot = guess.open(30);
    let (old, newer, newest) = (chain(0, 10, 1), chain(0, 10, 2), chain(0, 14, 3));
    guess.record_sent(slot, &old);
    guess.record_sent(slot, &newer);
    guess.record_sent(slot, &newest);
    assert_eq!((matched(&guess, slot, &old), matched(&guess, slot, &newer), matched(&guess, slot, &newest)), (6, 10, 14));
    guess.record_sent(slot, &old);
    assert_eq!((matched(&guess, slot, &old), matched(&guess, slot, &newer), matched(&guess, slot, &newest)), (10, 6, 14));
}

#[test]
fn a_shared_prefix_stays_while_anyone_uses_it() {
    let guess = ApproxPrefixIndex::default();
    let slot = guess.open(20);
    for tail in 1..50 {
        guess.record_sent(slot, &chain(5, 5, tail));
        assert_eq!(matched(&guess, slot, &chain(5, 5, tail)), 10);
    }
    assert_eq!(matched(&guess, slot, &chain(5, 5, 1)), 5);
}

#[test]
fn an_oversized_prompt_keeps_only_its_beginning() {
    let guess = ApproxPrefixIndex::default();
    let (small, none) = (guess.open(8), guess.open(0));
    let keys = chain(0, 20, 1);
    guess.record_sent(small, &keys);
    guess.record_sent(none, &keys);
    assert_eq!(guess.matched_blocks(&keys, &[small, none]), [8, 0]);
}

#[test]
fn a_correction_forgets_all_that_follows_on_the_missing_block() {
    let guess = ApproxPrefixIndex::default();
    let slot = guess.open(100);
    let (one, other, apart) = (chain(10, 5, 1), chain(10, 5, 2), chain(2, 5, 3));
    for keys in [&one, &other, &apart] {
        guess.record_sent(slot, keys);
    }
    guess.correct(slot, &one, 4);
    assert_eq!((matched(&guess, slot, &one), matched(&guess, slot, &other), matched(&guess, slot, &apart)), (4, 4, 7));
    guess.record_sent(slot, &one);
    assert_eq!((matched(&guess, slot, &one), matched(&guess, slot, &other)), (15, 10));
    guess.correct(slot, &one, 15);
    guess.correct(slot, &one, 99);
    assert_eq!(matched(&guess, slot, &one), 15, "the engine knew it all");
}

#[test]
fn a_closed_slot_is_emptied_and_reused() {
    let guess = ApproxPrefixIndex::default();
    let slot = guess.open(100);
    let keys = chain(0, 10, 1);
    guess.record_sent(slot, &keys);
    guess.close(slot);
    guess.close(slot);
    guess.record_sent(slot, &keys);
    guess.correct(slot, &keys, 1);
    assert_eq!(matched(&guess, slot, &keys), 0);
    assert_eq!(guess.open(100), slot);
    assert_eq!(matched(&guess, slot, &keys), 0);
}

/// Model of the tree: a list of keys by use, the newest first, with the chain in which each was
/// sent.
#[derive(Default)]
struct Model {
    capacity: usize,
    blocks: Vec<BlockKey>,
}

impl Model {
    fn sent(&mut self, keys: &[BlockKey]) {
        let keys = &keys[..keys.len().min(self.capacity)];
        self.blocks.retain(|key| !keys.contains(key));
        self.blocks.splice(..0, keys.iter().copied());
        self.blocks.truncate(self.capacity);
    }

    fn matched(&self, keys: &[BlockKey]) -> usize {
        let known: BTreeSet<&BlockKey> = self.blocks.iter().collect();
        keys.iter().take_while(|key| known.contains(key)).count()
    }
}

proptest! {
    #[test]
    fn any_history_matches_a_plain_least_recently_used_list(
        capacity in 0..60usize,
        history in prop::collection::vec((0..5usize, 0..=20usize, any::<bool>()), 1..60),
    ) {
        let chains = [chain(0, 20, 1), chain(3, 17, 2), chain(10, 10, 3), chain(10, 10, 4), chain(20, 0, 5)];
        let guess = ApproxPrefixIndex::default();
        let slot = guess.open(capacity);
        let mut model = Model { capacity, ..Model::default() };
        for (number, length, sent) in history {
            let keys = &chains[number];
            if sent {
                guess.record_sent(slot, &keys[..length]);
                model.sent(&keys[..length]);
            } else if let Some(missing) = keys.get(length) {
                guess.correct(slot, keys, u32::try_from(length).unwrap());
                for chain in chains.iter().filter(|chain| chain[length] == *missing) {
                    model.blocks.retain(|key| !chain[length..].contains(key));
                }
            }
            for keys in &chains {
                prop_assert_eq!(matched(&guess, slot, keys) as usize, model.matched(keys));
            }
        }
    }

    #[test]
    fn colliding_keys_do_no_harm(
        capacity in 0..6usize,
        history in prop::collection::vec((prop::collection::vec(0..8u64, 0..8), any::<bool>()), 1..40),
    ) {
        let guess = ApproxPrefixIndex::default();
        let slot = guess.open(capacity);
        for (keys, sent) in history {
            if sent {
                guess.record_sent(slot, &keys);
            } else {
                guess.correct(slot, &keys, 1);
            }
            prop_assert!(matched(&guess, slot, &keys) as usize <= keys.len());
        }
    }
}
