//! Simulates the fleet under faults: the router's own code from a client's connection to the
//! agents' connections, in one thread, with time that stands still while anybody has something to
//! do.
//!
//! A seed determines a run. `docs/decisions/0023` gives the reasons, and the limits of the
//! simulation.

mod client;
mod engine;
mod fleet;
mod link;
mod model;
mod node;
mod router;
pub(crate) mod sabotage;
mod scenario;
mod trace;
mod verdict;
mod world;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::sleep;

use client::{Draw, Form, Pace, Question};
use fleet::SimulatedFleet;
use sabotage::Sabotage;
use scenario::Scenario;
use verdict::{Verdict, judge};
use world::World;

use crate::resumption::SEAM;

/// The outcome of a seed.
#[derive(Debug)]
struct Outcome {
    /// Hash of everything that happened.
    hash: u64,
    lines: Vec<String>,
    violations: Vec<String>,
    /// The lines of interest, if something was violated.
    excerpt: String,
    verdicts: BTreeMap<Verdict, usize>,
}

/// Runs a seed to its end.
fn run(seed: u64, sabotage: Option<Sabotage>) -> Outcome {
    // The router's random choices use this thread's generator.
    fastrand::seed(seed);
    sabotage::set(sabotage);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().expect("it needs no resources");
    runtime.block_on(simulate(Scenario::draw(seed)))
}

async fn simulate(scenario: Scenario) -> Outcome {
    let delays = scenario.nodes.iter().map(|node| (node.name.clone(), node.delay)).collect();
    let world = World::new(scenario.poison.clone(), delays);
    let fleet = SimulatedFleet::start(&world, &scenario).await;
    let mut clients = JoinSet::new();
    for question in scenario.questions.clone() {
        let (world, is_survivable, spares_streams) = (world.clone(), scenario.is_survivable(), scenario.spares_streams());
        clients.spawn(async move {
            sleep(question.at).await;
            let verdict = ask(&world, &question).await;
            let is_unneeded = match verdict {
                Some(Verdict::Failed) => spares_streams,
                Some(Verdict::Refused) => is_survivable,
                _ => false,
            };
            if is_unneeded && question.outlives_engine() {
                world.trace.violation(format_args!("q{}: {verdict:?}, although it could go on elsewhere; {question:?}", question.number));
            }
            verdict
        });
    }
    let mut faults = JoinSet::new();
    for (at, fault) in scenario.faults.clone() {
        let fleet = fleet.clone();
        faults.spawn(async move {
            sleep(at).await;
            fleet.inject(fault).await;
        });
    }
    let mut verdicts = BTreeMap::new();
    while let Some(verdict) = clients.join_next().await {
        if let Some(verdict) = verdict.expect("no client panics") {
            *verdicts.entry(verdict).or_default() += 1;
        }
    }
    while let Some(ended) = faults.join_next().await {
        ended.expect("no fault panics");
    }
    fleet.heal().await;
    let last = probe(scenario.questions.len() as u64);
    if ask(&world, &last).await != Some(Verdict::Whole) {
        world.trace.violation("a fleet without faults has not answered");
    }
    fleet.check_idle().await;
    if scenario.is_calm() && verdicts.keys().any(|verdict| !matches!(verdict, Verdict::Whole | Verdict::Cut)) {
        world.trace.violation(format_args!("nothing was wrong, and answers were {verdicts:?}"));
    }
    let violations = world.trace.violations();
    let words: Vec<String> = violations.iter().filter_map(|violation| violation.split(':').next()).map(|word| format!("{word} ")).collect();
    Outcome { hash: world.trace.hash(), lines: world.trace.lines(), excerpt: world.trace.excerpt(&words), violations, verdicts }
}

/// A request that must be answered whenever there is an engine.
fn probe(number: u64) -> Question {
    let (at, pace) = (Duration::ZERO, Pace::Eager);
    Question { number, at, form: Form::Chat, draw: Draw::Greedy, is_stream: true, wants_usage: true, max_tokens: None, pace }
}

/// Most attempts of one request, and of each continuation: eight if engines refuse.
const MAX_ATTEMPTS: usize = 8;

/// Asks a question and judges the answer. Returns nothing if the answer is wrong, which is
/// recorded.
async fn ask(world: &Arc<World>, question: &Question) -> Option<Verdict> {
    let seen = question.ask(world).await;
    let verdict = judge(question, &seen);
    let (number, length) = (question.number, seen.body.len());
    let seams = memchr::memmem::find_iter(&seen.body, &SEAM[..]).count();
    world.trace.note(format_args!("q{number} ends: {:?} {:?}, {length} bytes, {seams} seams, {verdict:?}", seen.status, seen.end));
    // If the client has not seen everything, there may be one more continuation.
    let continuations = seams + usize::from(verdict == Ok(Verdict::Cut));
    let attempts = world.attempts(number);
    if attempts > MAX_ATTEMPTS * (1 + continuations) {
        world.trace.violation(format_args!("q{number}: engines were asked {attempts} times"));
    }
    if let Err(wrong) = &verdict {
        world.trace.violation(format_args!("q{number}: {wrong}; {question:?}"));
    }
    verdict.ok()
}

#[cfg(test)]
mod tests;
