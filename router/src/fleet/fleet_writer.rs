//! The only task that writes the fleet. It applies the sessions' updates, watches the leases and
//! publishes the view.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arc_swap::{ArcSwap, Guard};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, sleep_until};

use super::agent_report::AgentReport;
use super::aliases::contested_aliases;
use super::changes::{NodeArrival, note_replica};
use super::directives::Directives;
use super::expectation::{ANNOUNCEMENT_TTL, Expectations};
use super::gone_jobs::GoneJobs;
use super::job::Job;
use super::local_load::LocalLoad;
use super::log_lines::LogLines;
use super::replica_cache::{CacheTier, ReplicaCache};
use super::replica_status::{Phase, ReplicaLoad, ReplicaStatus};
use super::view::{FleetView, Node, Replica};
use crate::background::BackgroundTasks;
use crate::event_log::EventLog;
use crate::lanes::Lanes;

/// How long a node that has lost its connection is still shown, so that operators see it go and
/// come back.
const RETENTION_AFTER_LOSS: Duration = Duration::from_secs(60);

/// How often leases are checked; a lease lasts seconds.
const LEASE_CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// Most updates queued for the writer. When the queue is full, a session waits, and its agent's
/// reports with it.
const MAX_QUEUED_UPDATES: usize = 1024;

/// Shortest time between two views that differ only in loads.
///
/// A view has a pointer to each replica, and agents report every few milliseconds. Without this
/// limit, and when a view was a copy of the whole fleet, 200 views a second of 1,000 idle replicas
/// took a third of a core.
pub(super) const LOAD_PUBLISH_INTERVAL: Duration = Duration::from_millis(5);

#[derive(Debug)]
pub(crate) enum FleetUpdate {
    /// An agent has attached. An earlier attachment of the same node is replaced.
    Attached {
        attachment: u64,
        node: Arc<str>,
        agent_version: String,
        agent_run: u64,
        lanes: Arc<Lanes>,
        directives: Directives,
    },
    /// A report, which renews the lease even if it is empty.
    Reported {
        attachment: u64,
        /// Whether `replicas` are all that the node has.
        snapshot: bool,
        replicas: Vec<ReplicaChange>,
    },
    /// The agent's batch job has another run or another end.
    JobReported {
        attachment: u64,
        job: Job,
    },
    /// A tier of a replica's cache is now completely known, or no longer counts.
    CacheChanged {
        attachment: u64,
        index: u32,
        tier: CacheTier,
        epoch: u64,
        cache: ReplicaCache,
    },
    Detached {
        attachment: u64,
    },
    /// A controller has announced what it can bring, which replaces its earlier announcement.
    Announced(Expectations),
}

#[derive(Debug)]
pub(crate) struct ReplicaChange {
    pub index: u32,
    pub epoch: u64,
    /// `None` when unchanged.
    pub state: Option<ReplicaStatus>,
    /// Absent when unchanged.
    pub load: Option<ReplicaLoad>,
    /// The report as it came.
    pub report: AgentReport,
}

/// The handle of readers and sessions on the fleet. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Fleet {
    view: Arc<ArcSwap<FleetView>>,
    updates: mpsc::Sender<FleetUpdate>,
    lease: Duration,
    /// Why this router has cut off the remaining answers.
    cut_off: Arc<OnceLock<&'static str>>,
    events: EventLog,
}

impl Fleet {
    #[must_use]
    pub(crate) fn start(lease: Duration, events: EventLog, tasks: &BackgroundTasks) -> Self {
        let (updates, received) = mpsc::channel(MAX_QUEUED_UPDATES);
        let started = Instant::now();
        let view = Arc::new(ArcSwap::from_pointee(FleetView::new(started, lease)));
        let fleet = Self { view, updates, lease, cut_off: Arc::default(), events: events.clone() };
        let writer = FleetWriter {
            fleet: fleet.clone(),
            nodes: BTreeMap::new(),
            gone_jobs: GoneJobs::new(events),
            expectations: Arc::default(),
            contested_aliases: Arc::default(),
            announced_at: started,
            nodes_lost: 0,
            has_lower_tiers: false,
            started,
            last_publish: started,
            has_unpublished_loads: false,
            leaving: Vec::new(),
        };
        tasks.spawn(writer.run(received));
        fleet
    }

    /// The present fleet view, which does not change under its reader.
    #[must_use]
    pub(crate) fn view(&self) -> Guard<Arc<FleetView>> {
        self.view.load()
    }

    /// What has happened to the fleet in the last hour.
    #[must_use]
    pub(crate) fn events(&self) -> &EventLog {
        &self.events
    }

    #[must_use]
    pub(crate) fn lease(&self) -> Duration {
        self.lease
    }

    /// Ends every running answer for this reason. No answer goes on elsewhere, because this router
    /// ends.
    pub(crate) fn cut_off(&self, reason: &'static str) {
        let _ = self.cut_off.set(reason);
        self.view().replicas.iter().for_each(|replica| replica.lanes.mark_lost());
    }

    /// Why answers were cut off, once they are.
    #[must_use]
    pub(crate) fn cut_off_reason(&self) -> Option<&'static str> {
        self.cut_off.get().copied()
    }

    /// Replaces the expected models, for as long as an announcement counts.
    pub(crate) async fn expect(&self, expectations: Expectations) {
        self.update(FleetUpdate::Announced(expectations)).await;
    }

    /// Queues an update, waiting while the queue is full. Does nothing once the writer has ended.
    pub(crate) async fn update(&self, update: FleetUpdate) {
        if self.updates.send(update).await.is_err() {
            tracing::debug!("the fleet's writer has ended; an update is dropped");
        }
    }
}

#[derive(Debug)]
struct FleetWriter {
    fleet: Fleet,
    nodes: BTreeMap<Arc<str>, AttachedNode>,
    gone_jobs: GoneJobs,
    expectations: Arc<Expectations>,
    contested_aliases: Arc<BTreeSet<String>>,
    announced_at: Instant,
    nodes_lost: u64,
    /// A node has reported blocks behind a GPU's memory.
    has_lower_tiers: bool,
    started: Instant,
    last_publish: Instant,
    /// Some loads are not in any view yet.
    has_unpublished_loads: bool,
    /// Replicas that have begun to leave. Their streams hear of it once a view says so.
    leaving: Vec<Arc<LocalLoad>>,
}

#[derive(Debug)]
struct AttachedNode {
    attachment: u64,
    node: Node,
    lanes: Arc<Lanes>,
    replicas: BTreeMap<u32, Arc<Replica>>,
    /// The files that its replicas share.
    file_cache: ReplicaCache,
    /// When the last report came, or the connection was lost.
    last_report: Instant,
    /// Counts the lines about its replicas, also over attachments.
    log_lines: LogLines,
    /// What is said of the attachment once its first snapshot is here.
    arrival: Option<NodeArrival>,
    events: EventLog,
}

impl FleetWriter {
    async fn run(mut self, mut updates: mpsc::Receiver<FleetUpdate>) {
        let mut tick = tokio::time::interval(LEASE_CHECK_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let update = tokio::select! {
                // Updates may come all the time, so they come last.
                biased;
                _ = tick.tick() => None,
                () = sleep_until(self.last_publish + LOAD_PUBLISH_INTERVAL), if self.has_unpublished_loads => {
                    self.publish();
                    continue;
                }
                update = updates.recv() => {
                    let Some(update) = update else { return };
                    Some(update)
                }
            };
            let are_leases_due = update.is_none();
            let mut is_urgent = false;
            // Updates that came meanwhile are published together, and no lease lapses whose report
            // is here. Updates that come while these are applied wait for the next turn.
            let waiting = updates.len();
            for update in update.into_iter().chain(std::iter::from_fn(|| updates.try_recv().ok()).take(waiting)) {
                is_urgent |= self.apply(update);
                self.has_unpublished_loads = true;
            }
            is_urgent |= are_leases_due && self.check_leases();
            if is_urgent {
                self.settle_aliases();
            }
            if is_urgent || (self.has_unpublished_loads && self.last_publish.elapsed() >= LOAD_PUBLISH_INTERVAL) {
                self.publish();
                self.announce_moves();
            }
        }
    }

    /// Applies an update. Returns `true` if it must be published at once, unlike loads.
    fn apply(&mut self, update: FleetUpdate) -> bool {
        match update {
            FleetUpdate::Attached { attachment, node, agent_version, agent_run: life, lanes, directives } => {
                let previous = self.nodes.remove(&node);
                let arrival = previous.as_ref().map_or(NodeArrival::New, |previous| NodeArrival::again(previous.node.is_attached));
                self.gone_jobs.forget(&node, life);
                if let Some(previous) = &previous {
                    previous.lanes.mark_lost();
                    if previous.node.is_attached && previous.node.agent_run != life {
                        self.gone_jobs.record(&previous.node, &previous.replicas, Instant::now());
                    }
                    tracing::info!(event = "agent_attached", %node, "agent attached again");
                } else {
                    tracing::info!(event = "agent_attached", %node, agent_version, "agent attached");
                }
                // The router's own in-flight counts go on: their guards may still live.
                let (mut replicas, log_lines) = previous.map(|previous| (previous.replicas, previous.log_lines)).unwrap_or_default();
                // The caches are reported again, to new replica slots.
                for replica in replicas.values_mut().map(Arc::make_mut) {
                    replica.forget_caches();
                    replica.job = None;
                }
                let described = Node { name: node.clone(), agent_version, agent_run: life, is_attached: true, directives, job: None };
                let (last_report, events, arrival) = (Instant::now(), self.fleet.events.clone(), Some(arrival));
                let file_cache = ReplicaCache::default();
                let attached =
                    AttachedNode { attachment, node: described, lanes, replicas, file_cache, last_report, log_lines, arrival, events };
                self.nodes.insert(node, attached);
            }
            FleetUpdate::Reported { attachment, snapshot, replicas } => {
                let Some(attached) = self.nodes.values_mut().find(|attached| attached.attachment == attachment) else { return false };
                attached.last_report = Instant::now();
                attached.lanes.mark_heard(attached.last_report, self.fleet.lease);
                let has_state = |change: &&ReplicaChange| change.state.is_some();
                let changed: Vec<u32> = replicas.iter().filter(has_state).map(|change| change.index).collect();
                let is_urgent = attached.apply_report(snapshot, replicas);
                let changed = changed.iter().filter_map(|index| attached.replicas.get(index));
                self.leaving.extend(changed.filter(|replica| replica.is_leaving()).map(|replica| replica.local_load.clone()));
                return is_urgent;
            }
            FleetUpdate::JobReported { attachment, job } => {
                let Some(attached) = self.nodes.values_mut().find(|attached| attached.attachment == attachment) else { return false };
                if attached.node.job.as_deref().is_none_or(|known| known.id != job.id || known.run != job.run) {
                    let name = &attached.node.name;
                    attached.events.record("job_reported", name, &format!("node {name} is in {job}"), false);
                }
                let job = Some(Arc::new(job));
                attached.replicas.values_mut().for_each(|replica| Arc::make_mut(replica).job.clone_from(&job));
                attached.node.job = job;
            }
            FleetUpdate::CacheChanged { attachment, index, tier, epoch, cache } => {
                let Some(attached) = self.nodes.values_mut().find(|attached| attached.attachment == attachment) else { return false };
                self.has_lower_tiers |= tier != CacheTier::Gpu;
                attached.change_cache(index, tier, epoch, cache);
            }
            FleetUpdate::Detached { attachment } => return self.detach(attachment),
            FleetUpdate::Announced(expectations) => {
                self.expectations = Arc::new(expectations.replace(&self.expectations));
                self.announced_at = Instant::now();
            }
        }
        true
    }

    /// Ends an agent's connection, and forgets its node if the engines there were stopped. `false`
    /// if another connection of that agent has taken its place.
    fn detach(&mut self, attachment: u64) -> bool {
        let Some(attached) = self.nodes.values_mut().find(|attached| attached.attachment == attachment) else { return false };
        attached.node.is_attached = false;
        attached.lanes.mark_lost();
        attached.last_report = Instant::now();
        let (name, has_left) = (attached.node.name.clone(), attached.has_left());
        if has_left {
            tracing::info!(event = "agent_left", node = %name, "node forgotten: its agent has left");
            attached.events.record("agent_left", &name, &format!("node {name}: its agent has left"), false);
        } else {
            tracing::warn!(event = "agent_lost", node = %name, "agent lost: its replicas get no requests until it attaches again");
            attached.events.record("agent_lost", &name, &format!("node {name}: its agent is not connected"), true);
        }
        self.gone_jobs.record(&attached.node, &attached.replicas, attached.last_report);
        for replica in attached.replicas.values_mut().map(Arc::make_mut) {
            replica.forget_caches();
            replica.lease_lapsed = true;
            replica.last_report = attached.last_report;
        }
        if has_left {
            self.nodes.remove(&name);
        }
        true
    }

    /// Marks replicas whose agent is silent, and forgets nodes that stay away and a silent
    /// controller's announcements. Returns whether anything changed.
    fn check_leases(&mut self) -> bool {
        let lease = self.fleet.lease;
        let before = self.nodes.len();
        self.nodes.retain(|name, attached| {
            let keep = attached.node.is_attached || attached.last_report.elapsed() < RETENTION_AFTER_LOSS;
            if !keep {
                tracing::warn!(event = "node_lost", node = %name, "node forgotten: its agent has not come back");
                attached.events.record("node_lost", name, &format!("node {name} is gone: its agent has not come back"), true);
                self.nodes_lost += 1;
            }
            keep
        });
        let mut changed = self.gone_jobs.prune(Instant::now()) || self.nodes.len() != before;
        if !self.expectations.is_empty() && self.announced_at.elapsed() > ANNOUNCEMENT_TTL {
            tracing::warn!(event = "controller_silent", "the controller is silent: no model is expected any more");
            self.fleet.events.record("controller_silent", "", "the controller is silent: no model is expected any more", true);
            (self.expectations, changed) = (Arc::default(), true);
        }
        self.nodes.values_mut().for_each(AttachedNode::count_left_out_lines);
        for attached in self.nodes.values_mut().filter(|attached| attached.node.is_attached && attached.last_report.elapsed() > lease) {
            let AttachedNode { node, replicas, log_lines, events, .. } = attached;
            if replicas.values().any(|replica| !replica.lease_lapsed) {
                events.record("agent_silent", &node.name, &format!("node {} is silent: no report within the lease", node.name), true);
            }
            for replica in replicas.values_mut().filter(|replica| !replica.lease_lapsed) {
                if log_lines.take(Instant::now()) {
                    tracing::warn!(event = "agent_silent", replica = %replica.id, "suspect: its agent has sent no report within the lease");
                }
                Arc::make_mut(replica).lease_lapsed = true;
                self.leaving.push(replica.local_load.clone());
                changed = true;
            }
        }
        changed
    }

    /// Decides which aliases count among the names that there are now.
    fn settle_aliases(&mut self) {
        let replicas = self.nodes.values().flat_map(|attached| attached.replicas.values());
        let models = replicas.flat_map(|replica| &replica.state.models).chain(self.expectations.models());
        let mut contested = contested_aliases(&models.collect::<Vec<_>>());
        contested.extend(self.expectations.shared_aliases().iter().cloned());
        if contested == *self.contested_aliases && contested.is_empty() {
            return;
        }
        for replica in self.nodes.values_mut().flat_map(|attached| attached.replicas.values_mut()) {
            let is_contested = replica.state.models.iter().any(|model| model.alias_of.is_some() && contested.contains(&model.id));
            if replica.is_alias_contested != is_contested {
                Arc::make_mut(replica).is_alias_contested = is_contested;
            }
        }
        self.contested_aliases = Arc::new(contested);
    }

    fn publish(&mut self) {
        (self.last_publish, self.has_unpublished_loads) = (Instant::now(), false);
        let mut view = FleetView::new(self.started, self.fleet.lease);
        view.gone_jobs = self.gone_jobs.shared();
        view.expectations = self.expectations.clone();
        view.contested_aliases = self.contested_aliases.clone();
        view.nodes_lost = self.nodes_lost;
        view.has_lower_tiers = self.has_lower_tiers;
        for attached in self.nodes.values() {
            view.nodes.push(attached.node.clone());
            view.replicas.extend(attached.replicas.values().cloned());
        }
        self.fleet.view.store(Arc::new(view));
    }

    fn announce_moves(&mut self) {
        self.leaving.drain(..).for_each(|load| load.stream_moves.announce());
    }
}

impl AttachedNode {
    /// Whether the node's engines were stopped, and none of them had failed, when its agent went.
    fn has_left(&self) -> bool {
        let has_failed = |replica: &Arc<Replica>| replica.report.state.as_deref().is_some_and(|state| state.failure.is_some());
        self.replicas.values().all(|replica| replica.state.phase == Phase::Stopped && !has_failed(replica))
    }

    /// Writes how many lines about the node's replicas were left out in a minute that is over.
    fn count_left_out_lines(&mut self) {
        if let Some(count) = self.log_lines.close_window(Instant::now()) {
            tracing::warn!(node = %self.node.name, count, "lines about this node's replicas were left out: there were too many in a minute");
        }
    }

    /// Changes what is known of one tier: of a replica, if it is in that life, or of the files that
    /// all share.
    fn change_cache(&mut self, index: u32, tier: CacheTier, epoch: u64, cache: ReplicaCache) {
        if tier == CacheTier::Files {
            self.replicas.values_mut().for_each(|replica| Arc::make_mut(replica).file_cache.clone_from(&cache));
            self.file_cache = cache;
        } else if let Some(replica) = self.replicas.get_mut(&index).filter(|replica| replica.epoch == epoch) {
            *Arc::make_mut(replica).cache_mut(tier) = cache;
        }
    }

    /// Applies a report. Returns `true` if it has more than loads.
    fn apply_report(&mut self, snapshot: bool, changes: Vec<ReplicaChange>) -> bool {
        let is_known = |change: &ReplicaChange| self.replicas.get(&change.index).is_some_and(|replica| replica.epoch == change.epoch);
        let is_urgent = snapshot
            || changes.iter().any(|change| change.state.is_some() || !is_known(change))
            || self.replicas.values().any(|replica| replica.lease_lapsed);
        let name = &self.node.name;
        if self.arrival.is_none() && self.replicas.values().any(|replica| replica.lease_lapsed) {
            self.events.record("agent_heard", name, &format!("node {name} reports again"), false);
        }
        if snapshot {
            let reported: BTreeSet<u32> = changes.iter().map(|change| change.index).collect();
            let gone = self.replicas.extract_if(.., |index, _| !reported.contains(index));
            gone.for_each(|(_, replica)| self.events.record("replica_gone", &replica.id, &format!("{} is gone", replica.id), false));
        }
        for change in changes {
            match self.replicas.get_mut(&change.index) {
                Some(replica) => {
                    let replica = Arc::make_mut(replica);
                    let before = (replica.state.phase, replica.epoch);
                    if replica.epoch != change.epoch {
                        replica.forget_life();
                    }
                    replica.epoch = change.epoch;
                    replica.lanes = self.lanes.clone();
                    if let Some(mut state) = change.state {
                        // Clients who request these models then learn what their engine is doing,
                        // instead of that the models do not exist.
                        if state.models.is_empty() {
                            state.models.clone_from(&replica.state.models);
                        }
                        replica.state = Arc::new(state);
                    }
                    if change.load.as_ref().is_some_and(|load| load.served > replica.load.served) {
                        replica.last_request = Some(self.last_report);
                    }
                    replica.load = change.load.unwrap_or_else(|| std::mem::take(&mut replica.load));
                    replica.report.merge(change.report);
                    if (replica.state.phase, replica.epoch) != before && self.log_lines.take(Instant::now()) {
                        note_replica(&self.events, replica, Some(before));
                    }
                }
                None => self.insert_replica(change),
            }
        }
        if let Some(arrival) = self.arrival.take_if(|_| snapshot) {
            self.events.record("agent_attached", &self.node.name, &arrival.words(&self.node, self.replicas.values()), false);
        }
        for replica in self.replicas.values_mut().map(Arc::make_mut) {
            (replica.lease_lapsed, replica.last_report) = (false, self.last_report);
        }
        is_urgent
    }

    fn insert_replica(&mut self, change: ReplicaChange) {
        // A replica without a state is of no use. The session asks for a snapshot when a state is
        // missing.
        let Some(state) = change.state else { return };
        let has_served = change.load.as_ref().is_some_and(|load| load.served > 0);
        let replica = Replica {
            id: format!("{}/{}", self.node.name, change.index).into(),
            node: self.node.name.clone(),
            index: change.index,
            epoch: change.epoch,
            state: Arc::new(state),
            is_alias_contested: false,
            load: change.load.unwrap_or_default(),
            report: change.report,
            lease_lapsed: false,
            last_report: self.last_report,
            last_request: has_served.then_some(self.last_report),
            local_load: Arc::<LocalLoad>::default(),
            cache: ReplicaCache::default(),
            host_cache: ReplicaCache::default(),
            file_cache: self.file_cache.clone(),
            lanes: self.lanes.clone(),
            job: self.node.job.clone(),
        };
        if self.log_lines.take(Instant::now()) {
            // A node's arrival counts its replicas in one event.
            let events = if self.arrival.is_some() { &EventLog::default() } else { &self.events };
            note_replica(events, &replica, None);
        }
        self.replicas.insert(change.index, Arc::new(replica));
    }
}
