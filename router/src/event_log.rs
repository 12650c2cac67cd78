//! The last hour of what happened to the fleet, for whoever was not looking: `hostler top` and the
//! page show it. Whoever decides that something has happened records it here, beside its line in
//! the log.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use hostler_proto::fleet::v1::FleetEvent;
use parking_lot::Mutex;

/// Milliseconds for which an event is kept: an hour.
const RETENTION_MS: u64 = 3_600_000;

/// Most events. With words of the longest kind they take 2.3 MB.
const MAX_EVENTS: usize = 2048;

/// Most characters of an event's words, and of the name of its subject.
const MAX_WORDS: usize = 200;

/// Clones share the log.
#[derive(Debug, Clone, Default)]
pub(crate) struct EventLog(Arc<Mutex<EventRing>>);

#[derive(Debug, Default)]
struct EventRing {
    /// The events, the oldest first. Their numbers have no gap.
    events: VecDeque<FleetEvent>,
    last_number: u64,
}

impl EventLog {
    /// Records an event of a node, a replica or, with an empty `subject`, of the router. `kind` is
    /// the name of its line in the log (docs/logs.md).
    pub(crate) fn record(&self, kind: &str, subject: &str, words: &str, is_grave: bool) {
        let at_ms = millis_since_1970(SystemTime::now());
        let (kind, subject, words) = (kind.to_owned(), shorten(subject), shorten(words));
        self.push(FleetEvent { number: 0, at_ms, kind, subject, words, grave: is_grave });
    }

    fn push(&self, event: FleetEvent) {
        let oldest = event.at_ms.saturating_sub(RETENTION_MS);
        let mut ring = self.0.lock();
        let old = ring.events.iter().take_while(|event| event.at_ms < oldest).count();
        let surplus = (ring.events.len() + 1).saturating_sub(MAX_EVENTS);
        ring.events.drain(..old.max(surplus));
        ring.last_number += 1;
        let number = ring.last_number;
        ring.events.push_back(FleetEvent { number, ..event });
    }

    /// The latest events after the one of this number, the oldest first, and at most so many.
    pub(crate) fn after(&self, number: u64, most: usize) -> Vec<FleetEvent> {
        let ring = self.0.lock();
        let new = usize::try_from(ring.last_number.saturating_sub(number)).unwrap_or(usize::MAX);
        let skipped = ring.events.len().saturating_sub(new.min(most));
        ring.events.iter().skip(skipped).cloned().collect()
    }

    /// The subjects of grave events of this kind since `since`, in milliseconds since 1970, one for
    /// each event.
    pub(crate) fn grave_subjects(&self, kind: &str, since: u64) -> Vec<String> {
        let ring = self.0.lock();
        let recent = ring.events.iter().rev().take_while(|event| event.at_ms >= since);
        recent.filter(|event| event.grave && event.kind == kind).map(|event| event.subject.clone()).collect()
    }

    /// The number of the latest event; 0 before the first.
    pub(crate) fn last_number(&self) -> u64 {
        self.0.lock().last_number
    }
}

pub(crate) fn millis_since_1970(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// Cuts words of agents and clients, and takes what controls a terminal out of them.
fn shorten(words: &str) -> String {
    words.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).take(MAX_WORDS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(events: &[FleetEvent]) -> Vec<u64> {
        events.iter().map(|event| event.number).collect()
    }

    #[test]
    fn a_reader_gets_only_what_came_after_its_last_event() {
        let log = EventLog::default();
        assert_eq!((log.after(0, 10), log.last_number()), (Vec::new(), 0));
        (0..5).for_each(|_| log.record("agent_attached", "n", "node n has come", false));
        assert_eq!(numbers(&log.after(0, 10)), [1, 2, 3, 4, 5]);
        assert_eq!(numbers(&log.after(3, 10)), [4, 5]);
        assert!(log.after(5, 10).is_empty());
        assert_eq!(numbers(&log.after(0, 2)), [4, 5], "the latest ones");
        assert!(log.after(99, 10).is_empty(), "a number of the router before this one");
    }

    #[test]
    fn only_recent_grave_events_of_a_kind_have_their_subjects_counted() {
        let log = EventLog::default();
        let record = |at_ms, kind: &str, grave| {
            log.push(FleetEvent { at_ms, kind: kind.into(), subject: at_ms.to_string(), grave, ..FleetEvent::default() });
        };
        for (at_ms, kind, grave) in [(1, "lost", true), (5, "lost", true), (6, "lost", false), (7, "other", true), (9, "lost", true)] {
            record(at_ms, kind, grave);
        }
        assert_eq!(log.grave_subjects("lost", 2), ["9", "5"]);
    }

    #[test]
    fn an_hour_is_kept_and_no_more_than_fits() {
        let log = EventLog::default();
        let record = |seconds: u64, words: &str| {
            log.push(FleetEvent { at_ms: (1_000_000 + seconds) * 1000, words: shorten(words), ..FleetEvent::default() });
        };
        record(0, "old");
        record(3000, "recent");
        record(3601, "now");
        assert_eq!(numbers(&log.after(0, 10)), [2, 3]);
        (0..3000).for_each(|_| record(3700, &"\u{1f40e}\n".repeat(9000)));
        let kept = log.after(0, usize::MAX);
        assert_eq!((kept.len(), kept[0].number), (MAX_EVENTS, 3003 - MAX_EVENTS as u64 + 1));
        let bytes: usize =
            kept.iter().map(|event| size_of::<FleetEvent>() + event.words.len() + event.subject.len() + event.kind.len()).sum();
        assert!(bytes < 2_300_000, "{bytes}");
        assert!(kept.iter().all(|event| event.words.chars().count() == 200 && !event.words.contains('\n')));
    }
}
