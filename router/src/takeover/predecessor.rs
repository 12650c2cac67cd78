//! The running router's end of a takeover. It offers its listening sockets to a successor of its
//! user, gives it the agents, then the clients, and reports changes until it leaves. A successor
//! that fails on the way changes nothing.

use std::io;
use std::path::Path;
use std::time::Duration;

use hostler_boot::passing::send_files;
use hostler_boot::{PrivateSocket, Shutdown};
use rustix::fd::{AsFd, OwnedFd};
use rustix::process::geteuid;
use tokio::net::{TcpListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::message::{
    ANSWER_TIMEOUT, FleetSummary, FromPredecessor, FromSuccessor, Memory, MemoryChange, PROTOCOL, ReadyReplica, receive, receive_within,
    send,
};
use crate::admission::{Admission, UsageChange};
use crate::fleet::{Fleet, FleetView};
use crate::response_affinity::{ResponseAffinity, ResponseRecord};
use crate::succession::Succession;

/// How long a successor may take for a step. It waits 10 s for the agents.
const STEP_TIMEOUT: Duration = Duration::from_secs(30);

/// How soon a failed bind of the socket is retried.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// A router that another one may replace.
#[derive(Debug)]
pub(crate) struct Predecessor {
    pub(crate) listeners: ListeningSockets,
    pub(crate) fleet: Fleet,
    pub(crate) admission: Admission,
    pub(crate) response_affinity: ResponseAffinity,
    pub(crate) succession: Succession,
    /// Drained once the successor has the clients.
    pub(crate) serving: Shutdown,
    /// Cancelled then, too: operators find the successor.
    pub(crate) admin_end: CancellationToken,
    /// Cancelled when the last request of this router has ended.
    pub(crate) requests_ended: CancellationToken,
}

/// The listening sockets of edge, agents and admin, until they are given away.
#[derive(Debug)]
pub(crate) struct ListeningSockets(io::Result<[OwnedFd; 3]>);

impl ListeningSockets {
    pub(crate) fn of([edge, agents, admin]: [&TcpListener; 3]) -> Self {
        let copy = |listener: &TcpListener| listener.as_fd().try_clone_to_owned();
        Self(copy(edge).and_then(|edge| Ok([edge, copy(agents)?, copy(admin)?])))
    }

    fn close(&mut self) {
        self.0 = Err(io::ErrorKind::NotConnected.into());
    }
}

#[derive(Debug, thiserror::Error)]
enum Failure {
    /// Somebody only checked whether the socket is alive.
    #[error("it said nothing")]
    NoSuccessor,
    #[error("{0}")]
    Refused(String),
    #[error("it said {0:?} out of turn")]
    OutOfTurn(FromSuccessor),
    #[error("{0}")]
    Lost(#[from] io::Error),
}

impl Predecessor {
    /// Waits for a successor on the socket as long as this router lives, then reports changes to
    /// it.
    pub(crate) async fn serve(self, socket: PrivateSocket) {
        let requests_ended = self.requests_ended.clone();
        let (stream, changes) = tokio::select! {
            replaced = self.wait_for_successor(socket) => replaced,
            () = requests_ended.cancelled() => return,
        };
        tell_changes(stream, changes, requests_ended).await;
    }

    async fn wait_for_successor(mut self, socket: PrivateSocket) -> (UnixStream, Changes) {
        let path = socket.file().path().to_owned();
        let mut next = Some(socket);
        loop {
            let mut stream = tokio::select! {
                stream = accept_caller(&mut next, &path) => stream,
                // While a copy is open, the kernel takes clients into a queue that only a successor
                // serves.
                () = self.wait_closing(), if self.listeners.0.is_ok() => {
                    self.listeners.close();
                    continue;
                }
            };
            match self.give_place(&mut stream).await {
                Ok(changes) => return (stream, changes),
                Err(Failure::NoSuccessor) => {}
                Err(error) => {
                    if !matches!(error, Failure::Refused(_)) {
                        // The successor may have ended. If it lives, it must know that this one
                        // does, too.
                        let _ = send(&mut stream, &FromPredecessor::Refused(format!("a step failed: {error}"))).await;
                    }
                    self.succession.take_agents_port();
                    tracing::warn!(
                        event = "takeover_failed",
                        %error,
                        "another router has failed to take this one's place; this one serves on"
                    );
                }
            }
        }
    }

    /// Resolves when this router no longer takes clients, and does not keep its place for a
    /// successor.
    async fn wait_closing(&self) {
        self.serving.wait_drain().await;
        if self.succession.keeps_place() {
            std::future::pending::<()>().await;
        }
    }

    async fn give_place(&self, stream: &mut UnixStream) -> Result<Changes, Failure> {
        let hello = receive_within(ANSWER_TIMEOUT, stream).await.map_err(|_| Failure::NoSuccessor)?;
        let FromSuccessor::Hello { protocol, version } = hello else { return Err(Failure::OutOfTurn(hello)) };
        if let Some(refusal) = self.refusal(stream, protocol, &version)? {
            send(stream, &FromPredecessor::Refused(refusal.clone())).await?;
            return Err(Failure::Refused(refusal));
        }
        tracing::info!(version, "another router begins to take this one's place");
        let fleet = summarize(&self.fleet.view());
        send(stream, &FromPredecessor::Offer { version: env!("CARGO_PKG_VERSION").into(), fleet }).await?;
        let listeners = self.listeners.0.as_ref().map_err(|error| io::Error::from(error.kind()))?;
        send_files(stream, &listeners.each_ref().map(AsFd::as_fd)).await?;

        expect(stream, |step| matches!(step, FromSuccessor::ReadyForAgents)).await?;
        self.succession.lend_agents_port();
        send(stream, &FromPredecessor::AgentsAreYours).await?;

        expect(stream, |step| matches!(step, FromSuccessor::ReadyForClients)).await?;
        // From here on, everything learned is in the memory or among the changes. No change may be
        // lost: a request whose end is lost counts as running until this router has left. Changes
        // are few: until `Serving` there is a deadline, and from then on no request begins here.
        let (usage_sender, usage_changes) = mpsc::unbounded_channel();
        let (response_sender, further_responses) = mpsc::unbounded_channel();
        let usage = self.admission.export(usage_sender);
        let responses = self.response_affinity.export(response_sender);
        send(stream, &FromPredecessor::Memory(Memory { usage, responses })).await?;

        expect(stream, |step| matches!(step, FromSuccessor::Serving)).await?;
        self.succession.give_place();
        self.serving.drain();
        self.admin_end.cancel();
        tracing::info!(event = "takeover_done", "another router has taken this one's place: what runs here may finish");
        Ok(Changes { usage: usage_changes, responses: further_responses })
    }

    /// Why this successor does not get the place.
    fn refusal(&self, stream: &UnixStream, protocol: u32, version: &str) -> io::Result<Option<String>> {
        // Root may connect too, but its files would belong to another user.
        let user = stream.peer_cred()?.uid();
        Ok(if user != geteuid().as_raw() {
            Some(format!("it runs as user {}, the new one as user {user}: start that as the same user", geteuid().as_raw()))
        } else if protocol != PROTOCOL {
            let own = env!("CARGO_PKG_VERSION");
            Some(format!(
                "router {version} takes over by protocol {protocol}, the running router {own} by protocol {PROTOCOL}: stop the running one, \
                 then start the new one"
            ))
        } else {
            let is_over = self.serving.is_draining() && !self.succession.keeps_place();
            is_over.then(|| "it is leaving already: start the new one when it has left".to_owned())
        })
    }
}

/// The next caller. The socket is made again if its file was removed.
async fn accept_caller(socket: &mut Option<PrivateSocket>, path: &Path) -> UnixStream {
    loop {
        let Some(bound) = socket else {
            sleep(RETRY_INTERVAL).await;
            *socket = PrivateSocket::bind(path).await.ok();
            continue;
        };
        tokio::select! {
            stream = bound.accept_trusted() => return stream,
            () = bound.file().wait_removed() => *socket = None,
        }
    }
}

async fn expect(stream: &mut UnixStream, is_due: impl Fn(&FromSuccessor) -> bool) -> Result<(), Failure> {
    let step = receive_within(STEP_TIMEOUT, stream).await?;
    if is_due(&step) { Ok(()) } else { Err(Failure::OutOfTurn(step)) }
}

fn summarize(view: &FleetView) -> FleetSummary {
    let ready_replicas = view
        .replicas
        .iter()
        .filter(|replica| replica.is_ready())
        .map(|replica| ReadyReplica { id: replica.id.to_string(), models: replica.models().map(|model| model.id.clone()).collect() });
    FleetSummary {
        nodes: view.nodes.iter().filter(|node| node.is_attached).map(|node| node.name.to_string()).collect(),
        ready_replicas: ready_replicas.collect(),
    }
}

/// Changes in this router's knowledge after it was exported.
struct Changes {
    usage: mpsc::UnboundedReceiver<UsageChange>,
    responses: mpsc::UnboundedReceiver<ResponseRecord>,
}

/// Reports changes until the router or its successor ends.
async fn tell_changes(mut stream: UnixStream, mut changes: Changes, requests_ended: CancellationToken) {
    loop {
        let change = tokio::select! {
            // Changes are reported before the end.
            biased;
            Some(change) = changes.usage.recv() => MemoryChange::Usage(change),
            Some(record) = changes.responses.recv() => MemoryChange::Response(record),
            () = requests_ended.cancelled() => return,
            // The successor says nothing more.
            Err(error) = receive::<FromSuccessor>(&mut stream) => {
                tracing::debug!(%error, "the router that took this one's place has left");
                return;
            }
        };
        if send(&mut stream, &FromPredecessor::Change(change)).await.is_err() {
            return;
        }
    }
}
