use std::sync::Arc;

use super::super::{ActualUsage, LimitKind, OutputTokens};
use super::*;
use crate::keys::Caller;

fn caller(limits: KeyLimits) -> Caller {
    Caller { key: "k".into(), limits: Arc::new(limits), ..Caller::anonymous("t".into()) }
}

fn estimate(prompt_tokens: u64, output_tokens: u64) -> UsageEstimate {
    UsageEstimate { prompt_tokens, output_tokens, ..UsageEstimate::default() }
}

/// The message after its transfer.
fn sent<T: Serialize + serde::de::DeserializeOwned>(message: T) -> T {
    serde_json::from_slice(&serde_json::to_vec(&message).unwrap()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_successor_counts_its_predecessors_usage_once_and_in_time() {
    let (before, after) = (Admission::new(10), Admission::new(10));
    let caller = caller(KeyLimits { output_per_day: Some(100), requests_per_minute: Some(4), ..KeyLimits::default() });
    tokio::time::advance(std::time::Duration::from_secs(3600)).await;
    drop(before.admit(&caller, estimate(1, 20)).unwrap());
    let mut running = before.admit(&caller, estimate(1, 50)).unwrap();
    let (sender, mut changes) = mpsc::unbounded_channel();
    let mut foreign = after.import(sent(before.export(sender)));
    let late = before.admit(&caller, estimate(1, 10)).unwrap();
    foreign.apply(sent(changes.recv().await.unwrap()));

    let refused = after.admit(&caller, estimate(1, 30)).unwrap_err();
    assert_eq!(refused.limit, LimitKind::DailyOutput, "80 of 100 are used or reserved: {refused}");
    running.reconcile_usage(ActualUsage { prompt_tokens: Some(1), output_tokens: OutputTokens::Exact(5) });
    drop((running, late));
    while let Ok(change) = changes.try_recv() {
        foreign.apply(sent(change));
    }
    drop(after.admit(&caller, estimate(1, 60)).unwrap());
    let refused = after.admit(&caller, estimate(1, 6)).unwrap_err();
    assert!(refused.is_quota && refused.message.contains("of which 5 are left"), "20 + 5 + 10 + 60 are used: {refused}");
    tokio::time::advance(std::time::Duration::from_secs(24 * 3600)).await;
    assert!(after.admit(&caller, estimate(1, 100)).is_ok(), "a day later all of it is free");
}

#[tokio::test(start_paused = true)]
async fn in_flight_limits_span_both_routers_during_a_takeover() {
    let (before, after) = (Admission::new(10), Admission::new(10));
    let caller = caller(KeyLimits { in_flight: Some(2), ..KeyLimits::default() });
    let running = [(); 2].map(|()| before.admit(&caller, estimate(1, 1)).unwrap());
    let (sender, mut changes) = mpsc::unbounded_channel();
    let mut foreign = after.import(sent(before.export(sender)));
    assert_eq!(after.admit(&caller, estimate(1, 1)).unwrap_err().limit, LimitKind::InFlight);
    let [first, second] = running;
    drop(first);
    while let Ok(change) = changes.try_recv() {
        foreign.apply(sent(change));
    }
    let own = after.admit(&caller, estimate(1, 1)).unwrap();
    assert!(after.admit(&caller, estimate(1, 1)).is_err());
    // The other router was killed.
    drop(foreign);
    assert!(after.admit(&caller, estimate(1, 1)).is_ok());
    drop((own, second));
}
