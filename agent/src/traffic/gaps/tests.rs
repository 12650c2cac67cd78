//! Bounds of the buckets, slow gaps, and forgetting.

use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn a_bucket_ends_at_most_a_quarter_above_its_gaps(micros in 4_u64..(1 << 37)) {
        let gap = Duration::from_micros(micros);
        let bound = bucket_end(bucket_of(gap));
        prop_assert!(bound > gap && bound <= gap.mul_f64(1.25) + Duration::from_micros(1), "{bound:?} for {gap:?}");
    }
}

#[test]
fn extreme_gaps_have_a_bucket_too() {
    let gaps = GapHistogram::default();
    for _ in 0..200 {
        gaps.record(Duration::ZERO);
        gaps.record(Duration::MAX);
    }
    assert_eq!(gaps.p99(), Some(bucket_end(BUCKETS - 1)));
}

#[test]
fn the_p99_ignores_the_slowest_hundredth_and_needs_enough_gaps() {
    let gaps = GapHistogram::default();
    for _ in 0..99 {
        gaps.record(Duration::from_millis(20));
    }
    assert_eq!(gaps.p99(), None);
    for _ in 0..900 {
        gaps.record(Duration::from_millis(20));
    }
    (0..9).for_each(|_| gaps.record(Duration::from_secs(8)));
    let usual = gaps.p99().unwrap();
    assert!(usual >= Duration::from_millis(20) && usual <= Duration::from_millis(25), "{usual:?}");
    (0..9).for_each(|_| gaps.record(Duration::from_secs(8)));
    assert!(gaps.p99().unwrap() >= Duration::from_secs(8));
}

#[test]
fn old_gaps_decay_as_new_ones_arrive() {
    let gaps = GapHistogram::default();
    (0..1000).for_each(|_| gaps.record(Duration::from_secs(3)));
    gaps.decay();
    assert!(gaps.p99().unwrap() >= Duration::from_secs(3), "little is kept whole");
    for _ in 0..20 {
        (0..DECAY_THRESHOLD).for_each(|_| gaps.record(Duration::from_millis(10)));
        gaps.decay();
    }
    assert!(gaps.p99().unwrap() < Duration::from_millis(13));
    assert_eq!(gaps.buckets[bucket_of(Duration::from_secs(3))].load(Ordering::Relaxed), 0);
}
