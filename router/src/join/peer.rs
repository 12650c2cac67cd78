//! A connection to the agents' port, and its peer.

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

/// How long a connection of an untrusted peer may last. The peer may only ask for a certificate,
/// which takes up to 15 s (`agent/src/join`), or learn why it is refused.
const UNAUTHENTICATED_TIMEOUT: Duration = Duration::from_secs(20);

/// The other end of a connection.
#[derive(Debug, Clone, Default)]
pub(crate) struct Peer {
    pub(crate) address: Option<SocketAddr>,
    /// The local address that the connection came to.
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

/// A connection without a certificate if agents need one, or of another user if they do not.
#[derive(Debug)]
struct UnauthenticatedPeer {
    deadline: Pin<Box<Sleep>>,
    _permit: OwnedSemaphorePermit,
}

impl Connection {
    /// A certificate on the stream was verified in the handshake. In plain text `is_trusted`
    /// decides. `None` for an untrusted connection if all `unauthenticated` places are taken.
    pub(crate) fn new(stream: Stream, is_trusted: bool, fence: &Arc<NewestCertificates>, unauthenticated: &Arc<Semaphore>) -> Option<Self> {
        let (address, local_address) = (stream.tcp().peer_addr().ok(), stream.tcp().local_addr().ok());
        let certified = stream.certificate().and_then(CertificateInfo::parse);
        let member = certified.map(|certified| Arc::new(Member::new(certified, fence.clone())));
        let mut limits = None;
        let is_authenticated = if matches!(stream, Stream::Tls(_)) { member.is_some() } else { is_trusted };
        if !is_authenticated {
            let Ok(place) = unauthenticated.clone().try_acquire_owned() else {
                tracing::debug!(peer = ?address, "a connection of nobody that is trusted is closed: there are many of them");
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

#[cfg(test)]
mod tests {
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    #[tokio::test]
    async fn other_users_plain_connections_are_bounded_and_the_own_are_not() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (fence, places) = (Arc::<NewestCertificates>::default(), Arc::new(Semaphore::new(2)));
        let address = listener.local_addr().unwrap();
        let connect = async |is_trusted| {
            let (theirs, ours) = tokio::join!(TcpStream::connect(address), listener.accept());
            Connection::new(Stream::Plain(ours.unwrap().0), is_trusted, &fence, &places).map(|connection| (connection, theirs.unwrap()))
        };
        let others = [connect(false).await, connect(false).await];
        assert!(others.iter().all(Option::is_some) && connect(false).await.is_none());
        assert!(connect(true).await.is_some_and(|(own, _)| own.unauthenticated.is_none()));
        drop(others);
        assert!(connect(false).await.is_some());
    }
}
