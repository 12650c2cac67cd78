//! Watch over the GPUs that engines run on.
//!
//! The watch reads each GPU once a second, listens for faults, and restarts or quarantines the
//! engines on a failing GPU. Engines on other GPUs are not touched.

mod incident;
mod xid;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use self::incident::{GpuIncident, IncidentKind, IncidentResponse, respond};
use crate::engine::{Engine, Phase};
use crate::gpu::nvml::{self, GpuEvent, GpuHealth};
use crate::gpu::{Gpu, GpuDriver, GpuReading, GpuReadings};

/// Interval between two readings of a GPU. A GPU that is lost without an XID is noticed within this
/// time.
const READ_INTERVAL: Duration = Duration::from_secs(1);

/// Incidents and events that may queue, although they are handled at once.
const MAX_QUEUED_EVENTS: usize = 64;

#[derive(Debug)]
pub(crate) struct WatchedReplica {
    /// Name of the replica in the fleet, `node/index`.
    pub name: String,
    pub gpus: Vec<Gpu>,
    pub engine: Engine,
}

pub(crate) async fn watch(driver: GpuDriver, replicas: Vec<WatchedReplica>, end: CancellationToken) {
    let used: Vec<Gpu> = replicas.iter().flat_map(|replica| replica.gpus.iter().cloned()).collect();
    let unread = |gpu: &Gpu| GpuReading { uuid: gpu.uuid.clone(), ..GpuReading::default() };
    driver.readings_sender().send_replace(Arc::new(GpuReadings { readings: used.iter().map(unread).collect() }));
    let (incidents, mut happened) = mpsc::channel(MAX_QUEUED_EVENTS);
    // Dropping this task drops its child tasks.
    let mut watching = JoinSet::new();
    let mut wholes: Vec<String> = used.iter().map(|gpu| gpu.whole_uuid().to_owned()).collect();
    wholes.sort();
    wholes.dedup();
    for uuid in wholes {
        let gpus: Vec<Gpu> = used.iter().filter(|gpu| gpu.whole_uuid() == uuid).cloned().collect();
        let one = GpuWatch { driver: driver.clone(), uuid, gpus, incidents: incidents.clone() };
        watching.spawn(one.watch());
    }
    let deal = async {
        let mut quarantined_epochs = vec![0; replicas.len()];
        while let Some(incident) = happened.recv().await {
            for (replica, quarantined_epoch) in replicas.iter().zip(&mut quarantined_epochs) {
                respond_to(&incident, replica, quarantined_epoch);
            }
        }
    };
    tokio::select! {
        () = deal => {}
        () = end.cancelled() => {}
    }
}

/// Makes the engine of one replica respond.
///
/// `quarantined_epoch` is the life that was quarantined last: a lasting fault is reported with each
/// reading, but the first reason is the one to show.
fn respond_to(incident: &GpuIncident, replica: &WatchedReplica, quarantined_epoch: &mut u64) {
    let Some(gpu) = replica.gpus.iter().find(|gpu| gpu.whole_uuid() == incident.whole_uuid) else { return };
    match respond(incident, gpu.slice.is_some()) {
        IncidentResponse::Log(reason) => {
            tracing::warn!(event = "gpu_fault", replica = replica.name, gpu = incident.index, "{reason}");
        }
        IncidentResponse::Fail(reason) => {
            tracing::error!(event = "gpu_fault", replica = replica.name, gpu = incident.index, "{reason}");
            replica.engine.fail(reason);
        }
        IncidentResponse::Quarantine { reason, at_once } => {
            let (phase, epoch) = {
                let status = replica.engine.status();
                let status = status.borrow();
                (status.phase, status.epoch)
            };
            let leaving = phase == Phase::Draining && *quarantined_epoch == epoch;
            if phase == Phase::Quarantined || (leaving && !matches!(incident.kind, IncidentKind::Xid(_))) {
                return;
            }
            *quarantined_epoch = epoch;
            tracing::error!(event = "gpu_fault", replica = replica.name, gpu = incident.index, "{reason}");
            replica.engine.quarantine(reason, at_once);
        }
    }
}

struct GpuWatch {
    driver: GpuDriver,
    uuid: String,
    /// The GPU, or those of its slices that have engines.
    gpus: Vec<Gpu>,
    incidents: mpsc::Sender<GpuIncident>,
}

impl GpuWatch {
    async fn watch(self) {
        let (events, receiver) = mpsc::channel(MAX_QUEUED_EVENTS);
        let look = Notify::new();
        tokio::join!(self.listen(events), self.forward_events(receiver, &look), self.read_periodically(&look));
    }

    /// Starts the thread that waits for events; it ends when the receiver is dropped.
    async fn listen(&self, events: mpsc::Sender<GpuEvent>) {
        let Some(whole) = self.driver.whole_gpu(&self.uuid) else { return };
        let index = whole.gpu.index;
        let started = whole.ask(move |driver| {
            let driver = Arc::clone(driver);
            std::thread::Builder::new().name(format!("gpu-{index}-events")).spawn(move || nvml::forward_events(&driver, index, &events))
        });
        if !matches!(started.await, Ok(Ok(_))) {
            tracing::warn!(gpu = index, "nobody waits for faults of this GPU; only its readings tell of them");
        }
    }

    async fn forward_events(&self, mut events: mpsc::Receiver<GpuEvent>, look: &Notify) {
        while let Some(event) = events.recv().await {
            let Some(xid) = event else {
                look.notify_one();
                continue;
            };
            self.report(IncidentKind::Xid(xid)).await;
            let number = u32::try_from(xid).unwrap_or(u32::MAX);
            self.publish(|reading| reading.last_xid = number);
        }
    }

    async fn read_periodically(&self, look: &Notify) {
        let Some(whole) = self.driver.whole_gpu(&self.uuid) else { return };
        let mut ticks = interval(READ_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut before = PreviousReading::default();
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = look.notified() => {}
            }
            let (index, gpus) = (whole.gpu.index, self.gpus.clone());
            let answer = whole.ask(move |driver| nvml::read(driver, index, &gpus)).await.ok();
            for what in before.detect_incidents(answer.as_ref()) {
                self.report(what).await;
            }
            let readings = answer.map(|(_, readings)| readings).unwrap_or_default();
            self.publish(|reading| {
                let last_xid = reading.last_xid;
                let unknown = GpuReading { uuid: reading.uuid.clone(), ..GpuReading::default() };
                *reading = readings.iter().find(|new| new.uuid == reading.uuid).cloned().unwrap_or(unknown);
                reading.last_xid = last_xid;
            });
        }
    }

    async fn report(&self, what: IncidentKind) {
        let Some(whole) = self.driver.whole_gpu(&self.uuid) else { return };
        let _ = self.incidents.send(GpuIncident { whole_uuid: self.uuid.clone(), index: whole.gpu.index, kind: what }).await;
    }

    /// Changes the readings of these GPUs.
    fn publish(&self, change: impl Fn(&mut GpuReading)) {
        self.driver.readings_sender().send_modify(|all| {
            let ours = |reading: &&mut GpuReading| self.gpus.iter().any(|gpu| gpu.uuid == reading.uuid);
            Arc::make_mut(all).readings.iter_mut().filter(ours).for_each(&change);
        });
    }
}

/// State at the previous reading.
#[derive(Debug, Default)]
struct PreviousReading {
    silent: bool,
    remap_pending: bool,
}

impl PreviousReading {
    /// Incidents in a reading; `None` means that the driver did not answer.
    fn detect_incidents(&mut self, answer: Option<&(GpuHealth, Vec<GpuReading>)>) -> Vec<IncidentKind> {
        let Some((standing, readings)) = answer else {
            let is_news = !std::mem::replace(&mut self.silent, true);
            return if is_news { vec![IncidentKind::Silent] } else { Vec::new() };
        };
        let mut incidents = Vec::new();
        if std::mem::replace(&mut self.silent, false) {
            incidents.push(IncidentKind::Answers);
        }
        match standing {
            GpuHealth::Reachable => {}
            GpuHealth::Lost => incidents.push(IncidentKind::Lost),
            GpuHealth::NeedsReset => incidents.push(IncidentKind::NeedsReset),
        }
        let pending = readings.iter().any(|reading| reading.remap_pending);
        if pending && !std::mem::replace(&mut self.remap_pending, pending) {
            incidents.push(IncidentKind::RemapPending);
        }
        self.remap_pending = pending;
        if readings.iter().any(|reading| reading.remap_failed) {
            incidents.push(IncidentKind::RemapFailed);
        }
        incidents
    }
}

#[cfg(test)]
mod tests;
