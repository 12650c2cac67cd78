//! Checks the bounds of `crash_suspects` on a small model of a fleet in steps of virtual time.
//!
//! Engines crash and come back, suspects wait and are tried, some requests kill engines at their
//! own moments, and agents report crashes sooner or later than the router sees them.

use proptest::prelude::*;

use super::super::trials::{MAX_CONCURRENT_TRIALS, TRIAL_START_TARGET};
use super::*;

const TICK: Duration = Duration::from_millis(10);

/// The time by which everything must be over.
const HORIZON: Duration = Duration::from_secs(300);

/// When a killer kills, counted from its sending.
#[derive(Debug, Clone, Copy)]
enum Strike {
    /// Before the first token, at this share of the way to it.
    Early(f64),
    /// After the first token, at this share of the rest.
    Late(f64),
}

#[derive(Debug, Clone, Copy)]
struct Request {
    first_token: Duration,
    length: Duration,
    streams: bool,
    strike: Option<Strike>,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Waits { since: Instant },
    Runs { engine: usize, trial: Option<u64>, sent: Instant },
    Answered,
    Refused,
}

#[derive(Debug, Clone, Copy)]
struct Engine {
    epoch: u64,
    up_at: Instant,
}

/// A fleet whose first engine has just crashed with all of these in flight.
struct Model {
    table: SuspectTable,
    now: Instant,
    requests: Vec<Request>,
    states: Vec<State>,
    engines: Vec<Engine>,
    /// Deaths that agents have not reported yet.
    untold: Vec<(Instant, EngineLife, Vec<Fingerprint>, Instant)>,
    restart: Duration,
    random: u64,
    kills: Vec<usize>,
    max_wait: Duration,
}

impl Model {
    fn new(requests: Vec<Request>, engines: usize, restart: Duration, seed: u64) -> Self {
        let (mut table, now) = table();
        let all: Vec<Fingerprint> = (0..requests.len()).map(|index| index as Fingerprint).collect();
        table.record_reported_crash(&life("m/0", 1), &all, now, now);
        let count = requests.len();
        Self {
            table,
            now,
            states: vec![State::Waits { since: now }; count],
            kills: requests.iter().map(|request| usize::from(request.strike.is_some())).collect(),
            requests,
            engines: vec![Engine { epoch: 1, up_at: now }; engines],
            untold: Vec::new(),
            restart,
            random: seed | 1,
            max_wait: Duration::ZERO,
        }
    }

    fn draw(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random % below as u64).unwrap()
    }

    /// All requests that are not over, in random order.
    fn order(&mut self) -> Vec<usize> {
        let is_over = |state: &State| matches!(state, State::Answered | State::Refused);
        let mut order: Vec<usize> = (0..self.requests.len()).filter(|index| !is_over(&self.states[*index])).collect();
        for last in (1..order.len()).rev() {
            order.swap(last, self.draw(last + 1));
        }
        order
    }

    fn run(mut self) -> Self {
        let end = self.now + HORIZON;
        while self.states.iter().any(|state| matches!(state, State::Waits { .. } | State::Runs { .. })) {
            assert!(self.now < end, "it does not end");
            self.tell();
            for request in self.order() {
                self.step(request);
            }
            self.now += TICK;
            self.table.sweep(self.now);
        }
        self
    }

    fn tell(&mut self) {
        let now = self.now;
        for (_, life, requests, at) in self.untold.extract_if(.., |(when, ..)| *when <= now) {
            self.table.record_reported_crash(&life, &requests, at, now);
        }
    }

    fn life(&self, engine: usize) -> EngineLife {
        life(&format!("n{engine}/0"), self.engines[engine].epoch)
    }

    fn step(&mut self, index: usize) {
        let Request { first_token, length, streams, strike } = self.requests[index];
        let (now, fingerprint) = (self.now, index as Fingerprint);
        match self.states[index] {
            State::Waits { since } => self.place(index, since),
            State::Runs { engine, trial, sent } => {
                let ran = now - sent;
                let strikes_at = strike.map(|strike| match strike {
                    Strike::Early(share) => first_token.mul_f64(share),
                    Strike::Late(share) => first_token + TICK * 2 + (length - first_token).mul_f64(share),
                });
                if strikes_at.is_some_and(|at| at <= ran) {
                    self.kills[index] += 1;
                    self.kill(engine);
                } else if ran >= length && strike.is_none() {
                    trial.iter().for_each(|trial| self.table.trials().end(*trial, fingerprint, true, now));
                    self.table.acquit(fingerprint, now);
                    self.states[index] = State::Answered;
                } else if let Some(trial) = trial.filter(|_| streams && ran >= first_token) {
                    self.table.trials().pass(trial, now);
                }
            }
            State::Answered | State::Refused => {}
        }
    }

    fn place(&mut self, index: usize, since: Instant) {
        let (now, fingerprint) = (self.now, index as Fingerprint);
        let standing = self.table.standing(fingerprint, now);
        if matches!(standing, SuspectStanding::Banned(_)) {
            self.states[index] = State::Refused;
            return;
        }
        let up: Vec<usize> = (0..self.engines.len()).filter(|engine| self.engines[*engine].up_at <= now).collect();
        let waiting = self.states.iter().filter(|state| matches!(state, State::Waits { .. })).count();
        let constraints = self.table.trial_constraints(fingerprint, TrialDemand { waiting, eligible: up.len(), waited: now - since }, now);
        let is_open = |engine: &usize| !constraints.closed_replicas.contains(&self.life(*engine).replica);
        let open: Vec<usize> = up.into_iter().filter(is_open).collect();
        let free: Vec<usize> =
            open.iter().copied().filter(|engine| !constraints.occupied_replicas.contains(&self.life(*engine).replica)).collect();
        let among = if free.is_empty() { open } else { free };
        if among.is_empty() {
            return;
        }
        let engine = among[self.draw(among.len())];
        let Request { first_token, streams, .. } = self.requests[index];
        let mut trial = None;
        if standing == SuspectStanding::Suspect {
            trial = self.table.begin_trial(
                fingerprint,
                &self.life(engine),
                TrialEstimate { first_token, is_stream: streams, max_concurrent: constraints.max_concurrent },
                now,
            );
            assert!(trial.is_some(), "what was open is open");
        }
        self.max_wait = self.max_wait.max(now - since);
        self.states[index] = State::Runs { engine, trial, sent: now };
    }

    fn kill(&mut self, engine: usize) {
        let (now, life) = (self.now, self.life(engine));
        self.engines[engine] = Engine { epoch: life.epoch + 1, up_at: now + self.restart };
        let order = self.order();
        let lost: Vec<usize> =
            order.into_iter().filter(|index| matches!(self.states[*index], State::Runs { engine: at, .. } if at == engine)).collect();
        let names: Vec<Fingerprint> = lost.iter().map(|index| *index as Fingerprint).collect();
        if self.draw(2) == 0 {
            self.table.record_reported_crash(&life, &names, now, now);
        } else {
            let told_at = now + TICK * u32::try_from(self.draw(500)).unwrap();
            self.untold.push((told_at, life.clone(), names, now));
        }
        for index in lost {
            let State::Runs { trial, sent, .. } = self.states[index] else { unreachable!("it ran") };
            self.table.blame(index as Fingerprint, &life, sent.min(now - TICK), now);
            trial.iter().for_each(|trial| self.table.trials().end(*trial, index as Fingerprint, false, now));
            self.states[index] = State::Waits { since: now };
        }
    }

    fn refused_innocents(&self) -> usize {
        let is_wronged = |(state, request): &(&State, &Request)| matches!(state, State::Refused) && request.strike.is_none();
        self.states.iter().zip(&self.requests).filter(is_wronged).count()
    }

    fn most_kills(&self) -> usize {
        self.kills.iter().copied().max().unwrap_or(0)
    }
}

fn request(strike: Option<Strike>) -> impl Strategy<Value = Request> {
    (1..30_u32, 1..300_u32, any::<bool>()).prop_map(move |(first, more, streams)| {
        let first_token = TICK * first;
        Request { first_token, length: first_token + TICK * (more + 3), streams, strike }
    })
}

fn killer(late: bool) -> impl Strategy<Value = Request> {
    (0.0..1.0_f64).prop_flat_map(move |share| request(Some(if late { Strike::Late(share) } else { Strike::Early(share) })))
}

fn requests(most: usize, killers: impl Strategy<Value = Vec<Request>>) -> impl Strategy<Value = Vec<Request>> {
    (proptest::collection::vec(request(None), 0..most), killers).prop_map(|(innocent, killers)| [killers, innocent].concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn killers_within_their_trial_kill_at_most_five_engines(
        requests in requests(60, proptest::collection::vec(killer(false), 1..4)), engines in 1..6_usize, restart in 0..500_u32, seed: u64,
    ) {
        let model = Model::new(requests, engines, TICK * restart, seed).run();
        prop_assert!(model.most_kills() <= 2 + MAX_CONCURRENT_TRIALS.ilog2() as usize, "{:?}", model.kills);
        prop_assert_eq!(model.refused_innocents(), 0);
    }

    #[test]
    fn a_killer_among_few_kills_two_engines(
        requests in requests(6, killer(false).prop_map(|killer| vec![killer])), engines in 3..6_usize, seed: u64,
    ) {
        let requests: Vec<Request> = requests.into_iter().map(|request| Request { streams: true, ..request }).collect();
        let model = Model::new(requests, engines, TICK, seed).run();
        prop_assert_eq!((model.most_kills(), model.refused_innocents()), (2, 0));
    }

    #[test]
    fn killers_after_their_trial_kill_at_most_seven_engines(
        requests in requests(40, killer(true).prop_map(|killer| vec![killer])), engines in 1..6_usize, restart in 0..500_u32, seed: u64,
    ) {
        let model = Model::new(requests, engines, TICK * restart, seed).run();
        prop_assert!(model.most_kills() <= 4 + MAX_CONCURRENT_TRIALS.ilog2() as usize, "{:?}", model.kills);
        prop_assert!(model.refused_innocents() <= 2, "{:?}", model.states);
    }

    #[test]
    fn trials_begin_in_time_while_no_further_engine_dies(
        requests in requests(120, Just(Vec::new())), engines in 1..6_usize, seed: u64,
    ) {
        let longest = requests.iter().map(|one| if one.streams { one.first_token } else { one.first_token * 2 + SECOND }).max();
        let longest = longest.unwrap_or_default() + TICK * 2;
        let rounds = u32::try_from(requests.len().div_ceil(MAX_CONCURRENT_TRIALS * engines)).unwrap();
        let model = Model::new(requests, engines, TICK, seed).run();
        prop_assert!(model.max_wait <= TRIAL_START_TARGET + longest * (rounds + 1), "{:?}", model.max_wait);
        prop_assert_eq!(model.refused_innocents(), 0);
    }
}
