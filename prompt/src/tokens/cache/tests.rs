//! Tests of the cache of segments.

use proptest::prelude::*;

use std::mem::discriminant;

use super::*;

fn key(number: u128) -> SegmentKey {
    SegmentKey { hash: number, bytes: 1, position: discriminant(&PiecePosition::Within) }
}

fn tokens(number: u32, length: usize) -> Arc<[u32]> {
    vec![number; length].into()
}

#[test]
fn the_least_recently_used_segment_is_evicted_first() {
    let one = cost(&tokens(0, 10));
    let mut cache = SegmentCache::new(8 * one);
    for number in 0..8_u32 {
        cache.put(key(number.into()), tokens(number, 10));
    }
    assert_eq!(cache.bytes(), 8 * one);
    assert!(cache.get(key(0)).is_some());
    cache.put(key(8), tokens(8, 10));
    assert_eq!(cache.get(key(1)), None);
    assert_eq!(cache.get(key(0)), Some(tokens(0, 10)));
    assert_eq!(cache.bytes(), 8 * one);
}

#[test]
fn a_large_segment_is_not_cached() {
    let mut cache = SegmentCache::new(8000);
    cache.put(key(1), tokens(1, 10));
    cache.put(key(2), tokens(2, 300));
    assert!(cache.get(key(1)).is_some());
    assert_eq!(cache.get(key(2)), None);
}

#[test]
fn a_segment_at_the_start_of_a_text_is_distinct() {
    let mut cache = SegmentCache::new(1 << 20);
    cache.put(key(1), tokens(1, 1));
    assert_eq!(cache.get(SegmentKey { position: discriminant(&PiecePosition::First), ..key(1) }), None);
}

proptest! {
    #[test]
    fn the_cache_keeps_its_bound_and_never_mixes_segments(operations in prop::collection::vec((0..40_u32, any::<bool>()), 1..400)) {
        let mut cache = SegmentCache::new(4000);
        for (number, put) in operations {
            let length = number as usize % 13;
            if put {
                cache.put(key(number.into()), tokens(number, length));
            } else if let Some(found) = cache.get(key(number.into())) {
                prop_assert_eq!(found, tokens(number, length));
            }
            prop_assert!(cache.bytes() <= 4000);
            let held: usize = cache.slots.values().map(|place| cost(&cache.entries[*place].tokens)).sum();
            prop_assert_eq!(held, cache.bytes());
            prop_assert_eq!(cache.slots.len() + cache.free.len(), cache.entries.len());
        }
    }
}
