//! Tests which tenant a crash is charged to, and where a confined tenant's requests go.

use super::super::tenant_crashes::{Confinement, ConfinementChoices};
use super::*;

const RECKLESS: u64 = 7;
const NEIGHBOR: u64 = 8;

/// A request of a tenant.
fn request_of(tenant: u64, number: u64) -> Fingerprint {
    fingerprint(tenant, "/v1/completions", &number.to_le_bytes()).unwrap()
}

fn choices(ready: &[&str]) -> ConfinementChoices {
    let ready: Vec<Arc<str>> = ready.iter().map(|id| Arc::from(*id)).collect();
    ConfinementChoices { expected: ready.clone(), ready }
}

impl SuspectTable {
    /// Crashes an engine with these requests in flight, all of which this router has lost.
    fn crashes(&mut self, life: &EngineLife, requests: &[Fingerprint], now: Instant) {
        requests.iter().for_each(|request| drop(self.lost(*request, life, now)));
        self.record_reported_crash(life, requests, now, now);
    }

    fn confines(&self, tenant: u64, now: Instant) -> bool {
        self.is_confined(request_of(tenant, 1000), now)
    }

    fn place(&mut self, tenant: u64, ready: &[&str], now: Instant) -> Option<String> {
        self.confine(request_of(tenant, 1000), Some("m"), &choices(ready), now)?.replica.map(|replica| replica.to_string())
    }
}

/// A table in which a tenant has crashed three engines alone.
fn confined() -> (SuspectTable, Instant) {
    let (mut table, now) = table();
    for number in 0..3 {
        table.crashes(&life(&format!("n{number}/0"), 1), &[request_of(RECKLESS, number)], now);
    }
    assert!(table.confines(RECKLESS, now));
    (table, now)
}

#[test]
fn variants_of_a_killer_confine_their_tenant_at_the_third_crash() {
    let (mut table, now) = table();
    let mut next = 0;
    let mut engine = || {
        next += 1;
        life(&format!("n{next}/0"), 1)
    };
    // Each time, another of the neighbor's requests runs beside it.
    for number in [101, 102] {
        table.crashes(&engine(), &[request_of(RECKLESS, 1), request_of(NEIGHBOR, number)], now);
        assert!(!table.confines(RECKLESS, now));
    }
    assert!(table.is_refused(request_of(RECKLESS, 1), now));
    // The router's own observation counts before the agent's report.
    table.lost(request_of(RECKLESS, 2), &engine(), now);
    assert!(table.confines(RECKLESS, now));
    assert!(!table.confines(NEIGHBOR, now));
    assert_eq!(table.confined_count(now), 1);
}

#[test]
fn three_crashes_with_one_lone_request_each_confine_its_tenant() {
    let (mut table, now) = table();
    for number in 0..3 {
        assert!(!table.confines(RECKLESS, now));
        table.crashes(&life(&format!("n{number}/0"), 1), &[request_of(RECKLESS, number)], now);
    }
    assert!(table.confines(RECKLESS, now));
    assert!(table.confines(RECKLESS, now + WINDOW - SECOND) && !table.confines(RECKLESS, now + WINDOW));
    table.sweep(now + WINDOW);
    assert_eq!(table.place(RECKLESS, &["n0/0"], now + WINDOW), None);
}

#[test]
fn crashes_among_many_requests_confine_no_tenant() {
    let (mut table, now) = table();
    for number in 0..20 {
        let there = [request_of(RECKLESS, 2 * number), request_of(RECKLESS, 2 * number + 1)];
        table.crashes(&life(&format!("n{number}/0"), 1), &there, now);
    }
    assert_eq!(table.confined_count(now), 0, "nothing shows that its requests are the cause");
}

#[test]
fn a_crash_is_put_down_to_one_tenant_alone() {
    let (mut table, now) = confined();
    // The neighbor's long request was there at each of four crashes, until it is banned.
    for number in 0..4 {
        let engine = life(&format!("n{number}/1"), 1);
        let variants = [request_of(RECKLESS, 20 + number), request_of(NEIGHBOR, 1)];
        table.record_reported_crash(&engine, &variants, now, now);
        table.crashes(&engine, &variants, now);
    }
    assert!(!table.confines(NEIGHBOR, now));
}

#[test]
fn requests_without_keys_are_never_confined() {
    let (mut table, now) = table();
    for number in 0..20 {
        table.crashes(&life(&format!("n{number}/0"), 1), &[request_of(0, number)], now);
    }
    assert_eq!((table.confined_count(now), table.place(0, &["n0/0"], now)), (0, None));
}

#[test]
fn an_agent_cannot_confine_a_tenant_by_inventing_crashes() {
    let (mut table, now) = table();
    let report_crash = |table: &mut SuspectTable, replica: &str, epoch| {
        table.record_reported_crash(&life(replica, epoch), &[request_of(RECKLESS, epoch)], now, now);
    };
    (0..100).for_each(|epoch| report_crash(&mut table, "n0/0", epoch));
    (100..200).for_each(|epoch| report_crash(&mut table, "n1/3", epoch));
    assert!(!table.confines(RECKLESS, now), "two nodes are two crashes");
    report_crash(&mut table, "n2/0", 200);
    assert!(table.confines(RECKLESS, now), "a router that starts anew believes three");
}

#[test]
fn an_answer_takes_its_crash_off_the_tenant() {
    let (mut table, now) = confined();
    assert!(table.acquit(request_of(RECKLESS, 1), now));
    assert!(!table.confines(RECKLESS, now));
}

#[test]
fn a_confined_tenant_keeps_its_replica_while_it_is_expected() {
    let (mut table, now) = confined();
    let chosen = table.place(RECKLESS, &["n0/0", "n1/0", "n7/0", "n8/0"], now).unwrap();
    assert!(["n0/0", "n1/0"].contains(&&*chosen), "one that it has crashed: {chosen}");
    let all = choices(&["n7/0", "n8/0", "n9/0"]);
    let starting = ConfinementChoices { expected: vec![chosen.as_str().into()], ..all };
    let kept = table.confine(request_of(RECKLESS, 2000), Some("m"), &starting, now);
    assert_eq!(kept, Some(Confinement { replica: Some(chosen.as_str().into()), crashes: 3, is_new: false }));
    let next = table.place(RECKLESS, &["n7/0", "n8/0"], now);
    assert!(next.is_some_and(|next| next != chosen), "that one is gone");
    assert_eq!(table.place(NEIGHBOR, &["n7/0"], now), None);
}

#[test]
fn routers_confine_a_tenant_to_the_same_replica() {
    let ready = ["n4/0", "n5/0", "n6/0", "n7/0"];
    let chosen = |order: &[&str]| {
        let (mut table, now) = confined();
        table.place(RECKLESS, order, now)
    };
    let mut reversed = ready;
    reversed.reverse();
    assert_eq!(chosen(&ready), chosen(&reversed));
    let (mut table, now) = confined();
    assert_eq!(
        table.confine(request_of(RECKLESS, 1), Some("m"), &choices(&[]), now),
        Some(Confinement { replica: None, crashes: 3, is_new: false })
    );
}

#[test]
fn an_excused_crash_is_taken_off_its_tenant() {
    let (mut table, now) = confined();
    table.excuse_crash(&life("n2/0", 1), now, now + SECOND);
    assert!(!table.confines(RECKLESS, now + SECOND));
}
