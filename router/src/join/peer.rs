//! A connection to the agents' port, and who is at its other end.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hostler_tls::{CertificateInfo, Stream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Sleep, sleep};
use tonic::Request;
use tonic::transport::server::Connected;

use crate::member::{Member, NewestCertificates};

/// How long a connection without a certificate may last where agents need one: it only serves to
/// ask for one, which takes up to 15 s (`agent/src/join`).
const UNAUTHENTICATED_TIMEOUT: Duration = Duration::from_secs(20);

/// Who is at the other end of a connection.
#[derive(Debug, Clone, Default)]
pub(crate) struct Peer {
    pub(crate) address: Option<SocketAddr>,
    /// Where it has come in.
    pub(crate) local_address: Option<SocketAddr>,
    pub(crate) member: Option<Arc<Member>>,
}

impl Peer {
    /// The peer of the connection that a call came by.
    pub(crate) fn of<T>(request: &Request<T>) -> Self {
        request.extensions().get::<Self>().cloned().unwrap_or_default()
    }
}

#[derive(Debug)]
pub(crate) struct Connection {
    stream: Stream,
    peer: Peer,
    unauthenticated: Option<UnauthenticatedPeer>,
}

/// A connection without a certificate where agents need one.
#[derive(Debug)]
struct UnauthenticatedPeer {
    deadline: Pin<Box<Sleep>>,
    _permit: OwnedSemaphorePermit,
}

impl Connection {
    /// Whatever certificate has come with it was found good in the handshake. `None` for one without, when there are as many already as there are
    /// places for `unauthenticated` ones.
    pub(crate) fn new(stream: Stream, fence: &Arc<NewestCertificates>, unauthenticated: &Arc<Semaphore>) -> Option<Self> {
        let (address, local_address) = (stream.tcp().peer_addr().ok(), stream.tcp().local_addr().ok());
        let certified = stream.certificate().and_then(CertificateInfo::parse);
        let member = certified.map(|certified| Arc::new(Member::new(certified, fence.clone())));
        let mut limits = None;
        if matches!(stream, Stream::Tls(_)) && member.is_none() {
            let Ok(place) = unauthenticated.clone().try_acquire_owned() else {
                tracing::debug!(peer = ?address, "a connection without a certificate is closed: there are many of them");
                return None;
            };
            limits = Some(UnauthenticatedPeer { deadline: Box::pin(sleep(UNAUTHENTICATED_TIMEOUT)), _permit: place });
        }
        Some(Self { stream, peer: Peer { address, local_address, member }, unauthenticated: limits })
    }
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let connection = self.get_mut();
        if connection.unauthenticated.as_mut().is_some_and(|peer| peer.deadline.as_mut().poll(context).is_ready()) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Pin::new(&mut connection.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(self: Pin<&mut Self>, context: &mut Context<'_>, slices: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}
