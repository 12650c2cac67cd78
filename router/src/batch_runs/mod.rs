//! Runs the unfinished batches of the router's folder: finds them, takes those that no other router
//! has, and removes what has expired. `Router::run` starts it beside the edge.

mod asking;
mod run;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hostler_boot::Shutdown;
use rustc_hash::{FxHashMap, FxHashSet};
use tokio::sync::Semaphore;
use tokio::task::{Id, JoinSet};
use tokio::time::{Instant, sleep};

use crate::batches::{Batches, BatchesError, FoundBatch, ObjectId};
use crate::inbound::Edge;
use run::{BatchRun, RunEnd};

/// How often the folder is searched for batches of other routers.
const SEARCH_INTERVAL: Duration = Duration::from_secs(5);

/// How long a batch that cannot go on is left alone.
const SUSPENSION: Duration = Duration::from_secs(60);

/// How often expired files are removed.
const SWEEP_INTERVAL: Duration = Duration::from_secs(3600);

/// Most batches that run at once. Each takes some 10 MB for 150,000 requests.
const MAX_RUNNING: usize = 16;

/// Most of them that one owner has, so that others need not wait for days.
const MAX_RUNNING_EACH: usize = 4;

/// Runs batches until the router drains, and then until their requests have ended.
pub(crate) async fn run_batches(edge: Arc<Edge>, batches: Batches, serving: Shutdown) {
    let in_flight = Arc::new(Semaphore::new(edge.config.batches_in_flight.clamp(1, Semaphore::MAX_PERMITS)));
    let mut runs = BatchRuns {
        edge,
        batches,
        serving: serving.clone(),
        in_flight,
        running: FxHashMap::default(),
        resting: FxHashMap::default(),
        ended: FxHashSet::default(),
        tasks: JoinSet::new(),
        next_sweep: Instant::now(),
    };
    tokio::select! {
        () = runs.run() => {}
        () = serving.wait_stop() => {}
    }
}

struct BatchRuns {
    edge: Arc<Edge>,
    batches: Batches,
    serving: Shutdown,
    /// Places for requests of all batches.
    in_flight: Arc<Semaphore>,
    /// The batches that run here, with their owners.
    running: FxHashMap<Id, (ObjectId, PathBuf)>,
    /// When to look again at batches that could not go on.
    resting: FxHashMap<ObjectId, Instant>,
    ended: FxHashSet<ObjectId>,
    tasks: JoinSet<RunEnd>,
    next_sweep: Instant,
}

impl BatchRuns {
    async fn run(&mut self) {
        while !self.serving.is_draining() {
            if let Err(error) = self.search().await {
                tracing::warn!(event = "batch_suspended", %error, "the folder of batches cannot be read: it is tried again");
            }
            tokio::select! {
                () = self.batches.wait_changed() => {}
                () = sleep(SEARCH_INTERVAL) => {}
                Some(ended) = self.tasks.join_next_with_id() => self.record_end(ended),
                () = self.serving.wait_drain() => {}
            }
        }
        while let Some(ended) = self.tasks.join_next_with_id().await {
            self.record_end(ended);
        }
    }

    /// Starts the batches that may run.
    async fn search(&mut self) -> Result<(), BatchesError> {
        let now = Instant::now();
        if now >= self.next_sweep {
            self.next_sweep = now + SWEEP_INTERVAL;
            self.batches.sweep().await?;
        }
        let (found, ended) = self.batches.find_unfinished(std::mem::take(&mut self.ended)).await?;
        self.ended = ended;
        self.edge.dispatch.metrics.set_unfinished_batches(found.len());
        self.resting.retain(|_, until| *until > now);
        for batch in found {
            self.start(batch);
        }
        Ok(())
    }

    fn start(&mut self, found: FoundBatch) {
        let owner = found.owner();
        let own = self.running.values().filter(|(_, other)| *other == owner).count();
        let is_running = self.running.values().any(|(id, _)| *id == found.id);
        if is_running || self.resting.contains_key(&found.id) || own >= MAX_RUNNING_EACH || self.running.len() >= MAX_RUNNING {
            return;
        }
        let id = found.id.clone();
        let run = BatchRun {
            edge: self.edge.clone(),
            batches: self.batches.clone(),
            serving: self.serving.clone(),
            in_flight: self.in_flight.clone(),
            id: id.clone(),
        };
        let task = self.tasks.spawn(run.run(found));
        self.running.insert(task.id(), (id, owner));
    }

    fn record_end(&mut self, ended: Result<(Id, RunEnd), tokio::task::JoinError>) {
        let (task, end) = match ended {
            Ok((task, end)) => (task, Ok(end)),
            Err(error) => (error.id(), Err(error)),
        };
        let Some((id, _)) = self.running.remove(&task) else { return };
        self.batches.set_progress(&id, None);
        let rest = match end {
            Ok(RunEnd::Ended | RunEnd::Paused) => return,
            Ok(RunEnd::Taken) => SEARCH_INTERVAL,
            Ok(RunEnd::Suspended(error)) => {
                tracing::warn!(event = "batch_suspended", batch = %id, %error, "a batch cannot go on; what is done is kept, and it is tried again");
                SUSPENSION
            }
            Err(error) => {
                tracing::warn!(event = "batch_suspended", batch = %id, %error, "a batch has stopped; what is done is kept, and it is tried again");
                SUSPENSION
            }
        };
        self.resting.insert(id, Instant::now() + rest);
    }
}
