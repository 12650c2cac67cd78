use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn slots_of(holders: Holders, masks: &Masks, among: &[u64]) -> Vec<u32> {
    let mut out = vec![u64::MAX; among.len()];
    holders.intersect(masks, among, &mut out);
    set_bits(&out).collect()
}

#[test]
fn a_mask_is_needed_from_the_fourth_slot_on() {
    let (mut holders, mut masks) = (Holders::default(), Masks::default());
    for slot in [0, MAX_SLOT, 70] {
        assert!(holders.insert(ReplicaSlot(slot), &mut masks));
    }
    assert_eq!(masks.bytes(), 0);
    assert!(holders.insert(ReplicaSlot(7), &mut masks));
    assert!(masks.bytes() > 0);
    assert_eq!(slots_of(holders, &masks, &[u64::MAX; 2]), [0, 7, 70], "nobody asked about the last slot");
}

#[test]
fn unused_masks_return_their_memory() {
    let mut masks = Masks::default();
    let mut all = [Holders::default(); 100];
    for holders in &mut all {
        (0..10).for_each(|slot| assert!(holders.insert(ReplicaSlot(slot), &mut masks)));
    }
    for holders in &mut all {
        (0..10).for_each(|slot| assert!(holders.remove(ReplicaSlot(slot), &mut masks)));
        assert!(holders.is_empty());
    }
    assert_eq!(masks.bytes(), 0);
}

proptest! {
    #[test]
    fn any_history_of_blocks_in_one_table_matches_plain_sets(
        changes in prop::collection::vec((0..6usize, prop_oneof![0..6u32, 60..70u32, Just(500)], any::<bool>()), 1..300),
    ) {
        let mut masks = Masks::default();
        let mut blocks: [(Holders, BTreeSet<u32>); 6] = Default::default();
        for (block, slot, stored) in changes {
            let (holders, model) = &mut blocks[block];
            if stored {
                prop_assert_eq!(holders.insert(ReplicaSlot(slot), &mut masks), model.insert(slot));
            } else {
                prop_assert_eq!(holders.remove(ReplicaSlot(slot), &mut masks), model.remove(&slot));
            }
            for (holders, model) in &blocks {
                prop_assert_eq!(holders.is_empty(), model.is_empty());
                prop_assert_eq!(slots_of(*holders, &masks, &[u64::MAX; 8]), model.iter().copied().collect::<Vec<_>>());
                let low: Vec<u32> = model.iter().copied().filter(|slot| *slot < 64 && slot % 2 == 0).collect();
                prop_assert_eq!(slots_of(*holders, &masks, &[0x5555_5555_5555_5555]), low);
            }
        }
    }
}
