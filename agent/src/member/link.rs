//! A member's connection to its head: how it is opened, and the task that carries its messages.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use hostler_tls::CertificateInfo;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use crate::gang::address::HeadAddress;
use crate::gang::wire::{HeadMessage, Hello, MemberMessage, MessageReader, MessageWriter, split};
use crate::join::PeerAccess;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Messages that may wait in each direction.
const QUEUE_LEN: usize = 256;

/// Why there is no connection to the head.
#[derive(Debug)]
pub(super) enum DialFailure {
    /// Nobody listens there: the head's agent is gone, and with it its part of the engine.
    NobodyThere(String),
    Other(String),
}

impl DialFailure {
    pub(super) fn reason(&self) -> &str {
        match self {
            Self::NobodyThere(reason) | Self::Other(reason) => reason,
        }
    }
}

#[derive(Debug)]
pub(super) struct Link {
    pub(super) head: SocketAddr,
    /// Address of this host on the connection.
    pub(super) own_address: IpAddr,
    outbox: mpsc::Sender<MemberMessage>,
    inbox: mpsc::Receiver<HeadMessage>,
    _carrier: AbortOnDropHandle<()>,
}

impl Link {
    /// Connects to the head and says who this member is.
    pub(super) async fn dial(address: HeadAddress, access: PeerAccess, hello: Hello) -> Result<Self, DialFailure> {
        let found = address.find().await.map_err(DialFailure::Other)?;
        let mut failure = DialFailure::Other(format!("{address} has no address"));
        for head in found {
            match Self::open(head, &access, hello.clone()).await {
                Ok(link) => return Ok(link),
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    async fn open(head: SocketAddr, access: &PeerAccess, hello: Hello) -> Result<Self, DialFailure> {
        let other = |reason: String| DialFailure::Other(format!("{head}: {reason}"));
        let connected = timeout(CONNECT_TIMEOUT, TcpStream::connect(head)).await.map_err(|_| other("timed out".to_owned()))?;
        let stream = connected.map_err(|error| match error.kind() {
            std::io::ErrorKind::ConnectionRefused => DialFailure::NobodyThere(format!("{head}: nobody listens there")),
            _ => other(error.to_string()),
        })?;
        stream.set_nodelay(true).map_err(|error| other(error.to_string()))?;
        let own_address = stream.local_addr().map_err(|error| other(error.to_string()))?.ip();
        let stream = access.connect(stream, HANDSHAKE_TIMEOUT).await.map_err(other)?;
        if let Some(node) = stream.certificate().and_then(CertificateInfo::parse).map(|certified| certified.node) {
            tracing::debug!(%head, node, "the head has shown its certificate");
        }
        let (reader, mut writer) = split(stream);
        writer.send(&MemberMessage::Hello(hello)).await.map_err(|error| other(error.to_string()))?;
        let (outbox, outgoing) = mpsc::channel(QUEUE_LEN);
        let (incoming, inbox) = mpsc::channel(QUEUE_LEN);
        let carrier = AbortOnDropHandle::new(tokio::spawn(carry(reader, writer, outgoing, incoming)));
        Ok(Self { head, own_address, outbox, inbox, _carrier: carrier })
    }

    /// Sends a message, or drops it if the connection takes nothing.
    pub(super) fn send(&self, message: MemberMessage) {
        if self.outbox.try_send(message).is_err() {
            tracing::debug!("the connection to the head takes no message");
        }
    }

    /// Next message; `None` once the connection has ended. Cancel safe.
    pub(super) async fn next(&mut self) -> Option<HeadMessage> {
        self.inbox.recv().await
    }
}

async fn carry(
    mut reader: MessageReader,
    mut writer: MessageWriter,
    mut outgoing: mpsc::Receiver<MemberMessage>,
    incoming: mpsc::Sender<HeadMessage>,
) {
    loop {
        tokio::select! {
            message = outgoing.recv() => {
                let Some(message) = message else { return };
                if writer.send(&message).await.is_err() {
                    return;
                }
            }
            heard = reader.next() => {
                let Ok(Some(message)) = heard else { return };
                if incoming.send(message).await.is_err() {
                    return;
                }
            }
        }
    }
}
