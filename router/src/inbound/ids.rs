//! The router's own number of a request, by which operators ask about it afterwards.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The hash's keys come from the operating system.
static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);

static COUNT: AtomicU64 = AtomicU64::new(0);

/// A new number, never 0. Other numbers do not reveal it: it is a count under a keyed hash
/// (SipHash) whose key only this process has.
pub(super) fn next_request_id() -> u64 {
    KEY.hash_one(COUNT.fetch_add(1, Ordering::Relaxed)).max(1)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::next_request_id;

    #[test]
    fn request_ids_are_unique_and_use_all_bits() {
        let drawn: HashSet<u64> = std::iter::repeat_with(next_request_id).take(10_000).collect();
        assert_eq!(drawn.len(), 10_000);
        assert_eq!(drawn.iter().fold(0, |bits, number| bits | number), u64::MAX);
        assert_eq!(drawn.iter().fold(u64::MAX, |bits, number| bits & number), 0);
    }
}
