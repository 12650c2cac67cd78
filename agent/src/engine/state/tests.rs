//! Tables for the paths that matter, and random event sequences for the promises that hold on every path.

use std::time::Duration;

use proptest::prelude::*;
use tokio::time::Instant;

use super::*;

fn limits() -> Limits {
    Limits { startup: Duration::from_secs(60), drain: Duration::from_secs(30), grace: Duration::from_secs(10) }
}

/// A machine brought to where the test begins.
fn machine_after(events: &[Event], now: Instant) -> Machine {
    let mut machine = Machine::new(limits(), false);
    for event in events {
        machine.on(*event, now);
    }
    machine
}

const READY: &[Event] = &[Event::Start, Event::Turn, Event::Loading, Event::Ready];

/// Ready again after one crash.
const RECOVERED: &[Event] = &[Event::Start, Event::Turn, Event::Exited, Event::GroupEmpty, Event::Restart, Event::Turn, Event::Ready];

/// Crashed, with nothing left.
const CRASHED: &[Event] = &[Event::Start, Event::Turn, Event::Exited, Event::GroupEmpty];

#[test]
fn a_start_passes_through_loading_to_ready() {
    let now = Instant::now();
    let mut machine = Machine::new(limits(), false);
    assert_eq!(machine.on(Event::Start, now), [Action::AwaitTurn]);
    assert_eq!((machine.state(), machine.wake_at()), (State::Waiting, None));
    assert_eq!(machine.on(Event::Turn, now), [Action::Spawn]);
    assert_eq!(machine.state(), State::Alive(Stage::Starting));
    assert_eq!(machine.on(Event::Loading, now), []);
    assert_eq!(machine.state(), State::Alive(Stage::Loading));
    assert_eq!(machine.on(Event::Ready, now), []);
    assert_eq!(machine.state(), State::Alive(Stage::Ready));
    assert_eq!(machine.wake_at(), None);
}

#[test]
fn an_exit_nobody_asked_for_kills_the_group_and_backs_off() {
    let now = Instant::now();
    let mut machine = machine_after(READY, now);
    assert_eq!(machine.on(Event::Exited, now), [Action::ReportCrash, Action::KillGroup]);
    assert_eq!(machine.state(), State::Killing { then: Then::BackOff });
    assert_eq!(machine.on(Event::Tick, now + LONGEST_BACKOFF), []);
    machine.on(Event::GroupEmpty, now);
    assert_eq!(machine.wake_at(), Some(now + Duration::from_secs(1)));
    assert_eq!(machine.on(Event::Tick, now + Duration::from_secs(1)), [Action::AwaitTurn]);
}

#[test]
fn an_engine_that_is_not_ready_in_time_is_a_crash() {
    let now = Instant::now();
    let mut machine = machine_after(&[Event::Start, Event::Turn, Event::Loading], now);
    assert_eq!(machine.on(Event::Tick, now + Duration::from_secs(59)), []);
    assert_eq!(machine.on(Event::Tick, now + Duration::from_secs(60)), [Action::ReportCrash, Action::KillGroup]);
}

#[test]
fn the_pause_doubles_up_to_five_minutes() {
    let seconds: Vec<u64> = (1..=11).map(|n| backoff(n).as_secs()).collect();
    assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
    assert_eq!(backoff(u32::MAX), LONGEST_BACKOFF);
}

#[test]
fn ten_minutes_of_health_forgive_earlier_crashes() {
    let now = Instant::now();
    for (healthy, pause) in [(599, 2), (600, 1)] {
        let mut machine = machine_after(RECOVERED, now);
        let later = now + Duration::from_secs(healthy);
        machine.on(Event::Exited, later);
        machine.on(Event::GroupEmpty, later);
        assert_eq!(machine.wake_at(), Some(later + Duration::from_secs(pause)));
    }
}

#[test]
fn a_healthy_life_that_ended_on_request_forgives_too_and_only_once() {
    let now = Instant::now();
    let mut machine = machine_after(RECOVERED, now);
    let later = now + RECOVERED_AFTER;
    for event in [Event::Restart, Event::Idle, Event::Exited, Event::GroupEmpty, Event::Turn] {
        machine.on(event, later);
    }
    for pause in [1, 2] {
        machine.on(Event::Exited, later);
        machine.on(Event::GroupEmpty, later);
        assert_eq!(machine.wake_at(), Some(later + Duration::from_secs(pause)));
        machine.on(Event::Restart, later);
        machine.on(Event::Turn, later);
    }
}

#[test]
fn a_retired_engine_finishes_its_requests_and_no_restart_revives_it() {
    let now = Instant::now();
    let mut machine = machine_after(READY, now);
    assert_eq!(machine.on(Event::Retire, now), []);
    assert!(matches!(machine.state(), State::Draining { .. }));
    for event in [Event::Restart, Event::Idle, Event::Restart, Event::Exited, Event::Restart, Event::GroupEmpty] {
        machine.on(event, now);
    }
    assert!(machine.is_finished());
    assert_eq!(machine.on(Event::Restart, now), []);
}

#[test]
fn a_drain_waits_for_requests_then_stops_and_stays_stopped() {
    let now = Instant::now();
    let mut machine = machine_after(READY, now);
    assert_eq!(machine.on(Event::Drain, now), []);
    assert!(matches!(machine.state(), State::Draining { .. }));
    assert_eq!(machine.on(Event::Idle, now), [Action::Terminate]);
    assert_eq!(machine.wake_at(), Some(now + limits().grace));
    assert_eq!(machine.on(Event::Exited, now), [Action::KillGroup]);
    machine.on(Event::GroupEmpty, now);
    assert_eq!(machine.state(), State::Stopped);
    assert!(!machine.is_finished(), "a drained engine can be restarted");
    assert_eq!(machine.on(Event::Restart, now), [Action::AwaitTurn]);
}

#[test]
fn a_drain_that_takes_too_long_ends_with_sigterm_then_sigkill() {
    let now = Instant::now();
    let mut machine = machine_after(READY, now);
    machine.on(Event::Drain, now);
    let late = now + limits().drain;
    assert_eq!(machine.on(Event::Tick, late), [Action::Terminate]);
    assert_eq!(machine.on(Event::Tick, late + limits().grace), [Action::KillGroup]);
}

#[test]
fn a_stop_during_start_up_waits_only_briefly_for_sigterm() {
    let now = Instant::now();
    let mut machine = machine_after(&[Event::Start, Event::Turn, Event::Loading], now);
    assert_eq!(machine.on(Event::Drain, now), [Action::Terminate]);
    assert_eq!(machine.wake_at(), Some(now + STARTING_GRACE));
}

#[test]
fn an_exit_during_a_drain_is_a_crash_that_still_ends_stopped() {
    let now = Instant::now();
    let mut machine = machine_after(READY, now);
    machine.on(Event::Drain, now);
    assert_eq!(machine.on(Event::Exited, now), [Action::ReportCrash, Action::KillGroup]);
    machine.on(Event::GroupEmpty, now);
    assert_eq!(machine.state(), State::Stopped);
}

#[test]
fn a_restart_cuts_the_backoff_short_and_a_drain_ends_it() {
    let now = Instant::now();
    let mut machine = machine_after(CRASHED, now);
    assert_eq!(machine.on(Event::Restart, now), [Action::AwaitTurn]);
    let mut machine = machine_after(CRASHED, now);
    assert_eq!(machine.on(Event::Drain, now), []);
    assert_eq!(machine.state(), State::Stopped);
}

#[test]
fn the_last_wish_counts_until_the_engine_is_stopped_for_good() {
    let now = Instant::now();
    let mut machine = machine_after(READY, now);
    machine.on(Event::Drain, now);
    machine.on(Event::Restart, now);
    machine.on(Event::Idle, now);
    machine.on(Event::Exited, now);
    assert_eq!(machine.on(Event::GroupEmpty, now), [Action::AwaitTurn]);
    assert_eq!(machine.on(Event::Turn, now), [Action::Spawn]);

    machine.on(Event::Stop, now);
    machine.on(Event::Restart, now);
    machine.on(Event::Exited, now);
    assert_eq!(machine.on(Event::GroupEmpty, now), []);
    assert!(machine.is_finished());
    assert_eq!(machine.on(Event::Restart, now), []);
}

#[test]
fn a_quarantine_lets_requests_finish_and_only_a_release_ends_it() {
    let now = Instant::now();
    let mut machine = machine_after(READY, now);
    assert_eq!(machine.on(Event::Quarantine, now), []);
    assert!(matches!(machine.state(), State::Draining { then: Then::Quarantine, .. }));
    // Not even a crash or a restart in between brings it back.
    assert_eq!(machine.on(Event::Restart, now), []);
    assert_eq!(machine.on(Event::Exited, now), [Action::ReportCrash, Action::KillGroup]);
    assert_eq!(machine.on(Event::Restart, now), []);
    assert_eq!(machine.on(Event::GroupEmpty, now), []);
    assert_eq!((machine.state(), machine.wake_at()), (State::Quarantined, None));
    for event in [Event::Restart, Event::Start, Event::Tick, Event::Turn, Event::Fail, Event::Exited, Event::WakeUp] {
        assert_eq!(machine.on(event, now + LONGEST_BACKOFF), []);
        assert_eq!(machine.state(), State::Quarantined, "after {event:?}");
    }
    assert_eq!(machine.on(Event::Release, now), [Action::AwaitTurn]);
}

#[test]
fn a_quarantine_comes_from_everywhere() {
    let now = Instant::now();
    let ready = |more: &[Event]| [READY, more].concat();
    let cases: [(Vec<Event>, Event, &[Action]); 9] = [
        (READY.to_vec(), Event::QuarantineNow, &[Action::KillGroup]),
        (vec![Event::Start, Event::Turn], Event::Quarantine, &[Action::Terminate]),
        (vec![Event::Start], Event::Quarantine, &[]),
        (CRASHED.to_vec(), Event::Quarantine, &[]),
        (ready(&[Event::Drain]), Event::QuarantineNow, &[Action::KillGroup]),
        (ready(&[Event::Restart, Event::Idle]), Event::QuarantineNow, &[Action::KillGroup]),
        (ready(&[Event::Exited]), Event::Quarantine, &[]),
        (ready(&[Event::FallAsleep]), Event::Quarantine, &[]),
        (ready(&[Event::Drain, Event::Idle, Event::Exited, Event::GroupEmpty]), Event::Quarantine, &[]),
    ];
    for (before, event, actions) in cases {
        let mut machine = machine_after(&before, now);
        assert_eq!(machine.on(event, now), actions, "after {before:?}");
        for rest in [Event::Idle, Event::Exited, Event::GroupEmpty] {
            machine.on(rest, now);
        }
        assert_eq!(machine.state(), State::Quarantined, "after {before:?}");
    }
}

#[test]
fn a_quarantined_engine_can_be_stopped_and_stays_in_quarantine_when_it_was_only_drained() {
    let now = Instant::now();
    let quarantined = [READY, &[Event::QuarantineNow, Event::GroupEmpty]].concat();
    let mut machine = machine_after(&quarantined, now);
    assert_eq!(machine.on(Event::Drain, now), []);
    assert_eq!(machine.state(), State::Stopped);
    assert!(!machine.is_finished() && machine.is_quarantined());
    assert_eq!(machine.on(Event::Restart, now), []);
    assert_eq!(machine.on(Event::Release, now), [Action::AwaitTurn]);
    for end in [Event::Stop, Event::Retire] {
        let mut machine = machine_after(&quarantined, now);
        machine.on(end, now);
        assert!(machine.is_finished());
        assert_eq!(machine.on(Event::Release, now), []);
    }
}

#[test]
fn a_failure_from_outside_is_a_crash() {
    let now = Instant::now();
    for before in [READY, &READY[..2]] {
        let mut machine = machine_after(before, now);
        assert_eq!(machine.on(Event::Fail, now), [Action::ReportCrash, Action::KillGroup]);
        assert_eq!(machine.state(), State::Killing { then: Then::BackOff });
    }
    // Also for an engine that has no process yet.
    let mut machine = machine_after(&[Event::Start], now);
    assert_eq!(machine.on(Event::Fail, now), []);
    assert_eq!(machine.state(), State::BackingOff { until: now + FIRST_BACKOFF });
}

#[test]
fn a_release_forgets_the_crashes() {
    let now = Instant::now();
    let mut machine = machine_after(CRASHED, now);
    for _ in 0..5 {
        for event in [Event::Restart, Event::Turn, Event::Exited, Event::GroupEmpty] {
            machine.on(event, now);
        }
    }
    assert_eq!(machine.wake_at(), Some(now + Duration::from_secs(32)));
    assert_eq!(machine.on(Event::Release, now), [Action::AwaitTurn]);
    for event in [Event::Turn, Event::Exited, Event::GroupEmpty] {
        machine.on(event, now);
    }
    assert_eq!(machine.wake_at(), Some(now + FIRST_BACKOFF));
}

#[test]
fn an_engine_sleeps_only_when_it_serves_and_its_death_is_noticed() {
    let now = Instant::now();
    let machine = machine_after(&[Event::Start, Event::Turn, Event::FallAsleep], now);
    assert_eq!(machine.state(), State::Alive(Stage::Starting));
    let mut machine = machine_after(READY, now);
    assert_eq!(machine.on(Event::FallAsleep, now), []);
    assert_eq!((machine.state(), machine.wake_at()), (State::Alive(Stage::Sleeping), None));
    assert_eq!(machine.on(Event::Ready, now), []);
    assert_eq!(machine.state(), State::Alive(Stage::Sleeping), "only what woke it says so");
    machine.on(Event::WakeUp, now);
    assert_eq!(machine.state(), State::Alive(Stage::Ready));
    machine.on(Event::FallAsleep, now);
    assert_eq!(machine.on(Event::Exited, now), [Action::ReportCrash, Action::KillGroup]);
}

#[test]
fn an_engine_that_is_found_asleep_has_never_been_ready_in_between() {
    let now = Instant::now();
    let mut machine = machine_after(&[Event::Start, Event::Turn, Event::Loading], now);
    assert_eq!(machine.on(Event::FoundAsleep, now), []);
    assert_eq!((machine.state(), machine.wake_at()), (State::Alive(Stage::Sleeping), None));
    machine.on(Event::WakeUp, now);
    assert_eq!(machine.state(), State::Alive(Stage::Ready));
}

#[test]
fn a_first_command_line_that_never_serves_is_replaced_at_once_and_the_second_backs_off() {
    let now = Instant::now();
    for ended in [Event::Exited, Event::SpawnFailed, Event::Unhealthy, Event::Unfit] {
        let mut machine = Machine::new(limits(), true);
        for event in [Event::Start, Event::Turn] {
            machine.on(event, now);
        }
        assert_eq!(machine.on(ended, now), [Action::FallBack, Action::KillGroup], "{ended:?}");
        assert_eq!(machine.on(Event::GroupEmpty, now), [Action::AwaitTurn]);
        machine.on(Event::Turn, now);
        assert_eq!(machine.on(Event::Exited, now), [Action::ReportCrash, Action::KillGroup]);
        machine.on(Event::GroupEmpty, now);
        assert_eq!(machine.wake_at(), Some(now + FIRST_BACKOFF));
    }
}

#[test]
fn a_start_that_failed_for_reasons_outside_of_the_engine_says_nothing_about_its_front_end() {
    let now = Instant::now();
    let mut machine = Machine::new(limits(), true);
    for event in [Event::Start, Event::Turn] {
        machine.on(event, now);
    }
    assert_eq!(machine.on(Event::Fail, now), [Action::ReportCrash, Action::KillGroup]);
    assert_eq!(machine.state(), State::Killing { then: Then::BackOff });
}

#[test]
fn a_front_end_that_has_served_is_kept_unless_it_lacks_a_route() {
    let now = Instant::now();
    let ready = || {
        let mut machine = Machine::new(limits(), true);
        READY.iter().for_each(|event| drop(machine.on(*event, now)));
        machine
    };
    assert_eq!(ready().on(Event::Exited, now), [Action::ReportCrash, Action::KillGroup]);
    assert_eq!(ready().on(Event::Unfit, now), [Action::FallBack, Action::KillGroup]);
    let mut only_one = machine_after(READY, now);
    assert_eq!(only_one.on(Event::Unfit, now), [], "without another one there is nothing to be done");
}

#[test]
fn an_adopted_engine_that_had_been_ready_must_answer_soon() {
    let now = Instant::now();
    for (was_ready, limit) in [(true, ADOPTION_LIMIT), (false, limits().startup)] {
        let mut machine = Machine::new(limits(), true);
        assert_eq!(machine.on(Event::Adopt { was_ready }, now), []);
        assert_eq!((machine.state(), machine.wake_at()), (State::Alive(Stage::Loading), Some(now + limit)));
        machine.on(Event::Ready, now);
        assert_eq!(machine.state(), State::Alive(Stage::Ready));
    }
    let mut machine = Machine::new(limits(), true);
    machine.on(Event::Adopt { was_ready: true }, now);
    assert_eq!(machine.on(Event::Tick, now + ADOPTION_LIMIT), [Action::ReportCrash, Action::KillGroup]);
}

#[test]
fn an_engine_that_waits_for_its_turn_stops_at_once() {
    let now = Instant::now();
    for end in [Event::Drain, Event::Stop, Event::Retire] {
        let mut machine = machine_after(&[Event::Start], now);
        assert_eq!(machine.on(end, now), []);
        assert_eq!(machine.state(), State::Stopped);
        assert_eq!(machine.on(Event::Turn, now), [], "a turn that comes too late starts nothing");
    }
}

#[test]
fn an_engine_that_is_handed_over_finishes_its_requests_and_is_let_go_alive() {
    let now = Instant::now();
    let asleep = [READY, &[Event::FallAsleep]].concat();
    for before in [READY, &asleep] {
        for end in [(Event::Idle, now), (Event::Tick, now + limits().drain)] {
            let mut machine = machine_after(before, now);
            assert_eq!(machine.on(Event::HandOver, now), []);
            assert_eq!(machine.state(), State::Draining { then: Then::LetGo, until: now + limits().drain });
            assert_eq!(machine.on(end.0, end.1), [Action::LetGo]);
            assert!(machine.is_finished());
        }
    }
    let mut starting = machine_after(&[Event::Start, Event::Turn, Event::Loading], now);
    assert_eq!(starting.on(Event::HandOver, now), [Action::LetGo], "it has no requests");
    for before in [&[Event::Start][..], CRASHED] {
        let mut machine = machine_after(before, now);
        assert_eq!(machine.on(Event::HandOver, now), []);
        assert!(machine.is_finished(), "there is nothing to hand over");
    }
}

#[test]
fn an_engine_that_was_to_end_or_dies_is_not_handed_over() {
    let now = Instant::now();
    let mut restarting = machine_after(READY, now);
    restarting.on(Event::Restart, now);
    restarting.on(Event::HandOver, now);
    assert_eq!(restarting.on(Event::Idle, now), [Action::Terminate]);
    let mut dying = machine_after(READY, now);
    dying.on(Event::HandOver, now);
    assert_eq!(dying.on(Event::Exited, now), [Action::ReportCrash, Action::KillGroup]);
    dying.on(Event::GroupEmpty, now);
    assert!(dying.is_finished());
    let mut stopped = machine_after(READY, now);
    stopped.on(Event::HandOver, now);
    assert_eq!(stopped.on(Event::Stop, now), [Action::Terminate], "the second wish is another one");
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        Just(Event::Drain),
        Just(Event::HandOver),
        Just(Event::Restart),
        Just(Event::Stop),
        Just(Event::Loading),
        Just(Event::Ready),
        Just(Event::Unhealthy),
        Just(Event::Exited),
        Just(Event::GroupEmpty),
        Just(Event::Idle),
        Just(Event::Tick),
        Just(Event::Turn),
        Just(Event::Quarantine),
        Just(Event::QuarantineNow),
        Just(Event::Release),
        Just(Event::Fail),
        Just(Event::FallAsleep),
        Just(Event::FoundAsleep),
        Just(Event::WakeUp),
        Just(Event::Unfit),
    ]
}

/// The world's side of the machine: what exists, and which events can therefore happen.
#[derive(Default)]
struct World {
    leader: bool,
    group: bool,
    killed: bool,
    asked: bool,
    /// Waits for its turn.
    queued: bool,
    /// The last wish is that it stays down until it is released.
    quarantined: bool,
}

impl World {
    fn can_happen(&self, event: Event) -> bool {
        match event {
            Event::Exited | Event::Loading | Event::Ready | Event::Unhealthy => self.leader,
            Event::GroupEmpty => self.killed && self.group,
            Event::Turn => self.queued,
            Event::Unfit => self.leader,
            _ => true,
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Exited => self.leader = false,
            Event::GroupEmpty => {
                self.leader = false;
                self.group = false;
            }
            Event::Turn => self.queued = false,
            Event::Quarantine | Event::QuarantineNow => self.quarantined = true,
            Event::Release => self.quarantined = false,
            _ => {}
        }
    }

    fn carry_out(&mut self, action: Action) {
        match action {
            Action::Spawn => {
                assert!(!self.group, "a second engine beside a living group");
                assert!(!self.quarantined, "an engine in quarantine was started");
                *self = Self { leader: true, group: true, ..Self::default() };
            }
            Action::Terminate => {
                assert!(self.leader, "SIGTERM to a process that is gone");
                self.asked = true;
            }
            Action::KillGroup => self.killed = true,
            Action::AwaitTurn => {
                assert!(!self.group, "the wait for a turn beside a living group");
                self.queued = true;
            }
            Action::LetGo => {
                assert!(self.leader && !self.killed, "nobody can go on with it");
                (self.leader, self.group) = (false, false);
            }
            Action::ReportCrash | Action::FallBack => {}
        }
    }
}

proptest! {
    #[test]
    fn no_sequence_of_events_makes_two_engines_or_hides_a_crash(
        events in proptest::collection::vec((any_event(), 0_u64..400), 0..80),
        may_fall_back: bool,
    ) {
        let mut now = Instant::now();
        let mut machine = Machine::new(limits(), may_fall_back);
        let mut world = World::default();
        for action in machine.on(Event::Start, now) {
            world.carry_out(action);
        }
        for (event, seconds) in events {
            now += Duration::from_secs(seconds);
            if !world.can_happen(event) {
                continue;
            }
            let unasked_exit = event == Event::Exited && !world.asked && !world.killed;
            world.happen(event);
            let actions = machine.on(event, now);
            let told = actions.contains(&Action::ReportCrash) || actions.contains(&Action::FallBack);
            prop_assert_eq!(unasked_exit, event == Event::Exited && told);
            for action in actions {
                world.carry_out(action);
            }
            if let State::BackingOff { until } = machine.state() {
                let pause = until.saturating_duration_since(now);
                prop_assert!(pause <= LONGEST_BACKOFF);
            }
            world.queued &= machine.state() == State::Waiting;
            if matches!(machine.state(), State::Stopped | State::Quarantined | State::Waiting) {
                prop_assert!(!world.group, "down with processes left");
            }
            prop_assert!(machine.state() != State::Quarantined || world.quarantined, "a quarantine that nobody wanted");
        }
        // From anywhere, Stop ends in finitely many steps with nothing left.
        for event in [Event::Stop, Event::Exited, Event::Tick, Event::GroupEmpty] {
            now += Duration::from_secs(600);
            if world.can_happen(event) {
                world.happen(event);
                for action in machine.on(event, now) {
                    world.carry_out(action);
                }
            }
        }
        prop_assert!(machine.is_finished());
        prop_assert!(!world.group);
    }
}
