//! Recent events: those of the router's last hour, and what this view itself has seen of the
//! router.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime};

use hostler_proto::fleet::v1::PastResponse;

/// Events that are kept, and that the router is asked for.
pub(super) const MAX_EVENTS: usize = 200;

#[derive(Debug)]
pub(super) struct ShownEvent {
    pub(super) at: SystemTime,
    pub(super) words: String,
    pub(super) is_grave: bool,
}

/// Recent events, newest last.
#[derive(Debug, Default)]
pub(super) struct RecentEvents {
    events: VecDeque<ShownEvent>,
    /// Number of the router's last event that is here.
    last_number: u64,
}

impl RecentEvents {
    pub(super) fn last_number(&self) -> u64 {
        self.last_number
    }

    pub(super) fn push(&mut self, at: SystemTime, words: String) {
        self.add(ShownEvent { at, words, is_grave: false });
    }

    /// Adds the events that the router has told of after the last one.
    pub(super) fn extend(&mut self, past: PastResponse) {
        // A router that has begun anew counts from 1 and is asked for all of its events next.
        self.last_number = if past.last_event < self.last_number { 0 } else { past.last_event };
        for event in past.events {
            let at = SystemTime::UNIX_EPOCH + Duration::from_millis(event.at_ms);
            self.add(ShownEvent { at, words: event.words, is_grave: event.grave });
        }
    }

    fn add(&mut self, event: ShownEvent) {
        if self.events.len() >= MAX_EVENTS {
            self.events.pop_front();
        }
        let at = self.events.partition_point(|earlier| earlier.at <= event.at);
        self.events.insert(at, event);
    }

    /// The latest events, at most this many.
    pub(super) fn latest(&self, most: usize) -> impl Iterator<Item = &ShownEvent> {
        self.events.iter().skip(self.events.len().saturating_sub(most))
    }
}
