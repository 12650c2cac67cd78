//! Client connections over HTTP/1.1 or HTTP/2, accepted up to a bound and ended gracefully on
//! drain.

use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use futures_util::future::OptionFuture;
use hostler_boot::connection_clock::{ConnectionClock, ConnectionPlaces, ConnectionTimeouts, Overdue, StreamExecutor, TimedBody};
use hostler_boot::socket::SocketFile;
use hostler_boot::{PrivateSocket, Shutdown, accept, configure_stream};
use hostler_tls::{EdgeTls, Handshake, Stream};
use http::{HeaderValue, Request, Response, Version, header};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulConnection;
use rustix::process::{Resource, getrlimit};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::coop::unconstrained;
use tokio_util::io::InspectReader;

use super::framing::watch_framing;
use super::parser_refusals::RefusalStream;
use super::reply::EdgeBody;
use crate::config::RouterConfig;
use crate::direct_writing::{ClientStream, DirectWriter};
use crate::inbound::Edge;
use crate::succession::Succession;

/// Largest head of a request, and most bytes of an answer that are buffered beyond the socket's
/// buffer.
const BUFFER_BYTES: usize = 64 * 1024;

/// The beginning of HTTP/2, which no HTTP/1 request shares.
const HTTP2_PREFACE_START: &[u8; 4] = b"PRI ";

/// Most concurrent requests on one HTTP/2 connection.
const MAX_STREAMS: u32 = 256;

/// Interval of pings over HTTP/2, and the time in which a client must answer one.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);

/// Files of this process that are not for clients: listeners, logs, agents and their lanes, admin
/// connections (256 at most), keepers of engines.
const RESERVED_FILES: u64 = 512;

/// How soon a failed bind of the socket is retried.
const SOCKET_RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// The listeners for clients.
#[derive(Debug)]
pub(crate) struct EdgeListeners {
    pub(crate) port: TcpListener,
    /// TLS of the port, if it has any.
    pub(crate) tls: Option<Arc<EdgeTls>>,
    /// A socket for clients of the router's own user.
    pub(crate) socket: Option<PrivateSocket>,
}

/// Accepts clients until drain begins. Connections live on the shutdown's tracker.
pub(crate) async fn serve(listeners: EdgeListeners, edge: Arc<Edge>, shutdown: Shutdown) {
    let EdgeListeners { port, tls, socket } = listeners;
    let files = getrlimit(Resource::Nofile).current;
    let most = connections_within(edge.config.max_connections, files);
    if most < edge.config.max_connections {
        tracing::warn!(
            "router.max_connections is {most} here, because this process may open {} files only: raise that with `ulimit -n`; further \
             clients wait to be accepted",
            files.unwrap_or_default()
        );
    }
    let places = ConnectionPlaces::new(most);
    let on_socket = OptionFuture::from(socket.map(|socket| serve_socket(socket, places.clone(), edge.clone(), shutdown.clone())));
    tokio::join!(serve_port((port, tls), places.clone(), edge.clone(), shutdown.clone()), on_socket);
}

/// Most concurrent client connections.
///
/// Each may have one more connection, to an engine of this process (`hostler up`). Clients wait
/// rather than take files that the rest of the process needs.
fn connections_within(configured: usize, max_files: Option<u64>) -> usize {
    let affordable = max_files.map_or(Semaphore::MAX_PERMITS as u64, |files| files.saturating_sub(RESERVED_FILES) / 2);
    let affordable = usize::try_from(affordable).unwrap_or(usize::MAX);
    configured.min(affordable).clamp(1, Semaphore::MAX_PERMITS)
}

async fn serve_port(
    (listener, tls): (TcpListener, Option<Arc<EdgeTls>>),
    places: Arc<ConnectionPlaces>,
    edge: Arc<Edge>,
    shutdown: Shutdown,
) {
    let http1 = Arc::new(http1_builder());
    let mut draining = pin!(shutdown.wait_drain());
    loop {
        let accepted = async {
            let place = places.take().await;
            (place, accept(&listener).await)
        };
        let (place, stream) = tokio::select! {
            // Check the drain first: a client that comes while another router takes over is that
            // router's.
            biased;
            () = &mut draining => return,
            accepted = accepted => accepted,
        };
        // The kernel drops a client that reads nothing for this long. It also watches a closed
        // window.
        if configure_stream(&stream, edge.config.client_stall_timeout).is_err() {
            continue;
        }
        let (edge, http1, shutdown, places) = (edge.clone(), http1.clone(), shutdown.clone(), places.clone());
        let handshake = tls.as_ref().map(|tls| tls.handshake());
        shutdown.tasks().clone().spawn(async move {
            let stream = match handshake {
                None => Some(Stream::Plain(stream)),
                Some(handshake) => tokio::select! {
                    // Boxed, like everything that only some connections need.
                    stream = Box::pin(accept_tls(stream, handshake, edge.config.header_timeout)) => stream,
                    () = shutdown.wait_stop() => None,
                },
            };
            if let Some(stream) = stream {
                connection_task(stream, edge, (&http1, places), &shutdown).await;
            }
            drop(place);
        });
    }
}

/// Accepts clients on a socket, in plain text: their bytes stay within this host. If the socket's
/// file is removed, the socket is made anew.
async fn serve_socket(mut socket: PrivateSocket, places: Arc<ConnectionPlaces>, edge: Arc<Edge>, shutdown: Shutdown) {
    let mut draining = pin!(shutdown.wait_drain());
    loop {
        let file = socket.file().clone();
        let stream = tokio::select! {
            biased;
            () = &mut draining => return,
            stream = socket.accept_trusted() => stream,
            () = file.wait_removed() => {
                tracing::warn!(socket = %file.path().display(), "the edge's socket was removed; it is made anew");
                tokio::select! {
                    made = bind_again(&file) => socket = made,
                    () = &mut draining => return,
                }
                continue;
            }
        };
        let (places, edge, shutdown) = (places.clone(), edge.clone(), shutdown.clone());
        shutdown.tasks().clone().spawn(async move {
            let _place = places.take().await;
            let clock = connection_clock(&edge.config, Some(places));
            serve_wire(stream, None, edge, (clock, None), &shutdown).await;
        });
    }
}

async fn bind_again(file: &SocketFile) -> PrivateSocket {
    loop {
        match PrivateSocket::bind(file.path()).await {
            Ok(socket) => return socket,
            Err(error) => tracing::debug!(%error, "the edge's socket cannot be made anew yet"),
        }
        tokio::time::sleep(SOCKET_RETRY_INTERVAL).await;
    }
}

/// Does the TLS handshake; `None` if it fails or takes longer than `limit`.
async fn accept_tls(stream: TcpStream, handshake: Handshake, limit: Duration) -> Option<Stream> {
    let secured = hostler_tls::accept(stream, handshake, limit).await;
    secured.inspect_err(|error| tracing::debug!(%error, "a client's handshake failed")).ok()
}

/// The library's settings for a connection that speaks HTTP/1.1.
fn http1_builder() -> http1::Builder {
    let mut http1 = http1::Builder::new();
    // The connection's clock watches slow heads, because it can tell them from idle connections.
    http1.header_read_timeout(None).max_buf_size(BUFFER_BYTES);
    http1
}

/// Settings for a connection whose version must be detected.
///
/// hyper detects it with a first read of 24 bytes, and then keeps a buffer of twice the size for
/// the connection's whole life.
fn auto_builder(clock: &Arc<ConnectionClock>) -> auto::Builder<StreamExecutor> {
    let mut either = auto::Builder::new(StreamExecutor(clock.clone()));
    either.http1().header_read_timeout(None).max_buf_size(BUFFER_BYTES);
    either
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(64 * 1024)
        .max_send_buf_size(BUFFER_BYTES)
        .keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_INTERVAL);
    either
}

/// Whether the first bytes of the connection may begin HTTP/2.
async fn may_be_http2(stream: &Stream) -> io::Result<bool> {
    let Stream::Plain(socket) = stream else { return Ok(true) };
    let mut first = [0; HTTP2_PREFACE_START.len()];
    let length = socket.peek(&mut first).await?;
    Ok(HTTP2_PREFACE_START.starts_with(&first[..length]))
}

async fn connection_task(stream: Stream, edge: Arc<Edge>, (http1, places): (&http1::Builder, Arc<ConnectionPlaces>), shutdown: &Shutdown) {
    let clock = connection_clock(&edge.config, Some(places));
    let told = tokio::select! {
        told = may_be_http2(&stream) => told,
        _ = wait_overdue(&clock) => return,
        () = wait_closing(&edge.succession, shutdown) => return,
    };
    let Ok(may_be_http2) = told else { return };
    let http1 = (!may_be_http2).then_some(http1);
    let wire = ClientStream::new(stream);
    let direct_writer = wire.direct_writer();
    serve_wire(wire, direct_writer, edge, (clock, http1), shutdown).await;
}

/// Serves an HTTP/1.1 connection in memory: the page's, or a simulated client's.
pub(crate) async fn serve_in_memory<W>(wire: W, edge: Arc<Edge>, shutdown: &Shutdown)
where
    W: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let clock = connection_clock(&edge.config, None);
    serve_wire(wire, None, edge, (clock, Some(&http1_builder())), shutdown).await;
}

fn connection_clock(config: &RouterConfig, places: Option<Arc<ConnectionPlaces>>) -> Arc<ConnectionClock> {
    let RouterConfig { header_timeout: head, keep_alive: idle, client_stall_timeout: stall, .. } = *config;
    ConnectionClock::new(ConnectionTimeouts { head, idle, stall }, places)
}

/// Serves a connection, with settings for HTTP/1.1 if it is known to speak that.
async fn serve_wire<W>(
    wire: W,
    direct_writer: Option<Arc<DirectWriter>>,
    edge: Arc<Edge>,
    (clock, http1): (Arc<ConnectionClock>, Option<&http1::Builder>),
    shutdown: &Shutdown,
) where
    W: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let wire = RefusalStream::new(wire, clock.clone(), edge.allowed_origins.allows_all());
    let (watch, framing) = watch_framing(clock.clone());
    let wire = InspectReader::new(wire, watch);
    let (asked, leaving) = (clock.clone(), wait_leaving(edge.succession.clone(), &clock, shutdown));
    let service = service_fn(move |request: Request<Incoming>| {
        let (edge, asking, flaw, open) = (edge.clone(), edge.clone(), framing.flaw(), asked.open_request());
        let direct_writer = direct_writer.clone().filter(|_| request.version() == Version::HTTP_11);
        let request = Box::new(request);
        // hyper keeps room for this future as long as the connection lives, and moves it: 16 bytes
        // are better than thousands.
        Box::pin(async move {
            let is_http2 = request.version() == Version::HTTP_2;
            let mut response = asking.answer(request, flaw).await;
            if !is_http2 && edge.is_left() {
                response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            if let Some(direct_writer) = direct_writer.filter(|_| is_chunked(&response)) {
                response.body_mut().enable_direct_writing(&direct_writer);
            }
            Ok::<_, Infallible>(response.map(|body| {
                let is_local = matches!(body, EdgeBody::Local(_));
                TimedBody::new(body, is_local, open)
            }))
        })
    });
    let wire = TokioIo::new(wire);
    match http1 {
        Some(http1) => serve_connection(pin!(http1.serve_connection(wire, service)), &clock, shutdown, leaving).await,
        // Boxed: its state is twice as large, and the task of every HTTP/1 connection would reserve
        // room for it.
        None => serve_connection(Box::pin(auto_builder(&clock).serve_connection(wire, service)).as_mut(), &clock, shutdown, leaving).await,
    }
}

/// Resolves when a connection without any request yet must close. If another router has taken over,
/// or may, connections accepted here are still answered here.
async fn wait_closing(succession: &Succession, shutdown: &Shutdown) {
    shutdown.wait_drain().await;
    if succession.serves_connections() {
        shutdown.wait_stop().await;
    }
}

/// Resolves when a connection must end once its requests are done.
///
/// If another router has taken over, or may, an idle HTTP/1 connection waits for its next request,
/// whose answer closes it. Closing at once would cross a request on its way. HTTP/2 can tell the
/// client which requests count.
async fn wait_leaving(succession: Succession, clock: &ConnectionClock, shutdown: &Shutdown) {
    shutdown.wait_drain().await;
    while succession.serves_connections() && !clock.has_streams() {
        tokio::select! {
            () = tokio::time::sleep(clock.check_interval()) => {}
            () = shutdown.wait_stop() => return,
        }
    }
}

async fn serve_connection<C>(mut connection: Pin<&mut C>, clock: &ConnectionClock, shutdown: &Shutdown, leaving: impl Future<Output = ()>)
where
    C: GracefulConnection<Error: fmt::Display>,
{
    let ended = tokio::select! {
        biased;
        ended = connection.as_mut() => ended,
        // Unconstrained: a client that always sends more would otherwise use up tokio's budget for
        // a task, and this branch would never be polled.
        why = unconstrained(wait_overdue(clock)) => {
            tracing::debug!(?why, "a client's connection is closed");
            if why == Overdue::Idle && clock.has_streams() {
                end_gracefully(connection, clock, shutdown).await
            } else {
                return;
            }
        }
        () = unconstrained(leaving) => end_gracefully(connection, clock, shutdown).await,
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a client's connection ended early");
    }
}

/// Ends a connection once its requests are answered.
///
/// Over HTTP/2 a request may be on its way. hyper tells the client to send no more, and answers
/// requests until the client has heard so. A silent client has as much time as for a head.
async fn end_gracefully<C>(mut connection: Pin<&mut C>, clock: &ConnectionClock, shutdown: &Shutdown) -> Result<(), C::Error>
where
    C: GracefulConnection,
{
    connection.as_mut().graceful_shutdown();
    let overdue = async {
        tokio::time::sleep(clock.head_timeout()).await;
        wait_overdue(clock).await
    };
    tokio::select! {
        ended = connection => ended,
        _ = overdue => Ok(()),
        () = shutdown.wait_stop() => Ok(()),
    }
}

/// Whether hyper will send an HTTP/1.1 answer in chunks, because no header gives its length.
fn is_chunked(response: &Response<EdgeBody>) -> bool {
    let has = |name| response.headers().contains_key(name);
    !has(header::CONTENT_LENGTH) && !has(header::TRANSFER_ENCODING)
}

/// Resolves when a wait of the connection has lasted too long.
async fn wait_overdue(clock: &ConnectionClock) -> Overdue {
    loop {
        tokio::time::sleep(clock.check_interval()).await;
        if let Some(overdue) = clock.find_overdue() {
            return overdue;
        }
    }
}

#[cfg(test)]
mod tests;
