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
    let mut machine = Machine::new(limits());
    for event in events {
        machine.on(*event, now);
    }
    machine
}

const READY: &[Event] = &[Event::Start, Event::Loading, Event::Ready];

#[test]
fn a_start_passes_through_loading_to_ready() {
    let now = Instant::now();
    let mut machine = Machine::new(limits());
    assert_eq!(machine.on(Event::Start, now), [Action::Spawn]);
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
    assert_eq!(machine.on(Event::Tick, now + Duration::from_secs(1)), [Action::Spawn]);
}

#[test]
fn an_engine_that_is_not_ready_in_time_is_a_crash() {
    let now = Instant::now();
    let mut machine = machine_after(&[Event::Start, Event::Loading], now);
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
        let mut machine = machine_after(&[Event::Start, Event::Exited, Event::GroupEmpty, Event::Restart, Event::Ready], now);
        let later = now + Duration::from_secs(healthy);
        machine.on(Event::Exited, later);
        machine.on(Event::GroupEmpty, later);
        assert_eq!(machine.wake_at(), Some(later + Duration::from_secs(pause)));
    }
}

#[test]
fn a_healthy_life_that_ended_on_request_forgives_too_and_only_once() {
    let now = Instant::now();
    let mut machine = machine_after(&[Event::Start, Event::Exited, Event::GroupEmpty, Event::Restart, Event::Ready], now);
    let later = now + RECOVERED_AFTER;
    for event in [Event::Restart, Event::Idle, Event::Exited, Event::GroupEmpty] {
        machine.on(event, later);
    }
    for pause in [1, 2] {
        machine.on(Event::Exited, later);
        machine.on(Event::GroupEmpty, later);
        assert_eq!(machine.wake_at(), Some(later + Duration::from_secs(pause)));
        machine.on(Event::Restart, later);
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
    assert_eq!(machine.on(Event::Restart, now), [Action::Spawn]);
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
    let mut machine = machine_after(&[Event::Start, Event::Loading], now);
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
    let crashed = [Event::Start, Event::Exited, Event::GroupEmpty];
    let mut machine = machine_after(&crashed, now);
    assert_eq!(machine.on(Event::Restart, now), [Action::Spawn]);
    let mut machine = machine_after(&crashed, now);
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
    assert_eq!(machine.on(Event::GroupEmpty, now), [Action::Spawn]);

    machine.on(Event::Stop, now);
    machine.on(Event::Restart, now);
    machine.on(Event::Exited, now);
    assert_eq!(machine.on(Event::GroupEmpty, now), []);
    assert!(machine.is_finished());
    assert_eq!(machine.on(Event::Restart, now), []);
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        Just(Event::Drain),
        Just(Event::Restart),
        Just(Event::Stop),
        Just(Event::Loading),
        Just(Event::Ready),
        Just(Event::Unhealthy),
        Just(Event::Exited),
        Just(Event::GroupEmpty),
        Just(Event::Idle),
        Just(Event::Tick),
    ]
}

/// The world's side of the machine: what exists, and which events can therefore happen.
#[derive(Default)]
struct World {
    leader: bool,
    group: bool,
    killed: bool,
    asked: bool,
}

impl World {
    fn can_happen(&self, event: Event) -> bool {
        match event {
            Event::Exited | Event::Loading | Event::Ready | Event::Unhealthy => self.leader,
            Event::GroupEmpty => self.killed && self.group,
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
            _ => {}
        }
    }

    fn carry_out(&mut self, action: Action) {
        match action {
            Action::Spawn => {
                assert!(!self.group, "a second engine beside a living group");
                *self = Self { leader: true, group: true, ..Self::default() };
            }
            Action::Terminate => {
                assert!(self.leader, "SIGTERM to a process that is gone");
                self.asked = true;
            }
            Action::KillGroup => self.killed = true,
            Action::ReportCrash => {}
        }
    }
}

proptest! {
    #[test]
    fn no_sequence_of_events_makes_two_engines_or_hides_a_crash(
        events in proptest::collection::vec((any_event(), 0_u64..400), 0..80),
    ) {
        let mut now = Instant::now();
        let mut machine = Machine::new(limits());
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
            prop_assert_eq!(unasked_exit, event == Event::Exited && actions.contains(&Action::ReportCrash));
            for action in actions {
                world.carry_out(action);
            }
            if let State::BackingOff { until } = machine.state() {
                let pause = until.saturating_duration_since(now);
                prop_assert!(pause <= LONGEST_BACKOFF);
            }
            if machine.state() == State::Stopped {
                prop_assert!(!world.group, "stopped with processes left");
            }
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
