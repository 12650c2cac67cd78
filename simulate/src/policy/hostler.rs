//! The router's own policy: the placement crate's index, overlay, popularity, learner, cost and
//! hold queue, put together as in the router's placement.
//!
//! Only the parts that need a network are left out: connections, deadlines, other routers.

use std::collections::BTreeSet;
use std::sync::Arc;

use hostler_placement::affinity::{
    Arrivals, CacheIndex, ChainGaps, InFlightBlocks, InFlightOverlay, Popularity, PromptKeys, PromptToMatch, ReplicaSlot,
};
use hostler_placement::block_keys::BlockKey;
use hostler_placement::cost::{Candidate, CandidateCost, Conditions, Decision, LowerTiers, PricingInput, has_room, place};
use hostler_placement::offered_work::OfferedWork;
use hostler_placement::output_lengths::OutputLengths;
use hostler_placement::queue::{Queue, TurnFactors};
use hostler_placement::rates::{FirstTokenSample, LearnedRates, LoadRates, RateLearner, RatePool, Rates};
use rustc_hash::FxHashMap;

use super::Policy;
use crate::fleet::{FleetState, ReplicaReport, SimulatedFleet};
use crate::request::{BLOCK_TOKENS, Request};

/// Most requests that may wait: more than any run has.
const MAX_QUEUED: usize = 1 << 20;

/// Queued requests that are examined after a change, in the order of their turns.
const SCANNED_REQUESTS: usize = 32;

#[derive(Debug)]
pub(super) struct HostlerPolicy {
    fleet: SimulatedFleet,
    random: fastrand::Rng,
    index: CacheIndex,
    slots: Vec<(ReplicaSlot, ChainGaps)>,
    /// Slots of the host tiers; none without such tiers.
    host_slots: Vec<(ReplicaSlot, ChainGaps)>,
    overlay: Arc<InFlightOverlay>,
    popularity: Popularity,
    offered_work: OfferedWork,
    output_lengths: OutputLengths,
    /// Reused buffer for the costs.
    priced: Vec<CandidateCost>,
    local_loads: Vec<LocalLoad>,
    in_flight: FxHashMap<usize, DispatchedRequest>,
    /// Requests that wait; `None` if every request is sent at once.
    queue: Option<Queue<(usize, QueuedPrompt)>>,
}

/// The router's own knowledge of one replica's load.
#[derive(Debug)]
struct LocalLoad {
    pending: u64,
    loading: u64,
    context: u64,
    learner: RateLearner,
    /// When each unanswered request was expected to be answered, with its id.
    ///
    /// The bits of positive numbers have the numbers' order.
    due: BTreeSet<(u64, usize)>,
}

/// A prompt, and how often its prefixes were requested before.
#[derive(Debug, Clone)]
struct QueuedPrompt {
    keys: Arc<[BlockKey]>,
    tokens: u32,
    output: u32,
    arrivals: Arrivals,
}

/// A request in flight.
#[derive(Debug)]
struct DispatchedRequest {
    at: f64,
    predicted: f64,
    /// Part of the prediction for loading from the host's memory.
    load_seconds: f64,
    choice: Candidate,
    tokens: u32,
    output: u32,
    uncached: u32,
    due: u64,
    in_flight_blocks: Option<InFlightBlocks>,
    /// When the first token came, among how many requests with how many tokens.
    first_token: Option<(f64, u32, u64)>,
}

impl HostlerPolicy {
    pub(super) fn new(fleet: &SimulatedFleet, random: fastrand::Rng, holds: bool) -> Self {
        let index = CacheIndex::new();
        let open = |count: u16| (0..count).map(|_| (index.open(), ChainGaps::None)).collect();
        let slots = open(fleet.replicas);
        let host_slots = open(if fleet.hardware.host_tokens > 0 { fleet.replicas } else { 0 });
        let own = || LocalLoad { pending: 0, loading: 0, context: 0, learner: RateLearner::new(Rates::default()), due: BTreeSet::new() };
        Self {
            fleet: *fleet,
            random,
            index,
            slots,
            host_slots,
            overlay: Arc::default(),
            popularity: Popularity::default(),
            offered_work: OfferedWork::new(),
            output_lengths: OutputLengths::default(),
            priced: Vec::new(),
            local_loads: (0..fleet.replicas).map(|_| own()).collect(),
            in_flight: FxHashMap::default(),
            queue: holds.then(|| Queue::new(MAX_QUEUED)),
        }
    }

    fn choose(&mut self, prompt: &QueuedPrompt, seen: &FleetState, now: f64) -> Decision {
        let mut matched = self.index.matched_blocks(&prompt.keys, &self.slots);
        self.overlay.raise_matches(&PromptToMatch::whole(&prompt.keys), &self.slots, &mut matched);
        let most = prompt.tokens.saturating_sub(1) / BLOCK_TOKENS;
        let learned: Vec<LearnedRates> = self.local_loads.iter().map(|own| own.learner.learned()).collect();
        let mean = RatePool::new(learned.iter()).mean(now);
        let mut candidates: Vec<Candidate> = matched
            .iter()
            .zip(&learned)
            .enumerate()
            .map(|(replica, (blocks, learned))| Candidate {
                matched: (*blocks).min(most) * BLOCK_TOKENS,
                rates: mean.rates_of(learned),
                ..self.candidate(replica, seen, now)
            })
            .collect();
        if !self.host_slots.is_empty() {
            let on_hosts = self.index.matched_blocks(&prompt.keys, &self.host_slots);
            for ((candidate, blocks), own) in candidates.iter_mut().zip(on_hosts).zip(&self.local_loads) {
                let rates = LoadRates { load: self.fleet.hardware.load, read: 0.0 };
                let on_host = blocks.min(most) * BLOCK_TOKENS;
                candidate.add_lower_tiers(&LowerTiers { on_host, in_files: 0, loading: own.loading, reading: 0, rates });
            }
        }
        let nominal = Rates::mean(candidates.iter().map(|candidate| &candidate.rates));
        let utilisation = self.offered_work.utilisation(candidates.len(), now);
        let ask = PricingInput {
            tokens: prompt.tokens,
            output: self.output_lengths.mean(),
            long_output: self.output_lengths.long(),
            arrivals: &prompt.arrivals,
        };
        let conditions = Conditions { nominal, utilisation };
        place(&ask, &candidates, &conditions, &mut self.priced, &mut self.random).expect("a fleet has a replica")
    }

    fn candidate(&self, replica: usize, seen: &FleetState, now: f64) -> Candidate {
        let (own, load) = (&self.local_loads[replica], &seen.loads[replica]);
        Candidate {
            replica,
            matched: 0,
            loaded: 0,
            read: 0,
            load_seconds: 0.0,
            in_flight: seen.in_flight[replica].max(load.running + load.waiting),
            pending: own.pending,
            context: own.context,
            capacity: self.fleet.hardware.kv_tokens.into(),
            kv_use: load.kv_use,
            budget: self.fleet.hardware.budget,
            overdue: own.due.first().map_or(0.0, |(due, _)| (now - f64::from_bits(*due)).max(0.0)),
            rates: Rates::default(),
            time_left: seen.job_ends[replica] - now,
            most_beside: u32::MAX,
            doubtful: false,
        }
    }

    fn dispatch(&mut self, id: usize, prompt: &QueuedPrompt, decision: &Decision, now: f64) -> usize {
        let choice = decision.choice();
        let replica = choice.candidate.replica;
        let rates = &choice.candidate.rates;
        self.offered_work.add_request(rates.work_seconds(choice.uncached, choice.candidate.matched, self.output_lengths.mean()), now);
        let predicted = choice.terms.first_token();
        let due = (now + predicted).to_bits();
        let own = &mut self.local_loads[replica];
        own.pending += u64::from(choice.uncached);
        own.loading += u64::from(choice.candidate.loaded);
        own.context += u64::from(prompt.tokens);
        own.due.insert((due, id));
        let pledge = Some(self.overlay.add_placed(self.slots[replica].0, PromptKeys::whole(prompt.keys.clone())));
        let (tokens, output, uncached) = (prompt.tokens, prompt.output, choice.uncached);
        self.in_flight.insert(
            id,
            DispatchedRequest {
                at: now,
                predicted,
                load_seconds: choice.terms.load,
                choice: choice.candidate,
                tokens,
                output,
                uncached,
                due,
                in_flight_blocks: pledge,
                first_token: None,
            },
        );
        replica
    }
}

impl Policy for HostlerPolicy {
    fn place(&mut self, id: usize, request: &Request, seen: &FleetState, now: f64) -> Option<usize> {
        let keys: Arc<[BlockKey]> = request.prompt_keys().into();
        let arrivals = self.popularity.arrive(&keys, BLOCK_TOKENS, now);
        let prompt = QueuedPrompt { keys, tokens: request.prompt, output: request.output, arrivals };
        let decision = self.choose(&prompt, seen, now);
        match &mut self.queue {
            Some(hold) if !has_room(&decision.choice().candidate) || !hold.is_empty() => {
                let uncached = decision.choice().uncached;
                let waiting =
                    TurnFactors { priority: 0, tenant: 0, weight: 1.0, uncached_tokens: uncached, output_tokens: 0, queued_at: now };
                hold.push(waiting, (id, prompt)).expect("there is room for every request of a run");
                None
            }
            _ => Some(self.dispatch(id, &prompt, &decision, now)),
        }
    }

    fn release(&mut self, seen: &FleetState, now: f64) -> Option<(usize, usize)> {
        // Take the queue out while the router is queried about its requests.
        let mut hold = self.queue.take()?;
        let mut released = None;
        if !hold.is_empty() && (0..self.local_loads.len()).any(|replica| has_room(&self.candidate(replica, seen, now))) {
            let mut decision = None;
            let gone = hold.pop_where(now, SCANNED_REQUESTS, |waiting, (_, prompt)| {
                let choice = decision.insert(self.choose(prompt, seen, now)).choice();
                waiting.uncached_tokens = choice.uncached;
                has_room(&choice.candidate)
            });
            if let (Some((_, (id, prompt))), Some(decision)) = (gone, decision) {
                released = Some((id, self.dispatch(id, &prompt, &decision, now)));
            }
        }
        self.queue = Some(hold);
        released
    }

    fn on_report(&mut self, replica: usize, report: &ReplicaReport) {
        let tiers = [(&self.slots, &report.changes), (&self.host_slots, &report.copy_changes)];
        for (slots, changes) in tiers {
            if let Some((slot, _)) = slots.get(replica) {
                self.index.remove(*slot, &changes.removed);
                self.index.store(*slot, &changes.stored);
            }
        }
    }

    fn on_first_token(&mut self, id: usize, seen: &FleetState, now: f64) {
        let Some(sent) = self.in_flight.get_mut(&id) else { return };
        let replica = sent.choice.replica;
        let own = &mut self.local_loads[replica];
        sent.in_flight_blocks = None;
        own.pending -= u64::from(sent.uncached);
        own.loading -= u64::from(sent.choice.loaded);
        own.due.remove(&(sent.due, id));
        sent.first_token = Some((now, seen.in_flight[replica], own.context));
        let sample = FirstTokenSample {
            predicted_seconds: sent.predicted,
            load_seconds: sent.load_seconds,
            priced: sent.choice.rates,
            actual_seconds: now - sent.at,
            uncached: sent.uncached,
            matched: sent.choice.matched,
            pending: sent.choice.pending,
            in_flight: sent.choice.in_flight,
        };
        own.learner.learn_first_token(&sample, now);
    }

    fn on_last_token(&mut self, id: usize, seen: &FleetState, now: f64) {
        let Some(sent) = self.in_flight.remove(&id) else { return };
        let replica = sent.choice.replica;
        let own = &mut self.local_loads[replica];
        self.output_lengths.observe(sent.output);
        if let Some((first, sequences, context)) = sent.first_token.filter(|_| sent.output > 2) {
            let interval = (now - first) / f64::from(sent.output - 1);
            let sequences = sequences.midpoint(seen.in_flight[replica]).max(1);
            own.learner.learn_interval(sequences, context.midpoint(own.context), interval, now);
        }
        own.context -= u64::from(sent.tokens);
    }

    fn on_cut(&mut self, id: usize, had_tokens: bool, _seen: &FleetState, _now: f64) {
        let Some(sent) = self.in_flight.remove(&id) else { return };
        let own = &mut self.local_loads[sent.choice.replica];
        if !had_tokens {
            own.pending -= u64::from(sent.uncached);
            own.loading -= u64::from(sent.choice.loaded);
            own.due.remove(&(sent.due, id));
        }
        own.context -= u64::from(sent.tokens);
    }
}
