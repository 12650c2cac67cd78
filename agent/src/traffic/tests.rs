//! In-flight counts return to zero whatever happens in between.

use std::time::Duration;

use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn any_interleaving_of_entering_and_leaving_returns_to_zero(
        steps in proptest::collection::vec((any::<bool>(), 0_u64..4, any::<prop::sample::Index>()), 0..200),
    ) {
        let traffic = Traffic::new();
        let mut guards: Vec<InFlight> = Vec::new();
        let mut ended = 0_u64;
        for (enters, router, which) in steps {
            if enters || guards.is_empty() {
                guards.push(traffic.enter(RouterKey(router)));
            } else {
                guards.swap_remove(which.index(guards.len()));
                ended += 1;
            }
            prop_assert_eq!(traffic.total() as usize, guards.len());
            for key in 0..4 {
                let expected = guards.iter().filter(|guard| guard.router == RouterKey(key)).count();
                prop_assert_eq!(traffic.of(RouterKey(key)) as usize, expected);
            }
            prop_assert_eq!(traffic.served_total(), ended);
        }
        guards.clear();
        prop_assert_eq!(traffic.total(), 0);
        prop_assert!(traffic.counts.borrow().routers.is_empty());
    }
}

#[test]
fn threads_that_enter_and_leave_at_once_lose_no_count() {
    let traffic = Traffic::new();
    std::thread::scope(|scope| {
        for router in 0..4 {
            let traffic = &traffic;
            scope.spawn(move || {
                for _ in 0..1_000 {
                    drop(traffic.enter(RouterKey(router)));
                }
            });
        }
    });
    assert_eq!((traffic.total(), traffic.served_total()), (0, 4_000));
}

#[tokio::test(start_paused = true)]
async fn idle_waits_for_the_last_request() {
    let traffic = Traffic::new();
    traffic.idle().await;
    let guard = traffic.enter(RouterKey(1));
    traffic.busy().await;
    let early = tokio::time::timeout(Duration::from_secs(1), traffic.idle()).await;
    assert!(early.is_err());
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_secs(5)).await;
        drop(guard);
    });
    traffic.idle().await;
    assert_eq!(traffic.total(), 0);
}

#[tokio::test]
async fn a_reader_is_woken_by_each_change() {
    let traffic = Traffic::new();
    let mut changes = traffic.changes();
    let guard = traffic.enter(RouterKey(7));
    changes.changed().await.unwrap();
    assert_eq!(changes.borrow_and_update().of(RouterKey(7)), 1);
    drop(guard);
    changes.changed().await.unwrap();
    assert_eq!(changes.borrow_and_update().total(), 0);
}
