//! Crashes for which an agent says that no request is to blame.

use super::*;

#[test]
fn an_excused_crash_clears_those_that_were_there() {
    let (mut table, now) = table();
    let engine = life("n0/0", 1);
    table.lost(KILLER, &engine, now);
    table.lost(FELLOW, &life("n1/0", 1), now);
    let told_at = now + SECOND;
    table.excuse_crash(&engine, now, told_at);
    assert_eq!((table.standing(KILLER, told_at), table.suspect_count()), (SuspectStanding::Clear, 1));
    assert_eq!(table.barred_now(told_at).len(), 2, "a suspect of the other crash does not go there either");
}

#[test]
fn whoever_notices_an_excused_crash_later_may_try_again() {
    let (mut table, now) = table();
    let engine = life("n0/0", 1);
    table.excuse_crash(&engine, now, now);
    let outcome = table.blame(FELLOW, &engine, now - SECOND, now + SECOND);
    assert_eq!((outcome.ban, outcome.is_excused), (None, true));
    assert_eq!(table.record_reported_crash(&engine, &[FELLOW], now, now + SECOND), []);
    assert_eq!(table.standing(FELLOW, now + SECOND), SuspectStanding::Clear);
}

#[test]
fn an_excuse_lifts_a_ban() {
    let (mut table, now) = table();
    table.lost(KILLER, &life("n0/0", 1), now);
    assert!(table.lost(KILLER, &life("n1/0", 1), now).is_some());
    table.excuse_crash(&life("n0/0", 1), now, now);
    assert_eq!(table.standing(KILLER, now), SuspectStanding::Suspect);
}
