//! Tests who may be on trial where and for how long, and what a crash means for suspects on trial.

use super::*;

#[test]
fn a_replica_tries_one_suspect_and_a_suspect_one_replica() {
    let (mut table, now) = table();
    let trial = table.tries(KILLER, &life("n1/0", 1), now).unwrap();
    assert_eq!(table.barred_now(now), ["n1/0"]);
    assert_eq!(table.tries(FELLOW, &life("n1/0", 1), now), None);
    assert!(table.tries(FELLOW, &life("n2/0", 1), now).is_some());
    assert_eq!(table.tries(KILLER, &life("n3/0", 1), now), None);
    table.trials().end(trial, KILLER, false, now);
    assert_eq!(table.barred_now(now), ["n2/0"]);
}

#[test]
fn more_and_longer_waiting_suspects_are_tried_together() {
    let (mut table, now) = table();
    let together = |table: &mut SuspectTable, waiting, waited| table.trials().max_concurrent(TrialDemand { waiting, eligible: 2, waited });
    assert_eq!(together(&mut table, 4000, SECOND), 1, "before anything is known of how long a trial lasts");
    let trial = table.tries(1, &life("n1/0", 1), now).unwrap();
    table.trials().pass(trial, now + SECOND / 2);
    // Trials of 0.2 s: two engines try 2 in each of 16 rounds.
    for (waiting, expected) in [(1, 1), (32, 1), (33, 2), (64, 2), (65, 3), (4000, 8)] {
        assert_eq!(together(&mut table, waiting, Duration::ZERO), expected, "{waiting}");
    }
    assert_eq!((together(&mut table, 32, SECOND * 2), together(&mut table, 2, SECOND * 3)), (3, 8));
}

#[test]
fn a_trial_ends_with_first_tokens_and_frees_its_replica() {
    let (mut table, now) = table();
    let engine = life("n1/0", 1);
    let trial = table.tries(KILLER, &engine, now).unwrap();
    assert!(table.trials().pass(trial, now) && !table.trials().pass(trial, now));
    assert_eq!(table.standing(FELLOW, now), SuspectStanding::Clear);
    assert!(table.barred_now(now).is_empty());
    assert!(table.tries(FELLOW, &engine, now).is_some());
    assert_eq!(
        table.trial_constraints(3, FEW, now).occupied_replicas,
        [engine.replica],
        "where there are others, it is not the first choice"
    );
}

#[test]
fn a_plain_answers_trial_lasts_twice_its_predicted_time() {
    let (mut table, now) = table();
    table.begin_trial(KILLER, &life("n1/0", 1), PLAIN, now).unwrap();
    assert_eq!(table.barred_now(now + Duration::from_millis(1199)), ["n1/0"]);
    assert!(table.barred_now(now + Duration::from_millis(1200)).is_empty());
    let trial = table.tries(FELLOW, &life("n2/0", 1), now).unwrap();
    table.trials().mark_answered(trial, now + SECOND * 5);
    assert_eq!(table.barred_now(now + SECOND * 5), ["n2/0"]);
    assert!(table.barred_now(now + SECOND * 6).is_empty(), "its client may read nothing");
}

#[test]
fn an_overdue_trial_admits_no_further_suspects() {
    let (mut table, now) = table();
    table.tries_beside(KILLER, &life("n1/0", 1), 8, now).unwrap();
    let closed = |table: &SuspectTable, at| {
        table.trial_constraints(FELLOW, TrialDemand { waiting: 9, eligible: 1, waited: SECOND * 9 }, at).closed_replicas
    };
    assert!(closed(&table, now + SECOND).is_empty());
    assert_eq!(closed(&table, now + SECOND * 2), ["n1/0".into()]);
}

#[test]
fn a_crash_halves_the_group_of_suspects_tried_together() {
    for reported_first in [false, true] {
        let (mut table, mut now) = table();
        let all: Vec<Fingerprint> = (1..=8).collect();
        table.record_reported_crash(&life("n0/0", 1), &all, now, now);
        for (epoch, group) in [(2, 8_usize), (3, 4), (4, 2)] {
            let engine = life("n1/0", epoch);
            now += SECOND;
            let trials: Vec<u64> = all[..group].iter().map(|one| table.tries_beside(*one, &engine, 8, now).unwrap()).collect();
            let more = table.tries_beside(100, &engine, 8, now);
            assert_eq!(more, None, "not even one that may be tried among more");
            if reported_first {
                assert_eq!(table.record_reported_crash(&engine, &all[..group], now, now), []);
            }
            for (one, trial) in all.iter().zip(trials) {
                assert!(table.blame(*one, &engine, now - SECOND, now).is_excused);
                table.trials().end(trial, *one, false, now);
            }
            assert_eq!(table.record_reported_crash(&engine, &all[..group], now, now), []);
        }
        let engine = life("n1/0", 5);
        table.tries_beside(KILLER, &engine, 8, now).unwrap();
        assert_eq!(table.tries_beside(FELLOW, &engine, 8, now), None);
        assert!(table.lost(KILLER, &engine, now).is_some());
        assert!(all[1..].iter().all(|one| table.standing(*one, now) == SuspectStanding::Suspect));
    }
}

#[test]
fn a_suspect_that_passed_is_not_blamed_for_later_trials() {
    for reported_first in [false, true] {
        let (mut table, now) = table();
        let (first, second) = (life("n0/0", 1), life("n1/0", 1));
        table.record_reported_crash(&first, &[KILLER, FELLOW], now, now);
        let fellow = table.tries(FELLOW, &second, now).unwrap();
        table.trials().pass(fellow, now);
        let now = now + SECOND;
        let trial = table.tries(KILLER, &second, now).unwrap();
        if reported_first {
            table.record_reported_crash(&second, &[3, FELLOW, KILLER], now, now);
        }
        table.lost(FELLOW, &second, now);
        table.lost(KILLER, &second, now);
        table.trials().end(trial, KILLER, false, now);
        table.lost(3, &second, now);
        table.record_reported_crash(&second, &[3, FELLOW, KILLER], now, now + SECOND);
        assert!(table.is_refused(KILLER, now));
        assert_eq!(table.standing(FELLOW, now), SuspectStanding::Suspect);
        assert_eq!(table.standing(3, now), SuspectStanding::Suspect, "who had nothing to its name has one crash now");
        // The crash counts if nobody else was on trial.
        table.lost(FELLOW, &life("n2/0", 1), now);
        assert!(table.is_refused(FELLOW, now));
    }
}

#[test]
fn a_twice_spared_suspect_is_tried_alone_to_the_end() {
    let (mut table, now) = table();
    table.record_reported_crash(&life("n0/0", 1), &[KILLER, FELLOW, 3], now, now);
    for (replica, other) in [("n1/0", FELLOW), ("n2/0", 3)] {
        let engine = life(replica, 1);
        let trial = table.tries(KILLER, &engine, now).unwrap();
        assert!(table.trials().pass(trial, now), "it kills late");
        table.tries(other, &engine, now).unwrap();
        assert!(table.blame(KILLER, &engine, now - SECOND, now).is_excused);
        table.trials().end(trial, KILLER, false, now);
    }
    let engine = life("n3/0", 1);
    let trial = table.tries(KILLER, &engine, now).unwrap();
    table.trials().mark_answered(trial, now);
    assert!(!table.trials().pass(trial, now));
    let later = now + SECOND * 9;
    assert_eq!(table.tries_beside(4, &engine, 8, later), None);
    assert!(table.lost(KILLER, &engine, later).is_some());
}

#[test]
fn suspects_that_passed_and_die_together_are_not_banned() {
    let (mut table, now) = table();
    let all: Vec<Fingerprint> = (1..=20).collect();
    let engine = life("n1/0", 1);
    table.record_reported_crash(&life("n0/0", 1), &all, now, now);
    for one in &all {
        let trial = table.tries(*one, &engine, now).unwrap();
        table.trials().pass(trial, now);
    }
    assert_eq!(table.record_reported_crash(&engine, &all, now, now), []);
    assert!(all.iter().all(|one| table.standing(*one, now) == SuspectStanding::Suspect));
}

#[test]
fn a_spared_suspect_stays_spared_when_its_crash_is_repeated() {
    let (mut table, now) = table();
    let (first, second) = (life("n0/0", 1), life("n1/0", 1));
    table.record_reported_crash(&first, &[KILLER, FELLOW], now, now);
    let fellow = table.tries(FELLOW, &second, now).unwrap();
    table.trials().pass(fellow, now);
    let now = now + SECOND;
    table.tries(KILLER, &second, now).unwrap();
    table.record_reported_crash(&second, &[KILLER, FELLOW], now, now);
    // A session that begins anew reports all crashes of the last ten minutes.
    let later = now + WINDOW / 2;
    table.sweep(later);
    table.record_reported_crash(&second, &[KILLER, FELLOW], now, later);
    assert!(table.is_refused(KILLER, later));
    assert_eq!(table.standing(FELLOW, later), SuspectStanding::Suspect);
}

#[test]
fn an_abandoned_trial_keeps_its_replica_until_a_hang_shows() {
    let (mut table, now) = table();
    let trial = table.tries(KILLER, &life("n1/0", 1), now).unwrap();
    table.trials().abandon(trial, KILLER, now);
    let before = now + SECOND * 14;
    table.sweep(before);
    assert_eq!(table.barred_now(before), ["n1/0"]);
    assert!(table.is_on_trial(KILLER, before), "nor does the same request hang another one meanwhile");
    let after = now + SECOND * 15;
    assert!(table.barred_now(after).is_empty() && !table.is_on_trial(KILLER, after));
    table.sweep(after);
    assert!(table.is_empty());
}

#[test]
fn a_copy_waits_for_a_trial_up_to_its_limit() {
    let (mut table, now) = table();
    table.tries(KILLER, &life("n1/0", 1), now).unwrap();
    assert_eq!(table.tries(KILLER, &life("n2/0", 1), now + SECOND * 29), None);
    assert!(table.tries(KILLER, &life("n2/0", 1), now + SECOND * 30).is_some());
}

#[test]
fn a_copy_of_a_passed_suspect_follows_it_without_waiting() {
    let (mut table, now) = table();
    let (engine, other) = (life("n1/0", 1), life("n2/0", 1));
    let trial = table.tries(KILLER, &engine, now).unwrap();
    assert!(table.is_on_trial(KILLER, now));
    table.trials().pass(trial, now);
    assert!(!table.is_on_trial(KILLER, now));
    assert_eq!(table.trial_constraints(KILLER, FEW, now).required_engine, Some(engine.clone()));
    assert_eq!(table.tries(KILLER, &other, now), None, "one that kills late would kill two at once");
    let copy = table.tries(KILLER, &engine, now).unwrap();
    assert!(table.barred_now(now).is_empty(), "what has passed there needs no further trial");
    for trial in [trial, copy] {
        table.trials().end(trial, KILLER, true, now);
    }
    assert!(table.tries(KILLER, &other, now).is_some());
}
