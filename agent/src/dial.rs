//! Connections to routers: TCP tuned for many small messages and quick detection of a dead peer,
//! TLS if the agent has a fleet, and HTTP/2 on top.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hostler_proto::wire;
use hostler_tls::{ClientConfig, Stream, describe_for_agent, is_alert_about_certificate};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    #[error("{0}")]
    Unreachable(String),
    #[error("{reason}")]
    Tls {
        /// A sentence that says what to do.
        reason: String,
        /// Whether another certificate could help.
        certificate: bool,
    },
}

impl DialError {
    fn unreachable(error: &(dyn std::error::Error + 'static)) -> Self {
        Self::Unreachable(hostler_boot::root_cause(error))
    }
}

/// Connects to the router at `address`, with TLS if there are settings for it.
///
/// # Errors
/// When the router cannot be reached in time, or the handshake fails.
pub(crate) async fn dial(address: SocketAddr, config: Option<Arc<ClientConfig>>) -> Result<Channel, DialError> {
    let stream = timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await;
    let stream = stream.map_err(|_| DialError::Unreachable("timed out".into()))?.map_err(|error| DialError::unreachable(&error))?;
    hostler_boot::configure_stream(&stream, wire::TCP_USER_TIMEOUT).map_err(|error| DialError::unreachable(&error))?;
    let stream = match config {
        None => Stream::Plain(stream),
        Some(config) => {
            let secured = timeout(HANDSHAKE_TIMEOUT, hostler_tls::connect(stream, config)).await;
            secured.map_err(|_| no_handshake())?.map_err(|error| tls_error(&error))?
        }
    };
    // The channel would redial by itself. The session redials instead, because it knows the reason.
    let stream = Arc::new(Mutex::new(Some(stream)));
    let connector = tower::service_fn(move |_| {
        let stream = stream.lock().take().map(TokioIo::new);
        async move { stream.ok_or(std::io::Error::from(std::io::ErrorKind::NotConnected)) }
    });
    let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|error| DialError::unreachable(&error))?;
    let connected = endpoint
        .initial_stream_window_size(wire::HTTP2_WINDOW_BYTES)
        .initial_connection_window_size(wire::HTTP2_WINDOW_BYTES)
        .max_frame_size(wire::MAX_HTTP2_FRAME_BYTES)
        .http2_keep_alive_interval(wire::KEEPALIVE_TIMEOUT)
        .keep_alive_timeout(wire::KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .connect_with_connector(connector)
        .await;
    connected.map_err(|error| DialError::unreachable(&error))
}

fn no_handshake() -> DialError {
    let limit = HANDSHAKE_TIMEOUT.as_secs();
    DialError::Unreachable(format!("no TLS handshake within {limit} s: does the router have its fleet's folder (router.tls_dir)?"))
}

fn tls_error(error: &std::io::Error) -> DialError {
    match describe_for_agent(error) {
        Some(reason) => DialError::Tls { reason, certificate: is_alert_about_certificate(error) },
        None => DialError::Unreachable(format!(
            "the connection ended in the TLS handshake ({error}): does the router have its fleet's folder (router.tls_dir)?"
        )),
    }
}
