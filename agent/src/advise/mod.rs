//! Findings: what slows an engine down or keeps it from serving what it should.
//!
//! Each finding has its evidence and the flag to change. A task for each replica observes its
//! engine once a second and publishes what `rules` finds in the last minute.

mod cpu;
mod rules;
mod window;

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};

use self::cpu::FrontEndCpu;
pub(crate) use self::rules::evaluate_rules;
pub(crate) use self::rules::{Finding, FindingKind};
pub(crate) use self::window::{EngineSetup, Observation, RuntimeFacts, Window};
use crate::engine::{Engine, EngineStatus, Phase};
use crate::gpu::GpuReading;
use crate::probe::DetailReader;
use crate::vllm::FrontEndInUse;

/// How often an engine is observed.
const OBSERVE_INTERVAL: Duration = Duration::from_secs(1);

/// How often the text of standing findings is renewed.
///
/// Their metrics change every second, and each change sends a report to every router.
const EVIDENCE_REFRESH_INTERVAL: Duration = Duration::from_secs(10);

pub(crate) struct AdvisedReplica<'a> {
    pub(crate) replica: u32,
    pub(crate) engine: &'a Engine,
    pub(crate) setup: &'a EngineSetup,
    pub(crate) findings: &'a watch::Sender<Vec<Finding>>,
}

/// Watches one engine until dropped or until its task has ended; `gpus` returns the readings of its
/// GPUs.
pub(crate) async fn watch(advised: AdvisedReplica<'_>, gpus: impl Fn() -> Vec<GpuReading>) {
    let AdvisedReplica { replica, engine, setup, findings } = advised;
    let mut details = DetailReader::new(engine.socket());
    let mut processes = FrontEndCpu::default();
    let mut window = Window::default();
    let mut renewed = Instant::now();
    let status = engine.status();
    let mut epoch = status.borrow().epoch;
    let mut ticks = tokio::time::interval(OBSERVE_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while status.has_changed().is_ok() {
        ticks.tick().await;
        let now = status.borrow().clone();
        if std::mem::replace(&mut epoch, now.epoch) != now.epoch {
            details.reset();
        }
        let mut observation = Observation::default();
        if now.phase == Phase::Ready {
            observation.metrics = engine.samples().borrow().filter(|sample| !sample.is_stale).map(|sample| sample.metrics);
            observation.gpus = gpus();
            observation.guided = engine.traffic().guided_in_flight();
            observation.front_end_cpu = now.pid.and_then(|pid| processes.read(pid, Instant::now()));
            // An idle engine has no details worth reading.
            if observation.is_busy() {
                observation.details = details.read().await;
            }
        }
        window.push(now.epoch, observation);
        // Read this before writing: the channel's lock must be free by then.
        let standing = kinds(&findings.borrow());
        let facts = RuntimeFacts { lost_adapters: engine.missing_adapters(), ..runtime_facts(&now) };
        let found = evaluate_rules(&window, setup, &facts, &standing);
        for finding in found.iter().filter(|finding| !standing.contains(&finding.kind)) {
            tracing::info!(replica, kind = finding.kind.as_str(), evidence = finding.evidence, advice = finding.advice, "advice");
        }
        publish(findings, found, &mut renewed);
    }
}

/// The facts about this life that the engine itself has reported.
fn runtime_facts(status: &EngineStatus) -> RuntimeFacts {
    RuntimeFacts {
        python: status.front_end == FrontEndInUse::Python,
        eager: status.facts.eager,
        max_model_len: status.max_model_len(),
        kv_tokens: status.facts.kv_tokens,
        lost_adapters: Vec::new(),
    }
}

fn kinds(findings: &[Finding]) -> Vec<FindingKind> {
    findings.iter().map(|finding| finding.kind).collect()
}

/// Publishes new and ended findings at once, and refreshes the evidence of standing ones now and
/// then.
fn publish(findings: &watch::Sender<Vec<Finding>>, found: Vec<Finding>, renewed: &mut Instant) {
    findings.send_if_modified(|current| {
        if kinds(current) == kinds(&found) && (renewed.elapsed() < EVIDENCE_REFRESH_INTERVAL || *current == found) {
            return false;
        }
        *renewed = Instant::now();
        *current = found;
        true
    });
}

#[cfg(test)]
mod tests;
