//! Balanced waits, and the pauses that count as the engine's.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use tokio::sync::Notify;

use super::*;
use crate::traffic::{RouterKey, Traffic};

proptest! {
    #[test]
    fn any_interleaving_of_waits_ends_at_zero(steps in proptest::collection::vec((0_u8..5, any::<prop::sample::Index>()), 0..200)) {
        let flow = ResponseFlow::default();
        let mut waits: Vec<EngineWait<'_>> = Vec::new();
        for (step, which) in steps {
            let chosen = which.index(waits.len().max(1));
            match (step, waits.get_mut(chosen)) {
                (1, Some(wait)) => wait.begin(),
                (2, Some(wait)) => wait.record_progress(),
                // The wait is given up while its client reads nothing.
                (3, Some(wait)) => {
                    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
                    let before = wait.is_waiting;
                    let mut passing = Box::pin(wait.pause_during(std::future::pending::<()>()));
                    prop_assert!(passing.as_mut().poll(&mut context).is_pending());
                    drop(passing);
                    prop_assert!(!wait.is_waiting || !before);
                }
                (4, Some(_)) => drop(waits.swap_remove(chosen)),
                _ => waits.push(EngineWait::new(&flow)),
            }
            prop_assert_eq!(flow.waiting() as usize, waits.iter().filter(|wait| wait.is_waiting).count());
        }
        waits.clear();
        prop_assert_eq!(flow.waiting(), 0);
    }
}

#[test]
fn concurrent_waits_lose_no_count() {
    let traffic = Traffic::new();
    std::thread::scope(|scope| {
        for router in 0..4 {
            let traffic = &traffic;
            scope.spawn(move || {
                for _ in 0..1_000 {
                    let in_flight = traffic.enter(RouterKey(router));
                    let mut wait = in_flight.track_wait();
                    wait.begin();
                    wait.record_progress();
                    wait.record_progress();
                }
            });
        }
    });
    assert_eq!(traffic.flow().waiting(), 0);
    assert!(traffic.flow().gaps().p99().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_gap_excludes_time_in_which_the_client_reads_nothing() {
    let flow = ResponseFlow::default();
    let mut wait = EngineWait::new(&flow);
    wait.begin();
    wait.record_progress();
    for _ in 0..100 {
        tokio::time::advance(Duration::from_millis(30)).await;
        wait.record_progress();
        wait.pause_during(async {}).await;
        assert_eq!(flow.waiting(), 1);
    }
    let taken = Arc::new(Notify::new());
    let passing = wait.pause_during(taken.notified());
    let client = async {
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(flow.waiting(), 0);
        taken.notify_one();
    };
    tokio::join!(passing, client);
    assert_eq!(flow.waiting(), 1);
    (0..2).for_each(|_| wait.record_progress());
    let p99 = flow.gaps().p99().unwrap();
    assert!(p99 > Duration::from_millis(30) && p99 < Duration::from_millis(40), "{p99:?}");
}

#[tokio::test(start_paused = true)]
async fn each_event_is_recorded_as_progress() {
    let flow = ResponseFlow::default();
    let mut wait = EngineWait::new(&flow);
    let mut seen = flow.last_progress();
    for _ in 0..3 {
        tokio::time::advance(Duration::from_micros(1)).await;
        wait.record_progress();
        assert_ne!(std::mem::replace(&mut seen, flow.last_progress()), flow.last_progress());
    }
}
