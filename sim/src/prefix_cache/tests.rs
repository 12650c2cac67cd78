//! Property tests of the block pool: any sequence of prompts arriving, growing and
//! leaving keeps its invariants.

use proptest::prelude::*;

use super::*;
use crate::tokens::mix;

const CAPACITY: usize = 24;

/// Actions of a sequence in the test: arrive with a prompt of some blocks from one of a few
/// families (so that prompts share prefixes), grow by a block, or leave.
#[derive(Clone, Debug)]
enum Action {
    Arrive { family: u64, blocks: usize },
    Grow { which: usize },
    Leave { which: usize },
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let action = prop_oneof![
        (0..3_u64, 1..8_usize).prop_map(|(family, blocks)| Action::Arrive { family, blocks }),
        any::<usize>().prop_map(|which| Action::Grow { which }),
        any::<usize>().prop_map(|which| Action::Leave { which }),
    ];
    prop::collection::vec(action, 1..120)
}

struct Held {
    blocks: Vec<BlockId>,
    hashes: Vec<u64>,
}

fn chain(family: u64, position: usize) -> u64 {
    (0..=position as u64).fold(family + 1, mix)
}

/// Admits a prompt as the scheduler does: it matches all blocks but the last one.
fn arrive(pool: &mut BlockPool, family: u64, blocks: usize) -> Option<Held> {
    let hashes: Vec<u64> = (0..blocks).map(|position| chain(family, position)).collect();
    let mut held = pool.matched(&hashes[..blocks - 1]);
    if blocks - held.len() + pool.idle_among(&held) > pool.idle() {
        return None;
    }
    pool.reference(&held);
    let matched = held.len();
    assert!(pool.allocate(blocks - matched, &mut held), "room was checked");
    for position in matched..blocks {
        pool.store(held[position], hashes[position]);
    }
    Some(Held { blocks: held, hashes })
}

fn grow(pool: &mut BlockPool, held: &mut Held) {
    if pool.allocate(1, &mut held.blocks) {
        let hash = mix(held.hashes[held.hashes.len() - 1], 99);
        pool.store(held.blocks[held.blocks.len() - 1], hash);
        held.hashes.push(hash);
    }
}

fn check(pool: &BlockPool, running: &[Held], parents: &HashMap<u64, Option<u64>>) {
    let mut references = vec![0; CAPACITY];
    for block in running.iter().flat_map(|held| &held.blocks) {
        references[*block] += 1;
    }
    for (block, expected) in pool.blocks.iter().zip(&references) {
        assert_eq!(block.references, *expected, "a block counts its holders");
    }
    assert_eq!(pool.idle(), references.iter().filter(|count| **count == 0).count());
    let carriers: usize = pool.by_hash.values().map(Vec::len).sum();
    assert!(carriers <= CAPACITY, "the cache never holds more than its capacity");
    for hash in pool.by_hash.keys() {
        if let Some(Some(parent)) = parents.get(hash) {
            assert!(pool.by_hash.contains_key(parent), "a cached block has its parent cached");
        }
    }
}

proptest! {
    #[test]
    fn capacity_references_and_prefixes_hold_after_any_actions(actions in actions()) {
        let mut pool = BlockPool::new(CAPACITY);
        let mut running: Vec<Held> = Vec::new();
        let mut parents = HashMap::new();
        for action in actions {
            match action {
                Action::Arrive { family, blocks } => running.extend(arrive(&mut pool, family, blocks)),
                Action::Grow { which } if !running.is_empty() => {
                    let which = which % running.len();
                    grow(&mut pool, &mut running[which]);
                }
                Action::Leave { which } if !running.is_empty() => {
                    let held = running.swap_remove(which % running.len());
                    pool.release(&held.blocks);
                }
                _ => {}
            }
            for held in &running {
                let mut parent = None;
                for hash in &held.hashes {
                    parents.insert(*hash, parent);
                    parent = Some(*hash);
                }
            }
            pool.take_evicted();
            check(&pool, &running, &parents);
        }
        for held in running.drain(..) {
            pool.release(&held.blocks);
        }
        prop_assert_eq!(pool.idle(), CAPACITY);
        // Every cached hash can be removed exactly once.
        let cached: usize = pool.by_hash.values().map(Vec::len).sum();
        prop_assert!(pool.allocate(CAPACITY, &mut Vec::new()));
        prop_assert_eq!(pool.take_evicted().len(), cached);
    }
}

#[test]
fn the_end_of_a_prefix_is_evicted_before_its_beginning() {
    let mut pool = BlockPool::new(3);
    let held = arrive(&mut pool, 0, 3).expect("there is room");
    pool.release(&held.blocks);
    assert!(pool.allocate(1, &mut Vec::new()));
    assert_eq!(pool.take_evicted(), [held.hashes[2]]);
    assert_eq!(pool.matched(&held.hashes).len(), 2);
}

#[test]
fn two_blocks_with_one_hash_are_evicted_separately() {
    let mut pool = BlockPool::new(4);
    let first = arrive(&mut pool, 0, 1).expect("there is room");
    let second = arrive(&mut pool, 0, 1).expect("there is room");
    assert_eq!(first.hashes, second.hashes);
    pool.release(&first.blocks);
    pool.release(&second.blocks);
    assert!(pool.allocate(4, &mut Vec::new()));
    assert_eq!(pool.take_evicted(), [first.hashes[0], first.hashes[0]]);
}
