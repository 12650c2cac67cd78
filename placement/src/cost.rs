//! Cost of a request on each replica, in seconds, and the cheapest one.
//!
//! This module is pure: it reads no clock, takes no lock and awaits nothing. The router's dispatch
//! and the simulator call [`place`]. Its result explains itself: every term can be worked out by
//! hand from the candidate and the conditions that are printed beside it.

mod decision;

use std::cmp::{Ordering, Reverse};

pub use self::decision::{Candidate, ChoiceReason, Conditions, Decision, LowerTiers, PricingInput, Scored, Terms};
use crate::offered_work::MAX_UTILISATION;
use crate::rates::{MAX_SLOWNESS, MIN_SLOWNESS, Rates};

/// Cost of one candidate, in the memory that [`place`] works in.
#[derive(Debug, Clone, Copy)]
pub struct CandidateCost {
    total: f64,
    terms: Terms,
}

/// Standing of a candidate.
///
/// A better standing wins, whatever the costs, except that a tight candidate goes before sound ones
/// that all lack room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    Sound,
    /// The replica has room, and stays until the expected end of an answer, though not of a long
    /// one.
    Tight,
    /// The replica leaves before the expected end of the answer.
    ///
    /// It still beats one that may be dead already.
    EndsFirst,
    Doubtful,
}

/// Candidates kept per decision; nobody reads more in a fleet of a thousand replicas.
pub const MAX_RECORDED: usize = 64;

/// Share of the decoding cost that counts.
///
/// The time between tokens matters less than the time to the first. The whole cost would drive long
/// answers away from every busy replica, whatever it has cached.
const DECODE_SHARE: f64 = 0.15;

/// Relative width of a near-tie: the cost exceeds the lowest by at most this share of the
/// cheapest's time to the first token.
///
/// The estimates are no better, and several routers with the same view must not all choose the same
/// replica. The rest of the cost is left out, since decoding a long answer would make everything a
/// near-tie.
const TIE_SHARE: f64 = 0.02;

/// Absolute width of a near-tie, for small times: less than one more sequence in flight costs.
const TIE_SECONDS: f64 = 0.000_2;

/// Replacement for a term that is negative, not a number or larger: some thirty years.
///
/// So a replica with absurd figures is chosen last, and sums stay finite.
const MAX_SECONDS: f64 = 1e9;

/// Tokens of a step if a replica does not report them.
///
/// This is vLLM 0.32's default when it knows nothing of the GPU
/// (`SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS`). Its server uses 2,048 on CPUs, on A100s and
/// on all GPUs below 70 GiB, 8,192 on other GPUs, and 16,384 from 160 GiB
/// (`EngineArgs.get_batch_defaults`).
pub const DEFAULT_TOKEN_BUDGET: u32 = 2048;

/// Limit of the expected tokens of an answer.
const MAX_OUTPUT_TOKENS: f64 = 1e6;

/// Steps' worth of prompt tokens that keep an engine busy until a first token is seen: the running
/// step, the next one, which is planned meanwhile, and the one after it, whose prompts are on their
/// way.
///
/// With less, the engine runs out of prompts. With one step's worth, on two H200s under 1,024
/// streams, up to half of these waited in the router. In the simulator, whose engines have neither
/// of the two delays, three cost 4 % of the mean time to the first token at the heaviest load
/// against one.
const MAX_PENDING_STEPS: u64 = 3;

/// Largest factor by which the replica's steps slow down on the way: they compute prompts of
/// others, and sequences join.
///
/// Without it, four times as many answers were cut in the simulator on a busy fleet
/// (`docs/simulate.md`).
const FINISH_FACTOR: f64 = 1.5;

/// Additional seconds for an answer, for the part that is not proportional to its length.
const FINISH_MARGIN_SECONDS: f64 = 1.0;

/// Above this share of the KV cache, the next sequence probably preempts a running one.
const FULL_KV_USE: f64 = 0.97;

/// Chooses the cheapest replica that is not doubtful and is expected to finish even a long answer
/// before it leaves, with the reasons.
///
/// If there is none, the one that leaves the least too early wins, and then the cheapest of the
/// doubtful ones. `None` without candidates.
///
/// If no sound candidate has room, a candidate with room wins if it stays long enough for an answer
/// of the expected length. A candidate that does not stay long enough is never taken for its room:
/// a request that waits is better than one that is cut.
///
/// Among near-ties (within 2 % of the cheapest's time to the first token) the longest match wins,
/// so that bursts of equal prompts stay together. With equal matches the fewest requests in flight
/// win, so that short requests spread evenly and less is lost with a replica that dies. Remaining
/// ties are drawn at random, so that several routers do not all pick the first. Speeds that may
/// differ by noise alone come in equal ([`crate::rates::MeanRates::rates_of`]), so a tie is as wide
/// as the uncertainty of the speeds and no wider.
///
/// `priced` is the memory that the costs are worked out in, whatever was in it. Frequent callers
/// pass the same memory again.
#[must_use]
pub fn place(
    ask: &PricingInput<'_>,
    candidates: &[Candidate],
    conditions: &Conditions,
    priced: &mut Vec<CandidateCost>,
    random: &mut fastrand::Rng,
) -> Option<Decision> {
    let mut pricing = CostModel::new(ask, conditions);
    // Nearly always no candidate ends or is doubtful. Then all are sound, and a second pass is
    // unnecessary.
    let (mut cheapest, mut are_lasting, mut loaded) = ((f64::INFINITY, 0.0), true, 0);
    priced.clear();
    priced.extend(candidates.iter().map(|candidate| {
        let terms = pricing.terms(candidate);
        let total = terms.total();
        if total < cheapest.0 {
            cheapest = (total, terms.first_token());
        }
        are_lasting &= candidate.time_left == f64::INFINITY && !candidate.doubtful;
        loaded |= candidate.loaded;
        CandidateCost { total, terms }
    }));
    if loaded != 0 {
        cheapest = pricing.add_loads(candidates, priced);
    }
    let (standing, (least, first_token)) =
        if are_lasting { (Standing::Sound, cheapest) } else { pricing.best_standing(candidates, priced)? };
    let reach = least + (first_token * TIE_SHARE).max(TIE_SECONDS);
    let (mut tied, mut equals, mut best, mut chosen) = (0, 0, None, None);
    for (index, (candidate, priced)) in candidates.iter().zip(&*priced).enumerate() {
        let measure = if are_lasting { priced.total } else { pricing.measure(standing, candidate, priced) };
        if measure > reach || !are_lasting && pricing.standing(candidate, &priced.terms) != standing {
            continue;
        }
        tied += 1;
        let rank = (candidate.matched.min(ask.tokens), Reverse(candidate.in_flight));
        match Some(rank).cmp(&best) {
            Ordering::Less => {}
            Ordering::Greater => (best, equals, chosen) = (Some(rank), 1, Some(index)),
            // Reservoir sampling: each of the equals so far is chosen with the same probability,
            // without a list of them.
            Ordering::Equal => {
                equals += 1;
                if random.u32(..equals) == 0 {
                    chosen = Some(index);
                }
            }
        }
    }
    let chosen = chosen?;
    let why = match (standing, candidates.len(), tied) {
        (Standing::Doubtful, ..) => ChoiceReason::LastResort,
        (Standing::Tight | Standing::EndsFirst, ..) => ChoiceReason::EndsFirst,
        (Standing::Sound, 1, _) => ChoiceReason::Only,
        (Standing::Sound, _, 1) => ChoiceReason::Cheapest,
        _ => ChoiceReason::NearTie,
    };
    let scored = |(candidate, priced): (&Candidate, &CandidateCost)| Scored {
        candidate: *candidate,
        uncached: ask.tokens - candidate.matched.min(ask.tokens),
        terms: priced.terms,
        finish: pricing.finish(candidate, &priced.terms),
    };
    let (scored, chosen) = if candidates.len() > MAX_RECORDED {
        let remembered = candidates_to_record(priced, chosen);
        (remembered.into_iter().map(|index| scored((&candidates[index], &priced[index]))).collect(), 0)
    } else {
        (candidates.iter().zip(&*priced).map(scored).collect(), chosen)
    };
    let (utilisation, nominal) = (clamp_utilisation(conditions), conditions.nominal);
    Some(Decision { scored, chosen, candidates: candidates.len(), why, tied, utilisation, nominal })
}

/// Candidates to keep: the chosen one, then the cheapest others.
///
/// Among equals the first ones are kept.
fn candidates_to_record(priced: &[CandidateCost], chosen: usize) -> Vec<usize> {
    let mut kept = Vec::with_capacity(MAX_RECORDED + 1);
    kept.push(chosen);
    let mut dearest = f64::INFINITY;
    for (index, one) in priced.iter().enumerate() {
        // Most candidates cost more than those already found: sorting all would cost as much as
        // pricing half of them.
        if one.total < dearest && index != chosen {
            let cheaper = kept[1..].partition_point(|other| priced[*other].total <= one.total);
            kept.insert(1 + cheaper, index);
            kept.truncate(MAX_RECORDED);
            if kept.len() == MAX_RECORDED {
                dearest = priced[kept[MAX_RECORDED - 1]].total;
            }
        }
    }
    kept
}

/// Whether a request sent there now would be computed as soon as the engine can begin anything.
///
/// Until its replica has room, a request had better wait in the router, where every replica stays
/// open to it and shorter requests can go first.
#[must_use]
pub fn has_room(candidate: &Candidate) -> bool {
    let full = candidate.kv_use > FULL_KV_USE || excess_sequences(candidate) > 0;
    candidate.pending <= MAX_PENDING_STEPS * u64::from(token_budget(candidate)) && !full
}

/// How many sequences must end before the engine takes the request.
#[inline]
#[must_use]
pub fn excess_sequences(candidate: &Candidate) -> u32 {
    candidate.in_flight.saturating_sub(candidate.most_beside)
}

fn token_budget(candidate: &Candidate) -> u32 {
    if candidate.budget == 0 { DEFAULT_TOKEN_BUDGET } else { candidate.budget }
}

fn clamp_utilisation(conditions: &Conditions) -> f64 {
    if conditions.utilisation.is_nan() { 0.0 } else { conditions.utilisation.clamp(0.0, MAX_UTILISATION) }
}

struct CostModel<'a> {
    ask: &'a PricingInput<'a>,
    output: f64,
    /// Steps in which the answer's time is counted.
    finish_steps: f64,
    nominal: Rates,
    congestion_price: f64,
    /// Discounted tokens without a match, and those of the last match that was priced.
    ///
    /// Most candidates have one of the two.
    unmatched_tokens: f64,
    last_matched: (u32, f64),
}

impl<'a> CostModel<'a> {
    fn new(ask: &'a PricingInput<'a>, conditions: &Conditions) -> Self {
        let utilisation = clamp_utilisation(conditions);
        let bounded = |tokens: f64| if tokens.is_nan() { 0.0 } else { tokens.clamp(0.0, MAX_OUTPUT_TOKENS) };
        let output = bounded(ask.output);
        let price = 2.0 * utilisation / (1.0 - utilisation);
        let unmatched = if price > 0.0 { ask.arrivals.discounted_tokens(0, ask.tokens) } else { 0.0 };
        Self {
            ask,
            output,
            finish_steps: FINISH_FACTOR * bounded(ask.long_output),
            nominal: conditions.nominal,
            congestion_price: price,
            unmatched_tokens: unmatched,
            last_matched: (0, unmatched),
        }
    }

    #[inline]
    fn terms(&mut self, candidate: &Candidate) -> Terms {
        let rates = &candidate.rates;
        let matched = candidate.matched.min(self.ask.tokens);
        let uncached = self.ask.tokens - matched;
        let slowness = rates.slowness.clamp(MIN_SLOWNESS, MAX_SLOWNESS);
        let step = rates.step_seconds(candidate.in_flight, candidate.context);
        let steps = candidate.pending.saturating_add(u64::from(uncached)).div_ceil(u64::from(token_budget(candidate))).max(1);
        let slowdown = rates.decode + rates.context * (f64::from(self.ask.tokens) + self.output / 2.0);
        Terms {
            queue: clamp_seconds(rates.prefill * candidate.pending as f64 * slowness).max(candidate.overdue.min(MAX_SECONDS)),
            prefill: clamp_seconds(rates.prefill_seconds(uncached, matched) * slowness),
            steps: clamp_seconds(steps as f64 * step),
            load: 0.0,
            memory: clamp_seconds(self.waiting_steps(candidate, uncached) * step),
            congestion: self.congestion(matched, uncached),
            decode: clamp_seconds(DECODE_SHARE * self.output * (step + f64::from(candidate.in_flight) * slowdown)),
        }
    }

    /// Adds what loading from the tiers behind the GPUs' memory takes, and returns the lowest cost
    /// with the time to the first token there. What is computed waits for no load.
    // Apart from the other terms, because nearly all fleets load nothing: among them it took 8 % of
    // a choice's instructions.
    #[cold]
    fn add_loads(&self, candidates: &[Candidate], priced: &mut [CandidateCost]) -> (f64, f64) {
        let mut cheapest = (f64::INFINITY, 0.0);
        for (candidate, CandidateCost { total, terms }) in candidates.iter().zip(priced) {
            if candidate.loaded > 0 {
                let matched = candidate.matched.min(self.ask.tokens);
                let loaded = candidate.loaded.min(matched);
                terms.load = clamp_seconds(candidate.load_seconds);
                // Loaded tokens need memory like computed ones.
                let steps = self.waiting_steps(candidate, self.ask.tokens - matched + loaded);
                terms.memory = clamp_seconds(steps * candidate.rates.step_seconds(candidate.in_flight, candidate.context));
                *total = terms.total();
            }
            if *total < cheapest.0 {
                cheapest = (*total, terms.first_token());
            }
        }
        cheapest
    }

    fn standing(&self, candidate: &Candidate, terms: &Terms) -> Standing {
        match candidate {
            Candidate { doubtful: true, .. } => Standing::Doubtful,
            Candidate { time_left, .. } if *time_left < self.finish(candidate, terms) => {
                let is_tight = has_room(candidate) && *time_left >= self.finish_after(self.output, candidate, terms);
                if is_tight { Standing::Tight } else { Standing::EndsFirst }
            }
            _ => Standing::Sound,
        }
    }

    /// Measure by which candidates of one standing are compared: their cost in seconds, or by how
    /// much they leave too early.
    fn measure(&self, standing: Standing, candidate: &Candidate, cost: &CandidateCost) -> f64 {
        match standing {
            Standing::Sound | Standing::Doubtful => cost.total,
            Standing::Tight | Standing::EndsFirst => self.finish(candidate, &cost.terms) - candidate.time_left.max(0.0),
        }
    }

    /// Standing to choose from, with the lowest measure of its candidates and the time to the first
    /// token there.
    #[cold]
    fn best_standing(&self, candidates: &[Candidate], priced: &[CandidateCost]) -> Option<(Standing, (f64, f64))> {
        let (mut lowest, mut is_sound_one_free) = ([(f64::INFINITY, 0.0); 4], false);
        for (candidate, cost) in candidates.iter().zip(priced) {
            let standing = self.standing(candidate, &cost.terms);
            let measure = self.measure(standing, candidate, cost);
            if measure < lowest[standing as usize].0 {
                lowest[standing as usize] = (measure, cost.terms.first_token());
            }
            is_sound_one_free |= standing == Standing::Sound && has_room(candidate);
        }
        let tight = (!is_sound_one_free).then_some(Standing::Tight);
        let in_turn = tight.into_iter().chain([Standing::Sound, Standing::EndsFirst, Standing::Doubtful]);
        in_turn.map(|standing| (standing, lowest[standing as usize])).find(|(_, (measure, _))| measure.is_finite())
    }

    fn finish(&self, candidate: &Candidate, terms: &Terms) -> f64 {
        self.finish_after(self.finish_steps, candidate, terms)
    }

    fn finish_after(&self, steps: f64, candidate: &Candidate, terms: &Terms) -> f64 {
        let step = candidate.rates.step_seconds(candidate.in_flight, candidate.context);
        terms.first_token() + clamp_seconds(steps * step) + FINISH_MARGIN_SECONDS
    }

    /// Steps until the engine has memory, and a place, for this request.
    fn waiting_steps(&self, candidate: &Candidate, new: u32) -> f64 {
        let memory = self.memory_steps(candidate, new);
        // Most engines have a place, and every placement prices every replica.
        match excess_sequences(candidate) {
            0 => memory,
            excess => memory.max(f64::from(excess) / f64::from(candidate.in_flight.max(1)) * self.output),
        }
    }

    /// Steps until a running sequence has freed enough memory.
    fn memory_steps(&self, candidate: &Candidate, new: u32) -> f64 {
        let (capacity, context) = (candidate.capacity as f64, candidate.context as f64);
        let held = if candidate.kv_use > 0.0 { context.min(candidate.kv_use * capacity) } else { context };
        let excess = held + f64::from(new) + self.output - capacity;
        if candidate.capacity == 0 || excess <= 0.0 {
            return 0.0;
        }
        let sequences = f64::from(candidate.in_flight.max(1));
        ((excess * sequences / held).ceil() / sequences).min(1.0) * self.output
    }

    /// Cost of congestion.
    ///
    /// Absurd figures of the fleet would cost all candidates alike and hide their differences, so
    /// they count as zero.
    fn congestion(&mut self, matched: u32, uncached: u32) -> f64 {
        if self.congestion_price == 0.0 || uncached == 0 {
            return 0.0;
        }
        if matched != 0 && matched != self.last_matched.0 {
            self.last_matched = (matched, self.ask.arrivals.discounted_tokens(matched, self.ask.tokens));
        }
        let tokens = if matched == 0 { self.unmatched_tokens } else { self.last_matched.1 };
        let congestion = self.congestion_price * self.nominal.prefill_seconds_each(uncached, matched) * tokens;
        if congestion.is_nan() || congestion < 0.0 { 0.0 } else { congestion.min(MAX_SECONDS) }
    }
}

/// Makes a duration comparable and summable.
fn clamp_seconds(value: f64) -> f64 {
    if (0.0..=MAX_SECONDS).contains(&value) { value } else { MAX_SECONDS }
}

#[cfg(test)]
mod tests;
