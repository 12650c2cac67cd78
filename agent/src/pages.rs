//! The agent's own pages for operators and probes: health and metrics, on a Unix socket in its run
//! directory or on a configured address.
//!
//! While no engine starts, this module restores removed parts of the run directory.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hostler_boot::admin::{self, AdminPages};
use hostler_boot::metrics::MetricRegistry;
use hostler_boot::{ListenError, PrivateSocket, bind};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::engine::Phase;
use crate::node::NodeState;
use crate::run_dir::{HeldDirectories, RunDir};

/// How often the run directory is checked. A check looks at one file.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct AgentPages {
    pub(crate) state: Arc<NodeState>,
    pub(crate) metric_registry: MetricRegistry,
}

impl AdminPages for AgentPages {
    fn ready(&self) -> Result<(), String> {
        let ready = self.state.replicas().iter().any(|replica| replica.engine.status().borrow().phase == Phase::Ready);
        if ready { Ok(()) } else { Err("no engine is ready".into()) }
    }

    fn metrics(&self) -> &MetricRegistry {
        &self.metric_registry
    }
}

/// Listener for the pages.
pub(crate) enum PagesListener {
    Address(TcpListener, String),
    Socket(PathBuf),
}

impl PagesListener {
    /// Binds the configured address, if there is one.
    pub(crate) async fn bind(configured: &str, run_dir: &RunDir) -> Result<Self, ListenError> {
        if configured.is_empty() {
            return Ok(Self::Socket(run_dir.admin_socket()));
        }
        let (listener, address) = bind(configured, "agent.agent_admin").await?;
        tracing::info!(%address, "admin pages");
        Ok(Self::Address(listener, configured.to_owned()))
    }

    /// Serves the pages, and keeps the run directory, until `end`.
    pub(crate) async fn serve(self, pages: Arc<AgentPages>, run_dirs: Arc<HeldDirectories>, end: CancellationToken) {
        let routes = admin::routes(pages);
        match self {
            Self::Address(listener, configured) => {
                let serving = admin::serve(listener, admin::guard_metrics(routes, &configured), end.clone());
                tokio::join!(serving, async { while wait_removed(&run_dirs, || false, &end).await {} });
            }
            Self::Socket(path) => {
                while let Some(bound) = bind_again(&path, &run_dirs, &end).await {
                    let (file, replaced) = (bound.file().clone(), end.child_token());
                    let watch = async {
                        wait_removed(&run_dirs, || !file.exists(), &end).await;
                        replaced.cancel();
                    };
                    tokio::join!(admin::serve_socket(bound, routes.clone(), replaced.clone()), watch);
                }
            }
        }
    }
}

/// Creates the socket, as often as necessary. `None` at the end.
async fn bind_again(path: &Path, run_dirs: &HeldDirectories, end: &CancellationToken) -> Option<PrivateSocket> {
    let mut is_failing = false;
    while !end.is_cancelled() {
        match PrivateSocket::bind(path).await {
            Ok(socket) => return Some(socket),
            Err(error) if !std::mem::replace(&mut is_failing, true) => {
                tracing::error!(%error, "the admin socket could not be made; it is tried again every second");
            }
            Err(_) => {}
        }
        wait_removed(run_dirs, || true, end).await;
    }
    None
}

/// Restores the run directory whenever it is removed.
///
/// Returns `true` once `is_gone` holds, and `false` at the end.
async fn wait_removed(run_dirs: &HeldDirectories, is_gone: impl Fn() -> bool, end: &CancellationToken) -> bool {
    let mut is_failing = false;
    loop {
        tokio::select! {
            () = tokio::time::sleep(CHECK_INTERVAL) => {}
            () = end.cancelled() => return false,
        }
        match run_dirs.restore() {
            Ok(()) => is_failing = false,
            Err(error) if !std::mem::replace(&mut is_failing, true) => tracing::error!(%error, "the run directory was removed"),
            Err(_) => {}
        }
        if !is_failing && is_gone() {
            return true;
        }
    }
}
