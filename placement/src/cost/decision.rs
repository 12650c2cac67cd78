//! Input and output of placement: the candidates with the terms of their costs, and why one of them
//! was chosen.

use serde::Serialize;

use crate::affinity::Arrivals;
use crate::rates::{LoadRates, Rates};

#[derive(Debug, Clone, Copy)]
pub struct PricingInput<'a> {
    pub tokens: u32,
    /// Expected tokens of the answer.
    pub output: f64,
    /// Tokens that the answer hardly exceeds.
    pub long_output: f64,
    /// How often the beginnings of the prompt have recently been requested.
    pub arrivals: &'a Arrivals,
}

/// Knowledge about one replica, over the requests of all routers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Candidate {
    /// Index in the fleet view.
    pub replica: usize,
    /// Prompt tokens that the replica holds, or will hold once its requests in flight have been
    /// computed.
    pub matched: u32,
    /// Those of the matched tokens that the engine must first load from its host's memory.
    pub loaded: u32,
    /// Those of the loaded tokens that are read from files before.
    pub read: u32,
    /// Seconds until the loaded tokens are there, after those of requests ahead of a new one.
    pub load_seconds: f64,
    /// Sequences in flight: the larger of the routers' and the engine's count, since a hung engine
    /// reports nothing.
    pub in_flight: u32,
    /// Prompt tokens still to be computed for requests ahead of a new one.
    pub pending: u64,
    /// Tokens of the sequences being decoded.
    pub context: u64,
    /// Tokens that fit into the KV cache; 0 if unknown.
    pub capacity: u64,
    /// Share of the KV cache that running sequences hold, 0 to 1.
    pub kv_use: f64,
    /// Most tokens of a step; 0 if unknown, which counts as [`super::DEFAULT_TOKEN_BUDGET`].
    pub budget: u32,
    /// Most sequences in flight beside which the engine takes the request. `u32::MAX` if it takes
    /// any number, or that is unknown.
    pub most_beside: u32,
    /// Seconds that the oldest request there is overdue; 0 if none is.
    pub overdue: f64,
    pub rates: Rates,
    /// Seconds until the node begins to leave; infinite if no end is known.
    pub time_left: f64,
    /// The lease has lapsed or the last request failed, so the replica is used only if no other is
    /// left.
    pub doubtful: bool,
}

/// The part of a prompt in the tiers behind a GPU's memory, and what else is loaded there.
#[derive(Debug, Clone, Copy)]
pub struct LowerTiers {
    /// Leading tokens in the host's memory.
    pub on_host: u32,
    /// Leading tokens in the files that the host's engines share.
    pub in_files: u32,
    /// Tokens that the engine still loads for requests ahead, one transfer after the other.
    pub loading: u64,
    /// Those of them that are read from files before.
    pub reading: u64,
    pub rates: LoadRates,
}

impl Candidate {
    /// Adds what the tiers behind the GPU's memory have.
    ///
    /// Copies are written as blocks are computed, so those of a prompt begin with its first block.
    /// The engine loads what follows the part that its GPU has. What follows the part in the host's
    /// memory is read from files into that memory first.
    pub fn add_lower_tiers(&mut self, tiers: &LowerTiers) {
        let on_gpu = self.matched;
        let in_memory = on_gpu.max(tiers.on_host);
        self.matched = in_memory.max(tiers.in_files);
        (self.loaded, self.read) = (self.matched - on_gpu, self.matched - in_memory);
        let loads = tiers.rates.load * tiers.loading.saturating_add(self.loaded.into()) as f64;
        let reads = tiers.rates.read * tiers.reading.saturating_add(self.read.into()) as f64;
        self.load_seconds = if self.read > 0 { loads + reads } else { loads };
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Conditions {
    /// Mean rates of the fleet's replicas, in which recomputation is priced.
    pub nominal: Rates,
    /// Offered work as a share of the fleet's capacity, 0 to 1; more than 0.95 counts as 0.95.
    pub utilisation: f64,
}

/// Costs of one replica, in seconds.
///
/// `u` are the uncached and `h` the matched tokens, `s` is the replica's slowness (kept within 0.25
/// and 8), `step`, `prefill`, `attention` and `decode` are its rates, `η` and `ρ` the fleet's, and
/// `t` is `Rates::step_seconds` of its requests in flight and their context.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Terms {
    /// `max(prefill·pending·s, overdue)`: the prompts ahead.
    ///
    /// An engine that hangs reports nothing, so the wait of its oldest request without an answer
    /// counts.
    pub queue: f64,
    /// `(prefill·u + attention·u·(h + u/2))·s`: the prompt itself.
    pub prefill: f64,
    /// `max(1, ceil((pending + u)/budget))·t`: the share of each step on the way that the decoded
    /// sequences take.
    pub steps: f64,
    /// `load_seconds`, or 0 if `loaded` is 0: the transfer from the host's memory, after those
    /// ahead, and before it the reading of files.
    ///
    /// The engine loads whatever it finds there, also where computing would take less time.
    pub load: f64,
    /// Wait for memory, or for a place if the engine refuses more sequences, whichever is longer:
    /// steps until one of `n = max(1, in_flight)` running sequences has ended.
    ///
    /// For memory 0 if `held + u + loaded + output ≤ capacity`, else
    /// `ceil(excess·n/held)/n·output·t`, and `output·t` at most.
    ///
    /// `held` is the part of the KV cache that running sequences hold: `context`, or
    /// `kv_use·capacity` if that is reported and less, since sequences share prefixes. They count
    /// as equally long and spread evenly over answers as long as this one's: one of them ends every
    /// `output/n` steps.
    pub memory: f64,
    /// `η·nominal seconds per uncached token·Σ over uncached tokens of 1/(1 + arrivals)`, with `η =
    /// 2ρ/(1 − ρ)`: the cost of recomputation to the others.
    ///
    /// The cost is less if many recent requests share the tokens, because they can use the result.
    /// The sum follows from the arrivals of this request.
    pub congestion: f64,
    /// `0.15·output·(t + in_flight·Δ)`, with `Δ = decode + rates.context·(tokens + output/2)`: the
    /// answer, and by how much it slows down the others.
    ///
    /// Every request in flight counts as decoded, even if the engine does not report it.
    pub decode: f64,
}

impl Terms {
    /// Cost by which candidates are compared, in seconds.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.first_token() + self.congestion + self.decode
    }

    /// Predicted seconds until the first token.
    #[must_use]
    pub fn first_token(&self) -> f64 {
        self.queue + self.prefill + self.load + self.steps + self.memory
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Scored {
    pub candidate: Candidate,
    /// Prompt tokens that the replica would have to compute.
    pub uncached: u32,
    pub terms: Terms,
    /// `first token + 1.5·long_output·t + 1`: seconds after which the answer has almost certainly
    /// ended.
    ///
    /// Each step takes `t` as above, and longer if it computes the prompts of others.
    pub finish: f64,
}

impl Scored {
    /// Whether the replica may well leave before the answer has ended.
    #[must_use]
    pub fn ends_first(&self) -> bool {
        self.candidate.time_left < self.finish
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChoiceReason {
    Only,
    /// The replica was the cheapest by more than a near-tie.
    Cheapest,
    /// Several replicas cost about the least.
    ///
    /// This one had the longest match, then the fewest requests, and then it was drawn at random.
    NearTie,
    /// No replica except doubtful ones is expected to stay until the end of the answer.
    EndsFirst,
    /// All replicas are doubtful.
    LastResort,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Decision {
    /// Kept candidates, in the order given.
    ///
    /// If there are more than [`super::MAX_RECORDED`], these are the chosen one and then the
    /// cheapest others.
    pub scored: Vec<Scored>,
    /// Index of the chosen candidate in `scored`.
    pub chosen: usize,
    pub candidates: usize,
    pub why: ChoiceReason,
    /// Candidates within a near-tie, including the chosen one.
    pub tied: usize,
    pub utilisation: f64,
    pub nominal: Rates,
}

impl Decision {
    #[must_use]
    pub fn choice(&self) -> &Scored {
        &self.scored[self.chosen]
    }
}
