//! The measurement that the command line asks for: every target in every round, in alternating
//! order, a sweep step by step.

mod body;
mod conversation;
mod endpoint;
mod load;
mod machine;
mod session_feed;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::args::BenchArgs;
use crate::error::Error;
use crate::figures::Figures;
use crate::progress::{Phase, Progress};
use crate::report::{Report, SweepStep, TargetReport};
use crate::sweep::stop_reason;
use crate::workload::{Scenario, Seed, Shape, sessions};
use conversation::Endpoint;
use load::{Plan, load};

/// Clients of a separate warm-up.
const WARM_UP_CLIENTS: u32 = 4;

/// Measures, and calls `show` with the progress about once a second.
///
/// # Errors
/// When nothing can be measured: flags contradict each other, a target does not exist, or a trace
/// cannot be read. Failed requests are not errors but figures.
pub async fn run(args: &BenchArgs, mut show: impl FnMut(Progress)) -> Result<Report, Error> {
    args.check()?;
    let began = SystemTime::now();
    let endpoints = endpoint::endpoints(args).await?;
    let mut targets: Vec<TargetReport> = endpoints.iter().map(|endpoint| empty_report(endpoint)).collect();
    let mut words = WordSeeds::new(began);
    for round in 0..args.common.rounds {
        for index in order(targets.len(), round) {
            let mut measuring = TargetRun { args, endpoint: &endpoints[index], round, words: &mut words };
            if let Scenario::Sweep { steps } = &args.scenario {
                let why = measuring.sweep(steps, &mut targets[index].sweep, &mut show).await?;
                add_reason(&mut targets[index].broke, why, round, args.common.rounds);
            } else {
                targets[index].rounds.push(measuring.round(&mut show).await?);
            }
        }
    }
    Ok(Report {
        scenario: args.scenario.name().to_owned(),
        began: humantime::format_rfc3339_seconds(began).to_string(),
        settings: args.settings(),
        machine: machine::machine(),
        targets,
    })
}

fn empty_report(endpoint: &Endpoint) -> TargetReport {
    TargetReport {
        name: endpoint.name.clone(),
        url: endpoint.target.to_string(),
        model: endpoint.form.model.clone(),
        rounds: Vec::new(),
        sweep: Vec::new(),
        broke: None,
    }
}

/// Order of the targets in a round, alternately forwards and backwards, so that a machine that
/// becomes slower or faster affects all of them.
fn order(targets: usize, round: u32) -> Vec<usize> {
    if round.is_multiple_of(2) { (0..targets).collect() } else { (0..targets).rev().collect() }
}

/// Adds the reason for which a sweep ended. Sweeps of several rounds may end for different reasons.
fn add_reason(reasons: &mut Option<String>, why: Option<String>, round: u32, rounds: u32) {
    let Some(why) = why else { return };
    let why = if rounds > 1 { format!("round {}, {why}", round + 1) } else { why };
    *reasons = Some(reasons.take().map_or(why.clone(), |before| format!("{before}; {why}")));
}

/// Seeds of words. None repeats, in this measurement or another.
struct WordSeeds(u64);

impl WordSeeds {
    fn new(began: SystemTime) -> Self {
        let since = began.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        // Nanoseconds since 1970 fit until 2554, and any lower part is good enough.
        #[expect(clippy::cast_possible_truncation, reason = "any number will do")]
        Self(since.as_nanos() as u64)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        fastrand::Rng::with_seed(self.0).u64(..)
    }
}

/// One target in one round.
struct TargetRun<'a> {
    args: &'a BenchArgs,
    endpoint: &'a Arc<Endpoint>,
    round: u32,
    words: &'a mut WordSeeds,
}

impl TargetRun<'_> {
    async fn round(&mut self, show: &mut impl FnMut(Progress)) -> Result<Figures, Error> {
        let plan = Plan { phase: Phase::Round { number: self.round + 1, of: self.args.common.rounds }, ..self.plan(self.args.at_once()) };
        let shape = self.args.shape();
        // A load with its own times cannot begin in the middle: it would lack its first burst, or a
        // trace its beginning.
        let plan = if self.args.has_own_times() && !plan.warm_up.is_zero() {
            self.warm_up(&plan, show).await?;
            Plan { warm_up: Duration::ZERO, ..plan }
        } else {
            plan
        };
        let seed = self.seed(0);
        load(&plan, sessions(&self.args.scenario, &shape, seed)?, show).await
    }

    /// Makes a separate warm-up with a few clients.
    async fn warm_up(&mut self, plan: &Plan, show: &mut impl FnMut(Progress)) -> Result<(), Error> {
        let duration = Some(plan.warm_up);
        let phase = Phase::WarmUp;
        let plan = Plan { at_once: WARM_UP_CLIENTS, warm_up: Duration::ZERO, duration, requests: None, phase, ..self.plan(1) };
        let shape = Shape { rate: None, closed: true, ..self.args.shape() };
        let seed = self.seed(u64::MAX);
        load(&plan, sessions(&Scenario::Sustained, &shape, seed)?, show).await?;
        Ok(())
    }

    /// Runs step by step until the target breaks, and returns the reason.
    async fn sweep(&mut self, steps: &[u32], done: &mut Vec<SweepStep>, show: &mut impl FnMut(Progress)) -> Result<Option<String>, Error> {
        let first = done.len();
        for (number, concurrency) in (0..).zip(steps.iter().copied()) {
            let plan = Plan { phase: Phase::Step { concurrency }, ..self.plan(concurrency) };
            let seed = self.seed(number);
            let figures = load(&plan, sessions(&self.args.scenario, &self.args.shape(), seed)?, show).await?;
            let step = SweepStep { round: self.round, concurrency, figures };
            let why = stop_reason(&step, done[first..].last(), &self.args.limits());
            done.push(step);
            if why.is_some() {
                return Ok(why);
            }
        }
        Ok(None)
    }

    fn plan(&self, at_once: u32) -> Plan {
        let common = &self.args.common;
        Plan {
            endpoint: self.endpoint.clone(),
            at_once,
            warm_up: common.warm_up,
            duration: self.args.duration(),
            requests: common.requests,
            limits: self.args.limits(),
            is_even: !self.args.has_own_times(),
            phase: Phase::WarmUp,
        }
    }

    /// Seed of a step. All targets of a round get the same lengths and times, with different words.
    fn seed(&mut self, step: u64) -> Seed {
        let shape = self.args.common.seed.wrapping_add(u64::from(self.round) << 32).wrapping_add(step);
        Seed { shape, words: self.words.next() }
    }
}

#[cfg(test)]
mod tests;
