//! The events of a run: nodes, requests, faults, all drawn from the seed before it begins.

use std::collections::BTreeMap;
use std::time::Duration;

use fastrand::Rng;

use super::client::{Draw, Form, Pace, Question};
use super::engine::Death;

/// The milliseconds within which requests come and faults begin.
const BUSY_MS: u64 = 20_000;

#[derive(Debug, Clone)]
pub(super) struct Scenario {
    pub(super) nodes: Vec<NodePlan>,
    pub(super) questions: Vec<Question>,
    /// Requests that kill engines, and after how many events.
    pub(super) poison: BTreeMap<u64, usize>,
    pub(super) faults: Vec<(Duration, FleetFault)>,
}

#[derive(Debug, Clone)]
pub(super) struct NodePlan {
    pub(super) name: String,
    pub(super) delay: Duration,
    /// The time per token of each replica.
    pub(super) steps: Vec<Duration>,
}

/// A fault or an order. Nodes are named by their number, and replicas by their number in the fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FleetFault {
    EngineDies {
        replica: usize,
        death: Death,
        restart_after: Duration,
    },
    EngineHangs {
        replica: usize,
        time: Duration,
        is_killed: bool,
    },
    EngineRefuses {
        replica: usize,
        status: u16,
        time: Duration,
    },
    /// An operator restarts the replica.
    ReplicaRestarts {
        replica: usize,
    },
    /// An operator drains the replica, and releases it after a while.
    ReplicaDrains {
        replica: usize,
        time: Duration,
    },
    /// An operator puts the replica to sleep, and wakes it after a while.
    ReplicaSleeps {
        replica: usize,
        time: Duration,
    },
    /// The node's job ends: the agent leaves, and another one starts after a while.
    NodeLeaves {
        node: usize,
        time: Duration,
    },
    ConnectionBreaks {
        node: usize,
    },
    Partition {
        node: usize,
        time: Duration,
    },
    SlowNetwork {
        node: usize,
        delay: Duration,
        time: Duration,
    },
    /// The agent dies with its engines, and starts anew.
    AgentDies {
        node: usize,
        time: Duration,
    },
    /// During a partition another agent gets the node's name. Then the first one is heard again.
    AgentIsReplaced {
        node: usize,
        time: Duration,
    },
    /// The router's host stands still: its clock jumps.
    RouterIsSuspended {
        time: Duration,
    },
    RouterDies {
        time: Duration,
    },
    /// Another router takes this one's place.
    RouterIsReplaced,
}

fn time(random: &mut Rng, from_ms: u64, to_ms: u64) -> Duration {
    Duration::from_millis(random.u64(from_ms..=to_ms))
}

impl Scenario {
    pub(super) fn draw(seed: u64) -> Self {
        let mut random = Rng::with_seed(seed);
        let nodes = Self::draw_nodes(&mut random);
        let mut questions: Vec<Question> = (0..random.u64(5..=40)).map(|number| draw_question(number, &mut random)).collect();
        questions.sort_by_key(|question| question.at);
        let mut poison = BTreeMap::new();
        if random.u32(..6) == 0 {
            poison.insert(random.u64(..questions.len() as u64), random.usize(..5));
        }
        // Some runs have nothing but load.
        let count = if random.u32(..10) == 0 { 0 } else { random.usize(1..=12) };
        let replicas = nodes.iter().map(|node| node.steps.len()).sum();
        let mut faults: Vec<_> =
            (0..count).map(|_| (time(&mut random, 500, BUSY_MS), draw_fault(nodes.len(), replicas, &mut random))).collect();
        if count > 0 {
            let departures = random.usize(..4);
            faults.extend((0..departures).map(|_| (time(&mut random, 500, BUSY_MS), draw_departure(nodes.len(), replicas, &mut random))));
            // Some runs have one departure or one fault, and nothing else.
            let (draw, at) = (if random.bool() { draw_departure } else { draw_fault }, time(&mut random, 500, BUSY_MS));
            let only = draw(nodes.len(), replicas, &mut random);
            if random.u32(..6) == 0 {
                poison.clear();
                faults = vec![(at, only)];
            }
        }
        faults.sort_by_key(|(at, _)| *at);
        Self { nodes, questions, poison, faults }
    }

    fn draw_nodes(random: &mut Rng) -> Vec<NodePlan> {
        let mut left = random.usize(2..=5);
        let mut nodes = Vec::new();
        while left > 0 {
            let replicas = random.usize(1..=left.min(3));
            left -= replicas;
            nodes.push(NodePlan {
                name: format!("n{}", nodes.len()),
                delay: time(random, 0, 20),
                steps: (0..replicas).map(|_| time(random, 15, 90)).collect(),
            });
        }
        nodes
    }

    /// Whether nothing goes wrong.
    pub(super) fn is_calm(&self) -> bool {
        self.faults.is_empty() && self.poison.is_empty()
    }

    /// Whether so little goes wrong that each request that can be repeated, or whose stream can go
    /// on, must get its whole answer.
    pub(super) fn is_survivable(&self) -> bool {
        let [(_, only)] = self.faults[..] else { return false };
        let is_survivable = match only {
            FleetFault::EngineDies { .. }
            | FleetFault::EngineHangs { .. }
            | FleetFault::EngineRefuses { .. }
            | FleetFault::ReplicaRestarts { .. }
            | FleetFault::ReplicaDrains { .. }
            | FleetFault::ReplicaSleeps { .. }
            | FleetFault::SlowNetwork { .. }
            | FleetFault::RouterIsReplaced => true,
            FleetFault::NodeLeaves { .. }
            | FleetFault::ConnectionBreaks { .. }
            | FleetFault::Partition { .. }
            | FleetFault::AgentDies { .. }
            | FleetFault::AgentIsReplaced { .. } => self.nodes.len() > 1,
            FleetFault::RouterIsSuspended { .. } | FleetFault::RouterDies { .. } => false,
        };
        is_survivable && self.poison.is_empty()
    }

    /// Whether so little goes wrong that each started stream that can go on must be whole. There
    /// may be no other engine, but the stream's own is back soon.
    pub(super) fn spares_streams(&self) -> bool {
        let breaks_one_connection = matches!(self.faults[..], [(_, FleetFault::ConnectionBreaks { .. })]);
        self.is_survivable() || (breaks_one_connection && self.poison.is_empty())
    }
}

fn draw_question(number: u64, random: &mut Rng) -> Question {
    let form = [Form::Chat, Form::Chat, Form::Text, Form::Tokens][random.usize(..4)];
    let is_stream = random.u32(..5) > 0;
    let pace = match random.u32(..12) {
        0 => Pace::Leaves(time(random, 1, 4000)),
        1 => Pace::Pauses(time(random, 1, 400)),
        2 if is_stream => Pace::Stalls(random.usize(..4000)),
        _ => Pace::Eager,
    };
    Question {
        number,
        at: time(random, 0, BUSY_MS),
        form,
        draw: [Draw::Greedy, Draw::Greedy, Draw::Random, Draw::Random, Draw::Random, Draw::Seeded][random.usize(..6)],
        is_stream,
        wants_usage: is_stream && random.bool(),
        max_tokens: random.bool().then(|| random.u64(1..60)),
        pace,
    }
}

fn draw_fault(nodes: usize, replicas: usize, random: &mut Rng) -> FleetFault {
    let (node, replica) = (random.usize(..nodes), random.usize(..replicas));
    match random.u32(..20) {
        0..=5 => {
            FleetFault::EngineDies { replica, death: Death::ALL[random.usize(..Death::ALL.len())], restart_after: time(random, 200, 6000) }
        }
        6 | 7 => FleetFault::EngineHangs { replica, time: time(random, 500, 15_000), is_killed: random.bool() },
        8 | 9 => FleetFault::EngineRefuses { replica, status: [500, 503][random.usize(..2)], time: time(random, 100, 4000) },
        10 => FleetFault::ReplicaRestarts { replica },
        11 | 12 => FleetFault::ConnectionBreaks { node },
        13 => FleetFault::Partition { node, time: time(random, 200, 15_000) },
        14 => FleetFault::SlowNetwork { node, delay: time(random, 50, 1500), time: time(random, 500, 8000) },
        15 => FleetFault::AgentDies { node, time: time(random, 100, 5000) },
        16 => FleetFault::AgentIsReplaced { node, time: time(random, 5000, 12_000) },
        17 => FleetFault::RouterIsSuspended { time: time(random, 500, 12_000) },
        18 => FleetFault::RouterDies { time: time(random, 100, 3000) },
        _ => FleetFault::RouterIsReplaced,
    }
}

fn draw_departure(nodes: usize, replicas: usize, random: &mut Rng) -> FleetFault {
    let (node, replica, time) = (random.usize(..nodes), random.usize(..replicas), time(random, 100, 8000));
    match random.u32(..8) {
        0 => FleetFault::ReplicaRestarts { replica },
        1..=3 => FleetFault::ReplicaDrains { replica, time },
        4 | 5 => FleetFault::ReplicaSleeps { replica, time },
        _ => FleetFault::NodeLeaves { node, time },
    }
}
