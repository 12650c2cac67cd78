//! Requests that were placed here but are sent by their callers. Each one's cost is counted at its
//! replica until the caller releases the booking or it expires, so the next request is placed as if
//! this one were running there, which it is.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::admission::Permit;
use crate::background::BackgroundTasks;
use crate::fleet::InFlight;
use crate::keys::Caller;
use crate::placement::RequestQueue;

/// The requests that their callers send themselves, bounded by admission. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Bookings(Arc<BookingsShared>);

#[derive(Debug)]
struct BookingsShared {
    table: Mutex<BookingTable>,
    /// Notified when a booking ends, because a queued request may now have room.
    queue: RequestQueue,
    changed: Notify,
}

#[derive(Debug, Default)]
struct BookingTable {
    by_id: FxHashMap<u64, ExternalBooking>,
    /// When to look at each booking next. Each booking is here once.
    timers: BTreeSet<(Instant, u64)>,
}

#[derive(Debug)]
struct ExternalBooking {
    in_flight: InFlight,
    _permit: Permit,
    /// The caller's key and tenant. No other caller may release the booking.
    owner: (Arc<str>, Arc<str>),
    next_check: Instant,
    expires: Instant,
}

impl Bookings {
    /// Starts the task that expires bookings.
    #[must_use]
    pub(crate) fn start(queue: RequestQueue, tasks: &BackgroundTasks) -> Self {
        let bookings = Self(Arc::new(BookingsShared { table: Mutex::default(), queue, changed: Notify::new() }));
        let expiring = bookings.clone();
        tasks.spawn(async move { expiring.run_expiry().await });
        bookings
    }

    /// Counts a request under `id`, which nobody can guess: its prompt for `computing`, the whole
    /// request for `lasts`.
    pub(crate) fn book(&self, id: u64, booked: (InFlight, Permit), caller: &Caller, (computing, lasts): (Duration, Duration)) {
        let ((in_flight, permit), now) = (booked, Instant::now());
        let expires = now + lasts;
        let next = expires.min(now + computing);
        let owner = (caller.key.clone(), caller.tenant.clone());
        let mut booked = self.0.table.lock();
        booked.by_id.insert(id, ExternalBooking { in_flight, _permit: permit, owner, next_check: next, expires });
        booked.timers.insert((next, id));
        drop(booked);
        self.0.changed.notify_one();
    }

    /// Ends a booking of the caller's own; `false` if it has none with this id.
    pub(crate) fn release(&self, id: u64, caller: &Caller) -> bool {
        let is_own = |booking: &ExternalBooking| booking.owner.0 == caller.key && booking.owner.1 == caller.tenant;
        let mut booked = self.0.table.lock();
        if !booked.by_id.get(&id).is_some_and(is_own) {
            return false;
        }
        let released = booked.remove(id);
        drop(booked);
        drop(released);
        self.0.queue.notify_change();
        true
    }

    async fn run_expiry(&self) {
        loop {
            let (next, ended) = self.0.table.lock().process_due(Instant::now());
            if !ended.is_empty() {
                tracing::debug!(count = ended.len(), "bookings have expired");
                drop(ended);
                self.0.queue.notify_change();
            }
            let due = async {
                match next {
                    Some(next) => sleep_until(next).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = due => {}
                () = self.0.changed.notified() => {}
            }
        }
    }
}

impl BookingTable {
    fn remove(&mut self, id: u64) -> Option<ExternalBooking> {
        let booking = self.by_id.remove(&id)?;
        self.timers.remove(&(booking.next_check, id));
        Some(booking)
    }

    /// Handles due bookings. Returns when to look again, and the bookings that have ended.
    fn process_due(&mut self, now: Instant) -> (Option<Instant>, Vec<ExternalBooking>) {
        let mut ended = Vec::new();
        while let Some((at, id)) = self.timers.first().copied() {
            if at > now {
                return (Some(at), ended);
            }
            self.timers.pop_first();
            match self.by_id.get_mut(&id) {
                Some(booking) if booking.expires > now => {
                    // Nobody tells the router that the answer has begun. It should have by now; if
                    // not, that says nothing of the engine's speed.
                    booking.in_flight.start_answer();
                    booking.next_check = booking.expires;
                    let next = (booking.next_check, id);
                    self.timers.insert(next);
                }
                Some(_) => ended.extend(self.by_id.remove(&id)),
                None => {}
            }
        }
        (None, ended)
    }
}

#[cfg(test)]
mod tests;
