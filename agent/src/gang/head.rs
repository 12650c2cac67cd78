//! The head's end of its members' connections: who may connect, what they say, and what the
//! supervisor of the head's own part asks of them.
//!
//! `roster` decides; this file carries messages and the time to it.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener as StdListener};
use std::sync::{Arc, Weak};
use std::time::Duration;

use hostler_tls::{CertificateInfo, Stream};
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::address::{address_of, interface_with};
use super::beat::Beats;
use super::roster::{FarActivity, Loss, MemberView, Order, Readiness, Roster};
use super::setup::PartSetup;
use super::wire::{HeadMessage, Hello, MemberMessage, MessageReader, MessageWriter, SEND_TIMEOUT, bounded, split};
use crate::epoch::next_epoch;
use crate::join::PeerAccess;
use crate::vllm::MeetingPoint;

/// Time for a handshake and for the first message.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Most connections that have not said yet which member they are of.
const MAX_UNKNOWN_CONNECTIONS: usize = 64;

/// Messages that may wait for a member's connection.
const OUTBOX_LEN: usize = 16;

/// Pieces of members' output that may wait to be kept.
const OUTPUT_LEN: usize = 256;

/// Time in which members say how their parts have ended, and that nothing is left of them.
const QUIET_TIMEOUT: Duration = Duration::from_secs(3);

/// What a head needs beside its place.
#[derive(Debug)]
pub(crate) struct GangSettings {
    pub(crate) nodes: u32,
    pub(crate) lease: Duration,
    /// Setup of the head's own part.
    pub(crate) setup: PartSetup,
    /// Interface for the engine's own connections; empty means the one of the members' connections.
    pub(crate) interface: String,
    pub(crate) access: PeerAccess,
}

/// A line of a member's output, or several.
#[derive(Debug)]
pub(crate) struct MemberOutput {
    pub(crate) number: u32,
    pub(crate) host: String,
    pub(crate) lines: String,
}

/// The members of a replica, for its head.
#[derive(Debug)]
pub(crate) struct Gang {
    members: Mutex<Members>,
    /// Says that `members` has changed.
    changed: watch::Sender<()>,
    /// Why a member has to leave, once one has.
    leaving: watch::Sender<Option<String>>,
    output: mpsc::Sender<MemberOutput>,
    taken_output: Mutex<Option<mpsc::Receiver<MemberOutput>>>,
    nodes: u32,
    interface: String,
    access: PeerAccess,
}

#[derive(Debug)]
struct Members {
    roster: Roster,
    outboxes: BTreeMap<u32, mpsc::Sender<HeadMessage>>,
    /// Address of this host on the members' connections.
    own_address: Option<IpAddr>,
    last_epoch: u64,
}

impl Members {
    fn deliver(&self, orders: Vec<Order>) {
        for (number, order) in orders {
            // A member without a connection, or with one that takes nothing, is found by its
            // silence.
            let _ = self.outboxes.get(&number).map(|outbox| outbox.try_send(order));
        }
    }
}

impl Gang {
    pub(crate) fn new(settings: GangSettings) -> Arc<Self> {
        let (output, taken_output) = mpsc::channel(OUTPUT_LEN);
        let roster = Roster::new(settings.nodes, settings.lease, settings.setup, Instant::now());
        let members = Members { roster, outboxes: BTreeMap::new(), own_address: None, last_epoch: 0 };
        Arc::new(Self {
            members: Mutex::new(members),
            changed: watch::Sender::default(),
            leaving: watch::Sender::default(),
            output,
            taken_output: Mutex::new(Some(taken_output)),
            nodes: settings.nodes,
            interface: settings.interface,
            access: settings.access,
        })
    }

    /// Members' output from now on. Only the first caller gets it.
    pub(crate) fn take_output(&self) -> Option<mpsc::Receiver<MemberOutput>> {
        self.taken_output.lock().take()
    }

    /// Begins an epoch, and waits until every member can start its part.
    ///
    /// # Errors
    /// Why the epoch cannot start: a refusal, or a member that has not come within `limit`.
    pub(crate) async fn prepare(&self, limit: Duration) -> Result<(), String> {
        let mut changed = self.changed.subscribe();
        self.update(|members| {
            members.last_epoch = next_epoch(members.last_epoch);
            let orders = members.roster.prepare(members.last_epoch);
            members.deliver(orders);
        });
        let deadline = Instant::now() + limit;
        loop {
            match self.members.lock().roster.readiness() {
                Readiness::Ready => return Ok(()),
                Readiness::Refused(reason) => return Err(reason),
                Readiness::Waits(what) if Instant::now() >= deadline => return Err(format!("{what}, for {} s in vain", limit.as_secs())),
                Readiness::Waits(_) => {}
            }
            tokio::select! {
                _ = changed.changed() => {}
                () = sleep_until(deadline) => {}
            }
        }
    }

    /// What the epoch that is being prepared waits for.
    pub(crate) fn waits_for(&self) -> Option<String> {
        match self.members.lock().roster.readiness() {
            Readiness::Waits(what) => Some(what),
            Readiness::Ready | Readiness::Refused(_) => None,
        }
    }

    /// Starts the epoch on all members, and says where the head's own part waits for theirs.
    ///
    /// The port is free now; if another program takes it, the engine says so and the next epoch has
    /// another one.
    ///
    /// # Errors
    /// When this host has no port or no address.
    pub(crate) fn start(&self) -> io::Result<MeetingPoint> {
        // PyTorch's store listens on all interfaces.
        let port = StdListener::bind((Ipv4Addr::UNSPECIFIED, 0))?.local_addr()?.port();
        let configured = (!self.interface.is_empty()).then(|| address_of(&self.interface)).transpose().map_err(io::Error::other)?;
        self.update(|members| {
            let address = configured.or(members.own_address).ok_or_else(|| io::Error::other("no member has connected"))?;
            let orders = members.roster.start(&address.to_string(), port);
            members.deliver(orders);
            Ok(MeetingPoint { head: address, port, own: address, interface: interface_with(address), nodes: self.nodes, number: 0 })
        })
    }

    /// Tells the members that the engine serves.
    pub(crate) fn mark_ready(&self) {
        self.update(|members| {
            let orders = members.roster.serve();
            members.deliver(orders);
        });
    }

    /// Ends the epoch on all members.
    pub(crate) fn kill(&self) {
        self.update(|members| {
            let orders = members.roster.kill();
            members.deliver(orders);
        });
    }

    /// Resolves when the epoch that runs has lost a part.
    pub(crate) async fn wait_lost(&self) -> Loss {
        let mut changed = self.changed.subscribe();
        loop {
            if let Some(loss) = self.loss() {
                return loss;
            }
            // `self` has the sender.
            let _ = changed.changed().await;
        }
    }

    /// Loss of the present epoch, or of the last one.
    pub(crate) fn loss(&self) -> Option<Loss> {
        self.members.lock().roster.loss().cloned()
    }

    /// Waits until nothing is left on the members that are heard, for a while.
    pub(crate) async fn wait_quiet(&self) {
        let mut changed = self.changed.subscribe();
        let quiet = async {
            while !self.members.lock().roster.is_quiet() {
                let _ = changed.changed().await;
            }
        };
        let _ = timeout(QUIET_TIMEOUT, quiet).await;
    }

    /// Waits no more for members whose connection has ended.
    pub(crate) fn stop_waiting(&self) {
        self.update(|members| members.roster.stop_waiting());
    }

    /// What the parts on other nodes do.
    pub(crate) fn activity(&self) -> FarActivity {
        self.members.lock().roster.activity(Instant::now())
    }

    /// Whether a member is not heard.
    pub(crate) fn is_cut_off(&self) -> bool {
        self.members.lock().roster.is_cut_off(Instant::now())
    }

    pub(crate) fn view(&self) -> Vec<MemberView> {
        self.members.lock().roster.view(Instant::now())
    }

    /// Resolves with the reason when a member has to leave: the replica leaves with it.
    pub(crate) async fn wait_leaving(&self) -> String {
        let mut leaving = self.leaving.subscribe();
        // `self` has the sender.
        leaving.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone()).unwrap_or_default()
    }

    fn update<T>(&self, change: impl FnOnce(&mut Members) -> T) -> T {
        let done = change(&mut self.members.lock());
        self.changed.send_replace(());
        done
    }

    /// Serves members until `end`, then tells them that the replica has ended.
    pub(crate) async fn serve(self: Arc<Self>, listener: TcpListener, end: CancellationToken) {
        let (connections, mut unknown) = (TaskTracker::new(), UnknownConnections::default());
        let mut beats = Beats::new();
        loop {
            let stream = tokio::select! {
                () = end.cancelled() => break,
                paused = beats.next() => {
                    self.update(|members| {
                        members.roster.excuse(paused);
                        members.roster.tick(Instant::now());
                    });
                    continue;
                }
                stream = hostler_boot::accept(&listener) => stream,
            };
            let (gang, end, place) = (self.clone(), end.clone(), unknown.admit());
            connections.spawn(async move {
                let greeted = timeout(HELLO_TIMEOUT, place.run_until_cancelled(gang.greet(stream))).await;
                let Ok(Some(Some((peer, hello)))) = greeted else { return };
                drop(place);
                gang.serve_member(peer, hello, end).await;
            });
        }
        connections.close();
        let _ = timeout(SEND_TIMEOUT, connections.wait()).await;
    }

    /// Does the handshake and reads who is there; `None` if that is nobody who may know.
    async fn greet(&self, stream: TcpStream) -> Option<(Peer, Hello)> {
        stream.set_nodelay(true).ok()?;
        let own_address = stream.local_addr().ok()?.ip();
        let from = stream.peer_addr().ok()?;
        let stream = match self.access.accept(stream, HELLO_TIMEOUT).await {
            Ok(stream) => stream,
            Err(reason) => {
                tracing::warn!(%from, reason, "a connection that is no member's");
                return None;
            }
        };
        let certified = stream.certificate().and_then(CertificateInfo::parse).map(|certified| certified.node);
        let is_plain = matches!(stream, Stream::Plain(_));
        let (mut reader, writer) = split(stream);
        let hello = match reader.next().await {
            Ok(Some(MemberMessage::Hello(hello))) => hello.bounded(),
            Ok(_) | Err(_) => return None,
        };
        if !is_plain && certified.as_ref() != Some(&hello.node) {
            tracing::warn!(%from, node = hello.node, "a node that calls itself by another node's name");
            return None;
        }
        Some((Peer { reader, writer, own_address, from }, hello))
    }

    async fn serve_member(self: &Arc<Self>, mut peer: Peer, hello: Hello, end: CancellationToken) {
        let (number, host) = (hello.number, hello.host.clone());
        let (outbox, mut orders) = mpsc::channel(OUTBOX_LEN);
        let joined = self.update(|members| {
            let (link, orders) = members.roster.join(hello, Instant::now())?;
            // The connection before this one sees that nobody sends to it any more.
            members.outboxes.insert(number, outbox.clone());
            members.own_address = Some(peer.own_address);
            for order in orders {
                let _ = outbox.try_send(order);
            }
            Ok::<_, String>(link)
        });
        drop(outbox);
        let link = match joined {
            Ok(link) => link,
            Err(reason) => {
                tracing::warn!(event = "member_refused", number, host, reason, "not taken in as a member");
                let _ = peer.writer.send(&HeadMessage::Refused(reason)).await;
                return;
            }
        };
        tracing::info!(event = "member_joined", number, host, from = %peer.from, "a member of the replica has joined");
        let mut beats = Beats::new();
        loop {
            let message = tokio::select! {
                () = end.cancelled() => HeadMessage::Leave("the head of the replica has ended".to_owned()),
                order = orders.recv() => match order {
                    Some(order) => order,
                    // Another connection of the member has taken its place.
                    None => return,
                },
                _ = beats.next() => HeadMessage::Beat,
                heard = peer.reader.next() => match heard {
                    Ok(Some(message)) => {
                        self.hear((number, link), &host, message);
                        continue;
                    }
                    Ok(None) | Err(_) => break,
                },
            };
            let is_last = matches!(message, HeadMessage::Leave(_));
            if peer.writer.send(&message).await.is_err() || is_last {
                break;
            }
        }
        tracing::info!(event = "member_left", number, host, "the connection of a member has ended");
        self.update(|members| members.roster.disconnect(number, link, Instant::now()));
    }

    fn hear(&self, (number, link): (u32, u64), host: &str, message: MemberMessage) {
        let activity = match &message {
            MemberMessage::Beat(activity) => Some(activity.clone()),
            _ => None,
        };
        self.update(|members| {
            members.roster.heard(number, link, activity, Instant::now());
            let orders = match message {
                MemberMessage::Prepared { epoch, setup, refusal } => {
                    members.roster.prepared((number, link), epoch, &setup, refusal);
                    Vec::new()
                }
                MemberMessage::Ended { epoch, end } => {
                    let end = end.bounded();
                    tracing::warn!(event = "part_ended", number, host, cause = end.cause, "a part of the engine has ended");
                    members.roster.ended(number, link, epoch, end);
                    Vec::new()
                }
                MemberMessage::Empty => members.roster.emptied(number, link),
                MemberMessage::Output { lines, .. } => {
                    // What does not fit is in the member's own log.
                    let _ = self.output.try_send(MemberOutput { number, host: host.to_owned(), lines });
                    Vec::new()
                }
                // Between two epochs another agent may take its place.
                MemberMessage::Leaving(_) if !members.roster.is_running() => Vec::new(),
                MemberMessage::Leaving(reason) => {
                    self.leaving.send_replace(Some(format!("{host}: {}", bounded(&reason))));
                    Vec::new()
                }
                MemberMessage::Hello(_) | MemberMessage::Beat(_) => Vec::new(),
            };
            members.deliver(orders);
        });
    }
}

/// Connections that have not said whose they are, oldest first. One too many ends the oldest: a
/// member speaks at once.
#[derive(Default)]
struct UnknownConnections(VecDeque<Weak<CancellationToken>>);

impl UnknownConnections {
    /// A place for one more, kept until it is dropped; the token ends it before.
    fn admit(&mut self) -> Arc<CancellationToken> {
        self.0.retain(|place| place.strong_count() > 0);
        if self.0.len() >= MAX_UNKNOWN_CONNECTIONS
            && let Some(oldest) = self.0.pop_front().and_then(|place| place.upgrade())
        {
            oldest.cancel();
        }
        let place = Arc::new(CancellationToken::new());
        self.0.push_back(Arc::downgrade(&place));
        place
    }
}

/// A connection of somebody who has said who it is.
struct Peer {
    reader: MessageReader,
    writer: MessageWriter,
    own_address: IpAddr,
    from: SocketAddr,
}
