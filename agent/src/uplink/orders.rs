//! Orders of operators to engines, as a session got them.
//!
//! Each replica gets the order at once, and their results make one answer.

use std::sync::Arc;

use futures_util::future::join_all;
use hostler_proto::agent::v1 as wire;
use hostler_proto::agent::v1::directive;

use super::Uplink;
use crate::engine::Phase;
use crate::engine::control::{ControlRequest, LoraAdapter, phase_label};
use crate::node::Replica;

/// Executes an order on all of its replicas and answers when the last is done.
///
/// Each engine has its own deadlines. Execution continues even if the session that waits here ends.
pub(super) async fn execute(uplink: Arc<Uplink>, id: u64, order: directive::Order) -> wire::Answer {
    let Some((order, replicas)) = parse_order(order) else {
        return wire::Answer { id, error: "the order is not known here".to_owned(), log_lines: Vec::new(), log_end: 0 };
    };
    tracing::info!(event = "order_received", replicas = ?replicas.indices, ?order, "directive from router");
    let carrying = uplink.state.select(&replicas.indices).map(|replica| {
        let (name, order) = (replica_name(&uplink, replica), order.clone());
        async move { (name, replica.engine.execute(order).await.map_err(|error| error.to_string())) }
    });
    let error = summarize_failures(&join_all(carrying).await);
    wire::Answer { id, error, log_lines: Vec::new(), log_end: 0 }
}

/// Restarts replicas that do not run, and lets draining ones continue; says why if there was none.
pub(super) fn release(uplink: &Uplink, replicas: &wire::Replicas) -> String {
    let phase = |replica: &Replica| replica.engine.status().borrow().phase;
    let (down, up): (Vec<_>, Vec<_>) = uplink.state.select(&replicas.indices).partition(|replica| waits_for_release(phase(replica)));
    down.iter().for_each(|replica| replica.engine.release());
    if !down.is_empty() {
        return String::new();
    }
    let up: Vec<String> =
        up.iter().map(|replica| format!("{} is {}", replica_name(uplink, replica), phase_label(phase(replica)))).collect();
    format!("there is nothing to release: {}", up.join(", "))
}

fn waits_for_release(phase: Phase) -> bool {
    matches!(phase, Phase::Quarantined | Phase::Failed | Phase::Stopped | Phase::Draining)
}

fn parse_order(order: directive::Order) -> Option<(ControlRequest, wire::Replicas)> {
    let (order, replicas) = match order {
        directive::Order::Sleep(order) => (ControlRequest::Sleep { level: u8::try_from(order.level).unwrap_or(u8::MAX) }, order.replicas),
        directive::Order::Wake(replicas) => (ControlRequest::Wake, Some(replicas)),
        directive::Order::Lora(wire::LoraOrder { replicas, name, path }) if path.is_empty() => (ControlRequest::Unload(name), replicas),
        directive::Order::Lora(wire::LoraOrder { replicas, name, path }) => (ControlRequest::Load(LoraAdapter { name, path }), replicas),
        _ => return None,
    };
    Some((order, replicas.unwrap_or_default()))
}

fn replica_name(uplink: &Uplink, replica: &Replica) -> String {
    format!("{}/{}", uplink.node, replica.index)
}

/// Describes which replicas failed and why, and which did not; empty if none failed.
fn summarize_failures(outcomes: &[(String, Result<(), String>)]) -> String {
    let failed: Vec<String> = outcomes.iter().filter_map(|(name, outcome)| Some(format!("{name}: {}", outcome.as_ref().err()?))).collect();
    let done: Vec<&str> = outcomes.iter().filter(|(_, outcome)| outcome.is_ok()).map(|(name, _)| name.as_str()).collect();
    match (&failed[..], &done[..]) {
        ([], _) => String::new(),
        (_, []) => failed.join("; "),
        _ => format!("{}; done on {}", failed.join("; "), done.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_orders_outcome_names_failed_and_succeeded_replicas() {
        let done = |name: &str| (name.to_owned(), Ok(()));
        let failed = |name: &str| (name.to_owned(), Err("it is full".to_owned()));
        assert_eq!(summarize_failures(&[done("n/0"), done("n/1")]), "");
        assert_eq!(summarize_failures(&[failed("n/0"), failed("n/1")]), "n/0: it is full; n/1: it is full");
        assert_eq!(summarize_failures(&[done("n/0"), failed("n/1")]), "n/1: it is full; done on n/0");
    }

    #[test]
    fn only_replicas_down_or_draining_can_be_released() {
        let down = [Phase::Quarantined, Phase::Failed, Phase::Stopped, Phase::Draining];
        let up = [Phase::Starting, Phase::Loading, Phase::Ready, Phase::Sleeping];
        assert!(down.into_iter().all(waits_for_release));
        assert!(!up.into_iter().any(waits_for_release));
    }
}
