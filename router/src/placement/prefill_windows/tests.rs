//! When windows are open.

use super::*;

const EVERY: Duration = Duration::from_millis(200);

fn windows(every: Duration) -> (PrefillWindows, Instant) {
    let now = Instant::now();
    (PrefillWindows::new(every, now, SystemTime::UNIX_EPOCH + Duration::from_secs(1_790_000_000)), now)
}

/// The milliseconds of the first two seconds in which a busy replica gets prompts.
fn open(windows: &PrefillWindows, begun: Instant) -> Vec<u64> {
    (0..2_000).filter(|ms| windows.is_open(BUSY_IN_FLIGHT, begun + Duration::from_millis(*ms))).collect()
}

#[test]
fn a_replica_gets_prompts_anytime_without_prefill_windows() {
    let (windows, now) = windows(Duration::ZERO);
    assert_eq!(open(&windows, now).len(), 2_000);
}

#[test]
fn a_busy_replica_gets_prompts_only_in_prefill_windows() {
    let (windows, now) = windows(EVERY);
    let open = open(&windows, now);
    let begins: Vec<u64> = open.iter().filter(|ms| ms.checked_sub(1).is_none_or(|before| !open.contains(&before))).copied().collect();
    assert!((240..=260).contains(&open.len()), "a quarter of a second in two: {}", open.len());
    assert!(begins.windows(2).all(|pair| (199..=201).contains(&(pair[1] - pair[0]))), "{begins:?}");
}

#[test]
fn an_idle_replica_gets_prompts_at_any_time() {
    let (windows, now) = windows(EVERY);
    assert!((0..400).all(|ms| windows.is_open(BUSY_IN_FLIGHT - 1, now + Duration::from_millis(ms))));
}

#[test]
fn a_prefill_window_has_a_minimum_length() {
    let (windows, now) = windows(Duration::from_millis(40));
    assert!((950..=1_050).contains(&open(&windows, now).len()));
}

#[test]
fn routers_agree_on_prefill_windows() {
    let (one, now) = windows(EVERY);
    let later = Duration::from_millis(777);
    let other = PrefillWindows::new(EVERY, now + later, SystemTime::UNIX_EPOCH + Duration::from_secs(1_790_000_000) + later);
    let (ones, others) = (open(&one, now + later), open(&other, now + later));
    let shared = ones.iter().filter(|ms| others.contains(ms)).count();
    assert!(shared >= 240, "to a millisecond or two: {shared}");
}
