use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::keys::{Chain, token_keys};

fn chain(shared: usize, own: usize, tail: u32) -> Vec<Key> {
    let tokens: Vec<u32> = (0..shared).map(|_| 0).chain((0..own).map(|_| tail)).collect();
    token_keys(Chain::new("", ""), &tokens, 1)
}

fn matched(guess: &Guess, seat: Seat, keys: &[Key]) -> u32 {
    guess.matched(keys, &[seat])[0]
}

#[test]
fn what_was_sent_to_a_replica_is_guessed_to_be_there_alone() {
    let guess = Guess::default();
    let (one, two) = (guess.open(100), guess.open(100));
    let keys = chain(10, 10, 1);
    guess.sent(one, &keys);
    assert_eq!(guess.matched(&keys, &[two, one]), [0, 20]);
    assert_eq!(guess.matched(&chain(10, 10, 2), &[two, one]), [0, 10]);
    assert_eq!(guess.matched(&[], &[two, one]), [0, 0]);
}

#[test]
fn the_ends_of_what_was_used_longest_ago_are_forgotten_first() {
    let guess = Guess::default();
    let seat = guess.open(30);
    let (old, newer, newest) = (chain(0, 10, 1), chain(0, 10, 2), chain(0, 14, 3));
    guess.sent(seat, &old);
    guess.sent(seat, &newer);
    guess.sent(seat, &newest);
    assert_eq!((matched(&guess, seat, &old), matched(&guess, seat, &newer), matched(&guess, seat, &newest)), (6, 10, 14));
    guess.sent(seat, &old);
    assert_eq!((matched(&guess, seat, &old), matched(&guess, seat, &newer), matched(&guess, seat, &newest)), (10, 6, 14));
}

#[test]
fn a_shared_beginning_stays_as_long_as_anyone_uses_it() {
    let guess = Guess::default();
    let seat = guess.open(20);
    for tail in 1..50 {
        guess.sent(seat, &chain(5, 5, tail));
        assert_eq!(matched(&guess, seat, &chain(5, 5, tail)), 10);
    }
    assert_eq!(matched(&guess, seat, &chain(5, 5, 1)), 5);
}

#[test]
fn of_a_prompt_that_does_not_fit_the_beginning_is_kept() {
    let guess = Guess::default();
    let (small, none) = (guess.open(8), guess.open(0));
    let keys = chain(0, 20, 1);
    guess.sent(small, &keys);
    guess.sent(none, &keys);
    assert_eq!(guess.matched(&keys, &[small, none]), [8, 0]);
}

#[test]
fn a_correction_forgets_all_that_follows_on_the_missing_block() {
    let guess = Guess::default();
    let seat = guess.open(100);
    let (one, other, apart) = (chain(10, 5, 1), chain(10, 5, 2), chain(2, 5, 3));
    for keys in [&one, &other, &apart] {
        guess.sent(seat, keys);
    }
    guess.corrected(seat, &one, 4);
    assert_eq!((matched(&guess, seat, &one), matched(&guess, seat, &other), matched(&guess, seat, &apart)), (4, 4, 7));
    guess.sent(seat, &one);
    assert_eq!((matched(&guess, seat, &one), matched(&guess, seat, &other)), (15, 10));
    guess.corrected(seat, &one, 15);
    guess.corrected(seat, &one, 99);
    assert_eq!(matched(&guess, seat, &one), 15, "the engine knew it all");
}

#[test]
fn a_closed_seat_holds_nothing_and_is_used_again_empty() {
    let guess = Guess::default();
    let seat = guess.open(100);
    let keys = chain(0, 10, 1);
    guess.sent(seat, &keys);
    guess.close(seat);
    guess.close(seat);
    guess.sent(seat, &keys);
    guess.corrected(seat, &keys, 1);
    assert_eq!(matched(&guess, seat, &keys), 0);
    assert_eq!(guess.open(100), seat);
    assert_eq!(matched(&guess, seat, &keys), 0);
}

/// The same as a list of keys by use, the newest first, with the chain that each was sent in.
#[derive(Default)]
struct Model {
    capacity: usize,
    blocks: Vec<Key>,
}

impl Model {
    fn sent(&mut self, keys: &[Key]) {
        let keys = &keys[..keys.len().min(self.capacity)];
        self.blocks.retain(|key| !keys.contains(key));
        self.blocks.splice(..0, keys.iter().copied());
        self.blocks.truncate(self.capacity);
    }

    fn matched(&self, keys: &[Key]) -> usize {
        let known: BTreeSet<&Key> = self.blocks.iter().collect();
        keys.iter().take_while(|key| known.contains(key)).count()
    }
}

proptest! {
    #[test]
    fn any_history_leads_to_what_a_plain_list_by_use_would_say(
        capacity in 0..60usize,
        history in prop::collection::vec((0..5usize, 0..=20usize, any::<bool>()), 1..60),
    ) {
        let chains = [chain(0, 20, 1), chain(3, 17, 2), chain(10, 10, 3), chain(10, 10, 4), chain(20, 0, 5)];
        let guess = Guess::default();
        let seat = guess.open(capacity);
        let mut model = Model { capacity, ..Model::default() };
        for (number, length, sent) in history {
            let keys = &chains[number];
            if sent {
                guess.sent(seat, &keys[..length]);
                model.sent(&keys[..length]);
            } else if let Some(missing) = keys.get(length) {
                guess.corrected(seat, keys, u32::try_from(length).unwrap());
                for chain in chains.iter().filter(|chain| chain[length] == *missing) {
                    model.blocks.retain(|key| !chain[length..].contains(key));
                }
            }
            for keys in &chains {
                prop_assert_eq!(matched(&guess, seat, keys) as usize, model.matched(keys));
            }
        }
    }

    #[test]
    fn keys_that_are_equal_by_chance_do_no_harm(
        capacity in 0..6usize,
        history in prop::collection::vec((prop::collection::vec(0..8u64, 0..8), any::<bool>()), 1..40),
    ) {
        let guess = Guess::default();
        let seat = guess.open(capacity);
        for (keys, sent) in history {
            if sent {
                guess.sent(seat, &keys);
            } else {
                guess.corrected(seat, &keys, 1);
            }
            prop_assert!(matched(&guess, seat, &keys) as usize <= keys.len());
        }
    }
}
