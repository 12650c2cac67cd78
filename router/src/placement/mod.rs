//! Chooses a replica for a request from the fleet view: reads the prompt, looks up where its
//! beginning is cached, and prices each replica. The choice itself is the placement crate's, which
//! knows neither requests nor views.

mod cache_lookup;
mod decisions;
mod feedback;
mod output_lengths;
mod prefill_windows;
mod prompt;
mod prompt_reading;
mod queue;
mod tokenizer_upkeep;

use std::cell::RefCell;
use std::sync::Arc;

use arc_swap::Guard;
use hostler_placement::affinity::{ApproxPrefixIndex, CacheIndex, ChainGaps, InFlightOverlay, Popularity, ReplicaSlot};
use hostler_placement::block_keys::{BlockKey, TEXT_BLOCK_TOKENS};
use hostler_placement::cost::{Candidate, CandidateCost, Conditions, Decision, PricingInput, excess_sequences, has_room, place};
use hostler_placement::offered_work::OfferedWork;
use hostler_placement::rates::{RatePool, Rates};
use tokio::time::Instant;

#[cfg(test)]
pub(crate) use decisions::tests::record;
pub(crate) use decisions::{DecisionLog, PlacementDecision};
pub(crate) use feedback::PlacementFeedback;
pub(crate) use prefill_windows::PrefillWindows;
pub(crate) use prompt::{PlacementRequest, Prompt, mentions_media};
pub(crate) use queue::{DispatchTurn, MAX_QUEUED_BYTES, Overload, QueueLimits, QueueShare, QueueSlot, RequestQueue, WaitEstimate};
pub(crate) use tokenizer_upkeep::maintain_tokenizers;

use self::cache_lookup::{CacheKnowledge, KnownCache};
use crate::cache_level::CacheLevel;
use crate::fleet::{Fleet, FleetView, InFlight, InFlightCost, Replica};
use crate::metrics::RouterMetrics;
use crate::prompt::Prompts;
pub(crate) use output_lengths::OutputBounds;
use output_lengths::SharedOutputLengths;

/// Most decisions that can still be explained.
pub(crate) const MAX_RECORDED_DECISIONS: usize = 10_000;

/// Tokens by which an approximate prefix may be wrong without any eviction. Blocks of text and of
/// tokens end in different places.
const APPROX_PREFIX_SLACK_TOKENS: u32 = 2 * TEXT_BLOCK_TOKENS;

/// A plain answer is late after this many times the longest duration possible at the learned speed.
const LATE_FACTOR: f64 = 2.0;

/// Largest ratio of all routers' load to this router's own that is assumed.
const MAX_FLEET_SHARE: f64 = 16.0;

#[derive(Debug)]
pub(crate) struct Placer {
    pub fleet: Fleet,
    pub index: Arc<CacheIndex>,
    pub prompts: Prompts,
    pub decisions: DecisionLog,
    pub metrics: Arc<RouterMetrics>,
    overlay: Arc<InFlightOverlay>,
    popularity: Popularity,
    approx_prefix: Arc<ApproxPrefixIndex>,
    offered_load: OfferedWork,
    output_lengths: SharedOutputLengths,
    prefill_windows: PrefillWindows,
}

/// The chosen replica, and how it was chosen.
#[derive(Debug)]
pub(crate) struct ChosenReplica {
    pub replica: Arc<Replica>,
    pub decision: Decision,
    /// The fleet view of the choice. A candidate's `replica` is an index into its replicas.
    pub view: Arc<FleetView>,
    pub chosen_at: Instant,
    pub level: CacheLevel,
    pub expected_output_tokens: f64,
    /// Tokens that the answer is unlikely to exceed.
    pub long_output_tokens: f64,
    /// The replica's slot in the cache index, if its cache is known.
    slot: Option<ReplicaSlot>,
    block_tokens: u32,
    /// Whether the replica's prefill window is open.
    is_window_open: bool,
}

impl ChosenReplica {
    /// Whether the replica would compute the request at once, and its prefill window is open.
    #[must_use]
    pub(crate) fn has_room(&self) -> bool {
        self.is_window_open && has_room(&self.decision.choice().candidate)
    }

    /// Whether the engine would refuse the request now, because it bounds its own queue.
    #[must_use]
    pub(crate) fn is_refused(&self) -> bool {
        excess_sequences(&self.decision.choice().candidate) > 0
    }

    #[must_use]
    pub(crate) fn first_token_seconds(&self) -> f64 {
        self.decision.choice().terms.first_token()
    }

    /// Whether the replica's node may well leave before the answer has ended. No other replica
    /// could then finish it.
    #[must_use]
    pub(crate) fn ends_first(&self) -> bool {
        self.decision.choice().ends_first()
    }

    /// The parts of the choice that a waiting request keeps.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "a fleet has fewer than 2^52 replicas")]
    pub(crate) fn wait_estimate(&self) -> WaitEstimate {
        let candidates = self.decision.candidates.max(1) as f64;
        WaitEstimate { first_token_seconds: self.first_token_seconds(), seconds_per_token: self.decision.nominal.prefill / candidates }
    }

    /// Where the prompt's text is added, if its tokens are not known.
    #[must_use]
    pub(crate) fn approx_prefix_slot(&self) -> Option<ReplicaSlot> {
        self.slot.filter(|_| self.level == CacheLevel::Text)
    }

    #[must_use]
    pub(crate) fn uncached_tokens(&self) -> u32 {
        self.decision.choice().uncached
    }
}

/// The tables of one choice. Each thread keeps their memory for its next choice, so a larger fleet
/// needs no allocations. Only the cache index, the approximate prefix and the overlay still
/// allocate some bytes for each replica.
#[derive(Debug, Default)]
struct PlacementScratch {
    /// The candidates, one per row.
    candidates: Vec<Candidate>,
    /// The knowledge of each candidate's cache, in the same rows.
    cache_knowledge: Vec<CacheKnowledge>,
    /// The cost of each candidate.
    priced: Vec<CandidateCost>,
    rows: Vec<usize>,
    /// Slots of these rows' replicas in the cache index.
    exact_slots: Vec<(ReplicaSlot, ChainGaps)>,
    /// Slots of these rows' replicas in the approximate prefix.
    approx_prefix_slots: Vec<ReplicaSlot>,
}

thread_local! {
    static SCRATCH: RefCell<PlacementScratch> = RefCell::default();
}

impl Placer {
    #[must_use]
    pub(crate) fn new(
        fleet: Fleet,
        index: Arc<CacheIndex>,
        prompts: Prompts,
        metrics: Arc<RouterMetrics>,
        prefill_windows: PrefillWindows,
    ) -> Self {
        Self {
            fleet,
            index,
            prompts,
            metrics,
            decisions: DecisionLog::new(MAX_RECORDED_DECISIONS),
            overlay: Arc::default(),
            popularity: Popularity::default(),
            approx_prefix: Arc::default(),
            offered_load: OfferedWork::new(),
            output_lengths: SharedOutputLengths::default(),
            prefill_windows,
        }
    }

    /// Whether a model has replicas, but none with room that a request would be sent to. Replicas
    /// that leave before the end of an answer of the expected length count only if there are no
    /// others.
    fn is_full(&self, view: &FleetView, model: Option<&str>, now: Instant) -> bool {
        let (mut others, mut leaving_has_room, mut leaving) = (false, false, false);
        for (_, replica) in candidates_for(view, model, &[], now, |_| true) {
            let has_room = self.has_room(view, replica, now);
            if self.leaves_first(replica, now) {
                (leaving, leaving_has_room) = (true, leaving_has_room || has_room);
            } else if has_room {
                return false;
            } else {
                others = true;
            }
        }
        others || (leaving && !leaving_has_room)
    }

    /// Whether a replica leaves before the end of an answer of the expected length.
    fn leaves_first(&self, replica: &Replica, now: Instant) -> bool {
        let time_left = replica.seconds_until_leaving(now);
        if time_left.is_infinite() {
            return false;
        }
        let local = &replica.local_load;
        time_left
            < self.output_lengths.expected(OutputBounds::default())
                * local.learned().rates.step_seconds(local.sequences(), local.context_tokens())
    }

    /// Whether a request would be sent to the replica now rather than queued.
    fn has_room(&self, view: &FleetView, replica: &Replica, now: Instant) -> bool {
        let candidate = candidate(view, replica, 1, (now, view.seconds(now)));
        has_room(&candidate) && self.prefill_windows.is_open(candidate.in_flight, now)
    }

    /// The cheapest untried replica for the prompt, or `None`.
    #[must_use]
    pub(crate) fn choose(&self, prompt: &Prompt, tried: &[Arc<str>], now: Instant) -> Option<ChosenReplica> {
        SCRATCH.with_borrow_mut(|tables| self.choose_with_scratch(tables, prompt, tried, now))
    }

    fn choose_with_scratch(
        &self,
        tables: &mut PlacementScratch,
        prompt: &Prompt,
        tried: &[Arc<str>],
        now: Instant,
    ) -> Option<ChosenReplica> {
        let view = Guard::into_inner(self.fleet.view());
        let seconds = view.seconds(now);
        tables.candidates.clear();
        tables.cache_knowledge.clear();
        let (mut pool, mut ours, mut others, mut max_context) = (RatePool::default(), 0, 0_u32, 0);
        for (index, replica) in candidates_for(&view, prompt.model(), tried, now, |replica| prompt.is_answerable_by(replica)) {
            tables.candidates.push(Candidate { replica: index, ..candidate(&view, replica, prompt.sequences(), (now, seconds)) });
            tables.cache_knowledge.push(self.cache_knowledge(prompt, replica));
            pool.add(&replica.local_load.learned());
            max_context = replica.max_context_tokens().max(max_context);
            ours += replica.local_load.in_flight();
            others = others.saturating_add(replica.load.in_flight_elsewhere);
        }
        // Each prompt's arrival is counted once, in blocks of the replicas that it may go to.
        if tables.candidates.is_empty() {
            return None;
        }
        self.look_up_caches(&view, prompt, tables);
        let PlacementScratch { candidates, priced, .. } = tables;
        let mean = pool.mean(seconds);
        // Read the rates again: keeping each candidate's until all are known would cost more. They
        // may have changed a little meanwhile.
        for candidate in &mut *candidates {
            candidate.rates = mean.rates_of(&view.replicas[candidate.replica].local_load.learned());
        }
        let nominal = Rates::mean(candidates.iter().map(|candidate| &candidate.rates));
        let utilisation = self.offered_load.utilisation(candidates.len(), seconds) * fleet_share(ours, others);
        let arrivals = prompt.arrivals(|keys, block_tokens| self.popularity.arrive(keys, block_tokens, seconds));
        let bounds = prompt.output_bounds();
        let (output, long_output) = (self.output_lengths.expected(bounds), self.output_lengths.long(bounds));
        let ask = PricingInput { tokens: prompt.computed_tokens(max_context), output, long_output, arrivals };
        let decision = place(&ask, candidates, &Conditions { nominal, utilisation }, priced, &mut fastrand::Rng::new())?;
        let choice = &decision.choice().candidate;
        let (replica, is_window_open) = (view.replicas[choice.replica].clone(), self.prefill_windows.is_open(choice.in_flight, now));
        let (level, slot, block_tokens) = match self.cache_knowledge(prompt, &replica) {
            CacheKnowledge::Exact(KnownCache { slot, block_tokens, .. }) => (CacheLevel::Exact, Some(slot), block_tokens),
            CacheKnowledge::Approximate(slot) => (CacheLevel::Text, Some(slot), TEXT_BLOCK_TOKENS),
            CacheKnowledge::Unknown => (CacheLevel::Load, None, 0),
        };
        Some(ChosenReplica {
            replica,
            decision,
            view,
            chosen_at: now,
            level,
            expected_output_tokens: output,
            long_output_tokens: long_output,
            slot,
            block_tokens,
            is_window_open,
        })
    }

    /// Expected tokens of an answer within these bounds.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "no answer has 2^53 tokens, and `as` saturates")]
    pub(crate) fn expected_output_tokens(&self, bounds: OutputBounds) -> u64 {
        self.output_lengths.expected(bounds).ceil() as u64
    }

    /// Counts the request on the chosen replica, and its blocks as soon to be cached there.
    #[must_use]
    pub(crate) fn count_in_flight(&self, prompt: &Prompt, chosen: &ChosenReplica, now: Instant) -> InFlight {
        let seconds = self.fleet.view().seconds(now);
        let pledge = match (chosen.level, chosen.slot) {
            (CacheLevel::Exact, Some(slot)) => Some(self.overlay.add_placed(slot, prompt.extent(chosen.block_tokens))),
            (CacheLevel::Text, Some(slot)) => {
                self.approx_prefix.record_sent(slot, prompt.text_keys());
                None
            }
            _ => None,
        };
        let choice = chosen.decision.choice();
        let rates = &choice.candidate.rates;
        let work = rates.work_seconds(choice.uncached, choice.candidate.matched, chosen.expected_output_tokens);
        self.offered_load.add_request(work, seconds);
        let first_token = seconds + chosen.first_token_seconds();
        // A plain answer comes when it is complete, and its length is unknown. So it is late only
        // after the time for the longest possible answer.
        let due = match prompt.output_bounds().most {
            _ if prompt.is_stream() => first_token,
            #[allow(clippy::cast_precision_loss, reason = "token counts are far below 2^52")]
            Some(most) => {
                first_token
                    + LATE_FACTOR * most as f64 * rates.step_seconds(choice.candidate.in_flight.saturating_add(1), choice.candidate.context)
            }
            None => f64::INFINITY,
        };
        let prompt_tokens = prompt.computed_tokens(chosen.replica.max_context_tokens());
        let cost = InFlightCost {
            sequences: prompt.sequences(),
            prompt_tokens,
            uncached_tokens: choice.uncached,
            loaded_tokens: choice.candidate.loaded,
            read_tokens: choice.candidate.read,
            first_byte_due: due,
        };
        chosen.replica.local_load.start_request(cost, pledge)
    }

    /// Corrects an approximate prefix by the engine's report of cached tokens. The engine has
    /// meanwhile computed, and so cached, all of the prompt again.
    fn correct_approx_prefix(&self, slot: ReplicaSlot, keys: &[BlockKey], predicted: u32, cached: u32) {
        if cached.saturating_add(APPROX_PREFIX_SLACK_TOKENS) < predicted {
            self.approx_prefix.correct(slot, keys, cached / TEXT_BLOCK_TOKENS);
            self.approx_prefix.record_sent(slot, keys);
        }
    }
}

/// Untried replicas for a request that each of them `may_answer`, with their index in the view.
///
/// Standbys are among them only if every other one is missing or a last resort.
#[inline]
fn candidates_for<'a>(
    view: &'a FleetView,
    model: Option<&'a str>,
    tried: &'a [Arc<str>],
    now: Instant,
    may_answer: impl Fn(&Replica) -> bool + Copy + 'a,
) -> impl Iterator<Item = (usize, &'a Arc<Replica>)> {
    let eligible = move || view.eligible(model, tried).filter(move |(_, replica)| may_answer(replica));
    let uses_standbys = eligible().all(|(_, replica)| replica.state.is_standby || view.is_last_resort(replica, now));
    eligible().filter(move |(_, replica)| uses_standbys || !replica.state.is_standby)
}

/// Facts about a replica for a request of so many sequences, over all routers. `seconds` is `now`
/// on the router's clock, computed once for all replicas.
#[expect(clippy::inline_always, reason = "a call for each replica costs a placement among 1,000 replicas 5 % of its instructions")]
#[inline(always)]
fn candidate(view: &FleetView, replica: &Replica, sequences: u32, (now, seconds): (Instant, f64)) -> Candidate {
    let (local, load) = (&replica.local_load, &replica.load);
    Candidate {
        replica: 0,
        matched: 0,
        loaded: 0,
        read: 0,
        load_seconds: 0.0,
        in_flight: local.sequences().saturating_add(load.in_flight_elsewhere).max(load.engine.running.saturating_add(load.engine.waiting)),
        pending: local.pending_tokens().saturating_add(load.pending_tokens_elsewhere),
        context: local.context_tokens().saturating_add(load.context_tokens_elsewhere),
        capacity: kv_capacity_tokens(replica),
        kv_use: load.engine.kv_use,
        budget: replica.state.token_budget,
        most_beside: match local.sequence_limit(replica.state.sequence_limit, seconds) {
            0 => u32::MAX,
            limit => limit.saturating_sub(sequences),
        },
        overdue: local.overdue_seconds(seconds),
        rates: Rates::default(),
        time_left: replica.seconds_until_leaving(now),
        doubtful: view.is_last_resort(replica, now),
    }
}

/// Tokens per block of a replica's KV cache, if known.
fn block_tokens(replica: &Replica) -> Option<u32> {
    // Before the first block is stored, only the engine's metrics have this.
    [replica.state.block_tokens, replica.load.engine.block_tokens].into_iter().find(|size| *size > 0)
}

/// Tokens that fit into a replica's KV cache; 0 when unknown.
fn kv_capacity_tokens(replica: &Replica) -> u64 {
    let engine = &replica.load.engine;
    engine.kv_blocks.saturating_mul(u64::from(engine.block_tokens))
}

/// How many times our own requests the fleet serves, with so many of `ours` and `others` in flight.
fn fleet_share(ours: u32, others: u32) -> f64 {
    if ours == 0 { 1.0 } else { (1.0 + f64::from(others) / f64::from(ours)).min(MAX_FLEET_SHARE) }
}

#[cfg(test)]
mod tests;
