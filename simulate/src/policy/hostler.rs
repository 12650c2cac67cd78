//! The router's own policy: the placement crate's index, overlay, popularity, learner, cost and hold queue, put together as the router's
//! placement does. What is left out here is what only a network has: connections, deadlines, other routers.

use std::collections::BTreeSet;
use std::sync::Arc;

use hostler_placement::affinity::{Arrivals, Compared, Extent, Holes, Index, Overlay, Pledge, Popularity, Seat};
use hostler_placement::cost::{Ask, Candidate, Conditions, Decision, Priced, has_room, place};
use hostler_placement::hold::{Queue, Waiting};
use hostler_placement::keys::Key;
use hostler_placement::offered::Offered;
use hostler_placement::rates::{FirstToken, Learned, Learner, Pool, Rates};
use rustc_hash::FxHashMap;

use super::Policy;
use crate::fleet::{Fleet, Report, Seen};
use crate::request::{BLOCK_TOKENS, Request};

/// Tokens of an answer before any has been seen.
const USUAL_OUTPUT: f64 = 256.0;

/// How much one answer moves the mean length.
const OUTPUT_WEIGHT: f64 = 0.02;

/// Requests that may wait: more than any run has.
const MOST_WAITING: usize = 1 << 20;

/// Requests that wait and are looked at when something has changed, in the order of their turns.
const LOOKED_AT: usize = 32;

/// See the module.
#[derive(Debug)]
pub(super) struct Hostler {
    fleet: Fleet,
    random: fastrand::Rng,
    index: Index,
    seats: Vec<(Seat, Holes)>,
    overlay: Arc<Overlay>,
    popularity: Popularity,
    offered: Offered,
    output: f64,
    /// Memory for the costs.
    priced: Vec<Priced>,
    own: Vec<Own>,
    sent: FxHashMap<usize, Sent>,
    /// Requests that wait; `None` when every request is sent at once.
    hold: Option<Queue<(usize, Prompt)>>,
}

/// What the router knows of one replica by itself.
#[derive(Debug)]
struct Own {
    pending: u64,
    context: u64,
    learner: Learner,
    /// When the answer of each unanswered request was expected, and whose that is; positive numbers are in the order of their bits.
    due: BTreeSet<(u64, usize)>,
}

/// A prompt and how often its beginnings were asked for before it.
#[derive(Debug, Clone)]
struct Prompt {
    keys: Arc<[Key]>,
    tokens: u32,
    output: u32,
    arrivals: Arrivals,
}

/// A request in flight.
#[derive(Debug)]
struct Sent {
    at: f64,
    predicted: f64,
    choice: Candidate,
    tokens: u32,
    output: u32,
    uncached: u32,
    due: u64,
    pledge: Option<Pledge>,
    /// When its first token came, among how many requests with how many tokens.
    first: Option<(f64, u32, u64)>,
}

impl Hostler {
    pub(super) fn new(fleet: &Fleet, random: fastrand::Rng, holds: bool) -> Self {
        let index = Index::new();
        let seats = (0..fleet.replicas).map(|_| (index.open(), Holes::None)).collect();
        let own = || Own { pending: 0, context: 0, learner: Learner::new(Rates::default()), due: BTreeSet::new() };
        Self {
            fleet: *fleet,
            random,
            index,
            seats,
            overlay: Arc::default(),
            popularity: Popularity::default(),
            offered: Offered::new(),
            output: USUAL_OUTPUT,
            priced: Vec::new(),
            own: (0..fleet.replicas).map(|_| own()).collect(),
            sent: FxHashMap::default(),
            hold: holds.then(|| Queue::new(MOST_WAITING)),
        }
    }

    fn choose(&mut self, prompt: &Prompt, seen: &Seen, now: f64) -> Decision {
        let mut matched = self.index.matched(&prompt.keys, &self.seats);
        self.overlay.raise(&Compared::whole(&prompt.keys), &self.seats, &mut matched);
        let most = prompt.tokens.saturating_sub(1) / BLOCK_TOKENS;
        let learned: Vec<Learned> = self.own.iter().map(|own| own.learner.learned()).collect();
        let pool = Pool::new(learned.iter());
        let candidates: Vec<Candidate> = matched
            .iter()
            .zip(&learned)
            .enumerate()
            .map(|(replica, (blocks, learned))| Candidate {
                matched: (*blocks).min(most) * BLOCK_TOKENS,
                rates: pool.rates(learned),
                ..self.candidate(replica, seen, now)
            })
            .collect();
        let nominal = Rates::mean(candidates.iter().map(|candidate| &candidate.rates));
        let utilisation = self.offered.utilisation(candidates.len(), now);
        let ask = Ask { tokens: prompt.tokens, output: self.output, arrivals: &prompt.arrivals };
        let conditions = Conditions { nominal, utilisation };
        place(&ask, &candidates, &conditions, &mut self.priced, &mut self.random).expect("a fleet has a replica")
    }

    fn candidate(&self, replica: usize, seen: &Seen, now: f64) -> Candidate {
        let (own, load) = (&self.own[replica], &seen.loads[replica]);
        Candidate {
            replica,
            matched: 0,
            in_flight: seen.in_flight[replica].max(load.running + load.waiting),
            pending: own.pending,
            context: own.context,
            capacity: self.fleet.hardware.kv_tokens.into(),
            kv_use: load.kv_use,
            budget: self.fleet.hardware.budget,
            overdue: own.due.first().map_or(0.0, |(due, _)| (now - f64::from_bits(*due)).max(0.0)),
            rates: Rates::default(),
            doubtful: false,
        }
    }

    fn enter(&mut self, id: usize, prompt: &Prompt, decision: &Decision, now: f64) -> usize {
        let choice = decision.choice();
        let replica = choice.candidate.replica;
        let rates = &choice.candidate.rates;
        self.offered.arrive(rates.work_seconds(choice.uncached, choice.candidate.matched, self.output), now);
        let predicted = choice.terms.first_token();
        let due = (now + predicted).to_bits();
        let own = &mut self.own[replica];
        own.pending += u64::from(choice.uncached);
        own.context += u64::from(prompt.tokens);
        own.due.insert((due, id));
        let pledge = Some(self.overlay.enter(self.seats[replica].0, Extent::whole(prompt.keys.clone())));
        let (tokens, output, uncached) = (prompt.tokens, prompt.output, choice.uncached);
        self.sent.insert(id, Sent { at: now, predicted, choice: choice.candidate, tokens, output, uncached, due, pledge, first: None });
        replica
    }
}

impl Policy for Hostler {
    fn place(&mut self, id: usize, request: &Request, seen: &Seen, now: f64) -> Option<usize> {
        let keys: Arc<[Key]> = request.prompt_keys().into();
        let arrivals = self.popularity.arrive(&keys, BLOCK_TOKENS, now);
        let prompt = Prompt { keys, tokens: request.prompt, output: request.output, arrivals };
        let decision = self.choose(&prompt, seen, now);
        match &mut self.hold {
            Some(hold) if !has_room(&decision.choice().candidate) || !hold.is_empty() => {
                let uncached = decision.choice().uncached;
                let waiting = Waiting { priority: 0, tenant: 0, weight: 1.0, uncached, output: 0, since: now };
                hold.push(waiting, (id, prompt)).expect("there is room for every request of a run");
                None
            }
            _ => Some(self.enter(id, &prompt, &decision, now)),
        }
    }

    fn release(&mut self, seen: &Seen, now: f64) -> Option<(usize, usize)> {
        // Taken out for as long as the router is asked about its requests.
        let mut hold = self.hold.take()?;
        let mut released = None;
        if !hold.is_empty() && (0..self.own.len()).any(|replica| has_room(&self.candidate(replica, seen, now))) {
            let mut decision = None;
            let gone = hold.pop_where(now, LOOKED_AT, |waiting, (_, prompt)| {
                let choice = decision.insert(self.choose(prompt, seen, now)).choice();
                waiting.uncached = choice.uncached;
                has_room(&choice.candidate)
            });
            if let (Some((_, (id, prompt))), Some(decision)) = (gone, decision) {
                released = Some((id, self.enter(id, &prompt, &decision, now)));
            }
        }
        self.hold = Some(hold);
        released
    }

    fn reported(&mut self, replica: usize, report: &Report) {
        self.index.remove(self.seats[replica].0, &report.changes.removed);
        self.index.store(self.seats[replica].0, &report.changes.stored);
    }

    fn first(&mut self, id: usize, seen: &Seen, now: f64) {
        let Some(sent) = self.sent.get_mut(&id) else { return };
        let replica = sent.choice.replica;
        let own = &mut self.own[replica];
        sent.pledge = None;
        own.pending -= u64::from(sent.uncached);
        own.due.remove(&(sent.due, id));
        sent.first = Some((now, seen.in_flight[replica], own.context));
        own.learner.first_token(&FirstToken {
            predicted: sent.predicted,
            took: now - sent.at,
            uncached: sent.uncached,
            matched: sent.choice.matched,
            pending: sent.choice.pending,
            in_flight: sent.choice.in_flight,
        });
    }

    fn last(&mut self, id: usize, seen: &Seen, now: f64) {
        let Some(sent) = self.sent.remove(&id) else { return };
        let replica = sent.choice.replica;
        let own = &mut self.own[replica];
        self.output += OUTPUT_WEIGHT * (f64::from(sent.output) - self.output);
        if let Some((first, sequences, context)) = sent.first.filter(|_| sent.output > 2) {
            let interval = (now - first) / f64::from(sent.output - 1);
            let sequences = sequences.midpoint(seen.in_flight[replica]).max(1);
            own.learner.interval(sequences, context.midpoint(own.context), interval);
        }
        own.context -= u64::from(sent.tokens);
    }
}
