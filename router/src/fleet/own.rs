//! This router's own share of a replica's work, exact at every moment, and what it has learned of the replica's speed. It outlives
//! views: guards of requests in flight hold it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use hostler_placement::affinity::{Guess, Pledge, Seat};
use hostler_placement::rates::{FirstToken, Learned, Learner, Rates};
use parking_lot::Mutex;

/// See the module.
#[derive(Debug)]
pub struct Own {
    in_flight: AtomicU32,
    /// Prompt tokens that requests in flight still have computed.
    pending: AtomicU64,
    /// Prompt tokens of the requests in flight.
    context: AtomicU64,
    /// Until when the replica is avoided, in milliseconds of the router's clock.
    pub(super) avoided_until: AtomicU64,
    speed: Mutex<Learner>,
    /// A copy of what the learner has learned that is read without its lock. Its parts may be of two moments, which harms nobody.
    learned: [AtomicU64; 9],
    unanswered: Mutex<Unanswered>,
    /// When the answer of the oldest unanswered request was expected, in seconds of the router's clock, as bits.
    earliest_due: AtomicU64,
    /// Where the text that was sent to this life of its engine is remembered.
    guess: Mutex<Option<(u64, GuessSeat)>>,
}

/// A seat that is given back with its replica.
#[derive(Debug)]
struct GuessSeat {
    guess: Arc<Guess>,
    seat: Seat,
}

impl Drop for GuessSeat {
    fn drop(&mut self) {
        self.guess.close(self.seat);
    }
}

/// When the answer of each unanswered request was expected to begin, the earliest first.
#[derive(Debug, Default)]
struct Unanswered {
    /// Positive floating point numbers are in the order of their bits.
    due: BTreeSet<(u64, u64)>,
    next: u64,
}

impl Default for Own {
    fn default() -> Self {
        let own = Self {
            in_flight: AtomicU32::new(0),
            pending: AtomicU64::new(0),
            context: AtomicU64::new(0),
            avoided_until: AtomicU64::new(0),
            speed: Mutex::new(Learner::new(Rates::default())),
            learned: Default::default(),
            unanswered: Mutex::default(),
            earliest_due: AtomicU64::new(f64::INFINITY.to_bits()),
            guess: Mutex::default(),
        };
        own.publish(&Learned::default());
        own
    }
}

/// What a request is expected to cost a replica.
#[derive(Debug, Clone, Copy, Default)]
pub struct Booking {
    /// Tokens of its prompt.
    pub tokens: u32,
    /// Those among them that are not cached there.
    pub uncached: u32,
    /// When the first byte of its answer is expected, in seconds of the router's clock.
    pub due: f64,
}

impl Own {
    /// Counts a request until the guard is dropped. `pledge` lives until its prompt has been computed.
    #[must_use]
    pub fn enter(self: &Arc<Self>, booking: Booking, pledge: Option<Pledge>) -> InFlight {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        self.pending.fetch_add(booking.uncached.into(), Ordering::Relaxed);
        self.context.fetch_add(booking.tokens.into(), Ordering::Relaxed);
        let mut unanswered = self.unanswered.lock();
        unanswered.next += 1;
        let due = (booking.due.max(0.0).to_bits(), unanswered.next);
        unanswered.due.insert(due);
        self.note_due(&unanswered);
        InFlight { own: self.clone(), booking, due: Some(due), computing: Some(pledge) }
    }

    /// Requests in flight.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Prompt tokens that requests in flight still have computed.
    #[must_use]
    pub fn pending(&self) -> u64 {
        self.pending.load(Ordering::Relaxed)
    }

    /// Prompt tokens of the requests in flight.
    #[must_use]
    pub fn context(&self) -> u64 {
        self.context.load(Ordering::Relaxed)
    }

    /// Seconds for which the oldest unanswered request has waited beyond what was expected.
    #[must_use]
    pub fn overdue(&self, now: f64) -> f64 {
        (now - f64::from_bits(self.earliest_due.load(Ordering::Relaxed))).max(0.0)
    }

    /// What the replica has shown of its speed.
    #[must_use]
    pub fn learned(&self) -> Learned {
        let [step, prefill, attention, decode, context, slowness, first_tokens, intervals, load] =
            std::array::from_fn(|index| f64::from_bits(self.learned[index].load(Ordering::Relaxed)));
        Learned { rates: Rates { step, prefill, attention, decode, context, slowness }, first_tokens, intervals, load }
    }

    /// A stream's first token has come.
    pub fn learn_first_token(&self, seen: &FirstToken) {
        let mut speed = self.speed.lock();
        speed.first_token(seen);
        self.publish(&speed.learned());
    }

    /// A stream has ended whose tokens came `seconds` apart, among `sequences` that held `context` tokens.
    pub fn learn_interval(&self, sequences: u32, context: u64, seconds: f64) {
        let mut speed = self.speed.lock();
        speed.interval(sequences, context, seconds);
        self.publish(&speed.learned());
    }

    /// Where the text that is sent to the engine's life `epoch` is remembered; it holds `blocks` when it is new.
    #[must_use]
    pub fn guess(&self, epoch: u64, guess: &Arc<Guess>, blocks: impl FnOnce() -> u64) -> Seat {
        let mut known = self.guess.lock();
        if let Some((of, guessed)) = &*known
            && *of == epoch
        {
            return guessed.seat;
        }
        let seat = guess.open(usize::try_from(blocks()).unwrap_or(usize::MAX));
        *known = Some((epoch, GuessSeat { guess: guess.clone(), seat }));
        seat
    }

    fn publish(&self, learned: &Learned) {
        let Learned { rates, first_tokens, intervals, load } = learned;
        let values =
            [rates.step, rates.prefill, rates.attention, rates.decode, rates.context, rates.slowness, *first_tokens, *intervals, *load];
        for (slot, value) in self.learned.iter().zip(values) {
            slot.store(value.to_bits(), Ordering::Relaxed);
        }
    }

    fn note_due(&self, unanswered: &Unanswered) {
        let earliest = unanswered.due.first().map_or(f64::INFINITY.to_bits(), |(due, _)| *due);
        self.earliest_due.store(earliest, Ordering::Relaxed);
    }
}

/// A request in flight on a replica, from its dispatch to its last byte or its client's departure.
#[derive(Debug)]
pub struct InFlight {
    own: Arc<Own>,
    booking: Booking,
    /// Until its answer has begun.
    due: Option<(u64, u64)>,
    /// Until its prompt has been computed.
    computing: Option<Option<Pledge>>,
}

impl InFlight {
    /// Its prompt has been computed: it is not ahead of others any more.
    pub fn computed(&mut self) {
        if self.computing.take().is_some() {
            self.own.pending.fetch_sub(self.booking.uncached.into(), Ordering::Relaxed);
        }
    }

    /// Its answer has begun.
    pub fn answered(&mut self) {
        self.computed();
        if let Some(due) = self.due.take() {
            let mut unanswered = self.own.unanswered.lock();
            unanswered.due.remove(&due);
            self.own.note_due(&unanswered);
        }
    }

    /// Where it is counted.
    #[must_use]
    pub fn own(&self) -> &Arc<Own> {
        &self.own
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.answered();
        self.own.in_flight.fetch_sub(1, Ordering::Relaxed);
        self.own.context.fetch_sub(self.booking.tokens.into(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
