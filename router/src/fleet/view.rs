//! An immutable picture of the fleet, and the few atomics that must be exact between two pictures.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hostler_api::Route;
use hostler_prompt::Dialect;
use tokio::time::Instant;

use super::agent_report::AgentReport;
use super::arrival::Arrival;
use super::directives::Directives;
use super::expectation::{EntryUse, Expectation, Expectations};
use super::job::{GoneJob, Job};
use super::local_load::LocalLoad;
use super::replica_cache::{CacheTier, ReplicaCache};
use super::replica_status::{Model, Phase, ReplicaLoad, ReplicaStatus};
use crate::engine_life::EngineLife;
use crate::lanes::Lanes;
use crate::prompt::{EngineQuestion, RenderingEngine};

/// How long a replica is avoided after a request on it was lost. By then its agent has surely
/// reported what happened to the engine.
const AVOIDANCE_AFTER_LOSS: Duration = Duration::from_secs(1);

/// How long after its start a router may not know all agents yet: they dial again within a second
/// of losing a router.
const STARTUP_GRACE: Duration = Duration::from_secs(2);

/// Longest context of any model, in tokens. The longest today has 10 million.
pub(super) const MAX_CONTEXT_TOKENS: u64 = 1 << 24;

#[derive(Debug, Clone)]
pub(crate) struct Replica {
    pub id: Arc<str>,
    pub node: Arc<str>,
    pub index: u32,
    pub epoch: u64,
    pub state: Arc<ReplicaStatus>,
    /// Whether something else in the fleet has the name that is an alias here, so that it does not
    /// count.
    pub is_alias_contested: bool,
    /// The often changing state.
    pub load: ReplicaLoad,
    /// The agent's report as it came, for operators.
    pub report: AgentReport,
    /// The agent has been silent for longer than the lease.
    pub lease_lapsed: bool,
    /// When the agent last reported, or was lost.
    pub last_report: Instant,
    /// When the agent last reported another request, of any router.
    pub last_request: Option<Instant>,
    pub local_load: Arc<LocalLoad>,
    /// The blocks in the GPU's memory.
    pub cache: ReplicaCache,
    /// Those in the host's memory, if the engine keeps copies there.
    pub host_cache: ReplicaCache,
    /// Those in files, the same for all replicas of the node.
    pub file_cache: ReplicaCache,
    pub lanes: Arc<Lanes>,
    /// The batch job that the agent runs in, shared by all replicas of the node.
    pub job: Option<Arc<Job>>,
}

impl Replica {
    pub(super) fn cache_mut(&mut self, tier: CacheTier) -> &mut ReplicaCache {
        match tier {
            CacheTier::Gpu => &mut self.cache,
            CacheTier::Host => &mut self.host_cache,
            CacheTier::Files => &mut self.file_cache,
        }
    }

    /// Forgets the blocks of an engine whose life is over. Its files stay.
    pub(super) fn forget_life(&mut self) {
        (self.cache, self.host_cache) = (ReplicaCache::default(), ReplicaCache::default());
    }

    pub(super) fn forget_caches(&mut self) {
        self.forget_life();
        self.file_cache = ReplicaCache::default();
    }

    /// The longest context that the agent reports, in tokens.
    #[must_use]
    pub(crate) fn max_context_tokens(&self) -> u64 {
        self.state.launch.as_ref().and_then(|launch| launch.max_context_tokens).unwrap_or(MAX_CONTEXT_TOKENS)
    }

    #[must_use]
    pub(crate) fn is_ready(&self) -> bool {
        self.state.phase == Phase::Ready && self.lanes.is_available()
    }

    /// Whether the replica takes no new requests and ends the running ones: it drains, or is to
    /// sleep.
    #[must_use]
    pub(crate) fn is_being_emptied(&self) -> bool {
        matches!(self.state.phase, Phase::Draining | Phase::Sleeping)
    }

    /// Whether the replica's streams are better off elsewhere: it is being emptied, or its agent is
    /// silent.
    #[must_use]
    pub(crate) fn is_leaving(&self) -> bool {
        self.is_being_emptied() || self.lease_lapsed
    }

    /// Whether the engine's front-end has the route of this path, as far as its agent has found.
    #[must_use]
    pub(crate) fn has_route(&self, path: &str) -> bool {
        let is_at = |route: &String| path.strip_prefix(&**route).is_some_and(|below| below.is_empty() || below.starts_with('/'));
        !self.state.launch.as_ref().is_some_and(|launch| launch.missing_routes.iter().any(is_at))
    }

    /// Whether the engine has vLLM's Rust front-end, which lacks routes in some releases.
    pub(crate) fn has_rust_front_end(&self) -> bool {
        self.state.launch.as_ref().is_some_and(|launch| launch.dialect == Dialect::Rust)
    }

    /// The engine as it is asked for the tokens of a prompt.
    #[must_use]
    pub(crate) fn rendering_engine(&self) -> RenderingEngine<'_> {
        let engine = EngineQuestion { lanes: &self.lanes, replica: self.index };
        RenderingEngine { engine, epoch: self.epoch, known: &self.local_load.rendering }
    }

    /// The present life of the engine.
    #[must_use]
    pub(crate) fn engine_life(&self) -> EngineLife {
        EngineLife { replica: self.id.clone(), epoch: self.epoch }
    }

    /// Whether `life` is the engine's present life.
    #[must_use]
    pub(crate) fn has_life(&self, life: &EngineLife) -> bool {
        self.epoch == life.epoch && self.id == life.replica
    }

    /// Seconds until the node's agent begins to leave; infinite if no end is known.
    #[must_use]
    pub(crate) fn seconds_until_leaving(&self, now: Instant) -> f64 {
        let leaves_at = self.job.as_ref().and_then(|job| job.leaves_at);
        leaves_at.map_or(f64::INFINITY, |at| at.saturating_duration_since(now).as_secs_f64())
    }

    #[must_use]
    pub(crate) fn accepts(&self, model: Option<&str>) -> bool {
        self.is_ready() && self.serves(model)
    }

    /// Whether the replica serves `model`. Without a model, every replica does.
    #[must_use]
    pub(crate) fn serves(&self, model: Option<&str>) -> bool {
        model.is_none_or(|name| self.models().any(|model| model.id == name))
    }

    /// The models by their names that count, kept from the last life while the engine restarts.
    pub(crate) fn models(&self) -> impl Iterator<Item = &Model> {
        self.state.models.iter().filter(|model| !(self.is_alias_contested && model.alias_of.is_some()))
    }
}

/// A host and its agent.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub name: Arc<str>,
    pub agent_version: String,
    pub agent_run: u64,
    pub is_attached: bool,
    pub directives: Directives,
    /// The batch job that the agent runs in.
    pub job: Option<Arc<Job>>,
}

impl Node {
    /// The refusal for an agent that wants this node's name while another agent has it.
    #[must_use]
    pub(crate) fn name_refusal(&self) -> String {
        let whose = self.job.as_ref().map(|job| format!(", in {job}")).unwrap_or_default();
        format!(
            "another agent is attached as node `{}`{whose}: end that one, or give this one a name of its own with --node (agent.node)",
            self.name
        )
    }
}

/// All nodes and replicas at one moment, sorted by name.
#[derive(Debug, Clone)]
pub(crate) struct FleetView {
    pub nodes: Vec<Node>,
    /// Each replica as it was when it last changed. Views share unchanged replicas.
    pub replicas: Vec<Arc<Replica>>,
    /// Jobs whose agent is gone, the oldest first.
    pub gone_jobs: Arc<[GoneJob]>,
    /// The models that a controller has announced.
    pub(super) expectations: Arc<Expectations>,
    /// Aliases that do not count, because something else has that name too.
    pub(super) contested_aliases: Arc<BTreeSet<String>>,
    /// Nodes that were forgotten without having left.
    pub nodes_lost: u64,
    /// A node has reported blocks behind a GPU's memory since this router started.
    pub has_lower_tiers: bool,
    /// When the router started, the zero of `LocalLoad::avoided_until`.
    started: Instant,
    /// How long a report counts.
    lease: Duration,
}

impl FleetView {
    pub(super) fn new(started: Instant, lease: Duration) -> Self {
        Self {
            nodes: Vec::new(),
            replicas: Vec::new(),
            gone_jobs: Arc::default(),
            expectations: Arc::default(),
            contested_aliases: Arc::default(),
            nodes_lost: 0,
            has_lower_tiers: false,
            started,
            lease,
        }
    }

    /// The replicas that a request for `model` may go to, with their index here, except those that
    /// were `tried`.
    pub(crate) fn eligible(&self, model: Option<&str>, tried: &[Arc<str>]) -> impl Iterator<Item = (usize, &Arc<Replica>)> {
        self.replicas.iter().enumerate().filter(move |(_, replica)| replica.accepts(model) && !tried.contains(&replica.id))
    }

    /// The announcement of `model`, whether a replica serves it or not.
    #[must_use]
    pub(crate) fn expectation(&self, model: Option<&str>) -> Option<&Expectation> {
        self.expectations.get(model?).filter(|expectation| self.counts(&expectation.model))
    }

    /// Whether an expected model is known by this name.
    fn counts(&self, model: &Model) -> bool {
        model.alias_of.is_none() || !self.contested_aliases.contains(&model.id)
    }

    /// How many model names a controller has announced.
    #[must_use]
    pub(crate) fn expected_models(&self) -> usize {
        self.expectations.models().count()
    }

    /// What the nodes of the fleet's entries are used for, as their controller says.
    #[must_use]
    pub(crate) fn entries(&self) -> &[EntryUse] {
        &self.expectations.entries
    }

    /// Whether a replica serves `model`, or may yet: an engine that loads for the first time has
    /// not said what it serves. For an expected model, its controller's word counts until a replica
    /// serves it by name.
    #[must_use]
    pub(crate) fn may_serve(&self, replica: &Replica, model: Option<&str>) -> bool {
        replica.serves(model) || (replica.state.models.is_empty() && self.expectation(model).is_none())
    }

    /// Whether a replica that serves `model`, or may yet, has a front-end without the route of this
    /// path, or with a route that may turn out to be missing. The front-end of a model that is only
    /// expected is unknown.
    #[must_use]
    pub(crate) fn may_lack_route(&self, model: Option<&str>, route: Route) -> bool {
        let may_serve = |replica: &Replica| replica.state.models.is_empty() || replica.serves(model);
        let may_lack =
            |replica: &Replica| !replica.has_route(route.path()) || (replica.has_rust_front_end() && replica.state.phase != Phase::Ready);
        let is_only_expected = || self.expectation(model).is_some() && !self.replicas.iter().any(|replica| replica.serves(model));
        self.replicas.iter().any(|replica| may_lack(replica) && may_serve(replica)) || is_only_expected()
    }

    /// When a replica takes requests for `model`: an attached one, or an expected one if no
    /// attached replica ever will.
    #[must_use]
    pub(crate) fn arrival(&self, model: Option<&str>, now: Instant) -> Arrival {
        self.arrival_among(model, now, |_| true)
    }

    /// The arrival for a request that only some of the attached replicas `may_take`.
    #[must_use]
    pub(crate) fn arrival_among(&self, model: Option<&str>, now: Instant, may_take: impl Fn(&Replica) -> bool) -> Arrival {
        let arrival = |replica: &Arc<Replica>| {
            let lease_left = self.lease.saturating_sub(now.saturating_duration_since(replica.last_report));
            Arrival::of_replica(&replica.state, replica.lanes.is_available(), lease_left)
        };
        match self.replicas.iter().filter(|replica| self.may_serve(replica, model) && may_take(replica)).map(arrival).min() {
            None | Some(Arrival::Unknown) => self.expectation(model).map_or(Arrival::Unknown, |expectation| expectation.arrival(now)),
            Some(attached) => attached,
        }
    }

    /// Whether a replica is used only when nothing else is left: its lease has lapsed, a part of
    /// its engine is on a node that is not heard, or a request on it was just lost.
    #[must_use]
    pub(crate) fn is_last_resort(&self, replica: &Replica, now: Instant) -> bool {
        let avoided_until = replica.local_load.avoided_until.load(Ordering::Relaxed);
        // Most replicas have never lost a request, and every placement checks every replica.
        replica.lease_lapsed || replica.state.has_silent_member || (avoided_until > 0 && avoided_until > self.millis_since_start(now))
    }

    /// Whether the lease of `replica`'s agent has lapsed since the view that it is from, or the
    /// replica was forgotten.
    #[must_use]
    pub(crate) fn has_lapsed_lease(&self, replica: &Replica) -> bool {
        self.present(replica).is_none_or(|present| present.lease_lapsed)
    }

    /// The present state of `replica`; nothing if it was forgotten since the view that it is from.
    #[must_use]
    pub(crate) fn present(&self, replica: &Replica) -> Option<&Arc<Replica>> {
        let place = self.replicas.binary_search_by(|other| (&other.node, other.index).cmp(&(&replica.node, replica.index)));
        place.ok().map(|place| &self.replicas[place])
    }

    /// Whether this life of an engine lasts.
    #[must_use]
    pub(crate) fn is_alive(&self, life: &EngineLife) -> bool {
        self.replicas.iter().any(|replica| replica.has_life(life))
    }

    /// Seconds since the router started: placement's clock.
    #[must_use]
    pub(crate) fn seconds(&self, now: Instant) -> f64 {
        now.saturating_duration_since(self.started).as_secs_f64()
    }

    /// Whether the router started so recently that agents of the previous one may still be on their
    /// way.
    #[must_use]
    pub(crate) fn is_in_startup_grace(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.started) < STARTUP_GRACE
    }

    /// Records a request that was lost on `replica` through no fault of its own. The replica is
    /// used last for a second.
    pub(crate) fn avoid(&self, replica: &Replica, now: Instant) {
        replica.local_load.avoided_until.store(self.millis_since_start(now + AVOIDANCE_AFTER_LOSS), Ordering::Relaxed);
    }

    /// The models that replicas serve, and those that are expected. Those of replicas that were
    /// stopped on purpose are not served any more.
    #[must_use]
    pub(crate) fn models(&self) -> Vec<&Model> {
        let in_service = self.replicas.iter().filter(|replica| replica.state.phase != Phase::Stopped);
        let attached = in_service.flat_map(|replica| replica.models());
        let expected = self.expectations.models().filter(|model| self.counts(model));
        // The sort is stable: an engine's own description stays.
        let mut models: Vec<&Model> = attached.chain(expected).collect();
        models.sort_by(|left, right| left.id.cmp(&right.id));
        models.dedup_by(|left, right| left.id == right.id);
        models
    }

    /// The node of this name with a living agent other than that of `life`, which runs in `job`.
    ///
    /// The two agents would push each other out for ever. An agent whose job has been started again
    /// is dead, whatever its connection says.
    #[must_use]
    pub(crate) fn other_holder(&self, name: &str, life: u64, job: Option<&Job>) -> Option<&Node> {
        let heard = || self.replicas.iter().any(|replica| &*replica.node == name && !replica.lease_lapsed);
        let is_outrun = |node: &Node| node.job.as_ref().zip(job).is_some_and(|(earlier, job)| job.is_rerun_of(earlier));
        let is_other = |node: &&Node| &*node.name == name && node.is_attached && node.agent_run != life && !is_outrun(node);
        self.nodes.iter().find(is_other).filter(|_| heard())
    }

    /// The replicas of the node, or the one replica, that `target` names.
    #[must_use]
    pub(crate) fn replicas_of_target(&self, target: &str) -> Vec<&Arc<Replica>> {
        self.replicas.iter().filter(|replica| &*replica.id == target || &*replica.node == target).collect()
    }

    fn millis_since_start(&self, moment: Instant) -> u64 {
        u64::try_from(moment.saturating_duration_since(self.started).as_millis()).unwrap_or(u64::MAX)
    }
}
