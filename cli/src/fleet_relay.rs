//! A Unix socket that leads to the edge of the user's fleet, for what speaks no TLS itself. Each connection goes where the fleet's router is by then, so
//! it follows a controller that moves.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use hostler_controller::FleetFolder;
use tempfile::TempDir;
use tokio::io::copy_bidirectional;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;

use crate::fleet_connection::open_edge;

/// Connections at once: as many as a batch may have requests.
const MAX_CONNECTIONS: usize = 8192;

#[derive(Debug)]
pub(crate) struct FleetRelay {
    fleet: FleetFolder,
    /// With the socket in it, out of others' reach.
    folder: TempDir,
    listener: UnixListener,
}

impl FleetRelay {
    /// A way to the fleet that has this base URL now. It needs a runtime.
    pub(crate) fn open(fleet: FleetFolder, base_url: &str) -> anyhow::Result<Self> {
        let endpoint = fleet.endpoint()?.filter(|endpoint| endpoint.authority.is_some());
        let own = endpoint.map(|endpoint| format!("{}/v1", endpoint.edge));
        let known = own.as_deref().unwrap_or("none: no fleet of yours has its controller in a batch job");
        ensure!(own.as_deref() == Some(base_url), "https is spoken with your own fleet alone, whose address is {known}");
        // The kernel's limit for socket paths leaves no room for a longer folder.
        let builder = tempfile::Builder::new().prefix("hostler-").permissions(Permissions::from_mode(0o700)).tempdir_in("/tmp");
        let folder = builder.context("cannot make a folder for a socket in /tmp")?;
        let listener = UnixListener::bind(folder.path().join("s")).context("cannot listen in /tmp")?;
        Ok(Self { fleet, folder, listener })
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join("s")
    }

    /// Relays until it is dropped. A connection that does not come about is closed, which its client sees.
    pub(crate) async fn run(self) {
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
