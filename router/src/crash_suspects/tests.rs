use std::time::Duration;

use super::*;

mod excuses;
mod model;
mod tenants;
mod trials;

const KILLER: Fingerprint = 1;
const FELLOW: Fingerprint = 2;
const WINDOW: Duration = Duration::from_secs(600);
const SECOND: Duration = Duration::from_secs(1);
const STREAM: TrialEstimate = TrialEstimate { first_token: Duration::from_millis(100), is_stream: true, max_concurrent: 1 };
const PLAIN: TrialEstimate = TrialEstimate { is_stream: false, ..STREAM };
const FEW: TrialDemand = TrialDemand { waiting: 1, eligible: 2, waited: Duration::ZERO };

fn life(replica: &str, epoch: u64) -> EngineLife {
    EngineLife { replica: replica.into(), epoch }
}

/// A table, and a moment that earlier moments precede.
fn table() -> (SuspectTable, Instant) {
    let now = Instant::now() + Duration::from_secs(3600);
    (SuspectTable::new(WINDOW, now), now)
}

impl SuspectTable {
    /// Loses the engine to a request that was sent a second ago.
    fn lost(&mut self, fingerprint: Fingerprint, life: &EngineLife, now: Instant) -> Option<Ban> {
        self.blame(fingerprint, life, now - SECOND, now).ban
    }

    /// Begins a stream's trial, alone.
    fn tries(&mut self, fingerprint: Fingerprint, life: &EngineLife, now: Instant) -> Option<u64> {
        self.tries_beside(fingerprint, life, 1, now)
    }

    fn tries_beside(&mut self, fingerprint: Fingerprint, life: &EngineLife, max_concurrent: usize, now: Instant) -> Option<u64> {
        self.begin_trial(fingerprint, life, TrialEstimate { max_concurrent, ..STREAM }, now)
    }

    fn is_refused(&self, fingerprint: Fingerprint, now: Instant) -> bool {
        matches!(self.standing(fingerprint, now), SuspectStanding::Banned(_))
    }

    /// Whether the table remembers nothing but crashes.
    fn is_empty(&self) -> bool {
        let (records, trials, _) = self.lengths();
        (self.suspect_count(), records, trials) == (0, 0, 0)
    }

    /// The places where a request without a trial may not go.
    fn barred_now(&self, now: Instant) -> Vec<String> {
        let constraints = self.trial_constraints(0, FEW, now);
        constraints
            .closed_replicas
            .iter()
            .chain(constraints.crashed_engines.iter().map(|life| &life.replica))
            .map(|replica| replica.to_string())
            .collect()
    }
}

#[test]
fn one_crash_makes_a_suspect_and_two_a_ban() {
    let (mut table, now) = table();
    assert_eq!(table.standing(KILLER, now), SuspectStanding::Clear);
    assert_eq!(table.lost(KILLER, &life("n0/0", 1), now), None);
    assert_eq!((table.standing(KILLER, now), table.suspect_count()), (SuspectStanding::Suspect, 1));
    let later = now + SECOND * 3;
    let ban = table.lost(KILLER, &life("n3/0", 1), later).unwrap();
    assert_eq!(ban.crashes, [("n0/0".into(), SECOND * 3), ("n3/0".into(), Duration::ZERO)]);
    assert!(table.is_refused(KILLER, later));
    assert_eq!(table.standing(FELLOW, later), SuspectStanding::Clear);
    assert_eq!(table.lost(KILLER, &life("n4/0", 1), later), None, "it is said once");
}

#[test]
fn a_crash_reported_twice_counts_once() {
    let (mut table, now) = table();
    let first = life("n0/0", 7);
    table.lost(KILLER, &first, now);
    assert_eq!(table.record_reported_crash(&first, &[KILLER], now, now), []);
    assert_eq!(table.record_reported_crash(&first, &[KILLER], now, now + SECOND), []);
    assert_eq!(table.standing(KILLER, now), SuspectStanding::Suspect);
    let again = table.record_reported_crash(&life("n0/0", 8), &[KILLER], now, now + SECOND);
    assert_eq!(again.len(), 1, "the same replica's next engine is another one");
}

#[test]
fn a_loss_that_no_agent_reports_lapses() {
    let (mut table, now) = table();
    for (index, request) in [KILLER, FELLOW].into_iter().enumerate() {
        table.lost(request, &life(&format!("n{index}/0"), 1), now);
    }
    table.record_reported_crash(&life("n0/0", 1), &[KILLER], now, now + SECOND);
    let later = now + suspect_table::UNCONFIRMED_TTL;
    assert_eq!((table.standing(KILLER, later), table.standing(FELLOW, later)), (SuspectStanding::Suspect, SuspectStanding::Clear));
    table.sweep(later);
    assert_eq!(table.suspect_count(), 1);
    assert_eq!(table.standing(KILLER, now + WINDOW), SuspectStanding::Clear);
    table.sweep(now + WINDOW);
    assert_eq!(table.suspect_count(), 0);
}

#[test]
fn a_ban_ends_when_its_first_crash_expires() {
    let (mut table, now) = table();
    table.record_reported_crash(&life("n0/0", 1), &[KILLER], now - WINDOW / 2, now);
    let [(_, ban)] = &table.record_reported_crash(&life("n1/0", 1), &[KILLER], now, now)[..] else { panic!("no refusal") };
    assert_eq!(ban.remaining, WINDOW / 2);
    assert_eq!(table.standing(KILLER, now + WINDOW / 2), SuspectStanding::Suspect);
    table.record_reported_crash(&life("n2/0", 1), &[FELLOW], now - WINDOW, now);
    assert_eq!(table.standing(FELLOW, now), SuspectStanding::Clear, "a report of what is long past");
}

#[test]
fn a_complete_answer_clears_a_suspect_of_all_earlier_crashes() {
    let (mut table, now) = table();
    let first = life("n0/0", 1);
    table.lost(FELLOW, &first, now);
    assert!(table.acquit(FELLOW, now + SECOND));
    assert_eq!(table.suspect_count(), 0);
    table.record_reported_crash(&first, &[KILLER, FELLOW], now, now + SECOND * 2);
    assert_eq!(table.standing(FELLOW, now + SECOND * 2), SuspectStanding::Clear);
    assert_eq!((table.standing(KILLER, now + SECOND * 2), table.suspect_count()), (SuspectStanding::Suspect, 1));
    table.lost(FELLOW, &life("n1/0", 1), now + SECOND * 3);
    assert_eq!(table.standing(FELLOW, now + SECOND * 3), SuspectStanding::Suspect, "a later crash counts");
}

#[test]
fn only_a_lone_suspect_of_another_router_is_banned() {
    let (mut table, now) = table();
    table.record_reported_crash(&life("n0/0", 1), &[KILLER, FELLOW, 3], now, now);
    assert_eq!(table.record_reported_crash(&life("n1/0", 1), &[KILLER, FELLOW, 5], now, now), []);
    assert_eq!(table.record_reported_crash(&life("n2/0", 1), &[KILLER, 6], now, now).len(), 1);
    assert!(table.is_refused(KILLER, now) && !table.is_refused(FELLOW, now));
}

#[test]
fn an_agent_cannot_ban_requests_that_it_never_got() {
    let (mut table, now) = table();
    for epoch in 0..100 {
        for replica in ["n0/0", "n0/1"] {
            assert_eq!(table.record_reported_crash(&life(replica, epoch), &[FELLOW], now, now), []);
        }
    }
    assert_eq!(table.standing(FELLOW, now), SuspectStanding::Suspect);
    // Another node's word, or this router's own observation, is believed beside it.
    let (mut seen, mut reported) = (table, SuspectTable::new(WINDOW, now));
    reported.record_reported_crash(&life("n0/0", 1), &[FELLOW], now, now);
    assert_eq!(reported.record_reported_crash(&life("n1/0", 1), &[FELLOW], now, now).len(), 1);
    assert!(seen.lost(FELLOW, &life("n0/0", 100), now).is_some());
}

#[test]
fn invented_crashes_are_bounded_and_displace_no_real_ones() {
    let (mut table, now) = table();
    for epoch in 0..40_u32 {
        let from = u128::from(epoch) * 5000;
        let invented: Vec<Fingerprint> = (from..from + 5000).map(|one| one + 1000).collect();
        table.record_reported_crash(&life("n0/0", u64::from(epoch)), &invented, now, now);
    }
    for epoch in 0..2000 {
        table.record_reported_crash(&life("n0/1", epoch), &[1000], now, now);
    }
    assert_eq!(table.lengths(), (suspect_table::MAX_REPORTED_RECORDS, 0, suspect_table::MAX_CRASHES));
    table.lost(KILLER, &life("n1/0", 1), now);
    assert_eq!(table.standing(KILLER, now), SuspectStanding::Suspect);
    assert!(table.lost(KILLER, &life("n2/0", 1), now).is_some());
}

#[test]
fn a_request_answered_before_the_crash_is_no_suspect() {
    let (mut table, now) = table();
    let first = life("n0/0", 1);
    table.lost(FELLOW, &first, now);
    table.acquit(FELLOW, now + SECOND);
    let exited = now + SECOND * 5;
    table.record_reported_crash(&first, &[KILLER, FELLOW], exited, exited);
    assert_eq!((table.standing(FELLOW, exited), table.standing(KILLER, exited)), (SuspectStanding::Clear, SuspectStanding::Suspect));
    let later = exited + WINDOW - SECOND;
    table.sweep(later);
    table.record_reported_crash(&first, &[FELLOW], exited, later);
    assert_eq!((table.standing(FELLOW, later), table.suspect_count()), (SuspectStanding::Clear, 1));
    table.sweep(exited + WINDOW * 2);
    assert!(table.is_empty());
}

#[test]
fn a_request_sent_to_a_crashed_engine_is_not_blamed() {
    let (mut table, now) = table();
    let first = life("n0/0", 1);
    table.lost(KILLER, &first, now);
    assert_eq!(table.barred_now(now), ["n0/0"], "suspects do not go there, although it may still seem ready");
    table.blame(FELLOW, &first, now, now);
    assert_eq!(table.standing(FELLOW, now), SuspectStanding::Clear);
}

#[test]
fn only_equal_requests_share_a_fingerprint() {
    let of = |path, body: &str| fingerprint(7, path, body.as_bytes());
    assert_ne!(of("/v1/completions", "{}"), fingerprint(8, "/v1/completions", b"{}"), "another tenant's");
    assert_eq!(of("/v1/completions", "{}"), of("/v1/completions", "{}"));
    assert_ne!(of("/v1/completions", "{}"), of("/v1/chat/completions", "{}"));
    assert_ne!(of("/v1/completions", "{}"), of("/v1/completions", "{ }"));
    assert_eq!(of("/version", ""), None);
}

#[tokio::test(start_paused = true)]
async fn a_disabled_crash_record_blames_nobody() {
    let suspects = CrashSuspects::new(Duration::ZERO, EventLog::default());
    let crash = ReportedCrash { epoch: 1, age: Duration::ZERO, requests: vec![KILLER; 2] };
    suspects.record_reported_crash("n0/0", &crash);
    suspects.record_reported_crash("n1/0", &crash);
    assert_eq!(suspects.suspect_count(), 0);
    assert_eq!(suspects.watch(Some(KILLER)).clearance(), Ok(Clearance::Free));
}

#[tokio::test(start_paused = true)]
async fn a_banned_request_learns_why_and_for_how_long() {
    let suspects = CrashSuspects::new(WINDOW, EventLog::default());
    tokio::time::advance(SECOND * 10).await;
    for (replica, age, beside) in [("n0/0", SECOND * 9, FELLOW), ("n1/0", SECOND * 2, 3)] {
        suspects.record_reported_crash(replica, &ReportedCrash { epoch: 1, age, requests: vec![KILLER, beside] });
    }
    let refused = suspects.watch(Some(KILLER)).clearance().unwrap_err();
    assert_eq!(
        refused.to_string(),
        "this request is refused for another 591 s: it was in flight when 2 engines crashed (n0/0 9 s ago, n1/0 2 s ago). \
         It is known by its exact content; do not send it again unchanged"
    );
}

#[tokio::test(start_paused = true)]
async fn a_waiting_suspect_goes_when_the_other_has_finished() {
    let suspects = CrashSuspects::new(WINDOW, EventLog::default());
    let crash = ReportedCrash { epoch: 1, age: Duration::ZERO, requests: vec![KILLER, FELLOW] };
    suspects.record_reported_crash("n0/0", &crash);
    let mut first = suspects.watch(Some(KILLER));
    first.trial_id = suspects.table.lock().tries(KILLER, &life("n1/0", 1), Instant::now());
    let second = suspects.watch(Some(FELLOW));
    let is_barred = || second.trial_constraints(2, None).closed_replicas.iter().any(|replica| &**replica == "n1/0");
    assert!(is_barred());
    assert_eq!(suspects.watch(Some(KILLER)).clearance(), Ok(Clearance::Wait));
    let waiting = second.queue_for_trial().unwrap();
    let begun = Instant::now();
    tokio::join!(waiting.wait_for_change(), async { first.clear_suspicion() });
    assert_eq!((begun.elapsed(), is_barred()), (Duration::ZERO, false));
    drop(waiting);
    assert_eq!(suspects.queued_count.load(Ordering::Relaxed), 0);
    assert_eq!(suspects.watch(Some(KILLER)).clearance(), Ok(Clearance::Free));
}

#[tokio::test(start_paused = true)]
async fn an_excused_crash_frees_those_that_wait_for_trials() {
    let suspects = CrashSuspects::new(WINDOW, EventLog::default());
    let crash = ReportedCrash { epoch: 1, age: Duration::ZERO, requests: vec![KILLER, FELLOW] };
    suspects.record_reported_crash("n0/0", &crash);
    let fellow = suspects.watch(Some(FELLOW));
    assert_eq!(fellow.clearance(), Ok(Clearance::NeedsTrial));
    let (waiting, begun) = (fellow.queue_for_trial().unwrap(), Instant::now());
    let excused = ReportedCrash { requests: Vec::new(), ..crash };
    tokio::join!(waiting.wait_for_change(), async { suspects.record_reported_crash("n0/0", &excused) });
    assert_eq!((begun.elapsed(), fellow.clearance(), suspects.suspect_count()), (Duration::ZERO, Ok(Clearance::Free), 0));
}

#[tokio::test(start_paused = true)]
async fn a_stream_passes_its_trial_with_its_third_token_event() {
    let suspects = CrashSuspects::new(WINDOW, EventLog::default());
    let crash = ReportedCrash { epoch: 1, age: Duration::ZERO, requests: vec![KILLER, FELLOW] };
    suspects.record_reported_crash("n0/0", &crash);
    let mut first = suspects.watch(Some(KILLER));
    first.trial_id = suspects.table.lock().tries(KILLER, &life("n1/0", 1), Instant::now());
    let mut progress = first.trial_progress(b"\n\n").unwrap();
    let second = suspects.watch(Some(FELLOW));
    for (piece, is_over) in [(&b": keep-alive\n\n: keep-alive\n\n"[..], false), (b"data: 1\n\ndata: 2\n\nda", false), (b"ta: 3\n\n", true)]
    {
        assert_eq!(progress.observe_chunk(piece), is_over);
        assert_eq!(second.trial_constraints(2, None).closed_replicas.is_empty(), is_over);
    }
}

#[tokio::test(start_paused = true)]
async fn a_leaving_client_frees_its_trial_only_once_answered() {
    let suspects = CrashSuspects::new(WINDOW, EventLog::default());
    let crash = ReportedCrash { epoch: 1, age: Duration::ZERO, requests: vec![KILLER, FELLOW] };
    suspects.record_reported_crash("n0/0", &crash);
    for answered in [true, false] {
        let mut first = suspects.watch(Some(KILLER));
        first.trial_id = suspects.table.lock().tries(KILLER, &life("n1/0", 1), Instant::now());
        if answered {
            first.mark_answered();
        }
        drop(first);
        assert_eq!(suspects.watch(Some(FELLOW)).trial_constraints(2, None).closed_replicas.is_empty(), answered);
    }
}
