//! `Place` and `Release`: a replica for a request that its caller sends itself. What the request will cost the replica is counted there until
//! the caller releases the booking or it expires, so that the next request is placed as if this one were there. It is.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use hostler_placement::cost::has_room;
use hostler_proto::inference::v1 as wire;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tonic::{Code, Status};

use super::status;
use crate::admission::Permit;
use crate::background::BackgroundTasks;
use crate::dispatch::ExternalPlacement;
use crate::fleet::InFlight;
use crate::keys::Caller;
use crate::placement::{RequestQueue, PlacementDecision};

/// How long a booking lasts if its caller does not say.
const HOLD: Duration = Duration::from_secs(30);

/// The longest that one lasts: a caller that has died would count for as long.
const LONGEST_HOLD: Duration = Duration::from_secs(600);

/// Candidates that are told.
const MOST_CANDIDATES: usize = 64;

/// The requests that their callers send themselves. There are no more than admission lets in. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Bookings(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    booked: Mutex<Booked>,
    /// Told when a booking ends, as there may be room for somebody who waits.
    hold: RequestQueue,
    news: Notify,
}

#[derive(Debug, Default)]
struct Booked {
    by_id: FxHashMap<u64, Booking>,
    /// When to look at a booking next: each stands here once.
    agenda: BTreeSet<(Instant, u64)>,
}

/// One booking.
#[derive(Debug)]
struct Booking {
    in_flight: InFlight,
    _permit: Permit,
    /// Who may release it.
    owner: (Arc<str>, Arc<str>),
    next: Instant,
    expires: Instant,
}

impl Bookings {
    /// Starts the task that ends bookings.
    #[must_use]
    pub fn start(hold: RequestQueue, tasks: &BackgroundTasks) -> Self {
        let bookings = Self(Arc::new(Shared { booked: Mutex::default(), hold, news: Notify::new() }));
        let expiring = bookings.clone();
        tasks.spawn(async move { expiring.expire().await });
        bookings
    }

    /// Bookings that count now.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.booked.lock().by_id.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Counts a request under its number, which nobody can guess: for `lasts`, of which its prompt is computed for `computing`.
    fn book(&self, id: u64, booked: (InFlight, Permit), caller: &Caller, (computing, lasts): (Duration, Duration)) {
        let ((in_flight, permit), now) = (booked, Instant::now());
        let expires = now + lasts;
        let next = expires.min(now + computing);
        let owner = (caller.key.clone(), caller.tenant.clone());
        let mut booked = self.0.booked.lock();
        booked.by_id.insert(id, Booking { in_flight, _permit: permit, owner, next, expires });
        booked.agenda.insert((next, id));
        drop(booked);
        self.0.news.notify_one();
    }

    /// Ends a booking of the caller's own; `false` when there is none of this name.
    fn release(&self, id: u64, caller: &Caller) -> bool {
        let is_own = |booking: &Booking| booking.owner.0 == caller.key && booking.owner.1 == caller.tenant;
        let mut booked = self.0.booked.lock();
        if !booked.by_id.get(&id).is_some_and(is_own) {
            return false;
        }
        let released = booked.remove(id);
        drop(booked);
        drop(released);
        self.0.hold.notify_change();
        true
    }

    async fn expire(&self) {
        loop {
            let (next, ended) = self.0.booked.lock().pass(Instant::now());
            if !ended.is_empty() {
                tracing::debug!(count = ended.len(), "bookings have expired");
                drop(ended);
                self.0.hold.notify_change();
            }
            let due = async {
                match next {
                    Some(next) => sleep_until(next).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = due => {}
                () = self.0.news.notified() => {}
            }
        }
    }
}

impl Booked {
    fn remove(&mut self, id: u64) -> Option<Booking> {
        let booking = self.by_id.remove(&id)?;
        self.agenda.remove(&(booking.next, id));
        Some(booking)
    }

    /// Does what is due: when to look again, and the bookings that have ended.
    fn pass(&mut self, now: Instant) -> (Option<Instant>, Vec<Booking>) {
        let mut ended = Vec::new();
        while let Some((at, id)) = self.agenda.first().copied() {
            if at > now {
                return (Some(at), ended);
            }
            self.agenda.pop_first();
            match self.by_id.get_mut(&id) {
                Some(booking) if booking.expires > now => {
                    // Nobody tells the router that the answer has begun. By now it should have; that it has not is no sign of a slow engine.
                    booking.in_flight.answered();
                    booking.next = booking.expires;
                    let next = (booking.next, id);
                    self.agenda.insert(next);
                }
                Some(_) => ended.extend(self.by_id.remove(&id)),
                None => {}
            }
        }
        (None, ended)
    }
}

/// Where a request that was placed belongs, and its booking.
pub(super) fn booked(
    reserved: ExternalPlacement,
    permit: Permit,
    bookings: &Bookings,
    caller: &Caller,
    (lasts, tells): (Duration, bool),
) -> wire::PlaceResponse {
    let ExternalPlacement { replica, in_flight, decision: record, prefill_estimate: computing } = reserved;
    let id = record.id;
    bookings.book(id, (in_flight, permit), caller, (computing, lasts));
    wire::PlaceResponse {
        placement: Some(super::answer::placement(&record)),
        node: replica.node.to_string(),
        epoch: replica.epoch,
        address: replica.state.wire.engine_socket.clone(),
        has_room: has_room(&record.choice().1.candidate),
        booking: Some(wire::Booking { id: format!("{id:016x}"), expires_in: prost_types::Duration::try_from(lasts).ok() }),
        candidates: if tells { candidates(&record) } else { Vec::new() },
    }
}

/// Gives a booking back.
pub(super) fn release(bookings: &Bookings, caller: &Caller, name: &str) -> Result<(), Status> {
    let id = u64::from_str_radix(name, 16).map_err(|_| status::wrong("booking", "this is no booking's id"))?;
    if bookings.release(id, caller) {
        return Ok(());
    }
    Err(status::told(Code::NotFound, "BOOKING_NOT_FOUND", "there is no such booking: it has expired, or was released before", &[]))
}

/// How long a booking is to last.
pub(super) fn lasts(hold: Option<&prost_types::Duration>) -> Result<Duration, Status> {
    let Some(hold) = hold else { return Ok(HOLD) };
    let hold = Duration::try_from(*hold).ok().filter(|hold| !hold.is_zero());
    hold.map(|hold| hold.min(LONGEST_HOLD)).ok_or_else(|| status::wrong("hold", "a booking lasts for more than no time"))
}

/// The candidates of a decision, the cheapest first.
fn candidates(record: &PlacementDecision) -> Vec<wire::Candidate> {
    let scored = record.decision.scored.iter().zip(&record.replica_names).enumerate();
    let mut candidates: Vec<wire::Candidate> = scored
        .map(|(at, (scored, name))| wire::Candidate {
            replica: name.to_string(),
            matched_tokens: scored.candidate.matched,
            in_flight: scored.candidate.in_flight,
            predicted_first_token_seconds: scored.terms.first_token(),
            cost_seconds: scored.terms.total(),
            chosen: at == record.decision.chosen,
        })
        .collect();
    candidates.sort_by(|left, right| left.cost_seconds.total_cmp(&right.cost_seconds));
    candidates.truncate(MOST_CANDIDATES);
    candidates
}

#[cfg(test)]
mod tests;
