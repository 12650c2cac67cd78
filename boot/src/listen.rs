//! TCP listeners: binding with errors that name the setting, accepting despite errors, and
//! connections tuned for small messages.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use rustix::net::sockopt::set_tcp_user_timeout;
use tokio::net::{TcpListener, TcpSocket, TcpStream};

#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another process has the port.
    #[error("{address} (setting {setting}) is in use by another program: stop it, or choose another address with {flag}")]
    InUse { address: String, setting: &'static str, flag: String },
    #[error("cannot listen on {address} (setting {setting}): {source}")]
    Other { address: String, setting: &'static str, source: std::io::Error },
}

/// Listens on `address` (`HOST:PORT`; port 0 lets the system choose). `setting` is its full name,
/// such as `router.listen`.
///
/// # Errors
/// When the port is taken or the address is not one of this host's.
pub async fn bind(address: &str, setting: &'static str) -> Result<(TcpListener, SocketAddr), ListenError> {
    let other = |source| ListenError::Other { address: address.to_owned(), setting, source };
    let listener = listen(address).await.map_err(|source| match source.kind() {
        std::io::ErrorKind::AddrInUse => ListenError::InUse {
            address: address.to_owned(),
            setting,
            flag: format!("--{}", setting.rsplit('.').next().unwrap_or(setting).replace('_', "-")),
        },
        _ => other(source),
    })?;
    let bound = listener.local_addr().map_err(other)?;
    Ok((listener, bound))
}

/// The address at which programs of this host reach a listener. A listener on all addresses is on
/// loopback too.
#[must_use]
pub fn reachable_here(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(if address.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() });
    }
    address
}

/// Connections that may wait to be accepted: a thousand clients may start at once. The kernel's own
/// limit is usually as high.
const BACKLOG: u32 = 4096;

/// Addresses of `HOST:PORT`.
///
/// # Errors
/// When the name is not known.
pub async fn resolve(address: &str) -> std::io::Result<Vec<SocketAddr>> {
    Ok(tokio::net::lookup_host(address).await?.collect())
}

async fn listen(address: &str) -> std::io::Result<TcpListener> {
    let mut last = std::io::Error::other("the name has no address");
    for address in resolve(address).await? {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        // Allow binding a port that was released a moment ago.
        socket.set_reuseaddr(true)?;
        match socket.bind(address).and_then(|()| socket.listen(BACKLOG)) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// How long to wait after a failed `accept`, which mostly means that no file descriptors are left.
pub(crate) const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// Accepts the next connection. Errors of `accept` are logged and waited out.
pub async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

/// Sends small messages at once, and lets the kernel drop a silent peer.
///
/// The peer is dropped if for `silence` it acknowledges nothing, or has no room for data.
///
/// # Errors
/// When the connection is already gone.
pub fn configure_stream(stream: &TcpStream, silence: Duration) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    set_tcp_user_timeout(stream, u32::try_from(silence.as_millis()).unwrap_or(u32::MAX))?;
    Ok(())
}
