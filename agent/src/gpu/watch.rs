//! Watches the GPUs that engines run on: reads each once a second, listens for faults, and has the engines on a GPU that fails restarted or
//! taken out of service. Only engines on that GPU are touched.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::incident::{Incident, Response, What, respond};
use super::questions::{self, Event, Standing};
use super::{Driver, Gpu, Reading, Readings};
use crate::engine::{Engine, Phase};

/// Between two readings of a GPU. A GPU that is lost without an XID is noticed within this time.
const INTERVAL: Duration = Duration::from_secs(1);

/// Incidents and events that wait. They are dealt with at once.
const WAITING: usize = 64;

/// A replica whose GPUs are watched.
#[derive(Debug)]
pub struct Watched {
    /// Its name in the fleet, `node/index`.
    pub name: String,
    /// Its GPUs or slices.
    pub gpus: Vec<Gpu>,
    /// The engine on them.
    pub engine: Engine,
}

/// Watches until `end`.
pub async fn watch(driver: Driver, replicas: Vec<Watched>, end: CancellationToken) {
    let used: Vec<Gpu> = replicas.iter().flat_map(|replica| replica.gpus.iter().cloned()).collect();
    let unread = |gpu: &Gpu| Reading { uuid: gpu.uuid.clone(), ..Reading::default() };
    driver.readings_out().send_replace(Arc::new(Readings { gpus: used.iter().map(unread).collect() }));
    let (incidents, mut happened) = mpsc::channel(WAITING);
    // Dropped with this task, and its tasks with it.
    let mut watching = JoinSet::new();
    let mut wholes: Vec<String> = used.iter().map(|gpu| gpu.whole().to_owned()).collect();
    wholes.sort();
    wholes.dedup();
    for uuid in wholes {
        let gpus: Vec<Gpu> = used.iter().filter(|gpu| gpu.whole() == uuid).cloned().collect();
        let one = One { driver: driver.clone(), uuid, gpus, incidents: incidents.clone() };
        watching.spawn(one.watch());
    }
    let deal = async {
        let mut told = vec![0; replicas.len()];
        while let Some(incident) = happened.recv().await {
            for (replica, told) in replicas.iter().zip(&mut told) {
                deal_with(&incident, replica, told);
            }
        }
    };
    tokio::select! {
        () = deal => {}
        () = end.cancelled() => {}
    }
}

/// Has the engine of one replica do what follows. `told` is the life of the engine that was quarantined last: what stays true of a GPU is
/// told with each reading, and the first reason is the one to show.
fn deal_with(incident: &Incident, replica: &Watched, told: &mut u64) {
    let Some(gpu) = replica.gpus.iter().find(|gpu| gpu.whole() == incident.whole) else { return };
    match respond(incident, gpu.slice.is_some()) {
        Response::Log(reason) => tracing::warn!(replica = replica.name, gpu = incident.index, "{reason}"),
        Response::Fail(reason) => {
            tracing::error!(replica = replica.name, gpu = incident.index, "{reason}");
            replica.engine.fail(reason);
        }
        Response::Quarantine { reason, at_once } => {
            let (phase, epoch) = {
                let status = replica.engine.status();
                let status = status.borrow();
                (status.phase, status.epoch)
            };
            let leaving = phase == Phase::Draining && *told == epoch;
            if phase == Phase::Quarantined || (leaving && !matches!(incident.what, What::Xid(_))) {
                return;
            }
            *told = epoch;
            tracing::error!(replica = replica.name, gpu = incident.index, "{reason}");
            replica.engine.quarantine(reason, at_once);
        }
    }
}

/// One whole GPU that is watched.
struct One {
    driver: Driver,
    uuid: String,
    /// It, or those of its slices that have engines.
    gpus: Vec<Gpu>,
    incidents: mpsc::Sender<Incident>,
}

impl One {
    async fn watch(self) {
        let (events, told) = mpsc::channel(WAITING);
        let look = Notify::new();
        tokio::join!(self.listen(events), self.hear(told, &look), self.read(&look));
    }

    /// Starts the thread that waits for events; it ends when nobody hears it.
    async fn listen(&self, events: mpsc::Sender<Event>) {
        let Some(whole) = self.driver.whole(&self.uuid) else { return };
        let index = whole.gpu.index;
        let started = whole.ask(move |driver| {
            let driver = Arc::clone(driver);
            std::thread::Builder::new().name(format!("gpu-{index}-events")).spawn(move || questions::tell_events(&driver, index, &events))
        });
        if !matches!(started.await, Ok(Ok(_))) {
            tracing::warn!(gpu = index, "nobody waits for faults of this GPU; only its readings tell of them");
        }
    }

    async fn hear(&self, mut events: mpsc::Receiver<Event>, look: &Notify) {
        while let Some(event) = events.recv().await {
            let Some(xid) = event else {
                look.notify_one();
                continue;
            };
            self.tell(What::Xid(xid)).await;
            let number = u32::try_from(xid).unwrap_or(u32::MAX);
            self.publish(|reading| reading.last_xid = number);
        }
    }

    async fn read(&self, look: &Notify) {
        let Some(whole) = self.driver.whole(&self.uuid) else { return };
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut before = Before::default();
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = look.notified() => {}
            }
            let (index, gpus) = (whole.gpu.index, self.gpus.clone());
            let answer = whole.ask(move |driver| questions::read(driver, index, &gpus)).await.ok();
            for what in before.news(answer.as_ref()) {
                self.tell(what).await;
            }
            let readings = answer.map(|(_, readings)| readings).unwrap_or_default();
            self.publish(|reading| {
                let last_xid = reading.last_xid;
                let unknown = Reading { uuid: reading.uuid.clone(), ..Reading::default() };
                *reading = readings.iter().find(|new| new.uuid == reading.uuid).cloned().unwrap_or(unknown);
                reading.last_xid = last_xid;
            });
        }
    }

    async fn tell(&self, what: What) {
        let Some(whole) = self.driver.whole(&self.uuid) else { return };
        let _ = self.incidents.send(Incident { whole: self.uuid.clone(), index: whole.gpu.index, what }).await;
    }

    /// Changes the readings of these GPUs.
    fn publish(&self, change: impl Fn(&mut Reading)) {
        self.driver.readings_out().send_modify(|all| {
            let ours = |reading: &&mut Reading| self.gpus.iter().any(|gpu| gpu.uuid == reading.uuid);
            Arc::make_mut(all).gpus.iter_mut().filter(ours).for_each(&change);
        });
    }
}

/// What the reading before told.
#[derive(Debug, Default)]
struct Before {
    silent: bool,
    remap_pending: bool,
}

impl Before {
    /// What a reading says that must be dealt with; `None` is a driver that did not answer.
    fn news(&mut self, answer: Option<&(Standing, Vec<Reading>)>) -> Vec<What> {
        let Some((standing, readings)) = answer else {
            let is_news = !std::mem::replace(&mut self.silent, true);
            return if is_news { vec![What::Silent] } else { Vec::new() };
        };
        let mut news = Vec::new();
        if std::mem::replace(&mut self.silent, false) {
            news.push(What::Answers);
        }
        match standing {
            Standing::Reachable => {}
            Standing::Lost => news.push(What::Lost),
            Standing::NeedsReset => news.push(What::NeedsReset),
        }
        let pending = readings.iter().any(|reading| reading.remap_pending);
        if pending && !std::mem::replace(&mut self.remap_pending, pending) {
            news.push(What::RemapPending);
        }
        self.remap_pending = pending;
        if readings.iter().any(|reading| reading.remap_failed) {
            news.push(What::RemapFailed);
        }
        news
    }
}

#[cfg(test)]
mod tests;
