use super::*;
use crate::outcome::{AnswerOutcome, RefusalReason};

/// The end of step `number`, in milliseconds since 1970.
fn end_of(number: u64) -> u64 {
    1_000_000 + number * STEP_SECONDS * 1000
}

fn counted(number: u64, tokens: u64, served: u64) -> Reading {
    let replica = ReplicaReading { tokens, served, running: 3, waiting: 2, kv_use: 0.5, ..ReplicaReading::default() };
    Reading { at: end_of(number), replicas: vec![("n/0".into(), replica)], ..Reading::default() }
}

fn last(history: &History) -> FleetStep {
    history.latest(1).remove(0)
}

fn rates(history: &History) -> (f32, f32) {
    let step = last(history);
    (step.tokens_per_second, step.requests_per_second)
}

#[test]
fn rates_cover_the_last_ten_seconds() {
    let history = History::default();
    history.add(counted(0, 1_000_000, 5000));
    assert_eq!(rates(&history), (0.0, 0.0), "what came before is not of these seconds");
    history.add(counted(1, 1_000_500, 5020));
    assert_eq!(rates(&history), (50.0, 2.0));
    history.add(counted(2, 200, 5020));
    assert_eq!(rates(&history), (20.0, 0.0), "another engine has begun at 0");
    history.add(Reading { at: end_of(2) + 20_000, ..counted(0, 1200, 5020) });
    assert_eq!(rates(&history), (50.0, 0.0), "a step of twenty seconds");
    assert_eq!((last(&history).running, last(&history).waiting, last(&history).kv_use), (3, 2, Some(0.5)));
}

#[test]
fn the_history_keeps_an_hour() {
    let history = History::default();
    (0..500).for_each(|number| history.add(counted(number, 0, 0)));
    let steps = history.latest(usize::MAX);
    assert_eq!((steps.len(), steps[0].at, history.last_at()), (360, end_of(140), end_of(499)));
    assert_eq!(history.of_replica("n/0").len(), 360);
    assert!(history.of_replica("n/1").is_empty());
}

#[test]
fn a_step_counts_ends_by_verdict_and_refusals_by_reason() {
    let (history, mut ends) = (History::default(), EndCounts::default());
    ends.answers[AnswerOutcome::Error as usize] = 4;
    ends.refused[RefusalReason::Full as usize] = 7;
    history.add(Reading { ends, ..counted(0, 0, 0) });
    ends.refused[RefusalReason::Full as usize] = 9;
    history.add(Reading { ends, ..counted(1, 0, 0) });
    let told = serde_json::to_value(history.latest(2)).unwrap();
    assert_eq!(told[0]["ended"], serde_json::json!({"full": 7, "error": 4}));
    assert_eq!((&told[1]["ended"], &told[1]["refused"]), (&serde_json::json!({"full": 2}), &serde_json::json!({"full": 2})));
}

#[test]
fn ends_older_than_a_minute_are_not_recent() {
    let (history, mut ends) = (History::default(), EndCounts::default());
    assert_eq!(history.recent_ends(&ends), EndCounts::default());
    ends.refused[RefusalReason::Full as usize] = 50;
    assert_eq!(history.recent_ends(&ends), ends, "before the first step");
    history.add(Reading { ends, ..counted(0, 0, 0) });
    for number in 1..6 {
        assert_eq!(history.recent_ends(&ends), ends, "{number}");
        history.add(Reading { ends, ..counted(number, 0, 0) });
    }
    history.add(Reading { ends, ..counted(6, 0, 0) });
    let mut more = ends;
    more.refused[RefusalReason::Full as usize] = 52;
    assert_eq!(history.recent_ends(&more).refused[RefusalReason::Full as usize], 2);
}

#[test]
fn a_replica_that_was_away_has_a_gap() {
    let history = History::default();
    history.add(counted(0, 0, 0));
    history.add(Reading { at: end_of(1), ..Reading::default() });
    history.add(Reading { at: end_of(2), ..Reading::default() });
    let is_there = |history: &History| history.of_replica("n/0").iter().map(|(_, step)| step.is_some()).collect::<Vec<_>>();
    assert_eq!(is_there(&history), [true, false, false]);
    history.add(counted(3, 900, 0));
    assert_eq!(is_there(&history), [true, false, false, true]);
    assert_eq!(rates(&history), (0.0, 0.0), "what it did meanwhile is not of these seconds");
    (4..363).for_each(|number| history.add(Reading { at: end_of(number), ..Reading::default() }));
    assert_eq!(is_there(&history)[..2], [true, false]);
    history.add(Reading { at: end_of(363), ..Reading::default() });
    assert!(history.of_replica("n/0").is_empty(), "gone for an hour");
}

#[test]
fn first_tokens_belong_to_the_step_in_which_their_stream_was_sent() {
    let history = History::default();
    (0..3).for_each(|number| history.add(counted(number, 0, 0)));
    let start = |sent_at, first_token| StreamStart { sent_at, replica: "n/0".into(), first_token, between_tokens: Some(0.02) };
    let starts = vec![start(end_of(1) + 10, 7.0), start(end_of(1) + 20, 9.0), start(end_of(2) + 5, 0.5)];
    history.add(Reading { starts, ..counted(3, 0, 0) });
    let steps = history.latest(2);
    let first = |step: &FleetStep| step.first_tokens.map(|of| (of.streams, of.p50, of.p99));
    assert_eq!((first(&steps[0]), first(&steps[1])), (Some((2, 7.0, 9.0)), Some((1, 0.5, 0.5))));
    let of_replica = history.of_replica("n/0");
    let seen = |number: usize| of_replica[number].1.map(|step| (step.first_token, step.between_tokens));
    assert_eq!((seen(2), seen(3)), (Some((7.0, 0.02)), Some((0.5, 0.02))));
    assert!(seen(1).unwrap().0.is_nan());
    history.add(Reading { starts: vec![start(end_of(1) + 20, 9.0)], ..counted(4, 0, 0) });
    assert_eq!(first(&history.latest(3)[0]), Some((2, 7.0, 9.0)), "the router has forgotten a stream meanwhile");
}

/// docs/page.md states this memory.
#[test]
fn the_hour_of_a_thousand_replicas_and_a_hundred_tenants_fits_its_memory() {
    let history = History::default();
    let names = |kind: &str, count: usize| (0..count).map(|number| Arc::from(format!("{kind}-{number}"))).collect::<Vec<Arc<str>>>();
    let (replicas, tenants) = (names("node", 1200), names("tenant", 150));
    for number in 0..400 {
        history.add(Reading {
            at: end_of(number),
            replicas: replicas.iter().map(|name| (name.clone(), ReplicaReading { tokens: number, ..ReplicaReading::default() })).collect(),
            tenants: tenants.iter().map(|name| (name.clone(), TenantReading::default())).collect(),
            ..Reading::default()
        });
    }
    let hour = history.0.lock();
    let bytes = hour.replicas.bytes() + hour.tenants.bytes() + hour.fleet.capacity() * size_of::<FleetStep>();
    assert!(bytes < 13_000_000, "{bytes}");
    let with_steps = replicas.iter().filter(|name| !hour.replicas.steps(name, &hour.fleet).is_empty()).count();
    assert_eq!(with_steps, 1000);
    assert!((hour.fleet[399 - 40].tokens_per_second - 120.0).abs() < 0.1, "those without steps of their own count in the sum");
}

#[test]
fn who_has_gone_makes_room_for_newcomers() {
    let history = History::default();
    let of = |from: usize| (from..from + MAX_REPLICAS).map(|number| (Arc::from(number.to_string()), ReplicaReading::default())).collect();
    history.add(Reading { at: end_of(0), replicas: of(0), ..Reading::default() });
    history.add(Reading { at: end_of(1), replicas: of(500), ..Reading::default() });
    assert!(history.of_replica("1200").is_empty(), "all others were there a moment ago");
    history.add(Reading { at: end_of(2), replicas: of(500), ..Reading::default() });
    history.add(Reading { at: end_of(3), replicas: of(1000), ..Reading::default() });
    assert!(!history.of_replica("1800").is_empty() && history.of_replica("3").is_empty());
}
