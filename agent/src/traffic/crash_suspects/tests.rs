//! Requests that count as present when an engine crashed.

use super::*;
use crate::traffic::{InFlight, PromptEstimate, RouterKey, Traffic};

const LIFE: u64 = 7;

fn sent(traffic: &std::sync::Arc<Traffic>, name: u128, life: u64) -> InFlight {
    let in_flight = traffic.enter_with(RouterKey(1), PromptEstimate { tokens: 9, uncached: 5 });
    in_flight.mark_sent(life, RequestFingerprint(name));
    in_flight
}

fn names(traffic: &Traffic, life: u64) -> Vec<u128> {
    traffic.crash_suspects(life).into_iter().map(|RequestFingerprint(name)| name).collect()
}

#[tokio::test(start_paused = true)]
async fn requests_in_flight_or_just_broken_are_suspects_once_each() {
    let traffic = Traffic::new();
    let unnamed = traffic.enter(RouterKey(1));
    let (_running, _equal) = (sent(&traffic, 2, LIFE), sent(&traffic, 2, LIFE));
    let (broken, complete) = (sent(&traffic, 1, LIFE), sent(&traffic, 3, LIFE));
    for answered in [&broken, &complete] {
        answered.mark_prefilled();
    }
    broken.mark_failed();
    drop((broken, complete, unnamed));
    assert_eq!(names(&traffic, LIFE), [1, 2]);
    tokio::time::advance(FAILED_RETENTION + Duration::from_millis(1)).await;
    assert_eq!(names(&traffic, LIFE), [2], "that was too long ago");
}

#[tokio::test(start_paused = true)]
async fn a_request_abandoned_on_a_hung_engine_is_no_suspect() {
    let traffic = Traffic::new();
    let (unanswered, abandoned) = (sent(&traffic, 1, LIFE), sent(&traffic, 2, LIFE));
    abandoned.mark_prefilled();
    drop((unanswered, abandoned));
    assert_eq!(names(&traffic, LIFE), [1], "the other one had its first token");
}

#[tokio::test(start_paused = true)]
async fn a_life_fails_since_its_first_broken_answer() {
    let traffic = Traffic::new();
    // Neither a client that leaves nor another life's answer shows that this engine fails.
    drop((sent(&traffic, 1, LIFE), sent(&traffic, 2, LIFE)));
    let earlier = sent(&traffic, 3, LIFE - 1);
    earlier.mark_failed();
    drop(earlier);
    assert_eq!(traffic.failing_since(LIFE), None);
    let began = Instant::now();
    for name in [4, 5] {
        let broken = sent(&traffic, name, LIFE);
        broken.mark_failed();
        drop(broken);
        tokio::time::advance(FAILED_RETENTION / 2).await;
    }
    assert_eq!(traffic.failing_since(LIFE), Some(began));
    tokio::time::advance(Duration::from_millis(1)).await;
    assert_eq!(traffic.failing_since(LIFE), Some(began + FAILED_RETENTION / 2), "the first one was too long ago");
}

#[tokio::test(start_paused = true)]
async fn a_request_of_the_previous_life_is_no_suspect() {
    let traffic = Traffic::new();
    let late = sent(&traffic, 1, LIFE);
    assert_eq!(names(&traffic, LIFE), [1]);
    // The relay sees the end of the connection after the supervisor has seen the exit.
    let _next = sent(&traffic, 2, LIFE + 1);
    assert_eq!(names(&traffic, LIFE + 1), [2]);
    late.mark_failed();
    drop(late);
    assert_eq!(names(&traffic, LIFE + 1), [2]);
}

#[tokio::test(start_paused = true)]
async fn failed_suspects_are_bounded_and_open_ones_are_all_kept() {
    let traffic = Traffic::new();
    let running: Vec<InFlight> = (0..5000).map(|name| sent(&traffic, name, LIFE)).collect();
    assert_eq!(names(&traffic, LIFE).len(), 5000);
    drop(running);
    assert_eq!(names(&traffic, LIFE).len(), MAX_FAILED);
    assert!(traffic.suspects.0.lock().open.is_empty());
}
