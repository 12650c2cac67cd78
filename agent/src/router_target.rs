//! Where an agent finds its routers: names that are looked up, or a file that names the router.
//!
//! `Uplink` resolves them repeatedly, and agents of one replica once they need a certificate.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::address::{look_up, read_trusted};
use crate::config::AgentConfig;

/// An entry of `agent.router` or `agent.router_file`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RouterTarget {
    /// Name as `HOST:PORT`.
    Name(String),
    /// File whose `agents` entry is such a name. It is replaced when the router moves.
    File(PathBuf),
}

/// Why a router's address is unknown. The caller names the target.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TargetError {
    #[error("{0}")]
    Lookup(#[from] std::io::Error),
    #[error("{name}: {source}")]
    OfFile { name: String, source: Box<Self> },
    #[error("the file (agent.router_file) cannot be read: {0}; a fleet's controller writes it in a folder that its jobs see too")]
    Read(#[source] std::io::Error),
    #[error("the file (agent.router_file) does not say where the router is: {0}")]
    Content(#[from] serde_json::Error),
}

/// Part of the file that is read. The file may contain more.
#[derive(Debug, Deserialize)]
struct RouterFile {
    agents: String,
}

impl RouterTarget {
    /// Targets of the settings. A file replaces all names.
    #[must_use]
    pub fn of(config: &AgentConfig) -> Vec<Self> {
        if !config.router_file.as_os_str().is_empty() {
            return vec![Self::File(config.router_file.clone())];
        }
        config.router.iter().cloned().map(Self::Name).collect()
    }

    #[must_use]
    pub fn is_file(&self) -> bool {
        matches!(self, Self::File(_))
    }

    /// Addresses of the target's routers: a name with several addresses means a router at each.
    ///
    /// Loopback names are the exception, because their addresses belong to one host.
    pub(crate) async fn resolve(&self) -> Result<Vec<SocketAddr>, TargetError> {
        match self {
            Self::Name(name) => look_up_routers(name).await,
            Self::File(path) => {
                let path = path.clone();
                // There is no deadline: a file system that hangs blocks this one thread, and no
                // further one.
                let name = tokio::task::spawn_blocking(move || read_name(&path)).await.expect("reading a file does not panic")?;
                look_up_routers(&name).await.map_err(|source| TargetError::OfFile { name, source: Box::new(source) })
            }
        }
    }
}

impl std::fmt::Display for RouterTarget {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Name(name) => formatter.write_str(name),
            Self::File(path) => path.display().fmt(formatter),
        }
    }
}

fn read_name(path: &Path) -> Result<String, TargetError> {
    let text = read_trusted(path).map_err(TargetError::Read)?;
    let RouterFile { agents } = serde_json::from_slice(&text)?;
    Ok(agents)
}

async fn look_up_routers(name: &str) -> Result<Vec<SocketAddr>, TargetError> {
    let mut addresses = look_up(name).await?;
    if addresses.iter().all(|address| address.ip().is_loopback()) {
        addresses.sort_by_key(SocketAddr::is_ipv6);
        addresses.truncate(1);
    }
    Ok(addresses)
}

#[cfg(test)]
mod tests;
