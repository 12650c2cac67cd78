//! Which crashes are remembered, for how long, and who is notified.

use super::*;

fn requests(names: std::ops::Range<u128>) -> Vec<RequestFingerprint> {
    names.map(RequestFingerprint).collect()
}

fn epochs(crashes: &[Crash]) -> Vec<u64> {
    crashes.iter().map(|crash| crash.epoch).collect()
}

#[tokio::test(start_paused = true)]
async fn a_reader_gets_new_crashes_and_a_late_reader_all() {
    let crashes = CrashLog::default();
    crashes.record(1, requests(0..2));
    let reported = crashes.version();
    assert_eq!(crashes.crashes_since(reported), (Vec::new(), reported));
    crashes.record(2, requests(1..3));
    crashes.record(3, requests(5..6));
    assert_eq!(epochs(&crashes.crashes_since(reported).0), [2, 3]);
    assert_eq!(epochs(&crashes.recent_crashes()), [1, 2, 3]);
    assert_eq!(*crashes.recent_crashes()[0].requests, [RequestFingerprint(0), RequestFingerprint(1)]);
}

#[tokio::test(start_paused = true)]
async fn crashes_are_forgotten_after_ten_minutes_and_versions_go_on() {
    let crashes = CrashLog::default();
    crashes.record(1, requests(0..1));
    tokio::time::advance(CRASH_RETENTION / 2).await;
    crashes.record(2, requests(0..1));
    let reported = crashes.version();
    tokio::time::advance(CRASH_RETENTION / 2).await;
    assert_eq!(epochs(&crashes.recent_crashes()), [2]);
    crashes.record(3, requests(0..1));
    assert_eq!(epochs(&crashes.crashes_since(reported).0), [3]);
    assert_eq!(epochs(&crashes.recent_crashes()), [2, 3]);
}

#[tokio::test(start_paused = true)]
async fn a_crash_that_is_excused_is_reported_again() {
    let crashes = CrashLog::default();
    crashes.record(1, requests(0..2));
    crashes.record(2, requests(2..4));
    let reported = crashes.version();
    let mut changes = crashes.subscribe();
    tokio::time::advance(Duration::from_secs(3)).await;
    assert!(crashes.excuse(1) && changes.changed().await);
    let (since, version) = crashes.crashes_since(reported);
    assert_eq!((epochs(&since), &*since[0].requests, since[0].at.elapsed()), (vec![1], &[][..], Duration::from_secs(3)));
    assert_eq!(epochs(&crashes.recent_crashes()), [2, 1]);
    // Nothing is since a second time, for a life that has not crashed, or so long after the crash.
    tokio::time::advance(Duration::from_secs(3)).await;
    assert!(!crashes.excuse(1) && !crashes.excuse(3) && !crashes.excuse(2));
    assert_eq!(crashes.version(), version);
}

#[tokio::test(start_paused = true)]
async fn the_crash_log_bounds_its_crashes_and_their_requests() {
    let crashes = CrashLog::default();
    for epoch in 1..=40 {
        crashes.record(epoch, requests(0..5000));
    }
    let kept = crashes.recent_crashes();
    assert_eq!((kept.len(), kept[0].epoch, kept[31].requests.len()), (32, 9, 4096));
    assert_eq!(crashes.crashes_since(39).0.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn only_a_crash_with_requests_wakes_the_reports() {
    let crashes = CrashLog::default();
    let mut changes = crashes.subscribe();
    crashes.record(1, Vec::new());
    assert!(tokio::time::timeout(Duration::from_secs(1), changes.changed()).await.is_err());
    crashes.record(1, requests(0..1));
    assert!(changes.changed().await);
    drop(crashes);
    assert!(!changes.changed().await);
}
