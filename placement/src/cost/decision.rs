//! What placement is asked and what it answers: the candidates with the terms of their costs, and why one of them was chosen.

use serde::Serialize;

use crate::affinity::Arrivals;
use crate::rates::Rates;

#[derive(Debug, Clone, Copy)]
pub struct PricingInput<'a> {
    pub tokens: u32,
    /// Expected tokens of its answer.
    pub output: f64,
    /// Tokens that its answer hardly exceeds.
    pub long_output: f64,
    /// How often the beginnings of its prompt have lately been requested.
    pub arrivals: &'a Arrivals,
}

/// What placement knows of one replica, over the requests of all routers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Candidate {
    /// Its index in the fleet view.
    pub replica: usize,
    /// Prompt tokens that it holds, or will hold once its requests in flight have been computed.
    pub matched: u32,
    /// Requests in flight: the larger of the routers' and the engine's count, since a hung engine
    /// reports nothing.
    pub in_flight: u32,
    /// Prompt tokens that are still to be computed for requests ahead of a new one.
    pub pending: u64,
    /// Tokens of the sequences that it decodes.
    pub context: u64,
    /// Tokens that fit into its KV cache; 0 when unknown.
    pub capacity: u64,
    /// Share of the KV cache that running sequences hold, 0 to 1.
    pub kv_use: f64,
    /// The most tokens of a step; 0 where unknown, which counts as [`super::DEFAULT_TOKEN_BUDGET`].
    pub budget: u32,
    /// Seconds that the oldest request there is overdue; 0 when none is.
    pub overdue: f64,
    pub rates: Rates,
    /// Seconds until its node begins to leave; infinite where no end is known.
    pub time_left: f64,
    /// Its lease has lapsed or its last request failed: it is used only when nothing else is left.
    pub doubtful: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Conditions {
    /// The mean rates of its replicas, in which recomputation is priced.
    pub nominal: Rates,
    /// Offered work as a share of the fleet's capacity, 0 to 1; more than 0.95 counts as 0.95.
    pub utilisation: f64,
}

/// What one replica would cost, in seconds. `u` are the uncached and `h` the matched tokens, `s` is
/// its slowness (kept within 0.25 and 8), `step`, `prefill`, `attention` and `decode` are its
/// rates, `η` and `ρ` the fleet's, and `t` is `Rates::step_seconds` of its requests in flight and
/// their context.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Terms {
    /// `max(prefill·pending·s, overdue)`: the prompts ahead. An engine that hangs reports nothing;
    /// how long its oldest request has been left without an answer says it all.
    pub queue: f64,
    /// `(prefill·u + attention·u·(h + u/2))·s`: the prompt itself.
    pub prefill: f64,
    /// `max(1, ceil((pending + u)/budget))·t`: what the sequences that are decoded take of each
    /// step on the way.
    pub steps: f64,
    /// Until there is memory: 0 if `held + u + output ≤ capacity`, else
    /// `ceil(excess·n/held)/n·output·t`, and `output·t` at most, with `n = max(1, in_flight)`.
    /// `held` is what the KV cache holds for running sequences: `context`, or `kv_use·capacity`
    /// where that is reported and less, since sequences share prefixes. They are taken to be
    /// equally long and spread evenly over answers as long as this one's: one of them ends every
    /// `output/n` steps.
    pub memory: f64,
    /// `η·nominal seconds per uncached token·Σ over uncached tokens of 1/(1 + arrivals)`, with `η =
    /// 2ρ/(1 − ρ)`: what recomputing costs the others, and less where many lately came the same
    /// way, who can use what is computed here. The sum is what the arrivals say of this request.
    pub congestion: f64,
    /// `0.15·output·(t + in_flight·Δ)`, with `Δ = decode + rates.context·(tokens + output/2)`: the
    /// answer, and by how much it slows down the others. Every request in flight counts as decoded,
    /// also when the engine says nothing of it.
    pub decode: f64,
}

impl Terms {
    /// The cost that candidates are compared by, in seconds.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.first_token() + self.congestion + self.decode
    }

    /// Predicted seconds until the first token.
    #[must_use]
    pub fn first_token(&self) -> f64 {
        self.queue + self.prefill + self.steps + self.memory
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Scored {
    pub candidate: Candidate,
    /// Prompt tokens that it would have to compute.
    pub uncached: u32,
    pub terms: Terms,
    /// `first token + 1.5·long_output·t + 1`: seconds after which the answer has hardly still to end. Each step takes `t` as above, and longer
    /// where the prompts of others are computed in it.
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
    /// It was the cheapest by more than a near-tie.
    Cheapest,
    /// Several cost about the least: it had the longest match, then the fewest requests, and then
    /// it was drawn at random.
    NearTie,
    /// None but doubtful ones can be expected to finish the answer.
    EndsFirst,
    /// All are doubtful.
    LastResort,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Decision {
    /// The candidates that are kept, in the order given; of more than [`super::MAX_RECORDED`], the chosen
    /// one and then the cheapest others.
    pub scored: Vec<Scored>,
    /// Index of the chosen one in `scored`.
    pub chosen: usize,
    pub candidates: usize,
    pub why: ChoiceReason,
    /// Candidates within a near-tie, the chosen one included.
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
