//! Operator requests for one living engine over its own control routes: sleep, wake, load and
//! unload a LoRA adapter.
//!
//! One task per engine executes them in order, each within deadlines. Only this task knows which
//! adapters the engine's next life must have again.

mod desired_adapters;
mod routes;

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

pub(super) use self::desired_adapters::DesiredAdapters;
pub(super) use self::routes::is_asleep;
use self::routes::{NO_SLEEP_ROUTE, SLEEP_TIMEOUT, parse_adapter};
use super::{Engine, EngineShared, EngineStatus, Phase};
use crate::engine_client::{ApiClient, FetchError};

/// Control requests that may wait behind the running one.
const MAX_QUEUED_REQUESTS: usize = 8;

/// Time limit for noting an order's effect.
///
/// The supervisor notes it within microseconds; the models are read from the engine, whose
/// front-end may be busy.
const STATUS_TIMEOUT: Duration = Duration::from_secs(10);

const WAKE_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Delay between the last report of an adapter and its unloading.
///
/// Reports leave every 10 ms, and requests placed before are still on their way.
const UNLOAD_DELAY: Duration = Duration::from_millis(200);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoraAdapter {
    /// The name that requests use as their model.
    pub name: String,
    pub path: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControlRequest {
    /// Finish running requests, then give the memory back.
    Sleep {
        /// 1 keeps the weights in host memory, 2 forgets them.
        level: u8,
    },
    Wake,
    /// Load an adapter, now and in every further life.
    Load(LoraAdapter),
    Unload(String),
}

#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    #[error("the engine is {0}, and only a {1} one can do this")]
    Phase(&'static str, &'static str),
    #[error("{0}")]
    NoRoute(&'static str),
    #[error("{0}")]
    Conflict(String),
    #[error("the engine refused: {0}")]
    Refused(String),
    #[error("the engine did not answer: {0}; `hostler logs` may say why")]
    Unreachable(#[source] FetchError),
    #[error("{0}")]
    NoEffect(&'static str),
    /// The order may have taken effect without being seen here.
    #[error("the agent has not noted the change within {} s; `hostler ps` shows the state", STATUS_TIMEOUT.as_secs())]
    NotNoted,
    #[error("the engine ended or left service meanwhile")]
    Ended,
    #[error("other orders for this engine are at work; try again when they are done")]
    Busy,
}

#[derive(Debug)]
pub(super) struct PendingRequest {
    request: ControlRequest,
    outcome: oneshot::Sender<Result<(), ControlError>>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct ControlConfig {
    pub(super) index: u32,
    /// The engine was started with the routes for sleeping.
    ///
    /// If only the agent's environment unlocks them, an engine obeys but frees nothing.
    pub(super) may_sleep: bool,
    /// How long running requests may take before the engine sleeps.
    pub(super) drain_timeout: Duration,
    /// How long reading the weights may take.
    pub(super) startup_timeout: Duration,
}

#[derive(Debug)]
pub(super) struct ControlTask {
    config: ControlConfig,
    requests: mpsc::Receiver<PendingRequest>,
    desired_adapters: watch::Sender<DesiredAdapters>,
    /// The life whose adapters are known.
    adapters_epoch: u64,
    /// The life that sleeps and its level, if this agent has put it to sleep.
    sleeping_life: Option<(u64, u8)>,
}

impl Engine {
    /// Executes a request and waits until it has succeeded or failed; each step has a deadline.
    ///
    /// # Errors
    /// With what an operator can do about the failure.
    pub async fn execute(&self, order: ControlRequest) -> Result<(), ControlError> {
        let (outcome, done) = oneshot::channel();
        self.shared.control_requests.try_send(PendingRequest { request: order, outcome }).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => ControlError::Busy,
            mpsc::error::TrySendError::Closed(_) => ControlError::Ended,
        })?;
        done.await.unwrap_or(Err(ControlError::Ended))
    }
}

impl ControlTask {
    /// Creates a task that does not run yet, the sender for its requests, and the adapters that it
    /// wants.
    pub(super) fn new(terms: ControlConfig) -> (Self, mpsc::Sender<PendingRequest>, watch::Receiver<DesiredAdapters>) {
        let (sender, orders) = mpsc::channel(MAX_QUEUED_REQUESTS);
        let desired = watch::Sender::new(DesiredAdapters::default());
        let receiver = desired.subscribe();
        (Self { config: terms, requests: orders, desired_adapters: desired, adapters_epoch: 0, sleeping_life: None }, sender, receiver)
    }

    /// Executes requests until the engine is stopped for good or its last handle is gone.
    pub(super) async fn run(mut self, engine: Weak<EngineShared>, mut status: watch::Receiver<EngineStatus>) {
        loop {
            let ordered = tokio::select! {
                ordered = self.requests.recv() => ordered,
                changed = status.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    None
                }
            };
            // Keep the engine only while a request runs: the last handle's end is the engine's end.
            let Some(shared) = engine.upgrade() else { return };
            let engine = Engine { shared };
            match ordered {
                None => self.adopt_adapters(&engine),
                Some(PendingRequest { request: order, outcome }) => {
                    tracing::info!(engine = self.config.index, ?order, "carrying out");
                    let done = self.execute(&engine, order).await;
                    if let Err(error) = &done {
                        tracing::warn!(engine = self.config.index, %error, "not carried out");
                    }
                    // The requester may have gone.
                    let _ = outcome.send(done);
                }
            }
        }
    }

    /// Adopts the adapters of a life that this task has not seen.
    ///
    /// Another agent may have begun that life, and its adapters must be kept.
    fn adopt_adapters(&mut self, engine: &Engine) {
        let (epoch, models) = {
            let status = engine.status();
            let status = status.borrow();
            if !matches!(status.phase, Phase::Ready | Phase::Sleeping) || status.epoch == self.adapters_epoch {
                return;
            }
            (status.epoch, Arc::clone(&status.models))
        };
        self.adapters_epoch = epoch;
        for adapter in models.iter().filter_map(parse_adapter) {
            self.add_adapter(adapter);
        }
    }

    async fn execute(&mut self, engine: &Engine, order: ControlRequest) -> Result<(), ControlError> {
        let (epoch, phase) = {
            let status = engine.status();
            let status = status.borrow();
            (status.epoch, status.phase)
        };
        let required = if order == ControlRequest::Wake { Phase::Sleeping } else { Phase::Ready };
        if phase != required {
            return Err(ControlError::Phase(phase_label(phase), phase_label(required)));
        }
        let over = engine.status();
        tokio::select! {
            biased;
            done = self.execute_in_life(engine, epoch, order) => done,
            () = await_life_end(over, epoch) => {
                self.desired_adapters.send_if_modified(|desired| desired.unloading.take().is_some());
                Err(ControlError::Ended)
            }
        }
    }

    async fn execute_in_life(&mut self, engine: &Engine, epoch: u64, order: ControlRequest) -> Result<(), ControlError> {
        match order {
            ControlRequest::Sleep { level } => self.sleep(engine, epoch, level).await,
            ControlRequest::Wake => {
                let level = self.sleeping_life.filter(|(life, _)| *life == epoch).map_or(2, |(_, level)| level);
                self.wake(engine, level).await
            }
            ControlRequest::Load(adapter) => self.load(engine, adapter).await,
            ControlRequest::Unload(name) => self.unload(engine, name).await,
        }
    }

    async fn sleep(&mut self, engine: &Engine, epoch: u64, level: u8) -> Result<(), ControlError> {
        if !(1..=2).contains(&level) {
            return Err(ControlError::Conflict(format!(
                "there is no sleep of level {level}: 1 keeps the weights in host memory, 2 forgets them"
            )));
        }
        if !self.config.may_sleep {
            return Err(ControlError::NoRoute(NO_SLEEP_ROUTE));
        }
        if level == 2
            && let Some(loaded) = engine.status().borrow().models.iter().find_map(parse_adapter)
        {
            let name = loaded.name;
            return Err(ControlError::Conflict(format!(
                "level 2 would forget the weights of LoRA adapter {name} and nothing reads those again: unload it first, or use level 1"
            )));
        }
        let mut client = ApiClient::new(engine.socket());
        // Check the route first, so that no request is turned away for nothing.
        is_asleep(&mut client).await?;
        engine.fall_asleep(format!("an operator has put it to sleep, level {level}; `hostler wake` brings it back"));
        await_status(engine, |status| status.phase == Phase::Sleeping).await?;
        if timeout(self.config.drain_timeout, engine.traffic().wait_idle()).await.is_err() {
            tracing::warn!(
                engine = self.config.index,
                left = engine.traffic().in_flight(),
                "requests are cut short: the drain timeout is over"
            );
        }
        let reply = routes::sleep(&client, level).await;
        let failed = match (reply, is_asleep(&mut client).await) {
            // An engine that answers late may sleep all the same. An engine that accepted the
            // request is believed.
            (_, Ok(true)) | (Ok(()), Err(_)) => {
                self.sleeping_life = Some((epoch, level));
                // The engine reports its emptied cache only with its next step, after it was woken.
                engine.cache().clear();
                return Ok(());
            }
            (Err(error), _) => error,
            (Ok(()), Ok(false)) => ControlError::NoEffect("the engine says that it does not sleep, so it serves on"),
        };
        engine.wake_up();
        Err(failed)
    }

    async fn wake(&self, engine: &Engine, level: u8) -> Result<(), ControlError> {
        let mut client = ApiClient::new(engine.socket());
        routes::wake(&client, level, self.config.startup_timeout).await?;
        let awake = async {
            while is_asleep(&mut client).await? {
                tokio::time::sleep(WAKE_POLL_INTERVAL).await;
            }
            Ok(())
        };
        timeout(SLEEP_TIMEOUT, awake)
            .await
            .unwrap_or(Err(ControlError::NoEffect("the engine was told to wake and sleeps on; `hostler restart` starts it anew")))?;
        engine.wake_up();
        await_status(engine, |status| status.phase == Phase::Ready).await
    }

    async fn load(&self, engine: &Engine, adapter: LoraAdapter) -> Result<(), ControlError> {
        if adapter.name.is_empty() || adapter.path.is_empty() {
            return Err(ControlError::Conflict("an adapter needs a name and a path".to_owned()));
        }
        let known = engine.status().borrow().models.iter().find(|model| model.id == adapter.name).map(routes::parse_adapter);
        match known {
            Some(None) => {
                return Err(ControlError::Conflict(format!("{} is the name of the model itself; give the adapter another", adapter.name)));
            }
            Some(Some(loaded)) if loaded.path != adapter.path => {
                let (name, path) = (loaded.name, loaded.path);
                return Err(ControlError::Conflict(format!("{name} is loaded from {path}; `hostler lora unload {name}` comes first")));
            }
            // Some replicas may have failed: loading again must not fail on the others.
            Some(Some(_)) => {}
            None => routes::load(&ApiClient::new(engine.socket()), &adapter).await?,
        }
        self.desired_adapters.send_modify(|_| ());
        let noted = await_status(engine, |status| status.models.iter().any(|model| model.id == adapter.name)).await;
        // Add the adapter only once the engine is known to have it, or it would count as missing
        // for a moment.
        self.add_adapter(adapter);
        noted
    }

    async fn unload(&self, engine: &Engine, name: String) -> Result<(), ControlError> {
        let known = engine.status().borrow().models.iter().find(|model| model.id == name).map(parse_adapter);
        match known {
            None => {
                self.remove_adapter(&name);
                return Ok(());
            }
            Some(None) => return Err(ControlError::Conflict(format!("{name} is the model itself, not an adapter"))),
            Some(Some(_)) => {}
        }
        // Routers stop placing requests for the adapter here once it is no longer reported.
        self.desired_adapters.send_modify(|desired| desired.unloading = Some(name.clone()));
        let unloaded = async {
            await_status(engine, |status| status.models.iter().all(|model| model.id != name)).await?;
            tokio::time::sleep(UNLOAD_DELAY).await;
            routes::unload(&ApiClient::new(engine.socket()), &name).await
        };
        let unloaded = unloaded.await;
        if unloaded.is_ok() {
            self.remove_adapter(&name);
        }
        self.desired_adapters.send_modify(|desired| desired.unloading = None);
        unloaded
    }

    fn add_adapter(&self, adapter: LoraAdapter) {
        self.desired_adapters.send_modify(|desired| {
            let others = desired.adapters.iter().filter(|known| known.name != adapter.name).cloned();
            desired.adapters = others.chain([adapter.clone()]).collect();
        });
    }

    fn remove_adapter(&self, name: &str) {
        self.desired_adapters
            .send_modify(|desired| desired.adapters = desired.adapters.iter().filter(|known| known.name != name).cloned().collect());
    }
}

pub(crate) fn phase_label(phase: Phase) -> &'static str {
    match phase {
        Phase::Starting => "starting",
        Phase::Loading => "loading",
        Phase::Ready => "ready",
        Phase::Draining => "draining",
        Phase::Stopped => "stopped",
        Phase::Failed => "failed",
        Phase::Quarantined => "quarantined",
        Phase::Sleeping => "sleeping",
    }
}

/// Waits until the supervisor has noted something.
async fn await_status(engine: &Engine, is: impl FnMut(&EngineStatus) -> bool) -> Result<(), ControlError> {
    match timeout(STATUS_TIMEOUT, engine.status().wait_for(is)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(_)) => Err(ControlError::Ended),
        Err(_) => Err(ControlError::NotNoted),
    }
}

/// Resolves once the life of this epoch takes no requests any more.
async fn await_life_end(mut status: watch::Receiver<EngineStatus>, epoch: u64) {
    // A supervisor that is gone ends the life, too.
    let _ = status.wait_for(|status| status.epoch != epoch || !matches!(status.phase, Phase::Ready | Phase::Sleeping)).await;
}

#[cfg(test)]
mod tests;
