//! What is remembered of deaths, for how long, and who is told.

use super::*;

fn requests(names: std::ops::Range<u128>) -> Vec<Fingerprint> {
    names.map(Fingerprint).collect()
}

fn epochs(deaths: &[Death]) -> Vec<u64> {
    deaths.iter().map(|death| death.epoch).collect()
}

#[tokio::test(start_paused = true)]
async fn a_reader_gets_what_is_new_and_a_late_one_gets_all() {
    let deaths = Deaths::default();
    deaths.record(1, requests(0..2));
    let told = deaths.version();
    assert_eq!(deaths.since(told), (Vec::new(), told));
    deaths.record(2, requests(1..3));
    deaths.record(3, requests(5..6));
    assert_eq!(epochs(&deaths.since(told).0), [2, 3]);
    assert_eq!(epochs(&deaths.recent()), [1, 2, 3]);
    assert_eq!(*deaths.recent()[0].requests, [Fingerprint(0), Fingerprint(1)]);
}

#[tokio::test(start_paused = true)]
async fn a_death_is_forgotten_after_ten_minutes_and_the_versions_go_on() {
    let deaths = Deaths::default();
    deaths.record(1, requests(0..1));
    tokio::time::advance(KEPT_FOR / 2).await;
    deaths.record(2, requests(0..1));
    let told = deaths.version();
    tokio::time::advance(KEPT_FOR / 2).await;
    assert_eq!(epochs(&deaths.recent()), [2]);
    deaths.record(3, requests(0..1));
    assert_eq!(epochs(&deaths.since(told).0), [3]);
    assert_eq!(epochs(&deaths.recent()), [2, 3]);
}

#[tokio::test(start_paused = true)]
async fn neither_the_deaths_nor_the_requests_of_one_grow_without_bound() {
    let deaths = Deaths::default();
    for epoch in 1..=40 {
        deaths.record(epoch, requests(0..5000));
    }
    let kept = deaths.recent();
    assert_eq!((kept.len(), kept[0].epoch, kept[31].requests.len()), (32, 9, 4096));
    assert_eq!(deaths.since(39).0.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_death_wakes_the_reports_and_one_without_requests_does_not() {
    let deaths = Deaths::default();
    let mut tidings = deaths.tidings();
    deaths.record(1, Vec::new());
    assert!(tokio::time::timeout(Duration::from_secs(1), tidings.changed()).await.is_err());
    deaths.record(1, requests(0..1));
    assert!(tidings.changed().await);
    drop(deaths);
    assert!(!tidings.changed().await);
}
