//! Dials a router: a TCP connection tuned for many small messages and for noticing a dead peer soon, and HTTP/2 upon it.

use std::net::SocketAddr;
use std::time::Duration;

use hostler_proto::wire;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint, Error};

/// How long a router may take to accept.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// A connection to the router at `address`.
///
/// # Errors
/// When it cannot be reached within 5 s.
pub(super) async fn dial(address: SocketAddr) -> Result<Channel, Error> {
    let connector = tower::service_fn(move |_| async move {
        let stream = timeout(CONNECT_DEADLINE, TcpStream::connect(address)).await.map_err(|_| std::io::ErrorKind::TimedOut)??;
        hostler_boot::tune(&stream, wire::TCP_USER_TIMEOUT)?;
        Ok::<_, std::io::Error>(TokioIo::new(stream))
    });
    Endpoint::from_shared(format!("http://{address}"))?
        .initial_stream_window_size(wire::WINDOW_BYTES)
        .initial_connection_window_size(wire::WINDOW_BYTES)
        .max_frame_size(wire::FRAME_BYTES)
        .http2_keep_alive_interval(wire::KEEPALIVE)
        .keep_alive_timeout(wire::KEEPALIVE)
        .keep_alive_while_idle(true)
        .connect_with_connector(connector)
        .await
}
