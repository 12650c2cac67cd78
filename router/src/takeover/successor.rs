//! The starting router's end of a takeover. It finds the running router, gets its listening
//! sockets, waits for the agents, and takes the clients.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use hostler_boot::PrivateSocket;
use hostler_boot::passing::receive_files;
use hostler_boot::socket::{is_live, is_private_folder};
use rustix::process::geteuid;
use tokio::net::{TcpListener, UnixStream};
use tokio::time::{Instant, sleep, timeout};

use super::message::{
    ANSWER_TIMEOUT, FleetSummary, FromPredecessor, FromSuccessor, Memory, MemoryChange, PROTOCOL, receive, receive_within, send,
};
use super::peer_process::PeerProcess;
use super::{TakeoverError, socket_path};
use crate::admission::Admission;
use crate::background::BackgroundTasks;
use crate::fleet::{Fleet, FleetView};
use crate::operators::OperatorsSocket;
use crate::response_affinity::ResponseAffinity;
use crate::succession::Succession;

/// How long the agents may take to attach here too. They dial at once, and each sends a snapshot.
const AGENTS_TIMEOUT: Duration = Duration::from_secs(10);

const POLL_INTERVAL: Duration = Duration::from_millis(20);

type Listener = (TcpListener, SocketAddr);

/// A router that takes another one's place, and its connection with that one.
#[derive(Debug)]
pub(crate) struct Successor {
    stream: UnixStream,
    process: PeerProcess,
    /// Listeners that were not taken.
    listeners: Vec<Listener>,
    fleet: FleetSummary,
}

/// The starting router's own parts that a takeover needs.
#[derive(Debug)]
pub(crate) struct SuccessorParts<'a> {
    pub(crate) tasks: &'a BackgroundTasks,
    pub(crate) fleet: &'a Fleet,
    pub(crate) succession: &'a Succession,
    pub(crate) admission: &'a Admission,
    pub(crate) response_affinity: &'a ResponseAffinity,
    /// Sockets that take the other router's names.
    pub(crate) sockets: [Option<&'a mut PrivateSocket>; 3],
}

impl Successor {
    /// Asks the router whose operators' socket is at this place for its own; `None` if there is no
    /// router.
    ///
    /// # Errors
    /// If a living router refuses or does not answer.
    pub(crate) async fn find(place: &OperatorsSocket) -> Result<Option<Self>, TakeoverError> {
        for path in own_socket_paths(place) {
            if let Ok(stream) = UnixStream::connect(&path).await {
                let owner = stream.peer_cred()?.uid();
                if owner != geteuid().as_raw() {
                    return Err(TakeoverError::OtherUser { path, owner });
                }
                let process = PeerProcess::of(&stream);
                match introduce(stream).await {
                    Ok((stream, fleet, listeners)) => return Ok(Some(Self { stream, process, listeners, fleet })),
                    Err(error) if error.is_hang_up() && process.has_ended().await => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(None)
    }

    /// The running router's listener of an address (`HOST:PORT`), if it has one. Listeners that
    /// nobody asks for are closed with the running router.
    pub(crate) async fn take_listener(&mut self, address: &str) -> Option<(TcpListener, SocketAddr)> {
        let named = hostler_boot::resolve(address).await.unwrap_or_default();
        let place = self.listeners.iter().position(|(_, address)| named.contains(address))?;
        Some(self.listeners.remove(place))
    }

    /// Takes the running router's place: first the agents, then, when they are here, the clients.
    /// The running router serves on if this fails. If it ends meanwhile, its place is free.
    ///
    /// # Errors
    /// If the running router does not let go, or a model would have no replica here.
    pub(crate) async fn take_place(mut self, parts: SuccessorParts<'_>) -> Result<(), TakeoverError> {
        let SuccessorParts { tasks, fleet, succession, admission, response_affinity, sockets } = parts;
        let memory = match self.take_agents_and_memory(succession, fleet).await {
            Ok(memory) => Some(memory),
            Err(error) if error.is_hang_up() && self.process.has_ended().await => None,
            Err(error) => return Err(error),
        };
        succession.take_agents_port();
        fleet.events().record("takeover_done", "", "this router has taken the place of another one", false);
        for socket in sockets.into_iter().flatten() {
            socket.take_name()?;
        }
        let Some(Memory { usage, responses }) = memory else {
            tracing::warn!("the running router has ended while its place was taken");
            succession.record_predecessors_end();
            return Ok(());
        };
        let mut foreign = admission.import(usage);
        responses.into_iter().for_each(|record| response_affinity.import(record));
        if let Err(error) = send(&mut self.stream, &FromSuccessor::Serving).await
            && !self.process.has_ended().await
        {
            return Err(error.into());
        }
        let (response_affinity, succession) = (response_affinity.clone(), succession.clone());
        tasks.spawn(async move {
            let changes = self.follow(move |change| match change {
                MemoryChange::Usage(change) => foreign.apply(change),
                MemoryChange::Response(record) => response_affinity.import(record),
            });
            changes.await;
            succession.record_predecessors_end();
        });
        Ok(())
    }

    async fn take_agents_and_memory(&mut self, succession: &Succession, fleet: &Fleet) -> Result<Memory, TakeoverError> {
        send(&mut self.stream, &FromSuccessor::ReadyForAgents).await?;
        match receive_within(ANSWER_TIMEOUT, &mut self.stream).await? {
            FromPredecessor::AgentsAreYours => succession.take_agents_port(),
            other => return Err(refusal(other)),
        }
        self.wait_for_agents(fleet).await?;
        send(&mut self.stream, &FromSuccessor::ReadyForClients).await?;
        match receive_within(ANSWER_TIMEOUT, &mut self.stream).await? {
            FromPredecessor::Memory(memory) => Ok(memory),
            other => Err(refusal(other)),
        }
    }

    /// Waits until every agent and every ready replica of the running router is here too. Some may
    /// be gone meanwhile, so after the deadline it suffices that every model has a replica.
    async fn wait_for_agents(&self, fleet: &Fleet) -> Result<(), TakeoverError> {
        let deadline = Instant::now() + AGENTS_TIMEOUT;
        loop {
            let missing = find_missing(&self.fleet, &fleet.view());
            if missing.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let models = find_models_without_replica(&self.fleet, &fleet.view());
                if models.is_empty() {
                    tracing::warn!(?missing, "taking the running router's place without these, which have not come here in time");
                    return Ok(());
                }
                return Err(TakeoverError::NoReplicas { seconds: AGENTS_TIMEOUT.as_secs(), models: models.join(", ") });
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Passes on the other router's changes until it has left.
    async fn follow(mut self, mut apply: impl FnMut(MemoryChange)) {
        // These are addresses that the configuration no longer has.
        self.listeners.clear();
        loop {
            match receive(&mut self.stream).await {
                Ok(FromPredecessor::Change(change)) => apply(change),
                Ok(_) => {}
                Err(_) => {
                    tracing::info!("the router whose place was taken has left");
                    return;
                }
            }
        }
    }
}

/// Asks for the fleet and the listening sockets.
async fn introduce(mut stream: UnixStream) -> Result<(UnixStream, FleetSummary, Vec<Listener>), TakeoverError> {
    send(&mut stream, &FromSuccessor::Hello { protocol: PROTOCOL, version: env!("CARGO_PKG_VERSION").into() }).await?;
    let fleet = match receive_within(ANSWER_TIMEOUT, &mut stream).await? {
        FromPredecessor::Offer { version, fleet } => {
            tracing::info!(version, "taking the running router's place");
            fleet
        }
        other => return Err(refusal(other)),
    };
    let files = timeout(ANSWER_TIMEOUT, receive_files(&stream)).await;
    let files = files.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    let listeners = files.into_iter().map(|file| {
        let listener = std::net::TcpListener::from(file);
        listener.set_nonblocking(true)?;
        let listener = TcpListener::from_std(listener)?;
        let address = listener.local_addr()?;
        Ok((listener, address))
    });
    let listeners = listeners.collect::<io::Result<Vec<_>>>()?;
    Ok((stream, fleet, listeners))
}

/// Whether a router of this user can be replaced there.
pub(crate) async fn is_offered(place: &OperatorsSocket) -> bool {
    for path in own_socket_paths(place) {
        if is_live(&path).await {
            return true;
        }
    }
    false
}

/// Where such a router listens. Sockets in another user's folder are not asked.
fn own_socket_paths(place: &OperatorsSocket) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = place.usual_paths().iter().map(|path| socket_path(path)).collect();
    paths.retain(|path| path.parent().is_some_and(is_private_folder));
    paths
}

/// The error for an answer out of turn.
fn refusal(answer: FromPredecessor) -> TakeoverError {
    TakeoverError::Refused(match answer {
        FromPredecessor::Refused(reason) => reason,
        _ => "its answer is not the one that is due: stop it, then start the new one".into(),
    })
}

/// The nodes and replicas of the other router that are not here.
fn find_missing(there: &FleetSummary, view: &FleetView) -> Vec<String> {
    let is_attached = |name: &&String| view.nodes.iter().any(|node| *node.name == ***name && node.is_attached);
    let is_ready = |id: &&String| view.replicas.iter().any(|replica| *replica.id == ***id && replica.is_ready());
    let replicas = there.ready_replicas.iter().map(|replica| &replica.id).filter(|id| !is_ready(id));
    there.nodes.iter().filter(|name| !is_attached(name)).chain(replicas).cloned().collect()
}

fn find_models_without_replica(there: &FleetSummary, view: &FleetView) -> Vec<String> {
    let mut models: Vec<String> = there.ready_replicas.iter().flat_map(|replica| replica.models.clone()).collect();
    models.sort();
    models.dedup();
    models.retain(|model| view.eligible(Some(model), &[]).next().is_none());
    models
}
