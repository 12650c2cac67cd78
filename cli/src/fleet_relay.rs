//! A Unix socket that leads to the edge of the user's fleet, for code without TLS. Each connection
//! goes to the router's current address, so the relay follows a controller that moves.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, ensure};
use hostler_bench::Target;
use hostler_controller::FleetFolder;
use tempfile::TempDir;
use tokio::io::copy_bidirectional;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;

use crate::fleet_connection::open_edge;
use crate::settings::cluster_config;

/// Most connections at once: as many as a batch may have requests.
const MAX_CONNECTIONS: usize = 8192;

/// Name of the socket in its folder.
const SOCKET: &str = "s";

#[derive(Debug)]
pub(crate) struct FleetRelay {
    fleet: FleetFolder,
    /// Folder of the socket, out of others' reach.
    folder: TempDir,
    listener: UnixListener,
}

impl FleetRelay {
    /// Returns the target itself, or a relay to the user's fleet if the target is its current
    /// address. Needs a runtime.
    ///
    /// The relay runs as long as the returned handle is held.
    pub(crate) fn lead(target: Target, config: Option<&Path>) -> anyhow::Result<(Target, Option<AbortOnDropHandle<()>>)> {
        let Some(origin) = target.secured_origin() else { return Ok((target, None)) };
        let relay = Self::open(FleetFolder::open(&cluster_config(config)?)?, &origin)?;
        let target = target.through(relay.folder.path().join(SOCKET));
        Ok((target, Some(AbortOnDropHandle::new(tokio::spawn(relay.run())))))
    }

    fn open(fleet: FleetFolder, origin: &str) -> anyhow::Result<Self> {
        let own = fleet.endpoint()?.filter(|endpoint| endpoint.authority.is_some()).map(|endpoint| endpoint.edge);
        let known = own.as_deref().unwrap_or("none: no fleet of yours runs, or none that shows a certificate of its authority");
        ensure!(own.as_deref() == Some(origin), "https is spoken with your own fleet alone, whose address is {known}");
        // The kernel's limit for socket paths leaves no room for a longer folder.
        let builder = tempfile::Builder::new().prefix("hostler-").permissions(Permissions::from_mode(0o700)).tempdir_in("/tmp");
        let folder = builder.context("cannot make a folder for a socket in /tmp")?;
        let listener = UnixListener::bind(folder.path().join(SOCKET)).context("cannot listen in /tmp")?;
        Ok(Self { fleet, folder, listener })
    }

    /// Relays until dropped. A connection that cannot be made is closed, which its client sees.
    async fn run(self) {
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                accepted = self.listener.accept(), if connections.len() < MAX_CONNECTIONS => match accepted {
                    Ok((client, _)) => drop(connections.spawn(relay(client, self.fleet.clone()))),
                    Err(error) => {
                        tracing::debug!(%error, "a connection to the fleet was not accepted");
                        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                    }
                },
                Some(_) = connections.join_next() => {}
            }
        }
    }
}

async fn relay(mut client: UnixStream, fleet: FleetFolder) {
    let relayed = async { anyhow::Ok(copy_bidirectional(&mut client, &mut open_edge(&fleet).await?).await?) };
    if let Err(error) = relayed.await {
        tracing::debug!(error = format!("{error:#}"), "a connection to the fleet has ended");
    }
}
