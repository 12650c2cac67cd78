use super::*;

fn filled(capacity: usize, hashes: &[u64]) -> HostTier {
    let mut tier = HostTier::new(capacity);
    for hash in hashes {
        assert_eq!(tier.store(*hash), None, "it has room for all");
    }
    tier
}

#[test]
fn the_end_of_the_least_recently_used_prefix_is_dropped_first() {
    let mut tier = filled(4, &[1, 2, 11, 12]);
    tier.touch(&[11, 12]);
    tier.touch(&[1, 2]);
    assert_eq!(tier.store(21), Some(12));
    assert_eq!((tier.matched(&[11, 12]), tier.matched(&[1, 2, 3])), (1, 2));
}

#[test]
fn a_copy_after_a_missing_one_does_not_match() {
    let tier = filled(4, &[1, 3]);
    assert_eq!(tier.matched(&[1, 2, 3]), 1);
}
