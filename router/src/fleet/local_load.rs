//! This router's own share of a replica's work, exact at every moment, and the replica's learned
//! speed.
//!
//! The load outlives views: guards of requests in flight hold it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use hostler_placement::affinity::{ApproxPrefixIndex, InFlightBlocks, ReplicaSlot};
use hostler_placement::rates::{FirstTokenSample, LearnedRates, LoadFactors, LoadSample, RateLearner, Rates, Samples};
use parking_lot::Mutex;

use super::stream_moves::StreamMoves;
use crate::prompt::EngineRendering;

#[derive(Debug)]
pub(crate) struct LocalLoad {
    in_flight: AtomicU32,
    /// Sequences that the engine computes for them.
    sequences: AtomicU32,
    /// Uncached prompt tokens of requests in flight that are still to be computed.
    pending_tokens: AtomicU64,
    /// Tokens that are still to be loaded from the host's memory for requests in flight.
    loading_tokens: AtomicU64,
    /// Those of them that are to be read from files before.
    reading_tokens: AtomicU64,
    /// Prompt tokens of the requests in flight.
    context_tokens: AtomicU64,
    /// Answers of its engines that were errors or broke off.
    failures: AtomicU64,
    /// Until when the replica is avoided, in milliseconds of the router's clock.
    pub(super) avoided_until: AtomicU64,
    /// The learned limit of sequences, in the lower half, and until when it holds, in seconds of
    /// the router's clock.
    learned_limit: AtomicU64,
    learner: Mutex<RateLearner>,
    /// How many times as long as assumed loads from the tiers behind its GPU's memory take.
    load_factors: Mutex<LoadFactors>,
    /// A copy of the learner's results that is read without its lock. Its parts may be of two
    /// moments, which is harmless.
    learned_bits: [AtomicU64; 12],
    unanswered: Mutex<Unanswered>,
    /// When the oldest unanswered request was expected to be answered: seconds of the router's
    /// clock, as the bits of an `f64`.
    earliest_due: AtomicU64,
    /// The approximate prefix slot of this life of the engine.
    approx_prefix: Mutex<Option<(u64, ApproxPrefixSlot)>>,
    /// How the replica's streams leave it. Kept here because a view copies each replica whenever
    /// that reports.
    pub(crate) stream_moves: StreamMoves,
    /// Kept here for the same reason.
    pub(crate) rendering: EngineRendering,
}

/// How long a learned limit holds before the engine is asked again: another tenant's long prompts
/// may have caused the refusal.
const LEARNED_LIMIT_SECONDS: f64 = 30.0;

#[expect(clippy::cast_possible_truncation, reason = "the half is what is asked for")]
const fn lower_half(both: u64) -> u32 {
    both as u32
}

const fn upper_half(both: u64) -> u32 {
    lower_half(both >> 32)
}

/// An approximate prefix slot, given back when it is dropped.
#[derive(Debug)]
struct ApproxPrefixSlot {
    index: Arc<ApproxPrefixIndex>,
    slot: ReplicaSlot,
}

impl Drop for ApproxPrefixSlot {
    fn drop(&mut self) {
        self.index.close(self.slot);
    }
}

/// When each unanswered request's answer was expected to begin, the earliest first.
#[derive(Debug, Default)]
struct Unanswered {
    /// Positive floating-point numbers have the order of their bits.
    due_times: BTreeSet<(u64, u64)>,
    next_number: u64,
}

impl Default for LocalLoad {
    fn default() -> Self {
        let own = Self {
            in_flight: AtomicU32::new(0),
            sequences: AtomicU32::new(0),
            pending_tokens: AtomicU64::new(0),
            loading_tokens: AtomicU64::new(0),
            reading_tokens: AtomicU64::new(0),
            context_tokens: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            avoided_until: AtomicU64::new(0),
            learned_limit: AtomicU64::new(0),
            learner: Mutex::new(RateLearner::new(Rates::default())),
            load_factors: Mutex::default(),
            learned_bits: Default::default(),
            unanswered: Mutex::default(),
            earliest_due: AtomicU64::new(f64::INFINITY.to_bits()),
            approx_prefix: Mutex::default(),
            stream_moves: StreamMoves::default(),
            rendering: EngineRendering::default(),
        };
        own.publish_learned(&LearnedRates::default());
        own
    }
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct InFlightCost {
    /// Sequences that the engine computes for the request.
    pub sequences: u32,
    pub prompt_tokens: u32,
    /// Prompt tokens that are not cached on the replica.
    pub uncached_tokens: u32,
    /// Prompt tokens that the engine loads from its host's memory.
    pub loaded_tokens: u32,
    /// Those of them that it reads from files before.
    pub read_tokens: u32,
    /// When the first byte of the request's answer is expected, in seconds of the router's clock.
    pub first_byte_due: f64,
}

impl LocalLoad {
    /// Counts a request until the guard is dropped. `pledge` is dropped when the request's prompt
    /// has been computed.
    #[must_use]
    pub(crate) fn start_request(self: &Arc<Self>, cost: InFlightCost, pledge: Option<InFlightBlocks>) -> InFlight {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        self.sequences.fetch_add(cost.sequences, Ordering::Relaxed);
        self.pending_tokens.fetch_add(cost.uncached_tokens.into(), Ordering::Relaxed);
        self.loading_tokens.fetch_add(cost.loaded_tokens.into(), Ordering::Relaxed);
        self.reading_tokens.fetch_add(cost.read_tokens.into(), Ordering::Relaxed);
        self.context_tokens.fetch_add(cost.prompt_tokens.into(), Ordering::Relaxed);
        let mut unanswered = self.unanswered.lock();
        unanswered.next_number += 1;
        let due = (cost.first_byte_due.max(0.0).to_bits(), unanswered.next_number);
        unanswered.due_times.insert(due);
        self.update_earliest_due(&unanswered);
        InFlight { load: self.clone(), cost, due: Some(due), in_flight_blocks: Some(pledge) }
    }

    /// Counts an answer of the replica's engine that has failed its client.
    pub(crate) fn count_failure(&self) {
        self.failures.fetch_add(1, Ordering::Relaxed);
    }

    #[must_use]
    pub(crate) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Most sequences that the engine takes at once: `stated` by its flags, else learned from its
    /// last refusal; 0 if neither says. `now` is in seconds of the router's clock.
    #[inline]
    #[must_use]
    pub(crate) fn sequence_limit(&self, stated: u32, now: f64) -> u32 {
        // Most engines have never refused a request, and every placement checks every replica.
        match self.learned_limit.load(Ordering::Relaxed) {
            learned if stated == 0 && learned > 0 && f64::from(upper_half(learned)) > now => lower_half(learned),
            _ => stated,
        }
    }

    /// Learns that the engine takes no more than so many sequences.
    pub(crate) fn learn_sequence_limit(&self, limit: u32, now: f64) {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a router runs for fewer than 2^32 seconds")]
        let until = (now + LEARNED_LIMIT_SECONDS) as u32;
        self.learned_limit.store(u64::from(until) << 32 | u64::from(limit), Ordering::Relaxed);
    }

    #[must_use]
    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::Relaxed)
    }

    #[must_use]
    pub(crate) fn sequences(&self) -> u32 {
        self.sequences.load(Ordering::Relaxed)
    }

    #[must_use]
    pub(crate) fn pending_tokens(&self) -> u64 {
        self.pending_tokens.load(Ordering::Relaxed)
    }

    #[must_use]
    pub(crate) fn loading_tokens(&self) -> u64 {
        self.loading_tokens.load(Ordering::Relaxed)
    }

    #[must_use]
    pub(crate) fn reading_tokens(&self) -> u64 {
        self.reading_tokens.load(Ordering::Relaxed)
    }

    #[must_use]
    pub(crate) fn context_tokens(&self) -> u64 {
        self.context_tokens.load(Ordering::Relaxed)
    }

    #[must_use]
    pub(crate) fn overdue_seconds(&self, now: f64) -> f64 {
        (now - f64::from_bits(self.earliest_due.load(Ordering::Relaxed))).max(0.0)
    }

    #[must_use]
    pub(crate) fn learned(&self) -> LearnedRates {
        let at = |index: usize| f64::from_bits(self.learned_bits[index].load(Ordering::Relaxed));
        LearnedRates {
            rates: Rates { step: at(0), prefill: at(1), attention: at(2), decode: at(3), context: at(4), slowness: at(5) },
            first_tokens: Samples { count: at(6), spread: at(7) },
            intervals: Samples { count: at(8), spread: at(9) },
            mean_load: at(10),
            learned_at: at(11),
        }
    }

    /// Learns from a stream's first token, which came at this time of the router's clock.
    pub(crate) fn learn_first_token(&self, seen: &FirstTokenSample, now: f64) {
        let mut speed = self.learner.lock();
        speed.learn_first_token(seen, now);
        self.publish_learned(&speed.learned());
    }

    /// Learns from the first token of a stream for which tokens were loaded.
    pub(crate) fn learn_load(&self, seen: &LoadSample) {
        self.load_factors.lock().learn(seen);
    }

    #[must_use]
    pub(crate) fn load_factors(&self) -> LoadFactors {
        *self.load_factors.lock()
    }

    /// Learns from a stream that ended at this time of the router's clock. Its tokens came
    /// `seconds` apart, among `sequences` that held `context` tokens.
    pub(crate) fn learn_interval(&self, sequences: u32, context: u64, seconds: f64, now: f64) {
        let mut speed = self.learner.lock();
        speed.learn_interval(sequences, context, seconds, now);
        self.publish_learned(&speed.learned());
    }

    /// The approximate prefix slot of the engine's life `epoch`. A new slot has room for `blocks`.
    #[must_use]
    pub(crate) fn approx_prefix_slot(&self, epoch: u64, index: &Arc<ApproxPrefixIndex>, blocks: impl FnOnce() -> u64) -> ReplicaSlot {
        let mut known = self.approx_prefix.lock();
        if let Some((of, noted)) = &*known
            && *of == epoch
        {
            return noted.slot;
        }
        let slot = index.open(usize::try_from(blocks()).unwrap_or(usize::MAX));
        *known = Some((epoch, ApproxPrefixSlot { index: index.clone(), slot }));
        slot
    }

    fn publish_learned(&self, learned: &LearnedRates) {
        let Rates { step, prefill, attention, decode, context, slowness } = learned.rates;
        let [first_tokens, intervals] = [learned.first_tokens, learned.intervals].map(|Samples { count, spread }| [count, spread]);
        let values = [step, prefill, attention, decode, context, slowness].into_iter().chain(first_tokens).chain(intervals);
        let values = values.chain([learned.mean_load, learned.learned_at]);
        for (slot, value) in self.learned_bits.iter().zip(values) {
            slot.store(value.to_bits(), Ordering::Relaxed);
        }
    }

    fn update_earliest_due(&self, unanswered: &Unanswered) {
        let earliest = unanswered.due_times.first().map_or(f64::INFINITY.to_bits(), |(due, _)| *due);
        self.earliest_due.store(earliest, Ordering::Relaxed);
    }
}

/// A request in flight on a replica, from its dispatch to its last byte or its client's departure.
#[derive(Debug)]
pub(crate) struct InFlight {
    load: Arc<LocalLoad>,
    cost: InFlightCost,
    /// `None` once the request's answer has begun.
    due: Option<(u64, u64)>,
    /// `None` once the request's prompt has been computed.
    in_flight_blocks: Option<Option<InFlightBlocks>>,
}

impl InFlight {
    /// Records that the prompt has been computed, so the request no longer delays others.
    pub(crate) fn finish_prefill(&mut self) {
        if self.in_flight_blocks.take().is_some() {
            self.load.pending_tokens.fetch_sub(self.cost.uncached_tokens.into(), Ordering::Relaxed);
            self.load.loading_tokens.fetch_sub(self.cost.loaded_tokens.into(), Ordering::Relaxed);
            self.load.reading_tokens.fetch_sub(self.cost.read_tokens.into(), Ordering::Relaxed);
        }
    }

    pub(crate) fn start_answer(&mut self) {
        self.finish_prefill();
        if let Some(due) = self.due.take() {
            let mut unanswered = self.load.unanswered.lock();
            unanswered.due_times.remove(&due);
            self.load.update_earliest_due(&unanswered);
        }
    }

    #[must_use]
    pub(crate) fn load(&self) -> &Arc<LocalLoad> {
        &self.load
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.start_answer();
        self.load.in_flight.fetch_sub(1, Ordering::Relaxed);
        self.load.sequences.fetch_sub(self.cost.sequences, Ordering::Relaxed);
        self.load.context_tokens.fetch_sub(self.cost.prompt_tokens.into(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
