//! Every order of signals that schedulers, people and service managers send.

use super::LeaveSignal::{HangUp, Interrupt, Terminate, User1};
use super::SignalEffect::{Drain, Hurry, Ignore, Stop};
use super::*;

fn effects(source: SignalSource, signals: &[LeaveSignal]) -> Vec<SignalEffect> {
    let mut history = SignalHistory::new(source);
    signals.iter().map(|signal| history.record(*signal)).collect()
}

#[test]
fn operators_drain_with_one_signal_and_stop_with_two() {
    for first in [Interrupt, Terminate, HangUp] {
        for second in [Interrupt, Terminate, HangUp] {
            assert_eq!(effects(SignalSource::Operators, &[first, second]), [Drain, Stop], "{first:?} {second:?}");
        }
    }
}

#[test]
fn a_user_signal_drains_and_never_counts_as_the_second() {
    let table: [(&[LeaveSignal], &[SignalEffect]); 4] = [
        (&[User1, User1, User1], &[Drain, Ignore, Ignore]),
        (&[User1, Terminate, Terminate], &[Drain, Ignore, Stop]),
        (&[Terminate, User1, Terminate], &[Drain, Ignore, Stop]),
        (&[User1, Interrupt, User1, Interrupt], &[Drain, Ignore, Ignore, Stop]),
    ];
    for (signals, expected) in table {
        assert_eq!(effects(SignalSource::Operators, signals), expected, "{signals:?}");
    }
}

#[test]
fn only_a_second_interrupt_stops_a_job_at_once() {
    let table: [(&[LeaveSignal], &[SignalEffect]); 8] = [
        (&[Terminate], &[Hurry]),
        (&[Terminate, Terminate, Terminate], &[Hurry, Ignore, Ignore]),
        (&[User1, Terminate], &[Drain, Hurry]),
        (&[User1, User1, Terminate, User1, Terminate], &[Drain, Ignore, Hurry, Ignore, Ignore]),
        (&[HangUp, Terminate, HangUp], &[Drain, Hurry, Ignore]),
        (&[Interrupt, Terminate, Interrupt], &[Drain, Hurry, Stop]),
        (&[Interrupt, Interrupt], &[Drain, Stop]),
        (&[Terminate, Interrupt, Interrupt], &[Hurry, Ignore, Stop]),
    ];
    for (signals, expected) in table {
        assert_eq!(effects(SignalSource::Scheduler, signals), expected, "{signals:?}");
    }
}

#[test]
fn any_signals_begin_one_drain_and_shorten_it_once() {
    let all = [Interrupt, Terminate, HangUp, User1];
    for source in [SignalSource::Operators, SignalSource::Scheduler] {
        for mut number in 0..4_usize.pow(5) {
            let signals: Vec<LeaveSignal> = std::iter::repeat_with(|| {
                let signal = all[number % 4];
                number /= 4;
                signal
            })
            .take(5)
            .collect();
            let effects_seen = effects(source, &signals);
            assert!(matches!(effects_seen[0], Drain | Hurry), "{source:?} {signals:?}");
            assert!(effects_seen.iter().filter(|effect| **effect == Drain).count() <= 1, "{source:?} {signals:?}");
            let hurried = usize::from(source == SignalSource::Scheduler && signals.contains(&Terminate));
            // A process that has stopped receives no more signals.
            let before_stop = effects_seen.iter().position(|effect| *effect == Stop).unwrap_or(effects_seen.len());
            let expected = hurried.min(signals[..before_stop].iter().filter(|signal| **signal == Terminate).count());
            assert_eq!(effects_seen[..before_stop].iter().filter(|effect| **effect == Hurry).count(), expected, "{source:?} {signals:?}");
        }
    }
}
