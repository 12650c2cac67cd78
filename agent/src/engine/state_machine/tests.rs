//! Tables for the paths that matter, and random event sequences for the promises that hold on every
//! path.

use std::time::Duration;

use proptest::prelude::*;
use tokio::time::Instant;

use super::*;

fn limits() -> PhaseTimeouts {
    PhaseTimeouts {
        startup: Duration::from_secs(60),
        drain: Duration::from_secs(30),
        grace: Duration::from_secs(10),
        max_backoff: MAX_BACKOFF,
    }
}

/// An agent that leaves without haste.
fn retire(now: Instant) -> EngineEvent {
    EngineEvent::Retire(LeaveDeadlines { drained_by: now + limits().drain, stop: limits().grace })
}

/// A machine in the state where the test begins.
fn machine_after(events: &[EngineEvent], now: Instant) -> EngineStateMachine {
    let mut machine = EngineStateMachine::new(limits(), false);
    for event in events {
        machine.handle(*event, now);
    }
    machine
}

const READY: &[EngineEvent] = &[EngineEvent::Start, EngineEvent::MayStart, EngineEvent::Loading, EngineEvent::Ready];

/// Ready again after one crash.
const RECOVERED: &[EngineEvent] = &[
    EngineEvent::Start,
    EngineEvent::MayStart,
    EngineEvent::Exited,
    EngineEvent::GroupEmpty,
    EngineEvent::Restart,
    EngineEvent::MayStart,
    EngineEvent::Ready,
];

/// Crashed, with nothing left.
const CRASHED: &[EngineEvent] = &[EngineEvent::Start, EngineEvent::MayStart, EngineEvent::Exited, EngineEvent::GroupEmpty];

#[test]
fn a_start_passes_through_loading_to_ready() {
    let now = Instant::now();
    let mut machine = EngineStateMachine::new(limits(), false);
    assert_eq!(machine.handle(EngineEvent::Start, now), [SupervisorAction::RequestStart]);
    assert_eq!((machine.state(), machine.next_deadline()), (EngineState::Waiting, None));
    assert_eq!(machine.handle(EngineEvent::MayStart, now), [SupervisorAction::Spawn]);
    assert_eq!(machine.state(), EngineState::Alive(LiveStage::Starting));
    assert_eq!(machine.handle(EngineEvent::Loading, now), []);
    assert_eq!(machine.state(), EngineState::Alive(LiveStage::Loading));
    assert_eq!(machine.handle(EngineEvent::Ready, now), []);
    assert_eq!(machine.state(), EngineState::Alive(LiveStage::Ready));
    assert_eq!(machine.next_deadline(), None);
}

#[test]
fn an_engine_knows_how_long_it_is_down() {
    let now = Instant::now();
    let table: [(&[EngineEvent], Option<Duration>); 7] = [
        (&[], None),
        (&[EngineEvent::Exited], Some(INITIAL_BACKOFF)),
        (&[EngineEvent::Exited, EngineEvent::GroupEmpty], Some(INITIAL_BACKOFF)),
        (&[EngineEvent::Restart], Some(limits().drain)),
        (&[EngineEvent::Drain], None),
        (&[EngineEvent::QuarantineNow], None),
        (&[EngineEvent::Exited, retire(now)], None),
    ];
    for (events, expected) in table {
        let machine = machine_after(&[READY, events].concat(), now);
        assert_eq!(machine.time_until_next_start(now), expected, "{events:?}");
    }
}

#[test]
fn an_unexpected_exit_kills_the_group_and_backs_off() {
    let now = Instant::now();
    let mut machine = machine_after(READY, now);
    assert_eq!(machine.handle(EngineEvent::Exited, now), [SupervisorAction::ReportCrash, SupervisorAction::KillGroup]);
    assert_eq!(machine.state(), EngineState::Killing { then: AfterExit::BackOff });
    assert_eq!(machine.handle(EngineEvent::Tick, now + MAX_BACKOFF), []);
    machine.handle(EngineEvent::GroupEmpty, now);
    assert_eq!(machine.next_deadline(), Some(now + Duration::from_secs(1)));
    assert_eq!(machine.handle(EngineEvent::Tick, now + Duration::from_secs(1)), [SupervisorAction::RequestStart]);
}

#[test]
fn an_engine_not_ready_in_time_counts_as_crashed() {
    let now = Instant::now();
    let mut machine = machine_after(&[EngineEvent::Start, EngineEvent::MayStart, EngineEvent::Loading], now);
    assert_eq!(machine.handle(EngineEvent::Tick, now + Duration::from_secs(59)), []);
    assert_eq!(
        machine.handle(EngineEvent::Tick, now + Duration::from_secs(60)),
        [SupervisorAction::ReportCrash, SupervisorAction::KillGroup]
    );
}

#[test]
fn suspended_time_does_not_count_against_a_start() {
    let now = Instant::now();
    let mut machine = machine_after(&[EngineEvent::Start, EngineEvent::MayStart, EngineEvent::Loading], now);
    machine.postpone_readiness(Duration::from_secs(3600));
    assert_eq!(machine.next_deadline(), Some(now + Duration::from_secs(3660)));
    assert_eq!(machine.handle(EngineEvent::Tick, now + Duration::from_secs(3659)), []);
    let mut ready = machine_after(READY, now);
    ready.postpone_readiness(Duration::from_secs(3600));
    assert_eq!(ready.next_deadline(), None);
}

#[test]
fn the_backoff_doubles_up_to_five_minutes() {
    let mut machine = machine_after(READY, Instant::now());
    let mut backoff = |crashes| {
        machine.crashes = crashes;
        machine.backoff()
    };
    let seconds: Vec<u64> = (1..=11).map(|crashes| backoff(crashes).as_secs()).collect();
    assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
    assert_eq!(backoff(u32::MAX), MAX_BACKOFF);
}

#[test]
fn ten_minutes_of_health_forgive_earlier_crashes() {
    let now = Instant::now();
    for (healthy, pause) in [(599, 2), (600, 1)] {
        let mut machine = machine_after(RECOVERED, now);
        let later = now + Duration::from_secs(healthy);
        machine.handle(EngineEvent::Exited, later);
        machine.handle(EngineEvent::GroupEmpty, later);
        assert_eq!(machine.next_deadline(), Some(later + Duration::from_secs(pause)));
    }
}

#[test]
fn a_healthy_life_ended_on_request_forgives_crashes_once() {
    let now = Instant::now();
    let mut machine = machine_after(RECOVERED, now);
    let later = now + RECOVERED_AFTER;
    for event in [EngineEvent::Restart, EngineEvent::Idle, EngineEvent::Exited, EngineEvent::GroupEmpty, EngineEvent::MayStart] {
        machine.handle(event, later);
    }
    for pause in [1, 2] {
        machine.handle(EngineEvent::Exited, later);
        machine.handle(EngineEvent::GroupEmpty, later);
        assert_eq!(machine.next_deadline(), Some(later + Duration::from_secs(pause)));
        machine.handle(EngineEvent::Restart, later);
        machine.handle(EngineEvent::MayStart, later);
    }
}

#[test]
fn a_retired_engine_finishes_its_requests_and_never_restarts() {
    let now = Instant::now();
    let mut machine = machine_after(READY, now);
    assert_eq!(machine.handle(retire(now), now), []);
    assert!(matches!(machine.state(), EngineState::Draining(_)));
    for event in
        [EngineEvent::Restart, EngineEvent::Idle, EngineEvent::Restart, EngineEvent::Exited, EngineEvent::Restart, EngineEvent::GroupEmpty]
    {
        machine.handle(event, now);
    }
    assert!(machine.is_finished());
    assert_eq!(machine.handle(EngineEvent::Restart, now), []);
}

#[test]
fn a_hurried_agent_shortens_drains_and_stops_but_lengthens_none() {
    let now = Instant::now();
    let second = Duration::from_secs(1);
    let pressed = |now: Instant| EngineEvent::Retire(LeaveDeadlines { drained_by: now + 4 * second, stop: second });
    // Cases: no other drain, a drain for leaving, and drains that an operator began.
    for before in [None, Some(retire(now)), Some(EngineEvent::Drain), Some(EngineEvent::Restart)] {
        let mut machine = machine_after(READY, now);
        if let Some(before) = before {
            machine.handle(before, now);
        }
        assert_eq!(machine.handle(pressed(now), now), [], "{before:?}");
        assert_eq!(machine.next_deadline(), Some(now + 4 * second), "{before:?}");
        assert_eq!(machine.handle(retire(now), now), []);
        assert_eq!(machine.next_deadline(), Some(now + 4 * second), "a later order with more time changes nothing");
        let drained = now + 4 * second;
        assert_eq!(machine.handle(EngineEvent::Tick, drained), [SupervisorAction::Terminate]);
        assert_eq!(machine.state(), EngineState::Stopping { then: AfterExit::Stop, until: drained + second });
    }
    // A leaving agent breaks running requests at the end of its drain. An engine that stopped at
    // that moment would be blamed.
    let mut machine = machine_after(READY, now);
    let later = now + limits().drain + second;
    machine.handle(EngineEvent::Retire(LeaveDeadlines { drained_by: later, stop: second }), now);
    assert_eq!(machine.next_deadline(), Some(later));
    // An engine that was told to stop has a second from now.
    let mut machine = machine_after(READY, now);
    machine.handle(EngineEvent::Stop, now);
    assert_eq!(machine.next_deadline(), Some(now + limits().grace));
    machine.handle(pressed(now + second), now + second);
    assert_eq!(machine.next_deadline(), Some(now + 2 * second));
    // A starting engine is told to stop at once.
    let mut machine = machine_after(&READY[..2], now);
    assert_eq!(machine.handle(pressed(now), now), [SupervisorAction::Terminate]);
    assert_eq!(machine.next_deadline(), Some(now + second));
}

#[test]
fn a_drain_waits_for_requests_and_ends_stopped() {
    let now = Instant::now();
    let mut machine = machine_after(READY, now);
    assert_eq!(machine.handle(EngineEvent::Drain, now), []);
    assert!(matches!(machine.state(), EngineState::Draining(_)));
    assert_eq!(machine.handle(EngineEvent::Idle, now), [SupervisorAction::Terminate]);
    assert_eq!(machine.next_deadline(), Some(now + IDLE_GRACE));
    assert_eq!(machine.handle(EngineEvent::Exited, now), [SupervisorAction::KillGroup]);
    machine.handle(EngineEvent::GroupEmpty, now);
    assert_eq!(machine.state(), EngineState::Stopped);
    assert!(!machine.is_finished(), "a drained engine can be restarted");
    assert_eq!(machine.handle(EngineEvent::Restart, now), [SupervisorAction::RequestStart]);
}

#[test]
fn only_an_engine_that_is_computing_gets_the_whole_grace() {
    let now = Instant::now();
    for (event, grace) in [(EngineEvent::Idle, IDLE_GRACE), (EngineEvent::Unattended, limits().grace), (EngineEvent::Stop, limits().grace)]
    {
        let mut machine = machine_after(READY, now);
        machine.handle(EngineEvent::Drain, now);
        assert_eq!(machine.handle(event, now), [SupervisorAction::Terminate]);
        assert_eq!(machine.next_deadline(), Some(now + grace), "{event:?}");
    }
    let brief = PhaseTimeouts { grace: Duration::from_secs(1), ..limits() };
    let mut machine = EngineStateMachine::new(brief, false);
    for event in READY.iter().chain(&[EngineEvent::Drain, EngineEvent::Idle]) {
        machine.handle(*event, now);
    }
    assert_eq!(machine.next_deadline(), Some(now + brief.grace), "the setting may be shorter");
}

#[test]
fn a_release_calls_off_a_drain() {
    let now = Instant::now();
    let asleep = [READY, &[EngineEvent::FallAsleep]].concat();
    for (before, stage) in [(READY, LiveStage::Ready), (&asleep, LiveStage::Sleeping)] {
        for order in [EngineEvent::Drain, EngineEvent::Restart] {
            let mut machine = machine_after(before, now);
            machine.handle(order, now);
            assert_eq!(machine.handle(EngineEvent::Release, now), []);
            assert_eq!((machine.state(), machine.next_deadline()), (EngineState::Alive(stage), None));
            assert_eq!(machine.handle(EngineEvent::Idle, now + limits().drain), [], "the drain is forgotten");
        }
    }
}

#[test]
fn a_release_restarts_an_engine_told_to_stop_or_quarantined() {
    let now = Instant::now();
    for orders in [&[EngineEvent::Drain, EngineEvent::Idle, EngineEvent::Release][..], &[EngineEvent::Quarantine, EngineEvent::Release]] {
        let mut machine = machine_after(&[READY, orders].concat(), now);
        for event in [EngineEvent::Idle, EngineEvent::Exited] {
            machine.handle(event, now);
        }
        assert_eq!(machine.handle(EngineEvent::GroupEmpty, now), [SupervisorAction::RequestStart], "{orders:?}");
    }
}

#[test]
fn a_release_keeps_no_engine_of_a_leaving_agent() {
    let now = Instant::now();
    for order in [retire(now), EngineEvent::HandOver] {
        let mut machine = machine_after(READY, now);
        machine.handle(order, now);
        machine.handle(EngineEvent::Release, now);
        assert!(matches!(machine.state(), EngineState::Draining(_)), "{order:?}");
    }
}

#[test]
fn an_overdue_drain_sends_sigterm_and_then_sigkill() {
    let now = Instant::now();
    let mut machine = machine_after(READY, now);
    machine.handle(EngineEvent::Drain, now);
    let late = now + limits().drain;
    assert_eq!(machine.handle(EngineEvent::Tick, late), [SupervisorAction::Terminate]);
    assert_eq!(machine.handle(EngineEvent::Tick, late + limits().grace), [SupervisorAction::KillGroup]);
}

#[test]
fn a_stop_during_start_up_waits_only_briefly_for_sigterm() {
    let now = Instant::now();
    let mut machine = machine_after(&[EngineEvent::Start, EngineEvent::MayStart, EngineEvent::Loading], now);
    assert_eq!(machine.handle(EngineEvent::Drain, now), [SupervisorAction::Terminate]);
    assert_eq!(machine.next_deadline(), Some(now + STARTING_GRACE));
}

#[test]
fn a_crash_during_a_drain_is_reported_and_ends_stopped() {
    let now = Instant::now();
    let mut machine = machine_after(READY, now);
    machine.handle(EngineEvent::Drain, now);
    assert_eq!(machine.handle(EngineEvent::Exited, now), [SupervisorAction::ReportCrash, SupervisorAction::KillGroup]);
    machine.handle(EngineEvent::GroupEmpty, now);
    assert_eq!(machine.state(), EngineState::Stopped);
}

#[test]
fn restarts_cut_the_backoff_short_and_drains_end_it() {
    let now = Instant::now();
    let mut machine = machine_after(CRASHED, now);
    assert_eq!(machine.handle(EngineEvent::Restart, now), [SupervisorAction::RequestStart]);
    let mut machine = machine_after(CRASHED, now);
    assert_eq!(machine.handle(EngineEvent::Drain, now), []);
    assert_eq!(machine.state(), EngineState::Stopped);
}

#[test]
fn the_last_order_counts_until_the_engine_is_retired() {
    let now = Instant::now();
    let mut machine = machine_after(READY, now);
    machine.handle(EngineEvent::Drain, now);
    machine.handle(EngineEvent::Restart, now);
    machine.handle(EngineEvent::Idle, now);
    machine.handle(EngineEvent::Exited, now);
    assert_eq!(machine.handle(EngineEvent::GroupEmpty, now), [SupervisorAction::RequestStart]);
    assert_eq!(machine.handle(EngineEvent::MayStart, now), [SupervisorAction::Spawn]);

    machine.handle(EngineEvent::Stop, now);
    machine.handle(EngineEvent::Restart, now);
    machine.handle(EngineEvent::Exited, now);
    assert_eq!(machine.handle(EngineEvent::GroupEmpty, now), []);
    assert!(machine.is_finished());
    assert_eq!(machine.handle(EngineEvent::Restart, now), []);
}

#[test]
fn a_quarantine_drains_and_only_a_release_ends_it() {
    let now = Instant::now();
    let mut machine = machine_after(READY, now);
    assert_eq!(machine.handle(EngineEvent::Quarantine, now), []);
    assert!(matches!(machine.state(), EngineState::Draining(Drain { then: AfterExit::Quarantine, .. })));
    // Not even a crash or a restart in between brings the engine back.
    assert_eq!(machine.handle(EngineEvent::Restart, now), []);
    assert_eq!(machine.handle(EngineEvent::Exited, now), [SupervisorAction::ReportCrash, SupervisorAction::KillGroup]);
    assert_eq!(machine.handle(EngineEvent::Restart, now), []);
    assert_eq!(machine.handle(EngineEvent::GroupEmpty, now), []);
    assert_eq!((machine.state(), machine.next_deadline()), (EngineState::Quarantined, None));
    for event in [
        EngineEvent::Restart,
        EngineEvent::Start,
        EngineEvent::Tick,
        EngineEvent::MayStart,
        EngineEvent::Fail,
        EngineEvent::Exited,
        EngineEvent::WakeUp,
    ] {
        assert_eq!(machine.handle(event, now + MAX_BACKOFF), []);
        assert_eq!(machine.state(), EngineState::Quarantined, "after {event:?}");
    }
    assert_eq!(machine.handle(EngineEvent::Release, now), [SupervisorAction::RequestStart]);
}

#[test]
fn any_state_can_be_quarantined() {
    let now = Instant::now();
    let ready = |more: &[EngineEvent]| [READY, more].concat();
    let cases: [(Vec<EngineEvent>, EngineEvent, &[SupervisorAction]); 9] = [
        (READY.to_vec(), EngineEvent::QuarantineNow, &[SupervisorAction::KillGroup]),
        (vec![EngineEvent::Start, EngineEvent::MayStart], EngineEvent::Quarantine, &[SupervisorAction::Terminate]),
        (vec![EngineEvent::Start], EngineEvent::Quarantine, &[]),
        (CRASHED.to_vec(), EngineEvent::Quarantine, &[]),
        (ready(&[EngineEvent::Drain]), EngineEvent::QuarantineNow, &[SupervisorAction::KillGroup]),
        (ready(&[EngineEvent::Restart, EngineEvent::Idle]), EngineEvent::QuarantineNow, &[SupervisorAction::KillGroup]),
        (ready(&[EngineEvent::Exited]), EngineEvent::Quarantine, &[]),
        (ready(&[EngineEvent::FallAsleep]), EngineEvent::Quarantine, &[]),
        (ready(&[EngineEvent::Drain, EngineEvent::Idle, EngineEvent::Exited, EngineEvent::GroupEmpty]), EngineEvent::Quarantine, &[]),
    ];
    for (before, event, actions) in cases {
        let mut machine = machine_after(&before, now);
        assert_eq!(machine.handle(event, now), actions, "after {before:?}");
        for rest in [EngineEvent::Idle, EngineEvent::Exited, EngineEvent::GroupEmpty] {
            machine.handle(rest, now);
        }
        assert_eq!(machine.state(), EngineState::Quarantined, "after {before:?}");
    }
}

#[test]
fn a_quarantined_engine_can_be_stopped_and_stays_quarantined() {
    let now = Instant::now();
    let quarantined = [READY, &[EngineEvent::QuarantineNow, EngineEvent::GroupEmpty]].concat();
    let mut machine = machine_after(&quarantined, now);
    assert_eq!(machine.handle(EngineEvent::Drain, now), []);
    assert_eq!(machine.state(), EngineState::Stopped);
    assert!(!machine.is_finished() && machine.is_quarantined());
    assert_eq!(machine.handle(EngineEvent::Restart, now), []);
    assert_eq!(machine.handle(EngineEvent::Release, now), [SupervisorAction::RequestStart]);
    for end in [EngineEvent::Stop, retire(now)] {
        let mut machine = machine_after(&quarantined, now);
        machine.handle(end, now);
        assert!(machine.is_finished());
        assert_eq!(machine.handle(EngineEvent::Release, now), []);
    }
}

#[test]
fn a_failure_from_outside_is_a_crash() {
    let now = Instant::now();
    for before in [READY, &READY[..2]] {
        let mut machine = machine_after(before, now);
        assert_eq!(machine.handle(EngineEvent::Fail, now), [SupervisorAction::ReportCrash, SupervisorAction::KillGroup]);
        assert_eq!(machine.state(), EngineState::Killing { then: AfterExit::BackOff });
    }
    // An engine that has no process yet is treated alike.
    let mut machine = machine_after(&[EngineEvent::Start], now);
    assert_eq!(machine.handle(EngineEvent::Fail, now), []);
    assert_eq!(machine.state(), EngineState::BackingOff { until: now + INITIAL_BACKOFF });
}

#[test]
fn a_release_forgets_the_crashes() {
    let now = Instant::now();
    let mut machine = machine_after(CRASHED, now);
    for _ in 0..5 {
        for event in [EngineEvent::Restart, EngineEvent::MayStart, EngineEvent::Exited, EngineEvent::GroupEmpty] {
            machine.handle(event, now);
        }
    }
    assert_eq!(machine.next_deadline(), Some(now + Duration::from_secs(32)));
    assert_eq!(machine.handle(EngineEvent::Release, now), [SupervisorAction::RequestStart]);
    for event in [EngineEvent::MayStart, EngineEvent::Exited, EngineEvent::GroupEmpty] {
        machine.handle(event, now);
    }
    assert_eq!(machine.next_deadline(), Some(now + INITIAL_BACKOFF));
}

#[test]
fn only_serving_engines_may_sleep_and_their_death_is_noticed() {
    let now = Instant::now();
    let machine = machine_after(&[EngineEvent::Start, EngineEvent::MayStart, EngineEvent::FallAsleep], now);
    assert_eq!(machine.state(), EngineState::Alive(LiveStage::Starting));
    let mut machine = machine_after(READY, now);
    assert_eq!(machine.handle(EngineEvent::FallAsleep, now), []);
    assert_eq!((machine.state(), machine.next_deadline()), (EngineState::Alive(LiveStage::Sleeping), None));
    assert_eq!(machine.handle(EngineEvent::Ready, now), []);
    assert_eq!(machine.state(), EngineState::Alive(LiveStage::Sleeping), "only what woke it says so");
    machine.handle(EngineEvent::WakeUp, now);
    assert_eq!(machine.state(), EngineState::Alive(LiveStage::Ready));
    machine.handle(EngineEvent::FallAsleep, now);
    assert_eq!(machine.handle(EngineEvent::Exited, now), [SupervisorAction::ReportCrash, SupervisorAction::KillGroup]);
}

#[test]
fn an_engine_found_asleep_was_never_ready_in_between() {
    let now = Instant::now();
    let mut machine = machine_after(&[EngineEvent::Start, EngineEvent::MayStart, EngineEvent::Loading], now);
    assert_eq!(machine.handle(EngineEvent::FoundAsleep, now), []);
    assert_eq!((machine.state(), machine.next_deadline()), (EngineState::Alive(LiveStage::Sleeping), None));
    machine.handle(EngineEvent::WakeUp, now);
    assert_eq!(machine.state(), EngineState::Alive(LiveStage::Ready));
}

#[test]
fn a_first_command_line_that_never_serves_is_replaced_immediately() {
    let now = Instant::now();
    for ended in [EngineEvent::Exited, EngineEvent::SpawnFailed, EngineEvent::Unhealthy, EngineEvent::LacksRoute] {
        let mut machine = EngineStateMachine::new(limits(), true);
        for event in [EngineEvent::Start, EngineEvent::MayStart] {
            machine.handle(event, now);
        }
        assert_eq!(machine.handle(ended, now), [SupervisorAction::FallBack, SupervisorAction::KillGroup], "{ended:?}");
        assert_eq!(machine.handle(EngineEvent::GroupEmpty, now), [SupervisorAction::RequestStart]);
        machine.handle(EngineEvent::MayStart, now);
        assert_eq!(machine.handle(EngineEvent::Exited, now), [SupervisorAction::ReportCrash, SupervisorAction::KillGroup]);
        machine.handle(EngineEvent::GroupEmpty, now);
        assert_eq!(machine.next_deadline(), Some(now + INITIAL_BACKOFF));
    }
}

#[test]
fn an_outside_failure_does_not_blame_the_front_end() {
    let now = Instant::now();
    let mut machine = EngineStateMachine::new(limits(), true);
    for event in [EngineEvent::Start, EngineEvent::MayStart] {
        machine.handle(event, now);
    }
    assert_eq!(machine.handle(EngineEvent::Fail, now), [SupervisorAction::ReportCrash, SupervisorAction::KillGroup]);
    assert_eq!(machine.state(), EngineState::Killing { then: AfterExit::BackOff });
}

#[test]
fn a_proven_front_end_is_kept_unless_lacking_a_route() {
    let now = Instant::now();
    let ready = || {
        let mut machine = EngineStateMachine::new(limits(), true);
        READY.iter().for_each(|event| drop(machine.handle(*event, now)));
        machine
    };
    assert_eq!(ready().handle(EngineEvent::Exited, now), [SupervisorAction::ReportCrash, SupervisorAction::KillGroup]);
    assert_eq!(ready().handle(EngineEvent::LacksRoute, now), [SupervisorAction::FallBack, SupervisorAction::KillGroup]);
    let mut only_one = machine_after(READY, now);
    assert_eq!(only_one.handle(EngineEvent::LacksRoute, now), [], "without another one there is nothing to be done");
}

#[test]
fn an_adopted_engine_that_had_been_ready_must_answer_soon() {
    let now = Instant::now();
    for (was_ready, limit) in [(true, ADOPTION_TIMEOUT), (false, limits().startup)] {
        let mut machine = EngineStateMachine::new(limits(), true);
        assert_eq!(machine.handle(EngineEvent::Adopt { was_ready }, now), []);
        assert_eq!((machine.state(), machine.next_deadline()), (EngineState::Alive(LiveStage::Loading), Some(now + limit)));
        machine.handle(EngineEvent::Ready, now);
        assert_eq!(machine.state(), EngineState::Alive(LiveStage::Ready));
    }
    let mut machine = EngineStateMachine::new(limits(), true);
    machine.handle(EngineEvent::Adopt { was_ready: true }, now);
    assert_eq!(machine.handle(EngineEvent::Tick, now + ADOPTION_TIMEOUT), [SupervisorAction::ReportCrash, SupervisorAction::KillGroup]);
}

#[test]
fn an_engine_waiting_for_its_turn_stops_at_once() {
    let now = Instant::now();
    for end in [EngineEvent::Drain, EngineEvent::Stop, retire(now)] {
        let mut machine = machine_after(&[EngineEvent::Start], now);
        assert_eq!(machine.handle(end, now), []);
        assert_eq!(machine.state(), EngineState::Stopped);
        assert_eq!(machine.handle(EngineEvent::MayStart, now), [], "a permit that comes too late starts nothing");
    }
}

#[test]
fn a_handed_over_engine_finishes_its_requests_and_lives_on() {
    let now = Instant::now();
    let asleep = [READY, &[EngineEvent::FallAsleep]].concat();
    for before in [READY, &asleep] {
        for end in [(EngineEvent::Idle, now), (EngineEvent::Tick, now + limits().drain)] {
            let mut machine = machine_after(before, now);
            assert_eq!(machine.handle(EngineEvent::HandOver, now), []);
            assert!(matches!(machine.state(), EngineState::Draining(Drain { then: AfterExit::Detach, .. })));
            assert_eq!(machine.next_deadline(), Some(now + limits().drain));
            assert_eq!(machine.handle(end.0, end.1), [SupervisorAction::Detach]);
            assert!(machine.is_finished());
        }
    }
    let mut starting = machine_after(&[EngineEvent::Start, EngineEvent::MayStart, EngineEvent::Loading], now);
    assert_eq!(starting.handle(EngineEvent::HandOver, now), [SupervisorAction::Detach], "it has no requests");
    for before in [&[EngineEvent::Start][..], CRASHED] {
        let mut machine = machine_after(before, now);
        assert_eq!(machine.handle(EngineEvent::HandOver, now), []);
        assert!(machine.is_finished(), "there is nothing to hand over");
    }
}

#[test]
fn a_hand_over_is_idempotent_and_other_endings_cancel_it() {
    let now = Instant::now();
    let table = [
        (EngineEvent::HandOver, SupervisorAction::Detach),
        (EngineEvent::Drain, SupervisorAction::Terminate),
        (retire(now), SupervisorAction::Terminate),
    ];
    for (second, action) in table {
        let mut machine = machine_after(READY, now);
        machine.handle(EngineEvent::HandOver, now);
        assert_eq!(machine.handle(second, now), [], "{second:?}");
        assert_eq!(machine.handle(EngineEvent::Idle, now), [action], "{second:?}");
    }
}

#[test]
fn an_ending_or_dying_engine_is_not_handed_over() {
    let now = Instant::now();
    let mut restarting = machine_after(READY, now);
    restarting.handle(EngineEvent::Restart, now);
    restarting.handle(EngineEvent::HandOver, now);
    assert_eq!(restarting.handle(EngineEvent::Idle, now), [SupervisorAction::Terminate]);
    let mut dying = machine_after(READY, now);
    dying.handle(EngineEvent::HandOver, now);
    assert_eq!(dying.handle(EngineEvent::Exited, now), [SupervisorAction::ReportCrash, SupervisorAction::KillGroup]);
    dying.handle(EngineEvent::GroupEmpty, now);
    assert!(dying.is_finished());
    let mut stopped = machine_after(READY, now);
    stopped.handle(EngineEvent::HandOver, now);
    assert_eq!(stopped.handle(EngineEvent::Stop, now), [SupervisorAction::Terminate], "the second wish is another one");
}

fn any_event() -> impl Strategy<Value = EngineEvent> {
    prop_oneof![
        Just(EngineEvent::Drain),
        Just(EngineEvent::HandOver),
        Just(EngineEvent::Restart),
        Just(EngineEvent::Stop),
        Just(EngineEvent::Loading),
        Just(EngineEvent::Ready),
        Just(EngineEvent::Unhealthy),
        Just(EngineEvent::Exited),
        Just(EngineEvent::GroupEmpty),
        Just(EngineEvent::Idle),
        Just(EngineEvent::Unattended),
        Just(EngineEvent::Tick),
        Just(EngineEvent::MayStart),
        Just(EngineEvent::Quarantine),
        Just(EngineEvent::QuarantineNow),
        Just(EngineEvent::Release),
        Just(EngineEvent::Fail),
        Just(EngineEvent::FallAsleep),
        Just(EngineEvent::FoundAsleep),
        Just(EngineEvent::WakeUp),
        Just(EngineEvent::LacksRoute),
    ]
}

/// Environment of the machine: what exists, and which events can therefore happen.
#[derive(Default)]
struct World {
    leader: bool,
    group: bool,
    killed: bool,
    stop_requested: bool,
    /// The engine waits for its start permit.
    queued: bool,
    /// The last request keeps the engine down until it is released.
    quarantined: bool,
}

impl World {
    fn can_happen(&self, event: EngineEvent) -> bool {
        match event {
            EngineEvent::Exited | EngineEvent::Loading | EngineEvent::Ready | EngineEvent::Unhealthy => self.leader,
            EngineEvent::GroupEmpty => self.killed && self.group,
            EngineEvent::MayStart => self.queued,
            EngineEvent::LacksRoute => self.leader,
            _ => true,
        }
    }

    fn happen(&mut self, event: EngineEvent) {
        match event {
            EngineEvent::Exited => self.leader = false,
            EngineEvent::GroupEmpty => {
                self.leader = false;
                self.group = false;
            }
            EngineEvent::MayStart => self.queued = false,
            EngineEvent::Quarantine | EngineEvent::QuarantineNow => self.quarantined = true,
            EngineEvent::Release => self.quarantined = false,
            _ => {}
        }
    }

    fn carry_out(&mut self, action: SupervisorAction) {
        match action {
            SupervisorAction::Spawn => {
                assert!(!self.group, "a second engine beside a living group");
                assert!(!self.quarantined, "an engine in quarantine was started");
                *self = Self { leader: true, group: true, ..Self::default() };
            }
            SupervisorAction::Terminate => {
                assert!(self.leader, "SIGTERM to a process that is gone");
                self.stop_requested = true;
            }
            SupervisorAction::KillGroup => self.killed = true,
            SupervisorAction::RequestStart => {
                assert!(!self.group, "the wait for a permit beside a living group");
                self.queued = true;
            }
            SupervisorAction::Detach => {
                assert!(self.leader && !self.killed, "nobody can go on with it");
                (self.leader, self.group) = (false, false);
            }
            SupervisorAction::ReportCrash | SupervisorAction::FallBack => {}
        }
    }
}

proptest! {
    #[test]
    fn no_event_sequence_runs_two_engines_or_hides_a_crash(
        events in proptest::collection::vec((any_event(), 0_u64..400), 0..80),
        may_fall_back: bool,
    ) {
        let mut now = Instant::now();
        let mut machine = EngineStateMachine::new(limits(), may_fall_back);
        let mut world = World::default();
        for action in machine.handle(EngineEvent::Start, now) {
            world.carry_out(action);
        }
        for (event, seconds) in events {
            now += Duration::from_secs(seconds);
            if !world.can_happen(event) {
                continue;
            }
            let unasked_exit = event == EngineEvent::Exited && !world.stop_requested && !world.killed;
            world.happen(event);
            let actions = machine.handle(event, now);
            let reported = actions.contains(&SupervisorAction::ReportCrash) || actions.contains(&SupervisorAction::FallBack);
            prop_assert_eq!(unasked_exit, event == EngineEvent::Exited && reported);
            for action in actions {
                world.carry_out(action);
            }
            if let EngineState::BackingOff { until } = machine.state() {
                let pause = until.saturating_duration_since(now);
                prop_assert!(pause <= MAX_BACKOFF);
            }
            world.queued &= machine.state() == EngineState::Waiting;
            if matches!(machine.state(), EngineState::Stopped | EngineState::Quarantined | EngineState::Waiting) {
                prop_assert!(!world.group, "down with processes left");
            }
            prop_assert!(machine.state() != EngineState::Quarantined || world.quarantined, "a quarantine that nobody wanted");
        }
        // From any state, Stop ends in finitely many steps with nothing left.
        for event in [EngineEvent::Stop, EngineEvent::Exited, EngineEvent::Tick, EngineEvent::GroupEmpty] {
            now += Duration::from_secs(600);
            if world.can_happen(event) {
                world.happen(event);
                for action in machine.handle(event, now) {
                    world.carry_out(action);
                }
            }
        }
        prop_assert!(machine.is_finished());
        prop_assert!(!world.group);
    }
}
