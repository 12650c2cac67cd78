//! The admin listener: health and metrics pages of a role, on an address or a Unix socket, apart
//! from user traffic.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{ConnectInfo, Request};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures_util::{Stream, StreamExt};
use http::uri::Authority;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

use crate::connection_clock::{CROWDED_PATIENCE, ConnectionClock, ConnectionPlaces, ConnectionTimeouts, TimedBody};
use crate::listen::configure_stream;
use crate::metrics::MetricRegistry;
use crate::socket::PrivateSocket;

pub trait AdminPages: Send + Sync + 'static {
    /// `Ok` if the role can do its work.
    ///
    /// # Errors
    /// The reason in one sentence, which `/readyz` shows with status 503.
    fn ready(&self) -> Result<(), String>;
    /// Metrics that the metrics page shows.
    fn metrics(&self) -> &MetricRegistry;
}

/// The routes `/livez`, `/readyz` and `/metrics`.
///
/// One page of metrics is made at a time, on a thread of its own: whoever asks for many of them
/// delays no request of the role.
pub fn routes(pages: Arc<impl AdminPages>) -> Router {
    let (ready, turns) = (pages.clone(), Arc::new(Semaphore::new(1)));
    Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route(
            "/readyz",
            get(move || {
                let state = ready.ready();
                async move {
                    match state {
                        Ok(()) => (StatusCode::OK, "ready\n".to_owned()),
                        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
                    }
                }
            }),
        )
        .route(
            "/metrics",
            get(move || {
                let (pages, turns) = (pages.clone(), turns.clone());
                async move {
                    let _turn = turns.acquire_owned().await;
                    let page = tokio::task::spawn_blocking(move || pages.metrics().render()).await.unwrap_or_default();
                    ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], page)
                }
            }),
        )
}

/// How a call reached the listener; routes find it as `ConnectInfo<CallOrigin>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallOrigin {
    /// Over the Unix socket, so from this user or root.
    Socket,
    /// Over TCP, to a loopback address: from any user of this host, browsers included.
    Loopback,
    /// Over TCP, to another address of this host.
    Network,
}

impl CallOrigin {
    /// Origin of this request. An unknown origin gets the least trust.
    #[must_use]
    pub fn of(request: &Request) -> Self {
        request.extensions().get::<ConnectInfo<Self>>().map_or(Self::Loopback, |info| info.0)
    }
}

fn origin_on_port(stream: &TcpStream) -> CallOrigin {
    let local = stream.local_addr();
    if local.is_ok_and(|address| !address.ip().to_canonical().is_loopback()) { CallOrigin::Network } else { CallOrigin::Loopback }
}

/// Connections at once on one listener. Further ones wait in the accept queue, where they take no
/// descriptor of those that clients of the edge need.
const MAX_CONNECTIONS: usize = 256;

/// A connection without a request under way is closed after this time, or twice as much at most.
/// Monitoring scrapes more rarely than that, and connects anew.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// Time after which a connection whose client reads nothing of an answer is closed.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Limits of a connection's waits. A head has as long as the next request.
const TIMEOUTS: ConnectionTimeouts = ConnectionTimeouts { head: IDLE_TIMEOUT, idle: IDLE_TIMEOUT, stall: STALL_TIMEOUT };

/// Serves `routes` on a TCP listener until `end`.
pub async fn serve(listener: TcpListener, routes: Router, end: CancellationToken) {
    let accepting = async |listener: &mut TcpListener| loop {
        let stream = crate::listen::accept(listener).await;
        if configure_stream(&stream, STALL_TIMEOUT).is_ok() {
            return (origin_on_port(&stream), stream);
        }
    };
    serve_on(listener, accepting, routes, end).await;
}

/// Serves `routes` on connections that are already secured, until `end`.
pub async fn serve_secured<S>(connections: impl Stream<Item = S> + Unpin + Send + 'static, routes: Router, end: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let accepting = async |connections: &mut _| match StreamExt::next(connections).await {
        Some(stream) => (CallOrigin::Network, stream),
        None => std::future::pending().await,
    };
    serve_on(connections, accepting, routes, end).await;
}

/// Serves `routes` on a Unix socket until `end`.
pub async fn serve_socket(socket: PrivateSocket, routes: Router, end: CancellationToken) {
    serve_on(socket, async |socket: &mut PrivateSocket| (CallOrigin::Socket, socket.accept_trusted().await), routes, end).await;
}

/// Serves connections that `accept` takes from `listener`, a bounded number at once, until `end`
/// and until the requests under way are answered.
async fn serve_on<L, S>(mut listener: L, accept: impl AsyncFn(&mut L) -> (CallOrigin, S), routes: Router, end: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (places, connections) = (ConnectionPlaces::new(MAX_CONNECTIONS), TaskTracker::new());
    let accepting = async {
        loop {
            let place = places.take().await;
            let (origin, stream) = accept(&mut listener).await;
            let serving = serve_connection(stream, origin, routes.clone(), places.clone(), end.clone());
            connections.spawn(async move {
                serving.await;
                drop(place);
            });
        }
    };
    tokio::select! {
        () = accepting => {}
        () = end.cancelled() => {}
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    origin: CallOrigin,
    routes: Router,
    places: Arc<ConnectionPlaces>,
    end: CancellationToken,
) {
    let clock = ConnectionClock::new(TIMEOUTS, Some(places));
    let opened = clock.clone();
    let answer = service_fn(move |mut request: http::Request<Incoming>| {
        let (routes, open) = (routes.clone(), opened.open_request());
        request.extensions_mut().insert(ConnectInfo(origin));
        async move {
            let answer = routes.oneshot(request.map(Body::new)).await;
            answer.map(|answer| answer.map(|body| Body::new(TimedBody::new(body, true, open))))
        }
    });
    let server = auto::Builder::new(TokioExecutor::new());
    let mut connection = std::pin::pin!(server.serve_connection_with_upgrades(TokioIo::new(stream), answer));
    let ended = tokio::select! {
        biased;
        ended = connection.as_mut() => ended,
        () = wait_overdue(&clock) => return,
        () = end.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection to the admin pages ended early");
    }
}

/// Resolves when the client has sent no request, or read nothing of an answer, for too long.
async fn wait_overdue(clock: &ConnectionClock) {
    while clock.find_overdue().is_none() {
        tokio::time::sleep(CROWDED_PATIENCE).await;
    }
}

/// Whether a request to loopback was meant for this host.
///
/// Such a request names an IP address, `localhost`, this host's own name or the configured host of
/// `listens`. A browser led here by another site's name (DNS rebinding) sends that name, and would
/// show the answer to that site.
#[must_use]
pub fn names_this_host(uri: &Uri, headers: &HeaderMap, listens: &str) -> bool {
    let configured = listens.rsplit_once(':').map_or(listens, |(host, _)| host);
    let system = rustix::system::uname();
    let is_ours = |name: &Authority| {
        let host = name.host().trim_matches(['[', ']']);
        let names = ["localhost", configured, system.nodename().to_str().unwrap_or_default()];
        host.parse::<std::net::IpAddr>().is_ok() || names.iter().any(|name| host.eq_ignore_ascii_case(name))
    };
    let mut named = headers.get_all(header::HOST).iter().map(|value| value.as_bytes().try_into().ok());
    // HTTP/2 has the host in `:authority`, which is part of the URI.
    uri.authority().is_none_or(is_ours) && named.all(|name| name.as_ref().is_some_and(is_ours))
}

/// Answer to a request that names another host.
pub const WRONG_HOST: &str = "this page is for programs of this host, and the request's `Host` names another: ask by an IP address, \
                              `localhost`, or the name that the listener was given\n";

/// Guards the pages of listeners without keys: requests that came to loopback under another host's
/// name get no metrics.
pub fn guard_metrics(pages: Router, listens: &str) -> Router {
    let listens: Arc<str> = listens.into();
    pages.layer(from_fn(move |request: Request, next: Next| {
        let listens = listens.clone();
        async move {
            let is_open = matches!(request.uri().path(), "/livez" | "/readyz") || CallOrigin::of(&request) != CallOrigin::Loopback;
            if is_open || names_this_host(request.uri(), request.headers(), &listens) {
                next.run(request).await
            } else {
                wrong_host_response()
            }
        }
    }))
}

fn wrong_host_response() -> Response {
    (StatusCode::FORBIDDEN, WRONG_HOST).into_response()
}

#[cfg(test)]
mod tests;
