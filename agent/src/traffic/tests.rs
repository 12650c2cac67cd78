//! In-flight counts return to zero whatever happens in between.

use std::time::Duration;

use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn any_interleaving_of_requests_ends_at_zero(
        steps in proptest::collection::vec((0_u8..3, 0_u64..4, any::<(u32, u32)>(), any::<prop::sample::Index>()), 0..200),
    ) {
        let traffic = Traffic::new();
        let mut guards: Vec<InFlight> = Vec::new();
        let mut ended = 0_u64;
        for (step, router, (tokens, uncached), which) in steps {
            match step {
                1 if !guards.is_empty() => guards[which.index(guards.len())].mark_prefilled(),
                2 if !guards.is_empty() => {
                    guards.swap_remove(which.index(guards.len()));
                    ended += 1;
                }
                _ => guards.push(traffic.enter_with(RouterKey(router), PromptEstimate { tokens, uncached })),
            }
            let counts = traffic.counts.borrow();
            prop_assert_eq!(counts.totals(), sum(&guards, |_| true));
            for key in (0..4).map(RouterKey) {
                prop_assert_eq!(counts.totals_of(key), sum(&guards, |guard| guard.router == key));
            }
            prop_assert_eq!(counts.served_total(), ended);
        }
        guards.clear();
        prop_assert_eq!(traffic.counts.borrow().totals(), InFlightTotals::default());
        prop_assert!(traffic.counts.borrow().routers.is_empty());
    }
}

fn sum(guards: &[InFlight], chosen: impl Fn(&InFlight) -> bool) -> InFlightTotals {
    guards.iter().filter(|guard| chosen(guard)).fold(InFlightTotals::default(), |sum, guard| InFlightTotals {
        requests: sum.requests + 1,
        pending_tokens: sum.pending_tokens + u64::from(guard.prompt.uncached) * u64::from(guard.pending.load(Ordering::Relaxed)),
        context_tokens: sum.context_tokens + u64::from(guard.prompt.tokens),
    })
}

#[test]
fn concurrent_requests_lose_no_count() {
    let traffic = Traffic::new();
    std::thread::scope(|scope| {
        for router in 0..4 {
            let traffic = &traffic;
            scope.spawn(move || {
                for _ in 0..1_000 {
                    drop(traffic.enter_with(RouterKey(router), PromptEstimate { tokens: 9, uncached: 4 }));
                }
            });
        }
    });
    assert_eq!((traffic.counts.borrow().totals(), traffic.served_total()), (InFlightTotals::default(), 4_000));
}

#[tokio::test(start_paused = true)]
async fn an_idle_wait_ends_with_the_last_request() {
    let traffic = Traffic::new();
    traffic.wait_idle().await;
    let guard = traffic.enter(RouterKey(1));
    traffic.wait_busy().await;
    let early = tokio::time::timeout(Duration::from_secs(1), traffic.wait_idle()).await;
    assert!(early.is_err());
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_secs(5)).await;
        drop(guard);
    });
    traffic.wait_idle().await;
    assert_eq!(traffic.in_flight(), 0);
}

#[tokio::test]
async fn a_watcher_is_woken_by_each_change() {
    let traffic = Traffic::new();
    let mut changes = traffic.subscribe();
    let guard = traffic.enter(RouterKey(7));
    changes.changed().await.unwrap();
    assert_eq!(changes.borrow_and_update().in_flight_from(RouterKey(7)), 1);
    drop(guard);
    changes.changed().await.unwrap();
    assert_eq!(changes.borrow_and_update().in_flight(), 0);
}
