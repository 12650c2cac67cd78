use super::*;
use crate::placement::prompt::tests::{exact, text};
use crate::placement::tests::{FILES, Fixture};

pub(crate) async fn record(id: u64, client_id: Option<&str>) -> Arc<PlacementDecision> {
    let fixture = Fixture::approximate(2).await;
    let prompt = text(&"a".repeat(400));
    Arc::new(PlacementDecision { client_id: client_id.map(Arc::from), ..PlacementDecision::new(id, &prompt, fixture.choose(&prompt)) })
}

fn ids(records: &[Arc<PlacementDecision>]) -> Vec<u64> {
    records.iter().map(|record| record.id).collect()
}

#[tokio::test(start_paused = true)]
async fn the_ring_of_decisions_forgets_the_oldest() {
    let ring = DecisionLog::new(3);
    for id in 1..=5 {
        ring.push(record(id, None).await);
    }
    assert_eq!((ids(&ring.latest(10)), ids(&ring.latest(2))), (vec![5, 4, 3], vec![5, 4]));
    assert!(ring.find("1").is_empty());
    let least = DecisionLog::new(0);
    least.push(record(1, None).await);
    assert_eq!(least.latest(10).len(), 1, "a ring of none is a ring of one");
}

#[tokio::test(start_paused = true)]
async fn a_decision_is_found_by_router_or_client_id() {
    let ring = DecisionLog::new(10);
    for (id, client_id) in [(0xab, Some("mine")), (0xcd, None), (0xab, Some("mine")), (0xef, Some("cd"))] {
        ring.push(record(id, client_id).await);
    }
    assert_eq!(ids(&ring.find("00000000000000ab")), [0xab, 0xab], "both attempts");
    assert_eq!(ids(&ring.find("mine")), [0xab, 0xab]);
    assert_eq!(ids(&ring.find("cd")), [0xef, 0xcd], "whatever is called so");
    assert!(ring.find("").is_empty() && ring.find("nobody").is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_decisions_reason_is_one_parsable_line() {
    let (fixture, slots) = Fixture::known(2).await;
    let prompt = exact(4000, FILES);
    fixture.index.store(slots[1], &prompt.token_keys(16)[..200]);
    let record = PlacementDecision { queued_seconds: 0.25, attempt: 2, ..PlacementDecision::new(0xab, &prompt, fixture.choose(&prompt)) };
    let line = record.line(true);
    let (_, choice) = record.choice();
    let (first_token, cost) = (choice.terms.first_token(), choice.terms.total());
    assert_eq!(
        line,
        format!(
            "replica=n/1 matched=3200 of=4000 level=exact why=cheapest ttft={first_token:.4} cost={cost:.4} candidates=2 attempt=2 queued=0.250 resume=none:no_stream"
        )
    );
    let short = "replica=n/1 of=4000 level=exact candidates=2 attempt=2 queued=0.250 resume=none:no_stream";
    assert_eq!(record.line(false), short, "nothing of what is cached");
}

#[tokio::test(start_paused = true)]
async fn a_decision_remembers_the_chosen_and_cheapest_of_many() {
    let (fixture, slots) = Fixture::known(100).await;
    let prompt = exact(4000, FILES);
    let keys = prompt.token_keys(16);
    for (blocks, slot) in slots.iter().enumerate() {
        fixture.index.store(*slot, &keys[..blocks + 1]);
    }
    let chosen = fixture.choose(&prompt);
    let record = PlacementDecision::new(1, &prompt, chosen);
    assert_eq!(
        (record.decision.candidates, record.replica_names.len(), record.report_ages.len(), record.decision.scored.len()),
        (100, 64, 64, 64)
    );
    let (name, choice) = record.choice();
    assert_eq!((name, choice.candidate.matched), ("n/99", 1600));
    let least = record.decision.scored.iter().map(|scored| scored.candidate.matched).min();
    assert_eq!(least, Some(37 * 16), "the others cost more");
    for (scored, name) in record.decision.scored.iter().zip(&record.replica_names) {
        assert_eq!(fixture.fleet.view().replicas[scored.candidate.replica].id, *name);
    }
}
