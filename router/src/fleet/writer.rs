//! The one task that writes the fleet: it applies the sessions' updates, watches the leases and publishes the view.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::{ArcSwap, Guard};
use hostler_proto::agent::v1::GpuReading;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, sleep_until};

use super::cache::Cache;
use super::directives::Directives;
use super::own::Own;
use super::view::{FleetView, Load, Node, Replica, State};
use crate::background::BackgroundTasks;
use crate::lanes::Lanes;

/// How long a node that has lost its connection is still shown: long enough to see it go and come back.
const SHOWN_AFTER_LOSS: Duration = Duration::from_secs(60);

/// How often leases are looked at. A lease is seconds long.
const LEASE_TICK: Duration = Duration::from_millis(200);

/// Updates that may wait for the writer; a session whose update does not fit waits, and its agent's reports with it.
const QUEUE: usize = 1024;

/// A view with nothing new but loads follows the one before after this time at the earliest. A view has a pointer to each replica, and agents report
/// every few milliseconds: when a view was a copy of the whole fleet, 200 of them, of 1,000 idle replicas, took a third of a core without it.
pub(super) const LOADS_WAIT: Duration = Duration::from_millis(5);

/// What a session tells the writer.
#[derive(Debug)]
pub enum Update {
    /// An agent has attached. An earlier attachment of the same node is replaced.
    Attached {
        /// Unique number of the attachment.
        attachment: u64,
        /// Name of the node.
        node: Arc<str>,
        /// Version of the agent.
        agent_version: String,
        /// Random number of the agent's life.
        life: u64,
        /// How requests reach it.
        lanes: Arc<Lanes>,
        /// How directives reach it.
        directives: Directives,
    },
    /// A report has come; an empty one renews the lease.
    Reported {
        /// From which attachment.
        attachment: u64,
        /// Whether `replicas` are all there are.
        snapshot: bool,
        /// What changed.
        replicas: Vec<Change>,
    },
    /// What is known of a replica's cache has become whole, or counts no longer.
    Cached {
        /// Of which attachment.
        attachment: u64,
        /// Index on its node.
        index: u32,
        /// Of which life of its engine.
        epoch: u64,
        /// What is known.
        cache: Cache,
    },
    /// The agent's connection has ended.
    Detached {
        /// Which attachment.
        attachment: u64,
    },
}

/// What changed of one replica.
#[derive(Debug)]
pub struct Change {
    /// Index on its node.
    pub index: u32,
    /// Life of its engine.
    pub epoch: u64,
    /// Absent when unchanged.
    pub state: Option<State>,
    /// Absent when unchanged.
    pub load: Option<Load>,
    /// How its GPUs do; absent when unchanged.
    pub gpus: Option<Arc<[GpuReading]>>,
}

/// The readers' and sessions' handle on the fleet. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Fleet {
    view: Arc<ArcSwap<FleetView>>,
    updates: mpsc::Sender<Update>,
    lease: Duration,
}

impl Fleet {
    /// Starts the writer.
    #[must_use]
    pub fn start(lease: Duration, tasks: &BackgroundTasks) -> Self {
        let (updates, received) = mpsc::channel(QUEUE);
        let started = Instant::now();
        let view = Arc::new(ArcSwap::from_pointee(FleetView::new(started)));
        let fleet = Self { view, updates, lease };
        let writer = Writer { fleet: fleet.clone(), nodes: BTreeMap::new(), started, published: started, waits: false };
        tasks.spawn(writer.run(received));
        fleet
    }

    /// The fleet as it is now; the picture does not change under its reader.
    #[must_use]
    pub fn view(&self) -> Guard<Arc<FleetView>> {
        self.view.load()
    }

    /// Until when a report counts.
    #[must_use]
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// Hands an update to the writer, waiting while its queue is full. After the writer's end it does nothing.
    pub async fn update(&self, update: Update) {
        if self.updates.send(update).await.is_err() {
            tracing::debug!("the fleet's writer has ended; an update is dropped");
        }
    }
}

#[derive(Debug)]
struct Writer {
    fleet: Fleet,
    nodes: BTreeMap<Arc<str>, Attached>,
    started: Instant,
    /// When the last view was published.
    published: Instant,
    /// There are loads that no view has yet.
    waits: bool,
}

/// A node as the writer keeps it.
#[derive(Debug)]
struct Attached {
    attachment: u64,
    node: Node,
    lanes: Arc<Lanes>,
    replicas: BTreeMap<u32, Arc<Replica>>,
    /// When the last report came, or when the connection was lost.
    heard: Instant,
}

impl Writer {
    async fn run(mut self, mut updates: mpsc::Receiver<Update>) {
        let mut tick = tokio::time::interval(LEASE_TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                update = updates.recv() => {
                    let Some(update) = update else { return };
                    let mut is_urgent = self.apply(update);
                    // What came meanwhile is published together.
                    while let Ok(update) = updates.try_recv() {
                        is_urgent |= self.apply(update);
                    }
                    self.waits = true;
                    if is_urgent || self.published.elapsed() >= LOADS_WAIT {
                        self.publish();
                    }
                }
                () = sleep_until(self.published + LOADS_WAIT), if self.waits => self.publish(),
                _ = tick.tick() => {
                    if self.watch_leases() {
                        self.publish();
                    }
                }
            }
        }
    }

    /// Takes an update in; whether readers must know it at once: of loads they may hear a little later.
    fn apply(&mut self, update: Update) -> bool {
        match update {
            Update::Attached { attachment, node, agent_version, life, lanes, directives } => {
                let previous = self.nodes.remove(&node);
                if let Some(previous) = &previous {
                    previous.lanes.mark_lost();
                    tracing::info!(%node, "agent attached again");
                } else {
                    tracing::info!(%node, agent_version, "agent attached");
                }
                // Our own in-flight counts go on: their guards may still live.
                let mut replicas = previous.map(|previous| previous.replicas).unwrap_or_default();
                // Their caches are told again, to seats of their own.
                replicas.values_mut().for_each(|replica| Arc::make_mut(replica).cache = Cache::default());
                let described = Node { name: node.clone(), agent_version, life, attached: true, directives };
                self.nodes.insert(node, Attached { attachment, node: described, lanes, replicas, heard: Instant::now() });
            }
            Update::Reported { attachment, snapshot, replicas } => {
                let Some(attached) = self.nodes.values_mut().find(|attached| attached.attachment == attachment) else { return false };
                attached.heard = Instant::now();
                return attached.report(snapshot, replicas);
            }
            Update::Cached { attachment, index, epoch, cache } => {
                let attached = self.nodes.values_mut().find(|attached| attached.attachment == attachment);
                let replica = attached.and_then(|attached| attached.replicas.get_mut(&index));
                if let Some(replica) = replica.filter(|replica| replica.epoch == epoch) {
                    Arc::make_mut(replica).cache = cache;
                }
            }
            Update::Detached { attachment } => {
                let Some(attached) = self.nodes.values_mut().find(|attached| attached.attachment == attachment) else { return false };
                attached.node.attached = false;
                attached.lanes.mark_lost();
                attached.heard = Instant::now();
                for replica in attached.replicas.values_mut().map(Arc::make_mut) {
                    (replica.suspect, replica.cache) = (true, Cache::default());
                }
                tracing::warn!(node = %attached.node.name, "agent lost: its replicas get no requests until it attaches again");
            }
        }
        true
    }

    /// Marks replicas whose agent has been silent, forgets nodes that stay away; `true` when that changed something.
    fn watch_leases(&mut self) -> bool {
        let lease = self.fleet.lease;
        let before = self.nodes.len();
        self.nodes.retain(|name, attached| {
            let keep = attached.node.attached || attached.heard.elapsed() < SHOWN_AFTER_LOSS;
            if !keep {
                tracing::info!(node = %name, "node forgotten: its agent has not come back");
            }
            keep
        });
        let mut changed = self.nodes.len() != before;
        for attached in self.nodes.values_mut().filter(|attached| attached.node.attached && attached.heard.elapsed() > lease) {
            for replica in attached.replicas.values_mut().filter(|replica| !replica.suspect) {
                tracing::warn!(replica = %replica.id, "suspect: its agent has sent no report within the lease");
                Arc::make_mut(replica).suspect = true;
                changed = true;
            }
        }
        changed
    }

    fn publish(&mut self) {
        (self.published, self.waits) = (Instant::now(), false);
        let mut view = FleetView::new(self.started);
        for attached in self.nodes.values() {
            view.nodes.push(attached.node.clone());
            view.replicas.extend(attached.replicas.values().cloned());
        }
        self.fleet.view.store(Arc::new(view));
    }
}

impl Attached {
    /// Takes a report in; whether it has more than loads.
    fn report(&mut self, snapshot: bool, changes: Vec<Change>) -> bool {
        let is_known = |change: &Change| self.replicas.get(&change.index).is_some_and(|replica| replica.epoch == change.epoch);
        let is_urgent = snapshot
            || changes.iter().any(|change| change.state.is_some() || !is_known(change))
            || self.replicas.values().any(|replica| replica.suspect);
        if snapshot {
            self.replicas.retain(|index, _| changes.iter().any(|change| change.index == *index));
        }
        for change in changes {
            match self.replicas.get_mut(&change.index) {
                Some(replica) => {
                    let replica = Arc::make_mut(replica);
                    if replica.epoch != change.epoch {
                        replica.cache = Cache::default();
                    }
                    replica.epoch = change.epoch;
                    replica.lanes = self.lanes.clone();
                    if let Some(mut state) = change.state {
                        // A request for them is then told what their engine does instead of that they do not exist.
                        if state.models.is_empty() {
                            state.models.clone_from(&replica.state.models);
                        }
                        if state.phase != replica.state.phase {
                            tracing::info!(replica = %replica.id, phase = state.word(), reason = state.wire.reason, "phase");
                        }
                        replica.state = Arc::new(state);
                    }
                    replica.load = change.load.unwrap_or_else(|| std::mem::take(&mut replica.load));
                    replica.gpus = change.gpus.unwrap_or_else(|| replica.gpus.clone());
                }
                None => self.insert(change),
            }
        }
        for replica in self.replicas.values_mut().map(Arc::make_mut) {
            (replica.suspect, replica.heard) = (false, self.heard);
        }
        is_urgent
    }

    fn insert(&mut self, change: Change) {
        // A replica without its state is of no use; the session asks for a snapshot when one is missing.
        let Some(state) = change.state else { return };
        let replica = Replica {
            id: format!("{}/{}", self.node.name, change.index).into(),
            node: self.node.name.clone(),
            index: change.index,
            epoch: change.epoch,
            state: Arc::new(state),
            load: change.load.unwrap_or_default(),
            gpus: change.gpus.unwrap_or_default(),
            suspect: false,
            heard: self.heard,
            own: Arc::<Own>::default(),
            cache: Cache::default(),
            lanes: self.lanes.clone(),
        };
        tracing::info!(replica = %replica.id, phase = replica.state.word(), reason = replica.state.wire.reason, "phase");
        self.replicas.insert(change.index, Arc::new(replica));
    }
}
