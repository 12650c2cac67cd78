//! What operators order of one living engine over its own control routes: sleep and wake, load and unload a LoRA adapter. One task per engine carries the orders out, one after another and each within deadlines; it alone knows which adapters the next life of the engine must have again.

mod routes;
mod wanted;

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

pub(super) use self::routes::is_asleep;
use self::routes::{NO_SLEEP, SLEEP_DEADLINE, adapter};
pub(super) use self::wanted::Wanted;
use super::http::{Client, GetError};
use super::{Engine, Phase, Shared, Status};

/// Orders that wait for the one at work.
const WAITING_ORDERS: usize = 8;

/// How long it may take until an order's effect is noted. The driver notes in microseconds; the models are read from the engine, whose front-end
/// may be busy.
const NOTED_DEADLINE: Duration = Duration::from_secs(10);

/// Between two questions whether the engine is awake.
const POLL: Duration = Duration::from_millis(50);

/// From the moment when an adapter is no longer told until it is unloaded: reports leave every 10 ms, and requests that were placed before are on their way.
const LEAVING: Duration = Duration::from_millis(200);

/// A LoRA adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Adapter {
    /// The name that requests use as their model.
    pub name: String,
    /// Where it is on this node.
    pub path: String,
}

/// What an operator wants of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// Finish what runs, then give the memory back.
    Sleep {
        /// 1 keeps the weights in host memory, 2 forgets them.
        level: u8,
    },
    /// Take the memory again.
    Wake,
    /// Load an adapter, now and in every further life.
    Load(Adapter),
    /// Unload the adapter of this name.
    Unload(String),
}

/// Why an order was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum OrderError {
    /// The engine's phase does not allow it.
    #[error("the engine is {0}, and only a {1} one can do this")]
    Phase(&'static str, &'static str),
    /// The engine has no such route.
    #[error("{0}")]
    NoRoute(&'static str),
    /// The order contradicts what is there.
    #[error("{0}")]
    Conflict(String),
    /// The engine said no.
    #[error("the engine refused: {0}")]
    Refused(String),
    /// The engine did not answer.
    #[error("the engine did not answer: {0}; `hostler logs` may say why")]
    Unreachable(#[source] GetError),
    /// What was ordered did not come about.
    #[error("{0}")]
    Undone(&'static str),
    /// The engine's life ended meanwhile.
    #[error("the engine ended or left service meanwhile")]
    Ended,
    /// Too many orders.
    #[error("other orders for this engine are at work; try again when they are done")]
    Busy,
}

/// An order and whoever waits for its outcome.
#[derive(Debug)]
pub(super) struct Ordered {
    order: Order,
    outcome: oneshot::Sender<Result<(), OrderError>>,
}

/// What the orders must know of the engine.
#[derive(Debug, Clone, Copy)]
pub(super) struct Terms {
    /// Its index on this node.
    pub(super) index: u32,
    /// It was started with the routes for sleeping. Where only the environment of the agent unlocks them, an engine obeys and frees nothing.
    pub(super) may_sleep: bool,
    /// How long running requests may take before it sleeps.
    pub(super) drain: Duration,
    /// How long the reading of its weights may take.
    pub(super) startup: Duration,
}

/// The task behind the orders for one engine.
#[derive(Debug)]
pub(super) struct Control {
    terms: Terms,
    orders: mpsc::Receiver<Ordered>,
    wanted: watch::Sender<Wanted>,
    /// The life whose adapters are known.
    known: u64,
    /// The life that sleeps and its level, if this agent has put it to sleep.
    slept: Option<(u64, u8)>,
}

impl Engine {
    /// Has an order carried out and waits until it is, or has failed; each step has a deadline.
    ///
    /// # Errors
    /// With what an operator can do about it.
    pub async fn order(&self, order: Order) -> Result<(), OrderError> {
        let (outcome, done) = oneshot::channel();
        self.shared.orders.try_send(Ordered { order, outcome }).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => OrderError::Busy,
            mpsc::error::TrySendError::Closed(_) => OrderError::Ended,
        })?;
        done.await.unwrap_or(Err(OrderError::Ended))
    }
}

impl Control {
    /// A task that does not run yet, the way to it, and what it wants.
    pub(super) fn new(terms: Terms) -> (Self, mpsc::Sender<Ordered>, watch::Receiver<Wanted>) {
        let (sender, orders) = mpsc::channel(WAITING_ORDERS);
        let wanted = watch::Sender::new(Wanted::default());
        let receiver = wanted.subscribe();
        (Self { terms, orders, wanted, known: 0, slept: None }, sender, receiver)
    }

    /// Carries orders out until the engine is stopped for good or its last handle is gone.
    pub(super) async fn run(mut self, engine: Weak<Shared>, mut status: watch::Receiver<Status>) {
        loop {
            let ordered = tokio::select! {
                ordered = self.orders.recv() => ordered,
                changed = status.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    None
                }
            };
            // Held while something is done only: the last handle's end is the engine's.
            let Some(shared) = engine.upgrade() else { return };
            let engine = Engine { shared };
            match ordered {
                None => self.take_over(&engine),
                Some(Ordered { order, outcome }) => {
                    tracing::info!(engine = self.terms.index, ?order, "carrying out");
                    let done = self.carry_out(&engine, order).await;
                    if let Err(error) = &done {
                        tracing::warn!(engine = self.terms.index, %error, "not carried out");
                    }
                    // Whoever asked may have gone.
                    let _ = outcome.send(done);
                }
            }
        }
    }

    /// A life that this task has not seen may be one that another agent began: its adapters are to be kept.
    fn take_over(&mut self, engine: &Engine) {
        let (epoch, models) = {
            let status = engine.status();
            let status = status.borrow();
            if !matches!(status.phase, Phase::Ready | Phase::Sleeping) || status.epoch == self.known {
                return;
            }
            (status.epoch, Arc::clone(&status.models))
        };
        self.known = epoch;
        for adapter in models.iter().filter_map(adapter) {
            self.remember(adapter);
        }
    }

    async fn carry_out(&mut self, engine: &Engine, order: Order) -> Result<(), OrderError> {
        let (epoch, phase) = {
            let status = engine.status();
            let status = status.borrow();
            (status.epoch, status.phase)
        };
        let wanted = if order == Order::Wake { Phase::Sleeping } else { Phase::Ready };
        if phase != wanted {
            return Err(OrderError::Phase(word(phase), word(wanted)));
        }
        let over = engine.status();
        tokio::select! {
            biased;
            done = self.obey(engine, epoch, order) => done,
            () = life_over(over, epoch) => {
                self.wanted.send_if_modified(|wanted| wanted.leaving.take().is_some());
                Err(OrderError::Ended)
            }
        }
    }

    async fn obey(&mut self, engine: &Engine, epoch: u64, order: Order) -> Result<(), OrderError> {
        match order {
            Order::Sleep { level } => self.sleep(engine, epoch, level).await,
            Order::Wake => {
                let level = self.slept.filter(|(life, _)| *life == epoch).map_or(2, |(_, level)| level);
                self.wake(engine, level).await
            }
            Order::Load(adapter) => self.load(engine, adapter).await,
            Order::Unload(name) => self.unload(engine, name).await,
        }
    }

    async fn sleep(&mut self, engine: &Engine, epoch: u64, level: u8) -> Result<(), OrderError> {
        if !(1..=2).contains(&level) {
            return Err(OrderError::Conflict(format!(
                "there is no sleep of level {level}: 1 keeps the weights in host memory, 2 forgets them"
            )));
        }
        if !self.terms.may_sleep {
            return Err(OrderError::NoRoute(NO_SLEEP));
        }
        if level == 2
            && let Some(loaded) = engine.status().borrow().models.iter().find_map(adapter)
        {
            let name = loaded.name;
            return Err(OrderError::Conflict(format!(
                "level 2 would forget the weights of LoRA adapter {name} and nothing reads those again: unload it first, or use level 1"
            )));
        }
        let mut client = Client::new(engine.socket());
        // Asked before requests are turned away for nothing.
        is_asleep(&mut client).await?;
        engine.fall_asleep(format!("an operator has put it to sleep, level {level}; `hostler wake` brings it back"));
        noted(engine, |status| status.phase == Phase::Sleeping).await?;
        if timeout(self.terms.drain, engine.traffic().wait_idle()).await.is_err() {
            tracing::warn!(
                engine = self.terms.index,
                left = engine.traffic().in_flight(),
                "requests are cut short: the drain timeout is over"
            );
        }
        let asked = routes::sleep(&client, level).await;
        let failed = match (asked, is_asleep(&mut client).await) {
            // An engine that answers late may sleep all the same, and one that said yes is believed.
            (_, Ok(true)) | (Ok(()), Err(_)) => {
                self.slept = Some((epoch, level));
                // The engine tells that its cache is empty with its next step, which is after it was woken.
                engine.cache().clear();
                return Ok(());
            }
            (Err(error), _) => error,
            (Ok(()), Ok(false)) => OrderError::Undone("the engine says that it does not sleep, so it serves on"),
        };
        engine.wake_up();
        Err(failed)
    }

    async fn wake(&self, engine: &Engine, level: u8) -> Result<(), OrderError> {
        let mut client = Client::new(engine.socket());
        routes::wake(&client, level, self.terms.startup).await?;
        let awake = async {
            while is_asleep(&mut client).await? {
                tokio::time::sleep(POLL).await;
            }
            Ok(())
        };
        timeout(SLEEP_DEADLINE, awake)
            .await
            .unwrap_or(Err(OrderError::Undone("the engine was told to wake and sleeps on; `hostler restart` starts it anew")))?;
        engine.wake_up();
        noted(engine, |status| status.phase == Phase::Ready).await
    }

    async fn load(&self, engine: &Engine, adapter: Adapter) -> Result<(), OrderError> {
        if adapter.name.is_empty() || adapter.path.is_empty() {
            return Err(OrderError::Conflict("an adapter needs a name and a path".to_owned()));
        }
        let known = engine.status().borrow().models.iter().find(|model| model.id == adapter.name).map(routes::adapter);
        match known {
            Some(None) => {
                return Err(OrderError::Conflict(format!("{} is the name of the model itself; give the adapter another", adapter.name)));
            }
            Some(Some(loaded)) if loaded.path != adapter.path => {
                let (name, path) = (loaded.name, loaded.path);
                return Err(OrderError::Conflict(format!("{name} is loaded from {path}; `hostler lora unload {name}` comes first")));
            }
            // Loading again after some replicas have failed must not fail on the others.
            Some(Some(_)) => {}
            None => routes::load(&Client::new(engine.socket()), &adapter).await?,
        }
        self.wanted.send_modify(|_| ());
        let noted = noted(engine, |status| status.models.iter().any(|model| model.id == adapter.name)).await;
        // Not before the engine is known to have it, or it would be missed for a moment.
        self.remember(adapter);
        noted
    }

    async fn unload(&self, engine: &Engine, name: String) -> Result<(), OrderError> {
        let known = engine.status().borrow().models.iter().find(|model| model.id == name).map(adapter);
        match known {
            None => {
                self.forget(&name);
                return Ok(());
            }
            Some(None) => return Err(OrderError::Conflict(format!("{name} is the model itself, not an adapter"))),
            Some(Some(_)) => {}
        }
        // Routers place no request for it here any more once it is not told.
        self.wanted.send_modify(|wanted| wanted.leaving = Some(name.clone()));
        let unloaded = async {
            noted(engine, |status| status.models.iter().all(|model| model.id != name)).await?;
            tokio::time::sleep(LEAVING).await;
            routes::unload(&Client::new(engine.socket()), &name).await
        };
        let unloaded = unloaded.await;
        if unloaded.is_ok() {
            self.forget(&name);
        }
        self.wanted.send_modify(|wanted| wanted.leaving = None);
        unloaded
    }

    fn remember(&self, adapter: Adapter) {
        self.wanted.send_modify(|wanted| {
            let others = wanted.adapters.iter().filter(|known| known.name != adapter.name).cloned();
            wanted.adapters = others.chain([adapter.clone()]).collect();
        });
    }

    fn forget(&self, name: &str) {
        self.wanted.send_modify(|wanted| wanted.adapters = wanted.adapters.iter().filter(|known| known.name != name).cloned().collect());
    }
}

/// A phase as operators read it.
pub(crate) fn word(phase: Phase) -> &'static str {
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

/// Waits until the driver has noted something.
async fn noted(engine: &Engine, is: impl FnMut(&Status) -> bool) -> Result<(), OrderError> {
    match timeout(NOTED_DEADLINE, engine.status().wait_for(is)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(_)) => Err(OrderError::Ended),
        Err(_) => Err(OrderError::Undone("the agent has not noted the change within 10 s; `hostler ps` shows the state")),
    }
}

/// Resolves when the life of this epoch takes no orders any more.
async fn life_over(mut status: watch::Receiver<Status>, epoch: u64) {
    // A driver that is gone ends the life, too.
    let _ = status.wait_for(|status| status.epoch != epoch || !matches!(status.phase, Phase::Ready | Phase::Sleeping)).await;
}

#[cfg(test)]
mod tests;
