use hostler_api::Route;
use tokio::time::sleep;

use super::*;
use crate::fleet::tests::{ReplicaChange, announce, attach, fleet, ready, report, state};
use crate::fleet::{Fleet, FleetUpdate, Phase, ReplicaLoad, ReplicaStatus};

fn arrival(fleet: &Fleet, model: &str) -> Arrival {
    fleet.view().arrival(Some(model), Instant::now())
}

fn in_seconds(range: std::ops::RangeInclusive<u64>, arrival: Arrival) -> bool {
    matches!(arrival, Arrival::Within(left) if range.contains(&left.as_secs()))
}

#[tokio::test(start_paused = true)]
async fn an_announcement_expires_after_thirty_seconds_unless_renewed() {
    let fleet = fleet();
    announce(&fleet, &[("m", None)]).await;
    sleep(Duration::from_secs(29)).await;
    announce(&fleet, &[("m", None)]).await;
    sleep(Duration::from_millis(29_900)).await;
    assert_eq!(arrival(&fleet, "m"), Arrival::Starting);
    sleep(Duration::from_secs(1)).await;
    assert_eq!((arrival(&fleet, "m"), fleet.view().models().len()), (Arrival::Unknown, 0));
}

#[tokio::test(start_paused = true)]
async fn a_new_announcement_replaces_the_last_but_keeps_misses() {
    let fleet = fleet();
    announce(&fleet, &[("kept", None), ("dropped", None)]).await;
    let missed_at = Instant::now();
    fleet.view().expectation(Some("kept")).unwrap().record_miss(missed_at);
    announce(&fleet, &[("kept", Some(60)), ("new", None)]).await;
    let view = fleet.view();
    let last_miss = |model| view.expectation(Some(model)).map(Expectation::last_miss);
    assert_eq!((last_miss("kept"), last_miss("new"), last_miss("dropped")), (Some(Some(missed_at)), Some(None), None));
}

#[tokio::test(start_paused = true)]
async fn an_expected_arrival_counts_down_and_then_stays_open() {
    let fleet = fleet();
    announce(&fleet, &[("m", Some(20))]).await;
    sleep(Duration::from_secs(5)).await;
    assert!(in_seconds(14..=15, arrival(&fleet, "m")));
    sleep(Duration::from_secs(16)).await;
    assert_eq!(arrival(&fleet, "m"), Arrival::Within(Duration::ZERO));
}

#[tokio::test(start_paused = true)]
async fn attached_replicas_override_an_announcement_while_one_may_serve() {
    let fleet = fleet();
    announce(&fleet, &[("m", Some(20))]).await;
    let enter = |phase, left: Option<u64>| {
        let state = ReplicaStatus { start_left: left.map(Duration::from_secs), ..state(phase, "m") };
        ReplicaChange { state: Some(state), ..ready(0) }
    };
    let _lane = attach(&fleet, 1, vec![enter(Phase::Loading, None)]).await;
    assert_eq!(arrival(&fleet, "m"), Arrival::Starting);
    report(&fleet, 1, false, vec![enter(Phase::Loading, Some(400))]).await;
    assert!(in_seconds(400..=400, arrival(&fleet, "m")));
    for phase in [Phase::Failed, Phase::Draining, Phase::Stopped] {
        report(&fleet, 1, false, vec![enter(phase, None)]).await;
        assert!(in_seconds(19..=20, arrival(&fleet, "m")), "{phase:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_with_unknown_models_does_not_replace_an_announcement() {
    let fleet = fleet();
    announce(&fleet, &[("m", Some(20))]).await;
    let state = ReplicaStatus { phase: Phase::Loading, start_left: Some(Duration::from_secs(900)), ..ReplicaStatus::default() };
    let _lane = attach(&fleet, 1, vec![ReplicaChange { state: Some(state), ..ready(0) }]).await;
    assert!(in_seconds(19..=20, arrival(&fleet, "m")) && in_seconds(900..=900, arrival(&fleet, "other")));
}

#[tokio::test(start_paused = true)]
async fn an_expected_model_is_listed_until_its_engine_describes_it() {
    let fleet = fleet();
    announce(&fleet, &[("m", None), ("a", None)]).await;
    let cards = || {
        let view = fleet.view();
        view.models().into_iter().map(|model| serde_json::from_slice(&model.card).unwrap()).collect::<Vec<serde_json::Value>>()
    };
    let expected = |name| serde_json::json!({"id": name, "object": "model", "created": 0, "owned_by": "hostler"});
    assert_eq!(cards(), [expected("a"), expected("m")]);
    let _lane = attach(&fleet, 1, vec![ready(0)]).await;
    assert_eq!(cards(), [expected("a"), serde_json::json!({})]);
}

#[tokio::test(start_paused = true)]
async fn a_model_is_listed_until_its_last_replica_is_stopped_on_purpose() {
    let fleet = fleet();
    let names = || fleet.view().models().iter().map(|model| model.id.clone()).collect::<Vec<_>>();
    let _lane = attach(&fleet, 1, vec![ready(0), ready(1)]).await;
    let stopped = |index| ReplicaChange { state: Some(state(Phase::Stopped, "m")), ..ready(index) };
    report(&fleet, 1, false, vec![stopped(0)]).await;
    assert_eq!(names(), ["m"]);
    report(&fleet, 1, false, vec![stopped(1)]).await;
    assert_eq!(names(), [""; 0]);
    announce(&fleet, &[("m", None)]).await;
    assert_eq!(names(), ["m"], "a controller can bring it");
}

#[tokio::test(start_paused = true)]
async fn an_expected_model_may_lack_any_front_end_route() {
    let fleet = fleet();
    announce(&fleet, &[("m", None)]).await;
    let may_lack = |model| fleet.view().may_lack_route(Some(model), Route::Messages);
    assert!(may_lack("m") && !may_lack("other"));
    let _lane = attach(&fleet, 1, vec![ready(0)]).await;
    assert!(!may_lack("m"));
}

#[tokio::test(start_paused = true)]
async fn a_replicas_last_request_follows_its_agents_count() {
    let fleet = fleet();
    let served = |served| ReplicaChange { load: Some(ReplicaLoad { served, ..ReplicaLoad::default() }), ..ready(0) };
    let last_request = || fleet.view().replicas[0].last_request;
    let _lane = attach(&fleet, 1, vec![served(0)]).await;
    assert_eq!(last_request(), None);
    let asked_at = Instant::now();
    report(&fleet, 1, false, vec![served(1)]).await;
    sleep(Duration::from_secs(1)).await;
    report(&fleet, 1, false, vec![served(1)]).await;
    assert_eq!(last_request(), Some(asked_at));
    fleet.update(FleetUpdate::Detached { attachment: 1 }).await;
    let _next = attach(&fleet, 2, vec![ReplicaChange { epoch: 2, ..served(0) }]).await;
    assert_eq!(last_request(), Some(asked_at), "the count of another agent begins anew");
}
