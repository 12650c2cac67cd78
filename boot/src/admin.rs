//! The admin listener: health and metrics pages of a role, on an address or a Unix socket, apart from user traffic.

use std::path::Path;
use std::sync::Arc;

use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::net::{TcpListener, UnixListener};
use tokio_util::sync::CancellationToken;

/// What the pages show.
pub trait Pages: Send + Sync + 'static {
    /// `Ok` when the role can do its work; otherwise why not, in one sentence.
    ///
    /// # Errors
    /// The reason, which `/readyz` shows with status 503.
    fn ready(&self) -> Result<(), String>;
    /// The metrics page, without its last line `# EOF`.
    fn metrics(&self) -> String;
}

/// The routes `/livez`, `/readyz` and `/metrics`.
pub fn routes(pages: Arc<impl Pages>) -> Router {
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
            get(move || {
                let page = pages.metrics() + "# EOF\n";
                async move { ([(header::CONTENT_TYPE, crate::metrics::CONTENT_TYPE)], page).into_response() }
            }),
        )
}

/// Serves `routes` on a TCP listener until `end`.
pub async fn serve(listener: TcpListener, routes: Router, end: CancellationToken) {
    let served = axum::serve(listener, routes).with_graceful_shutdown(end.cancelled_owned()).await;
    if let Err(error) = served {
        tracing::error!(%error, "the admin listener ended");
    }
}

/// Serves `routes` on a Unix socket at `path` until `end`, and removes the socket file.
///
/// # Errors
/// When the socket cannot be bound.
pub async fn serve_unix(path: &Path, routes: Router, end: CancellationToken) -> std::io::Result<()> {
    let listener = UnixListener::bind(path)?;
    let served = axum::serve(listener, routes).with_graceful_shutdown(end.cancelled_owned()).await;
    let removed = std::fs::remove_file(path);
    served.and(removed)
}
