//! When windows are open.

use super::*;

const EVERY: Duration = Duration::from_millis(200);

fn gather(every: Duration) -> (Gather, Instant) {
    let now = Instant::now();
    (Gather::new(every, now, SystemTime::UNIX_EPOCH + Duration::from_secs(1_790_000_000)), now)
}

/// In which milliseconds of the first two seconds a busy replica is given prompts.
fn open(gather: &Gather, replica: &str, begun: Instant) -> Vec<u64> {
    (0..2_000).filter(|ms| gather.is_open(replica, BUSY, begun + Duration::from_millis(*ms))).collect()
}

#[test]
fn without_the_setting_a_replica_is_given_prompts_at_any_time() {
    let (gather, now) = gather(Duration::ZERO);
    assert_eq!(open(&gather, "a/0", now).len(), 2_000);
}

#[test]
fn a_busy_replica_is_given_prompts_in_one_short_window_of_each_interval() {
    let (gather, now) = gather(EVERY);
    let open = open(&gather, "a/0", now);
    let begins: Vec<u64> = open.iter().filter(|ms| !open.contains(&(*ms - 1).min(**ms))).copied().collect();
    assert!((240..=260).contains(&open.len()), "a quarter of a second in two: {}", open.len());
    assert!(begins.windows(2).all(|pair| pair[1] - pair[0] == 200), "{begins:?}");
}

#[test]
fn a_replica_that_is_not_busy_is_given_prompts_at_any_time() {
    let (gather, now) = gather(EVERY);
    assert!((0..400).all(|ms| gather.is_open("a/0", BUSY - 1, now + Duration::from_millis(ms))));
}

#[test]
fn a_window_is_long_enough_to_be_seen_however_short_the_interval() {
    let (gather, now) = gather(Duration::from_millis(40));
    assert!((950..=1_050).contains(&open(&gather, "a/0", now).len()));
}

#[test]
fn routers_that_started_at_different_moments_agree_and_replicas_take_turns() {
    let (one, now) = gather(EVERY);
    let later = Duration::from_millis(777);
    let other = Gather::new(EVERY, now + later, SystemTime::UNIX_EPOCH + Duration::from_secs(1_790_000_000) + later);
    let seen = |gather: &Gather, replica: &str| open(gather, replica, now + later);
    let shared = seen(&one, "a/0").iter().filter(|ms| seen(&other, "a/0").contains(ms)).count();
    assert!(shared >= 240, "to a millisecond or two: {shared}");
    assert_ne!(seen(&one, "a/0"), seen(&one, "b/0"));
}
