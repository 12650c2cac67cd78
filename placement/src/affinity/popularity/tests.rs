use proptest::prelude::*;

use super::*;

fn chain(shared: u64, own: u64, tail: u64) -> Vec<BlockKey> {
    (0..shared).chain((0..own).map(|block| tail * 1_000_000 + block)).collect()
}

fn close(left: f64, right: f64) -> bool {
    (left - right).abs() < 1e-3 * (1.0 + right.abs())
}

#[test]
fn sampled_positions_grow_ever_further_apart() {
    let positions: Vec<u32> = (0..12).map(sample_block).collect();
    assert_eq!(positions, [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]);
    assert!((1..SAMPLES).all(|sample| sample_block(sample - 1) < first_block(sample) && first_block(sample) <= sample_block(sample)));
}

#[test]
fn the_first_arrival_finds_none_and_the_next_finds_it() {
    let popularity = Popularity::default();
    let keys = chain(100, 0, 0);
    let first = popularity.arrive(&keys, 16, 5.0);
    let second = popularity.arrive(&keys, 16, 5.0);
    assert!([0, 5, 50, 99].iter().all(|block| first.through_block(*block) == 0.0 && second.through_block(*block) == 1.0));
    assert_eq!(second.through_block(100), 0.0, "the chain has a hundred blocks");
}

#[test]
fn arrivals_are_forgotten_within_seconds() {
    let popularity = Popularity::default();
    let keys = chain(10, 0, 0);
    for _ in 0..100 {
        popularity.arrive(&keys, 16, 1.0);
    }
    let later = popularity.arrive(&keys, 16, 1.0 + DECAY_SECONDS).through_block(0);
    assert!(close(later, 100.0 / std::f64::consts::E), "{later}");
    assert!(popularity.arrive(&keys, 16, 60.0).through_block(0) < 1e-6);
}

#[test]
fn a_bad_clock_does_not_change_the_popularity() {
    let popularity = Popularity::default();
    let keys = chain(10, 0, 0);
    popularity.arrive(&keys, 16, 10.0);
    assert_eq!(popularity.arrive(&keys, 16, 3.0).through_block(0), 1.0);
    assert_eq!(popularity.arrive(&keys, 16, f64::NAN).through_block(0), 2.0);
    assert_eq!(popularity.arrive(&keys, 16, 10.0).through_block(0), 3.0);
}

#[test]
fn a_shared_prefix_is_popular_and_its_tails_are_not() {
    let popularity = Popularity::default();
    for tail in 1..=50 {
        popularity.arrive(&chain(96, 100, tail), 16, 0.0);
    }
    let arrivals = popularity.arrive(&chain(96, 100, 99), 16, 0.0);
    assert_eq!((arrivals.through_block(0), arrivals.through_block(70), arrivals.through_block(150)), (50.0, 50.0, 0.0));
}

#[test]
fn uncached_tokens_count_in_full_without_arrivals() {
    assert_eq!(Arrivals::empty().discounted_tokens(0, 1000), 1000.0);
    assert_eq!(Arrivals::empty().discounted_tokens(400, 1000), 600.0);
    assert_eq!(Arrivals::empty().discounted_tokens(1000, 1000), 0.0);
    assert_eq!(Arrivals::empty().discounted_tokens(2000, 1000), 0.0);
    let new = Popularity::default().arrive(&chain(62, 0, 0), 16, 0.0);
    assert!(close(new.discounted_tokens(160, 1000), 840.0));
}

#[test]
fn tokens_of_popular_blocks_count_less_except_the_partial_end() {
    let popularity = Popularity::default();
    let keys = chain(10, 0, 0);
    for _ in 0..3 {
        popularity.arrive(&keys, 16, 0.0);
    }
    let arrivals = popularity.arrive(&keys, 16, 0.0);
    assert!(close(arrivals.discounted_tokens(0, 160), 40.0));
    assert!(close(arrivals.discounted_tokens(0, 170), 50.0));
    assert!(close(arrivals.discounted_tokens(80, 165), 25.0));
    assert!(close(arrivals.discounted_tokens(8, 16), 2.0), "part of a block");
}

#[test]
fn popularity_is_bounded_and_popular_prefixes_outlive_the_rest() {
    let popularity = Popularity::new(100);
    for tail in 1..=1000 {
        popularity.arrive(&chain(3, 20, tail), 16, 0.0);
        assert!(popularity.len() <= 200);
    }
    let arrivals = popularity.arrive(&chain(3, 20, 5), 16, 0.0);
    assert_eq!(arrivals.through_block(0), 1000.0);
    assert_eq!(arrivals.through_block(20), 0.0, "a tail that was seen once, long ago");
}

proptest! {
    #[test]
    fn arrivals_never_grow_along_a_chain_and_sum_over_blocks(
        requests in prop::collection::vec((0..200u64, 0..200u64, 1..5u64), 1..40),
        (matched, tokens) in (0..4000u32, 0..4000u32),
        entries in 1..500usize,
    ) {
        let popularity = Popularity::new(entries);
        for (number, (shared, own, tail)) in (0u32..).zip(&requests) {
            let keys = chain(*shared, *own, *tail);
            let arrivals = popularity.arrive(&keys, 16, f64::from(number) * 0.1);
            let blocks = u32::try_from(keys.len()).unwrap();
            prop_assert!((1..blocks).all(|block| arrivals.through_block(block) <= arrivals.through_block(block - 1)));
            let slow: f64 = (matched..tokens).map(|token| 1.0 / (1.0 + arrivals.through_block(token / 16))).sum();
            prop_assert!(close(arrivals.discounted_tokens(matched, tokens), slow), "{} {slow}", arrivals.discounted_tokens(matched, tokens));
        }
    }
}
