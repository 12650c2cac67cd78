use std::time::Duration;

use super::table::{Fingerprint, Life, Standing, Table};
use super::*;

const KILLER: Fingerprint = 1;
const FELLOW: Fingerprint = 2;
const WINDOW: Duration = Duration::from_secs(600);
const SECOND: Duration = Duration::from_secs(1);

fn life(replica: &str, epoch: u64) -> Life {
    Life { replica: replica.into(), epoch }
}

/// A table, and a moment of which there were others before.
fn table() -> (Table, Instant) {
    let now = Instant::now() + Duration::from_secs(3600);
    (Table::new(WINDOW, now), now)
}

impl Table {
    /// The engine is lost to a request that was sent a second ago.
    fn lost(&mut self, fingerprint: Fingerprint, life: &Life, now: Instant) -> Option<Sentence> {
        self.blame(fingerprint, life, now - SECOND, now)
    }

    fn is_refused(&self, fingerprint: Fingerprint, now: Instant) -> bool {
        matches!(self.standing(fingerprint, now), Standing::Refused(_))
    }

    /// Whether it remembers nothing but who has died.
    fn is_empty(&self) -> bool {
        self.suspects() == 0 && self.lengths() == (0, 0)
    }

    fn barred_now(&self, now: Instant) -> Vec<String> {
        self.barred(now).map(|barred| barred.replica.to_string()).collect()
    }
}

#[test]
fn one_death_makes_a_suspect_and_the_second_a_refusal_that_names_both() {
    let (mut table, now) = table();
    assert_eq!(table.standing(KILLER, now), Standing::Clear);
    assert_eq!(table.lost(KILLER, &life("n0/0", 1), now), None);
    assert_eq!((table.standing(KILLER, now), table.suspects()), (Standing::Suspect, 1));
    let later = now + SECOND * 3;
    let sentence = table.lost(KILLER, &life("n3/0", 1), later).unwrap();
    assert_eq!(sentence.deaths, [("n0/0".into(), SECOND * 3), ("n3/0".into(), Duration::ZERO)]);
    assert!(table.is_refused(KILLER, later));
    assert_eq!(table.standing(FELLOW, later), Standing::Clear);
    assert_eq!(table.lost(KILLER, &life("n4/0", 1), later), None, "it is said once");
}

#[test]
fn a_death_that_is_known_twice_counts_once() {
    let (mut table, now) = table();
    let first = life("n0/0", 7);
    table.lost(KILLER, &first, now);
    assert_eq!(table.reported(&first, &[KILLER], now, now), []);
    assert_eq!(table.reported(&first, &[KILLER], now, now + SECOND), []);
    assert_eq!(table.standing(KILLER, now), Standing::Suspect);
    let again = table.reported(&life("n0/0", 8), &[KILLER], now, now + SECOND);
    assert_eq!(again.len(), 1, "the same replica's next engine is another one");
}

#[test]
fn what_the_router_alone_has_seen_lapses_unless_the_agent_reports_it() {
    let (mut table, now) = table();
    for (index, request) in [KILLER, FELLOW].into_iter().enumerate() {
        table.lost(request, &life(&format!("n{index}/0"), 1), now);
    }
    table.reported(&life("n0/0", 1), &[KILLER], now, now + SECOND);
    let later = now + table::UNCONFIRMED;
    assert_eq!((table.standing(KILLER, later), table.standing(FELLOW, later)), (Standing::Suspect, Standing::Clear));
    table.sweep(later);
    assert_eq!(table.suspects(), 1);
    assert_eq!(table.standing(KILLER, now + WINDOW), Standing::Clear);
    table.sweep(now + WINDOW);
    assert_eq!(table.suspects(), 0);
}

#[test]
fn a_refusal_ends_when_the_first_of_two_deaths_is_too_long_ago() {
    let (mut table, now) = table();
    table.reported(&life("n0/0", 1), &[KILLER], now - WINDOW / 2, now);
    let [(_, sentence)] = &table.reported(&life("n1/0", 1), &[KILLER], now, now)[..] else { panic!("no refusal") };
    assert_eq!(sentence.remaining, WINDOW / 2);
    assert_eq!(table.standing(KILLER, now + WINDOW / 2), Standing::Suspect);
    table.reported(&life("n2/0", 1), &[FELLOW], now - WINDOW, now);
    assert_eq!(table.standing(FELLOW, now), Standing::Clear, "a report of what is long past");
}

#[test]
fn a_good_answer_clears_a_suspect_of_every_death_before_it_even_of_one_that_is_told_later() {
    let (mut table, now) = table();
    let first = life("n0/0", 1);
    table.lost(FELLOW, &first, now);
    assert!(table.clear(FELLOW, now + SECOND));
    assert_eq!(table.suspects(), 0);
    table.reported(&first, &[KILLER, FELLOW], now, now + SECOND * 2);
    assert_eq!(table.standing(FELLOW, now + SECOND * 2), Standing::Clear);
    assert_eq!((table.standing(KILLER, now + SECOND * 2), table.suspects()), (Standing::Suspect, 1));
    table.lost(FELLOW, &life("n1/0", 1), now + SECOND * 3);
    assert_eq!(table.standing(FELLOW, now + SECOND * 3), Standing::Suspect, "a later death counts");
}

#[test]
fn two_suspects_are_never_tried_on_one_replica_nor_one_on_two() {
    let (mut table, now) = table();
    let seat = table.sit(KILLER, &life("n1/0", 1), 7.0, now).unwrap();
    assert_eq!(table.barred_now(now), ["n1/0"]);
    assert_eq!(table.sit(FELLOW, &life("n1/0", 1), 7.0, now), None);
    assert!(table.sit(FELLOW, &life("n2/0", 1), 7.0, now).is_some());
    assert_eq!(table.sit(KILLER, &life("n3/0", 1), 7.0, now), None);
    table.rise(seat);
    assert_eq!(table.barred_now(now), ["n2/0"]);
}

#[test]
fn the_more_suspects_wait_the_sooner_the_next_one_may_follow() {
    let (mut table, now) = table();
    table.sit(1, &life("few", 1), 7.0, now);
    table.sit(2, &life("many", 1), 0.1, now);
    table.sit(3, &life("hundreds", 1), 0.001, now);
    assert_eq!(table.barred_now(now + SECOND), ["few", "many"]);
    assert_eq!(table.barred_now(now + SECOND * 6), ["few"]);
    assert!(table.barred_now(now + SECOND * 30).is_empty());
}

#[test]
fn one_that_runs_on_beside_the_next_trial_is_not_refused_for_its_outcome() {
    for reported_first in [false, true] {
        let (mut table, now) = table();
        let (first, second) = (life("n0/0", 1), life("n1/0", 1));
        table.reported(&first, &[KILLER, FELLOW], now, now);
        table.sit(FELLOW, &second, 0.0, now).unwrap();
        let now = now + SECOND;
        let seat = table.sit(KILLER, &second, 0.0, now).unwrap();
        if reported_first {
            table.reported(&second, &[3, FELLOW, KILLER], now, now);
        }
        table.lost(FELLOW, &second, now);
        table.lost(KILLER, &second, now);
        table.rise(seat);
        table.lost(3, &second, now);
        table.reported(&second, &[3, FELLOW, KILLER], now, now + SECOND);
        assert!(table.is_refused(KILLER, now));
        assert_eq!(table.standing(FELLOW, now), Standing::Suspect);
        assert_eq!(table.standing(3, now), Standing::Suspect, "who had nothing to its name has one death now");
        // It is spared once.
        table.lost(FELLOW, &life("n2/0", 1), now);
        assert!(table.is_refused(FELLOW, now));
    }
}

#[test]
fn one_that_was_spared_stays_so_when_the_death_is_told_again_much_later() {
    let (mut table, now) = table();
    let (first, second) = (life("n0/0", 1), life("n1/0", 1));
    table.reported(&first, &[KILLER, FELLOW], now, now);
    table.sit(FELLOW, &second, 0.0, now).unwrap();
    let now = now + SECOND;
    table.sit(KILLER, &second, 0.0, now).unwrap();
    table.reported(&second, &[KILLER, FELLOW], now, now);
    // A session that begins anew tells all deaths of the last ten minutes.
    let later = now + WINDOW / 2;
    table.sweep(later);
    table.reported(&second, &[KILLER, FELLOW], now, later);
    assert!(table.is_refused(KILLER, later));
    assert_eq!(table.standing(FELLOW, later), Standing::Suspect);
}

#[test]
fn one_that_was_answered_before_its_engine_had_quite_died_is_no_suspect_afterwards() {
    let (mut table, now) = table();
    let first = life("n0/0", 1);
    table.lost(FELLOW, &first, now);
    table.clear(FELLOW, now + SECOND);
    let exited = now + SECOND * 5;
    table.reported(&first, &[KILLER, FELLOW], exited, exited);
    assert_eq!((table.standing(FELLOW, exited), table.standing(KILLER, exited)), (Standing::Clear, Standing::Suspect));
    let later = exited + WINDOW - SECOND;
    table.sweep(later);
    table.reported(&first, &[FELLOW], exited, later);
    assert_eq!((table.standing(FELLOW, later), table.suspects()), (Standing::Clear, 1));
    table.sweep(exited + WINDOW * 2);
    assert!(table.is_empty());
}

#[test]
fn a_trial_that_was_given_up_unanswered_keeps_its_place_until_a_hang_would_be_known() {
    let (mut table, now) = table();
    let seat = table.sit(KILLER, &life("n1/0", 1), 7.0, now).unwrap();
    table.give_up(seat, now);
    let before = now + SECOND * 14;
    table.sweep(before);
    assert_eq!(table.barred_now(before), ["n1/0"]);
    assert!(table.is_tried(KILLER, before), "nor does the same request hang another one meanwhile");
    let after = now + SECOND * 15;
    assert!(table.barred_now(after).is_empty() && !table.is_tried(KILLER, after));
    table.sweep(after);
    assert!(table.is_empty());
}

#[test]
fn the_same_request_waits_for_a_trial_that_lasts_no_longer_than_the_longest() {
    let (mut table, now) = table();
    table.sit(KILLER, &life("n1/0", 1), 0.0, now).unwrap();
    assert_eq!(table.sit(KILLER, &life("n2/0", 1), 7.0, now + SECOND * 29), None, "others may follow sooner, it may not");
    assert!(table.sit(KILLER, &life("n2/0", 1), 7.0, now + SECOND * 30).is_some());
}

#[test]
fn a_request_that_comes_to_a_dead_engine_has_not_killed_it() {
    let (mut table, now) = table();
    let first = life("n0/0", 1);
    table.lost(KILLER, &first, now);
    assert_eq!(table.barred_now(now), ["n0/0"], "suspects do not go there, although it may still seem ready");
    table.blame(FELLOW, &first, now, now);
    assert_eq!(table.standing(FELLOW, now), Standing::Clear);
}

#[test]
fn equal_requests_have_one_fingerprint_and_others_have_another() {
    let of = |path, body: &str| fingerprint(path, body.as_bytes());
    assert_eq!(of("/v1/completions", "{}"), of("/v1/completions", "{}"));
    assert_ne!(of("/v1/completions", "{}"), of("/v1/chat/completions", "{}"));
    assert_ne!(of("/v1/completions", "{}"), of("/v1/completions", "{ }"));
    assert_eq!(of("/version", ""), None);
    let known = of("/v1/completions", "{}").unwrap();
    assert_eq!(u128::from(wire::Fingerprint::from(known)), known);
}

#[tokio::test(start_paused = true)]
async fn a_record_that_keeps_nothing_blames_nobody() {
    let poison = Poison::new(Duration::ZERO);
    let death = wire::Death { epoch: 1, age_ms: 0, requests: vec![KILLER.into(); 2] };
    poison.reported("n0/0", &death);
    poison.reported("n1/0", &death);
    assert_eq!(poison.suspects(), 0);
    assert!(matches!(poison.watch(Some(KILLER)).leave(), Ok(Leave::Free)));
}

#[tokio::test(start_paused = true)]
async fn a_refused_request_is_told_why_and_for_how_long() {
    let poison = Poison::new(WINDOW);
    tokio::time::advance(SECOND * 10).await;
    for (replica, age_ms) in [("n0/0", 9000), ("n1/0", 2000)] {
        poison.reported(replica, &wire::Death { epoch: 1, age_ms, requests: vec![KILLER.into(), FELLOW.into()] });
    }
    let refused = poison.watch(Some(KILLER)).leave().unwrap_err();
    assert_eq!(
        refused.to_string(),
        "this request is refused for another 591 s: it was in flight when 2 engines died (n0/0 9 s ago, n1/0 2 s ago). \
         It is known by its exact content; do not send it again unchanged"
    );
}

#[tokio::test(start_paused = true)]
async fn a_suspect_that_waits_goes_as_soon_as_the_other_is_done() {
    let poison = Poison::new(WINDOW);
    let death = wire::Death { epoch: 1, age_ms: 0, requests: vec![KILLER.into(), FELLOW.into()] };
    poison.reported("n0/0", &death);
    let mut first = poison.watch(Some(KILLER));
    first.seat = poison.table.lock().sit(KILLER, &life("n1/0", 1), 1.0, Instant::now());
    let second = poison.watch(Some(FELLOW));
    let is_barred = |leave| matches!(leave, Ok(Leave::Alone(barred)) if barred.iter().any(|barred| &*barred.replica == "n1/0"));
    assert!(is_barred(second.leave()));
    assert!(matches!(poison.watch(Some(KILLER)).leave(), Ok(Leave::Later)));
    let waiting = second.queue().unwrap();
    let begun = Instant::now();
    tokio::join!(waiting.moment(), async { first.survived() });
    assert_eq!((begun.elapsed(), is_barred(second.leave())), (Duration::ZERO, false));
    drop(waiting);
    assert_eq!(poison.waiting.load(Ordering::Relaxed), 0);
    assert!(matches!(poison.watch(Some(KILLER)).leave(), Ok(Leave::Free)));
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_frees_the_place_at_once_only_when_the_engine_had_answered() {
    let poison = Poison::new(WINDOW);
    let death = wire::Death { epoch: 1, age_ms: 0, requests: vec![KILLER.into(), FELLOW.into()] };
    poison.reported("n0/0", &death);
    for answered in [true, false] {
        let mut first = poison.watch(Some(KILLER));
        first.seat = poison.table.lock().sit(KILLER, &life("n1/0", 1), 1.0, Instant::now());
        if answered {
            first.answered();
        }
        drop(first);
        let Ok(Leave::Alone(barred)) = poison.watch(Some(FELLOW)).leave() else { panic!("no leave") };
        assert_eq!(barred.iter().any(|barred| &*barred.replica == "n1/0"), !answered);
    }
}
