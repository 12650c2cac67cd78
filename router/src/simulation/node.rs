//! A node: engines, and an agent that speaks the agents' protocol with the present router.
//!
//! The agent has the real agent's end of a lane, and the rules of its session. It dials again when
//! a connection ends, reports changes and that it lives, carries orders out, and keeps two sessions
//! while one router takes the place of another.

mod session;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use hostler_agent::lane::IncomingRequest;
use hostler_agent::uplink::Backoff;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use session::Session;

use super::engine::{EngineFailure, SimulatedEngine};
use super::link::{Link, LinkEnd};
use super::model::ModelRequest;
use super::world::World;

const DIAL_TIMEOUT: Duration = Duration::from_secs(5);

const WELCOME_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the last report may take.
const FAREWELL_TIME: Duration = Duration::from_secs(1);

/// A life of a node's agent, with its engines.
#[derive(Debug)]
pub(super) struct Incarnation {
    pub(super) node: String,
    pub(super) life: u64,
    pub(super) engines: Vec<Arc<SimulatedEngine>>,
    world: Arc<World>,
    /// Links of the agent's sessions, the newest last.
    links: Mutex<Vec<Link>>,
    /// Whether no connection can be made, and nothing arrives on existing ones.
    is_partitioned: AtomicBool,
    end: CancellationToken,
    /// Whether the agent dials nobody any more.
    is_retired: AtomicBool,
    /// Ends the agent's sessions with a last report.
    farewell: CancellationToken,
    /// Notified when another router takes the place of the one that the agent serves.
    successor: Notify,
}

impl Incarnation {
    /// Starts an agent, which begins to dial.
    pub(super) fn start(world: &Arc<World>, node: &str, life: u64, engines: Vec<Arc<SimulatedEngine>>) -> Arc<Self> {
        let incarnation = Arc::new(Self {
            node: node.to_owned(),
            life,
            engines,
            world: world.clone(),
            links: Mutex::default(),
            is_partitioned: AtomicBool::new(false),
            end: CancellationToken::new(),
            is_retired: AtomicBool::new(false),
            farewell: CancellationToken::new(),
            successor: Notify::new(),
        });
        tokio::spawn(incarnation.clone().run());
        incarnation
    }

    /// Ends the whole process. All its peers see their connections break.
    pub(super) fn kill(&self) {
        self.end.cancel();
        self.cut();
    }

    /// Leaves as an agent does whose job is over: its engines finish their requests, and routers
    /// get a last report.
    pub(super) async fn leave(&self) {
        join_all(self.engines.iter().map(|engine| engine.drain())).await;
        self.retire();
        self.farewell.cancel();
        sleep(FAREWELL_TIME).await;
        self.kill();
    }

    pub(super) fn cut(&self) {
        std::mem::take(&mut *self.links.lock()).iter().for_each(Link::cut);
    }

    pub(super) fn partition(&self, is_partitioned: bool) {
        self.is_partitioned.store(is_partitioned, Ordering::Relaxed);
        self.links.lock().iter().for_each(|link| link.hold(is_partitioned));
    }

    pub(super) fn retire(&self) {
        self.is_retired.store(true, Ordering::Relaxed);
    }

    pub(super) fn set_delay(&self, delay: Duration) {
        self.links.lock().iter().for_each(|link| link.set_delay(delay));
    }

    /// Marks the links: nothing may be dispatched to this agent from now on.
    pub(super) fn fence(&self) {
        self.links.lock().iter().for_each(Link::mark);
    }

    /// Requests that are being served.
    pub(super) fn in_flight(&self) -> u32 {
        self.engines.iter().map(|engine| engine.in_flight(0).0).sum()
    }

    async fn run(self: Arc<Self>) {
        let mut backoff = Backoff::default();
        while !self.end.is_cancelled() && !self.is_retired.load(Ordering::Relaxed) {
            let session = tokio::spawn(self.clone().serve_session());
            let ended = tokio::select! {
                biased;
                ended = session => ended.unwrap_or_else(|error| Err(Status::internal(error.to_string()))),
                // The session goes on until its router ends it.
                () = self.successor.notified() => Ok(()),
            };
            match ended {
                Ok(()) => backoff = Backoff::default(),
                Err(status) => {
                    self.world.trace.note(format_args!("{} life {} is not attached: {}", self.node, self.life, status.message()));
                }
            }
            sleep(backoff.next_delay()).await;
        }
    }

    /// Serves a session. `Ok` if it was attached.
    async fn serve_session(self: Arc<Self>) -> Result<(), Status> {
        let end = self.end.clone();
        let session = async {
            let (link, wire) = self.dial().await?;
            let attached = timeout(WELCOME_TIMEOUT, Session::attach(self.clone(), link, wire)).await;
            let mut session = attached.map_err(|_| Status::unavailable("no welcome"))??;
            let ended = session.run().await;
            self.world.trace.note(format_args!("{} life {} has lost its session: {}", self.node, self.life, ended.message()));
            Ok(())
        };
        tokio::select! {
            biased;
            () = end.cancelled() => Ok(()),
            ended = session => ended,
        }
    }

    async fn dial(&self) -> Result<(Link, LinkEnd), Status> {
        let refused = || Status::unavailable("cannot connect");
        if self.is_partitioned.load(Ordering::Relaxed) {
            sleep(DIAL_TIMEOUT).await;
            return Err(refused());
        }
        let (link, wire) = self.world.dial_router(&self.node).ok_or_else(refused)?;
        self.links.lock().push(link.clone());
        Ok((link, wire))
    }
}

impl Incarnation {
    /// Serves a request to its end, as the agent's `relay` does.
    async fn serve(self: Arc<Self>, incoming: IncomingRequest, router: u64, link: Link) {
        let IncomingRequest { head, stream } = incoming;
        if link.is_past_mark() {
            self.world.trace.violation(format_args!("{} life {} was sent a request after another one had its name", self.node, self.life));
        }
        let answering = async {
            let mut body = Vec::new();
            let requested = stream.body();
            while let Some(bytes) = std::future::poll_fn(|context| requested.poll_bytes(context)).await.map_err(EngineFailure::Fault)? {
                body.extend_from_slice(&bytes);
            }
            let Some(engine) = self.engines.get(head.replica as usize) else {
                return Err(EngineFailure::GivenUp);
            };
            let question = ModelRequest::parse(&head.path, &body).map(|request| request.question);
            self.world.record_attempt(question, engine, &head.path, body.len());
            let poison = question.and_then(|question| self.world.poison.get(&question).copied());
            engine.answer((router, &head), &body, &stream, poison).await
        };
        let outcome = tokio::select! {
            biased;
            () = self.end.cancelled() => return,
            () = stream.wait_cancelled() => return,
            outcome = answering => outcome,
        };
        match outcome {
            Ok(()) => stream.end(&Ok(())),
            Err(EngineFailure::Fault(fault)) => stream.end(&Err(fault)),
            Err(EngineFailure::GivenUp) => {}
        }
    }
}
