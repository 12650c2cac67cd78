//! TCP listeners: bound with an error that names the setting, accepting through trouble, connections tuned for small messages.

use std::net::SocketAddr;

use std::time::Duration;

use rustix::net::sockopt::set_tcp_user_timeout;
use tokio::net::{TcpListener, TcpSocket, TcpStream};

/// Why a listener could not be bound.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Somebody else has the port.
    #[error("{address} (setting {setting}) is in use by another program: stop it, or choose another address with {flag}")]
    InUse {
        /// What was asked for.
        address: String,
        /// The setting's full name.
        setting: &'static str,
        /// The flag that sets it.
        flag: String,
    },
    /// Anything else.
    #[error("cannot listen on {address} (setting {setting}): {source}")]
    Other {
        /// What was asked for.
        address: String,
        /// The setting's full name.
        setting: &'static str,
        /// The operating system's words.
        source: std::io::Error,
    },
}

/// Listens on `address` (`HOST:PORT`; port 0 lets the system choose). `setting` is its full name, such as `router.listen`.
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

/// Connections that may wait to be accepted (the kernel has a bound of its own, usually as high): a thousand clients begin at once.
const BACKLOG: u32 = 4096;

async fn listen(address: &str) -> std::io::Result<TcpListener> {
    let mut last = std::io::Error::other("the name has no address");
    for address in tokio::net::lookup_host(address).await? {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        // A port that was left a moment ago can be taken again.
        socket.set_reuseaddr(true)?;
        match socket.bind(address).and_then(|()| socket.listen(BACKLOG)) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// After a failed `accept` (no file descriptors left, mostly) the next try waits this long.
pub(crate) const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// The next connection. Trouble in accepting is logged and waited out.
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

/// Sends small messages at once, and has the kernel drop a peer that acknowledges, or has room for, nothing for `silence`.
///
/// # Errors
/// When the connection is gone already.
pub fn configure_stream(stream: &TcpStream, silence: Duration) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    set_tcp_user_timeout(stream, u32::try_from(silence.as_millis()).unwrap_or(u32::MAX))?;
    Ok(())
}
