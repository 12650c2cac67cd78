//! What the routers are told about this node's engines: whole at first, then what changed. Wire types of `Attach` begin here.

use std::path::PathBuf;
use std::time::Duration;

use hostler_proto::agent::v1 as wire;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::client::{EngineClient, client};
use crate::engine::{Engine, Phase, Status};
use crate::traffic::RouterKey;

/// The least time between two reports.
pub(super) const REPORT_INTERVAL: Duration = Duration::from_millis(10);

/// A replica of this node: its engine, and the way of requests to it.
#[derive(Debug)]
pub struct Replica {
    /// Index on this node.
    pub index: u32,
    /// The supervised engine.
    pub engine: Engine,
    /// Name of its GPU, empty on CPU.
    pub gpu: String,
    pub(super) client: EngineClient,
}

impl Replica {
    /// A replica over a supervised engine.
    #[must_use]
    pub fn new(index: u32, engine: Engine, gpu: String) -> Self {
        let socket: PathBuf = engine.socket().to_owned();
        Self { index, engine, gpu, client: client(socket) }
    }
}

/// The node's replicas, and a pulse that beats when something about them has changed.
#[derive(Debug)]
pub struct Board {
    replicas: Vec<Replica>,
    pulse: watch::Sender<u64>,
}

impl Board {
    /// The board of these replicas, in the order of their index.
    #[must_use]
    pub fn new(replicas: Vec<Replica>) -> Self {
        Self { replicas, pulse: watch::Sender::new(0) }
    }

    /// All replicas.
    #[must_use]
    pub fn replicas(&self) -> &[Replica] {
        &self.replicas
    }

    /// The replica of an index.
    #[must_use]
    pub fn replica(&self, index: u32) -> Option<&Replica> {
        self.replicas.get(index as usize)
    }

    /// Wakes when something has changed, at most every 10 ms.
    pub(super) fn pulse(&self) -> watch::Receiver<u64> {
        self.pulse.subscribe()
    }

    /// Watches the engines until `end`.
    pub async fn watch(&self, end: CancellationToken) {
        let watching = self.replicas.iter().map(|replica| async {
            let (mut status, mut samples, mut traffic) =
                (replica.engine.status(), replica.engine.samples(), replica.engine.traffic().changes());
            loop {
                // An engine that has ended for good changes no more.
                let changed = tokio::select! {
                    changed = status.changed() => changed.is_ok(),
                    changed = samples.changed() => changed.is_ok(),
                    changed = traffic.changed() => changed.is_ok(),
                };
                if !changed {
                    return;
                }
                self.pulse.send_modify(|beats| *beats += 1);
                tokio::time::sleep(REPORT_INTERVAL).await;
            }
        });
        tokio::select! {
            _ = futures_util::future::join_all(watching) => end.cancelled().await,
            () = end.cancelled() => {}
        }
    }
}

/// Makes one router's reports.
#[derive(Debug)]
pub(super) struct Reporter {
    router: RouterKey,
    sequence: u64,
    /// What the router knows of each replica.
    told: Vec<Told>,
}

#[derive(Debug, Clone, Default, PartialEq)]
struct Told {
    epoch: u64,
    state: Option<wire::ReplicaState>,
    load: Option<wire::Load>,
}

impl Reporter {
    pub(super) fn new(router: RouterKey) -> Self {
        Self { router, sequence: 0, told: Vec::new() }
    }

    /// Everything, as if nothing had been told.
    pub(super) fn snapshot(&mut self, board: &Board) -> wire::Report {
        self.told = vec![Told::default(); board.replicas.len()];
        self.sequence = 0;
        wire::Report { snapshot: true, ..self.report(board) }
    }

    /// What has changed since the last report, which may be nothing.
    pub(super) fn report(&mut self, board: &Board) -> wire::Report {
        let mut replicas = Vec::new();
        for (replica, told) in board.replicas.iter().zip(&mut self.told) {
            let now = now(replica, self.router);
            if now == *told {
                continue;
            }
            replicas.push(wire::ReplicaReport {
                index: replica.index,
                epoch: now.epoch,
                state: now.state.clone().filter(|_| now.state != told.state),
                load: now.load.filter(|_| now.load != told.load),
            });
            *told = now;
        }
        let sequence = self.sequence;
        self.sequence += 1;
        wire::Report { sequence, snapshot: false, replicas }
    }
}

fn now(replica: &Replica, router: RouterKey) -> Told {
    let status = replica.engine.status().borrow().clone();
    // A reading that could not be renewed says nothing any more; the agent's own counts stay true.
    let sample = replica.engine.samples().borrow().filter(|sample| !sample.stale);
    let counts = replica.engine.traffic().changes();
    let counts = counts.borrow();
    let load = wire::Load {
        in_flight: counts.total(),
        in_flight_yours: counts.of(router),
        served: counts.served_total(),
        engine: sample.map(|sample| wire::EngineLoad {
            running: sample.figures.running,
            waiting: sample.figures.waiting,
            kv_use: sample.figures.kv_use,
            kv_blocks: sample.figures.kv_blocks.unwrap_or(0),
            block_size: sample.figures.block_size.unwrap_or(0),
            prompt_tokens: sample.figures.prompt_tokens,
            generation_tokens: sample.figures.generation_tokens,
            preemptions: sample.figures.preemptions,
            prefix_queries: sample.figures.prefix_queries,
            prefix_hits: sample.figures.prefix_hits,
        }),
    };
    Told { epoch: status.epoch, state: Some(state(replica, status)), load: Some(load) }
}

fn state(replica: &Replica, status: Status) -> wire::ReplicaState {
    let phase = match status.phase {
        Phase::Starting => wire::Phase::Starting,
        Phase::Loading => wire::Phase::Loading,
        Phase::Ready => wire::Phase::Ready,
        Phase::Draining => wire::Phase::Draining,
        Phase::Stopped => wire::Phase::Stopped,
        Phase::Failed => wire::Phase::Failed,
    };
    wire::ReplicaState {
        phase: phase.into(),
        reason: status.reason,
        models: status.models.iter().map(|card| wire::Model { id: card.id.clone(), card: card.raw.clone() }).collect(),
        engine_version: status.version.map(|version| version.to_string()).unwrap_or_default(),
        engine_pid: status.pid.unwrap_or(0),
        engine_socket: replica.engine.socket().display().to_string(),
        restarts: status.restarts,
        gpu: replica.gpu.clone(),
    }
}
