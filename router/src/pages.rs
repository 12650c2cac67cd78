//! The router's own pages, the one for people among them, and operators' calls, on the admin listener and on the operators' socket.

use std::sync::Arc;

use hostler_boot::admin::{self, AdminPages};
use hostler_boot::metrics::MetricRegistry;
use hostler_boot::{PrivateSocket, Shutdown};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::keys::{AdminGuard, guard_pages};
use crate::operators::{Operators, OperatorsSocket};
use crate::page::{Page, page_routes};

#[derive(Debug)]
pub(crate) struct RouterAdmin {
    pub(crate) calls: Operators,
    pub(crate) page: Arc<Page>,
    pub(crate) metric_registry: MetricRegistry,
    pub(crate) shutdown: Shutdown,
}

impl RouterAdmin {
    /// Serves the pages and operators' calls on the admin listener and on the operators' socket,
    /// until `end`.
    pub(crate) async fn serve(
        self,
        guard: AdminGuard,
        listener: TcpListener,
        operators: (OperatorsSocket, Option<PrivateSocket>),
        end: CancellationToken,
    ) {
        let (calls, page) = (self.calls.clone(), self.page.clone());
        let pages = guard_pages(admin::routes(Arc::new(self)).merge(calls.routes()).merge(page_routes(page)), guard);
        let (place, socket) = operators;
        tokio::join!(place.serve(socket, pages.clone(), end.clone()), admin::serve(listener, pages, end));
    }
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
