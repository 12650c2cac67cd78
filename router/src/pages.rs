//! The router's own pages, including the one for people, and operators' calls, on the admin
//! listener and on the operators' socket.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use hostler_boot::admin::{self, AdminPages};
use hostler_boot::metrics::MetricRegistry;
use hostler_boot::{PrivateSocket, Shutdown, accept};
use hostler_tls::{EdgeTls, Stream as Tunnel};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::keys::{AdminGuard, guard_pages};
use crate::operators::{Operators, OperatorsSocket};
use crate::page::{Page, PageChat, chat_routes, page_routes};

/// Limit of a handshake, as for connections of agents.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Most simultaneous handshakes. Further connections wait to be accepted.
const MAX_HANDSHAKES: usize = 64;

#[derive(Debug)]
pub(crate) struct RouterAdmin {
    pub(crate) calls: Operators,
    pub(crate) page: Arc<Page>,
    pub(crate) chat: Arc<PageChat>,
    pub(crate) metric_registry: MetricRegistry,
    pub(crate) shutdown: Shutdown,
}

impl RouterAdmin {
    /// Serves the pages and operators' calls on the admin listener and on the operators' socket,
    /// until `end`.
    pub(crate) async fn serve(
        self,
        guard: AdminGuard,
        (listener, tls): (TcpListener, Option<Arc<EdgeTls>>),
        operators: (OperatorsSocket, Option<PrivateSocket>),
        end: CancellationToken,
    ) {
        let (calls, page, chat) = (self.calls.clone(), self.page.clone(), self.chat.clone());
        let people = page_routes(page).merge(chat_routes(chat));
        let pages = guard_pages(admin::routes(Arc::new(self)).merge(calls.routes()).merge(people), guard);
        let (place, socket) = operators;
        let on_port = async {
            match tls {
                None => admin::serve(listener, pages.clone(), end.clone()).await,
                Some(tls) => admin::serve_secured(Box::pin(accept_secured(listener, tls)), pages.clone(), end.clone()).await,
            }
        };
        tokio::join!(place.serve(socket, pages.clone(), end.clone()), on_port);
    }
}

/// Yields the connections whose handshake has succeeded.
fn accept_secured(listener: TcpListener, tls: Arc<EdgeTls>) -> impl Stream<Item = Tunnel> {
    let accepted = futures_util::stream::unfold(listener, |listener| async { Some((accept(&listener).await, listener)) });
    let secured = accepted.map(move |stream| {
        let handshake = tls.handshake();
        async move { hostler_tls::accept(stream, handshake, HANDSHAKE_TIMEOUT).await.ok() }
    });
    secured.buffer_unordered(MAX_HANDSHAKES).filter_map(std::future::ready)
}

impl AdminPages for RouterAdmin {
    fn ready(&self) -> Result<(), String> {
        if self.shutdown.is_draining() {
            return Err("draining".into());
        }
        if self.calls.fleet.view().replicas.iter().any(|replica| replica.is_ready()) { Ok(()) } else { Err("no replica is ready".into()) }
    }

    fn metrics(&self) -> &MetricRegistry {
        &self.metric_registry
    }
}
