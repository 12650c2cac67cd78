//! The state that all parts of a run share: the present routers, the poison, and engines' attempts.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::engine::SimulatedEngine;
use super::link::{Link, LinkEnd};
use super::router::RunningRouter;
use super::trace::Trace;

#[derive(Debug)]
pub(super) struct World {
    pub(super) trace: Trace,
    /// Requests that kill engines, and after how many events.
    pub(super) poison: BTreeMap<u64, usize>,
    /// Delay between each node's agent and the router, in either direction.
    delays: BTreeMap<String, Duration>,
    routers: Mutex<Routers>,
    /// How many requests engines got, by question.
    attempts: Mutex<BTreeMap<u64, usize>>,
}

/// The routers that agents and clients reach. These differ while one router takes the place of
/// another.
#[derive(Debug, Default)]
struct Routers {
    of_agents: Option<Arc<RunningRouter>>,
    of_clients: Option<Arc<RunningRouter>>,
    started: usize,
}

impl World {
    pub(super) fn new(poison: BTreeMap<u64, usize>, delays: BTreeMap<String, Duration>) -> Arc<Self> {
        Arc::new(Self { trace: Trace::begin(), poison, delays, routers: Mutex::default(), attempts: Mutex::default() })
    }

    /// Starts a router that has no place yet.
    pub(super) fn start_router(&self) -> Arc<RunningRouter> {
        let mut routers = self.routers.lock();
        routers.started += 1;
        RunningRouter::start(routers.started)
    }

    pub(super) fn lead_agents_to(&self, router: Option<&Arc<RunningRouter>>) {
        self.routers.lock().of_agents = router.cloned();
    }

    pub(super) fn lead_clients_to(&self, router: Option<&Arc<RunningRouter>>) {
        self.routers.lock().of_clients = router.cloned();
    }

    /// The router that clients reach.
    pub(super) fn router(&self) -> Option<Arc<RunningRouter>> {
        self.routers.lock().of_clients.clone()
    }

    /// Connects a node to the router that agents reach.
    pub(super) fn dial_router(&self, node: &str) -> Option<(Link, LinkEnd)> {
        let router = self.routers.lock().of_agents.clone()?;
        router.accept_agent(self.delays.get(node).copied().unwrap_or_default())
    }

    pub(super) fn record_attempt(&self, question: Option<u64>, engine: &SimulatedEngine, path: &str, bytes: usize) {
        match question {
            Some(question) => {
                *self.attempts.lock().entry(question).or_default() += 1;
                self.trace.note(format_args!("q{question} is at {} ({path}, {bytes} bytes)", engine.name));
            }
            None => self.trace.violation(format_args!("{} was sent what nobody has asked: {path}, {bytes} bytes", engine.name)),
        }
    }

    pub(super) fn attempts(&self, question: u64) -> usize {
        self.attempts.lock().get(&question).copied().unwrap_or_default()
    }
}
