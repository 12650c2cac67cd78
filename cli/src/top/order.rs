//! Sorts and filters replicas, and defines the orders that an operator may give for a replica or a
//! node.

use std::cmp::Ordering;

use hostler_proto::agent::v1::{EngineLoad, Phase};
use hostler_proto::fleet::v1::{ListResponse, Node, Replica};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum SortKey {
    /// Order in which the router lists replicas.
    #[default]
    Node,
    Phase,
    Running,
    Waiting,
    KvUse,
    Tokens,
    FirstToken,
}

impl SortKey {
    const ALL: [Self; 7] = [Self::Node, Self::Phase, Self::Running, Self::Waiting, Self::KvUse, Self::Tokens, Self::FirstToken];

    pub(super) fn next(self) -> Self {
        let at = Self::ALL.iter().position(|key| *key == self).unwrap_or_default();
        Self::ALL[(at + 1) % Self::ALL.len()]
    }

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Phase => "phase",
            Self::Running => "running",
            Self::Waiting => "waiting",
            Self::KvUse => "KV use",
            Self::Tokens => "tokens/s",
            Self::FirstToken => "first token p99",
        }
    }

    /// Compares two replicas: the one that needs attention, or has most of the figure, comes first.
    /// Equal ones stay in the router's order.
    pub(super) fn compare(self, one: &SortedReplica<'_>, other: &SortedReplica<'_>) -> Ordering {
        let most = |of: fn(&SortedReplica<'_>) -> f64| of(other).total_cmp(&of(one));
        match self {
            Self::Node => Ordering::Equal,
            Self::Phase => urgency(one.replica.phase()).cmp(&urgency(other.replica.phase())),
            Self::Running => most(|of| engine_of(of).running.into()),
            Self::Waiting => most(|of| engine_of(of).waiting.into()),
            Self::KvUse => most(|of| engine_of(of).kv_use),
            Self::Tokens => most(|of| of.tokens_per_second.unwrap_or(-1.0)),
            Self::FirstToken => most(|of| of.first_token.unwrap_or(-1.0)),
        }
    }
}

/// A replica with the figures for sorting.
#[derive(Debug, Clone, Copy)]
pub(super) struct SortedReplica<'a> {
    pub(super) replica: &'a Replica,
    pub(super) tokens_per_second: Option<f64>,
    /// Seconds until the first token of the slowest streams.
    pub(super) first_token: Option<f64>,
}

/// Rank of a phase: the smaller, the more it needs attention.
fn urgency(phase: Phase) -> u8 {
    match phase {
        Phase::Quarantined => 0,
        Phase::Failed => 1,
        Phase::Suspect => 2,
        Phase::Draining => 3,
        Phase::Loading => 4,
        Phase::Unspecified | Phase::Starting => 5,
        Phase::Stopped => 6,
        Phase::Sleeping => 7,
        Phase::Ready => 8,
    }
}

fn engine_of(sorted: &SortedReplica<'_>) -> EngineLoad {
    sorted.replica.engine().unwrap_or_default()
}

/// Whether a replica matches the typed text: a part of its name, phase, models or job, in either
/// case.
pub(super) fn matches_filter(node: &Node, replica: &Replica, filter: &str) -> bool {
    let filter = filter.to_lowercase();
    let job = node.job.iter().map(|job| job.id.as_str());
    let texts = [replica.id.as_str(), replica.phase().as_str()].into_iter().chain(replica.model_ids()).chain(job);
    filter.is_empty() || texts.into_iter().any(|text| text.to_lowercase().contains(&filter))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OrderKind {
    Drain,
    Restart,
    Release,
}

impl OrderKind {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Drain => "drain",
            Self::Restart => "restart",
            Self::Release => "release",
        }
    }
}

/// An order for a node or a replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FleetOrder {
    pub(super) kind: OrderKind,
    pub(super) target: String,
}

/// Question before an order is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Question {
    pub(super) order: FleetOrder,
    /// Replicas that the order affected when the question was asked.
    pub(super) replicas: Vec<String>,
    /// Requests of all routers that run there.
    pub(super) in_flight: u32,
    /// Models that nobody would serve.
    pub(super) unserved: Vec<String>,
}

impl Question {
    /// A question about this order; `None` if the target has no replicas.
    pub(super) fn new(order: FleetOrder, fleet: &ListResponse) -> Option<Self> {
        let is_touched = |node: &Node, replica: &Replica| node.name == order.target || replica.id == order.target;
        let (touched, others): (Vec<_>, Vec<_>) = fleet.replicas().partition(|(node, replica)| is_touched(node, replica));
        if touched.is_empty() {
            return None;
        }
        let serves = |(node, replica): &&(&Node, &Replica)| node.attached && replica.is_ready();
        let mut unserved = Vec::new();
        if order.kind != OrderKind::Release {
            let models = touched.iter().filter(serves).flat_map(|(_, replica)| replica.model_ids());
            let is_served = |model: &str| others.iter().filter(serves).any(|(_, other)| other.model_ids().any(|served| served == model));
            unserved.extend(models.filter(|model| !is_served(model)).map(str::to_owned));
            unserved.sort();
            unserved.dedup();
        }
        let in_flight = touched.iter().map(|(_, replica)| replica.load().in_flight).sum();
        Some(Self { replicas: touched.iter().map(|(_, replica)| replica.id.clone()).collect(), order, in_flight, unserved })
    }

    /// The question, and the consequences.
    pub(super) fn sentences(&self) -> Vec<String> {
        let Self { order: FleetOrder { kind, target }, replicas, in_flight, unserved } = self;
        let of_node = if replicas.iter().eq([target]) { String::new() } else { format!(" of node {target}") };
        let verb = kind.as_str();
        let mut sentences = vec![match &replicas[..] {
            [only] => format!("{verb} {only}{of_node}?"),
            several => format!("{verb} {} replicas{of_node}: {}?", several.len(), some_of(several)),
        }];
        let requests = match in_flight {
            0 => "Nothing runs there.".to_owned(),
            1 => "1 request runs there: it moves, or may finish.".to_owned(),
            count => format!("{count} requests run there: they move, or may finish."),
        };
        sentences.push(match kind {
            OrderKind::Drain => format!("{requests} Then the engine stops, until it is released."),
            OrderKind::Restart => format!("{requests} Then the engine starts again."),
            OrderKind::Release => "A quarantined, failed or stopped engine starts again now; one that drains goes on serving.".to_owned(),
        });
        if !unserved.is_empty() {
            sentences.push(format!("NOBODY WOULD SERVE {}.", some_of(unserved)));
        }
        sentences
    }
}

/// The first few names, and how many more there are.
fn some_of(names: &[String]) -> String {
    const SHOWN: usize = 6;
    let first = names.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN { format!("{first} and {} more", names.len() - SHOWN) } else { first }
}
