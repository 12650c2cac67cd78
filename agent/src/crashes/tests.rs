//! What is remembered of deaths, for how long, and who is told.

use super::*;

fn requests(names: std::ops::Range<u128>) -> Vec<RequestFingerprint> {
    names.map(RequestFingerprint).collect()
}

fn epochs(deaths: &[Crash]) -> Vec<u64> {
    deaths.iter().map(|death| death.epoch).collect()
}

#[tokio::test(start_paused = true)]
async fn a_reader_gets_what_is_new_and_a_late_one_gets_all() {
    let deaths = CrashLog::default();
    deaths.record(1, requests(0..2));
    let told = deaths.version();
    assert_eq!(deaths.crashes_since(told), (Vec::new(), told));
    deaths.record(2, requests(1..3));
    deaths.record(3, requests(5..6));
    assert_eq!(epochs(&deaths.crashes_since(told).0), [2, 3]);
    assert_eq!(epochs(&deaths.recent_crashes()), [1, 2, 3]);
    assert_eq!(*deaths.recent_crashes()[0].requests, [RequestFingerprint(0), RequestFingerprint(1)]);
}

#[tokio::test(start_paused = true)]
async fn a_death_is_forgotten_after_ten_minutes_and_the_versions_go_on() {
    let deaths = CrashLog::default();
    deaths.record(1, requests(0..1));
    tokio::time::advance(CRASH_RETENTION / 2).await;
    deaths.record(2, requests(0..1));
    let told = deaths.version();
    tokio::time::advance(CRASH_RETENTION / 2).await;
    assert_eq!(epochs(&deaths.recent_crashes()), [2]);
    deaths.record(3, requests(0..1));
    assert_eq!(epochs(&deaths.crashes_since(told).0), [3]);
    assert_eq!(epochs(&deaths.recent_crashes()), [2, 3]);
}

#[tokio::test(start_paused = true)]
async fn neither_the_deaths_nor_the_requests_of_one_grow_without_bound() {
    let deaths = CrashLog::default();
    for epoch in 1..=40 {
        deaths.record(epoch, requests(0..5000));
    }
    let kept = deaths.recent_crashes();
    assert_eq!((kept.len(), kept[0].epoch, kept[31].requests.len()), (32, 9, 4096));
    assert_eq!(deaths.crashes_since(39).0.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_death_wakes_the_reports_and_one_without_requests_does_not() {
    let deaths = CrashLog::default();
    let mut tidings = deaths.subscribe();
    deaths.record(1, Vec::new());
    assert!(tokio::time::timeout(Duration::from_secs(1), tidings.changed()).await.is_err());
    deaths.record(1, requests(0..1));
    assert!(tidings.changed().await);
    drop(deaths);
    assert!(!tidings.changed().await);
}
