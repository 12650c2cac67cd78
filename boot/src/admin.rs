//! The admin listener: health and metrics pages of a role, on an address or a Unix socket, apart from user traffic.

use std::io;
use std::sync::Arc;

use axum::Router;
use axum::extract::connect_info::Connected;
use axum::extract::{ConnectInfo, Request};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::serve::{IncomingStream, Listener};
use futures_util::{Stream, StreamExt};
use http::uri::Authority;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::exposition::TextFormat;
use crate::metrics::MetricRegistry;
use crate::socket::PrivateSocket;

pub trait AdminPages: Send + Sync + 'static {
    /// `Ok` when the role can do its work; otherwise why not, in one sentence.
    ///
    /// # Errors
    /// The reason, which `/readyz` shows with status 503.
    fn ready(&self) -> Result<(), String>;
    /// What the metrics page shows.
    fn metrics(&self) -> &MetricRegistry;
}

/// The routes `/livez`, `/readyz` and `/metrics`.
pub fn routes(pages: Arc<impl AdminPages>) -> Router {
    let ready = pages.clone();
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
            get(async move |headers: HeaderMap| {
                let format = TextFormat::accepted_by(&headers);
                ([(header::CONTENT_TYPE, format.content_type()), (header::VARY, "Accept")], pages.metrics().render(format))
            }),
        )
}

/// How a call came to the listener; routes find it as `ConnectInfo<Via>`.
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
    /// The origin of this request. An unknown one gets the least trust.
    #[must_use]
    pub fn of(request: &Request) -> Self {
        request.extensions().get::<ConnectInfo<Self>>().map_or(Self::Loopback, |info| info.0)
    }
}

impl Connected<IncomingStream<'_, TcpListener>> for CallOrigin {
    fn connect_info(stream: IncomingStream<'_, TcpListener>) -> Self {
        let local = stream.io().local_addr();
        if local.is_ok_and(|address| !address.ip().to_canonical().is_loopback()) { Self::Network } else { Self::Loopback }
    }
}

impl Connected<IncomingStream<'_, PrivateSocket>> for CallOrigin {
    fn connect_info(_: IncomingStream<'_, PrivateSocket>) -> Self {
        Self::Socket
    }
}

/// Serves `routes` on a TCP listener until `end`.
pub async fn serve(listener: TcpListener, routes: Router, end: CancellationToken) {
    serve_on(listener, routes, end, "listener").await;
}

/// Serves `routes` on what the operator knows as the admin `place`.
async fn serve_on<L>(listener: L, routes: Router, end: CancellationToken, place: &'static str)
where
    L: Listener,
    L::Addr: std::fmt::Debug,
    CallOrigin: for<'a> Connected<IncomingStream<'a, L>>,
{
    let served =
        axum::serve(listener, routes.into_make_service_with_connect_info::<CallOrigin>()).with_graceful_shutdown(end.cancelled_owned());
    if let Err(error) = served.await {
        tracing::error!(%error, "the admin {place} ended");
    }
}

/// Connections that were secured before they come here, over TCP. A stream of them is the listener.
struct SecuredListener<C>(C);

impl<C, S> Listener for SecuredListener<C>
where
    C: Stream<Item = S> + Unpin + Send + 'static,
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    type Io = S;
    type Addr = CallOrigin;

    async fn accept(&mut self) -> (S, CallOrigin) {
        match self.0.next().await {
            Some(stream) => (stream, CallOrigin::Network),
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<CallOrigin> {
        Ok(CallOrigin::Network)
    }
}

impl<C, S> Connected<IncomingStream<'_, SecuredListener<C>>> for CallOrigin
where
    C: Stream<Item = S> + Unpin + Send + 'static,
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    fn connect_info(stream: IncomingStream<'_, SecuredListener<C>>) -> Self {
        *stream.remote_addr()
    }
}

/// Serves `routes` on connections that were secured already, until `end`.
pub async fn serve_secured<S>(connections: impl Stream<Item = S> + Unpin + Send + 'static, routes: Router, end: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    serve_on(SecuredListener(connections), routes, end, "listener").await;
}

/// Serves `routes` on a Unix socket until `end`.
pub async fn serve_socket(socket: PrivateSocket, routes: Router, end: CancellationToken) {
    serve_on(socket, routes, end, "socket").await;
}

/// Whether a request to loopback was meant for this host: it names an IP address, `localhost`, this
/// host's own name or the host of `listens`, which was configured. A browser that another site's
/// name has led here (DNS rebinding) sends that name, and would show the answer to that site.
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

/// The answer to a request that names another host.
pub const WRONG_HOST: &str = "this page is for programs of this host, and the request's `Host` names another: ask by an IP address, \
                              `localhost`, or the name that the listener was given\n";

/// The pages, but metrics are refused to requests that came to loopback under another host's name.
/// For listeners without keys.
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
