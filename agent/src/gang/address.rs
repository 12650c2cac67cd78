//! Where the agents of one replica meet, and the network between their nodes.

use std::fs::DirBuilder;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use hostler_boot::ListenError;
use hostler_tls::write_private;
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;

use crate::address::{look_up, read_trusted};
use crate::config::AgentConfig;

/// Setting that names where the head is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum HeadAddress {
    /// `HOST:PORT` on which the head listens.
    Name(String),
    /// File on a file system of all nodes, into which the head writes its address.
    File(PathBuf),
}

/// Content of the file.
#[derive(Debug, Serialize, Deserialize)]
struct HeadFile {
    head: String,
}

impl HeadAddress {
    /// Listens as the head.
    ///
    /// With a file the port is the system's choice, on loopback unless the head may be reached from
    /// other hosts.
    pub(crate) async fn bind(&self, beyond_host: bool) -> Result<(TcpListener, SocketAddr), ListenError> {
        match self {
            Self::Name(name) => hostler_boot::bind(name, "agent.head").await,
            Self::File(_) => hostler_boot::bind(if beyond_host { "0.0.0.0:0" } else { "127.0.0.1:0" }, "agent.head_file").await,
        }
    }

    /// Writes the head's address for the members to read.
    ///
    /// Returns what was written, for `withdraw`.
    pub(crate) fn publish(&self, bound: SocketAddr, host: &str, own: Option<IpAddr>) -> io::Result<String> {
        let Self::File(path) = self else { return Ok(String::new()) };
        let place = match own {
            Some(own) => own.to_string(),
            None if bound.ip().is_loopback() => bound.ip().to_string(),
            None => host.to_owned(),
        };
        let head = if place.contains(':') { format!("[{place}]:{}", bound.port()) } else { format!("{place}:{}", bound.port()) };
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        }
        if std::fs::symlink_metadata(path).is_ok_and(|found| !found.is_file()) {
            return Err(io::Error::other("it is there and no plain file"));
        }
        write_private(path, &serde_json::to_vec(&HeadFile { head: head.clone() })?).map_err(io::Error::other)?;
        Ok(head)
    }

    /// Removes what `publish` has written, unless another head has written since.
    pub(crate) fn withdraw(&self, published: &str) {
        if let Self::File(path) = self
            && read_head(path).is_ok_and(|head| head == published)
        {
            let _ = std::fs::remove_file(path);
        }
    }

    /// Addresses of the head, as known now.
    ///
    /// # Errors
    /// Why they are not known, in a sentence.
    pub(crate) async fn find(&self) -> Result<Vec<SocketAddr>, String> {
        let name = match self {
            Self::Name(name) => name.clone(),
            Self::File(path) => {
                let path = path.clone();
                let read = tokio::task::spawn_blocking(move || read_head(&path).map_err(|error| format!("{}: {error}", path.display())));
                read.await.expect("reading a file does not panic")?
            }
        };
        look_up(&name).await.map_err(|error| format!("{name}: {error}"))
    }

    /// The setting, if there is one.
    pub(crate) fn of(config: &AgentConfig) -> Option<Self> {
        match (config.head.as_str(), config.head_file.as_os_str().is_empty()) {
            ("", true) => None,
            ("", false) => Some(Self::File(config.head_file.clone())),
            (name, _) => Some(Self::Name(name.to_owned())),
        }
    }
}

impl std::fmt::Display for HeadAddress {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Name(name) => formatter.write_str(name),
            Self::File(path) => path.display().fmt(formatter),
        }
    }
}

fn read_head(path: &Path) -> io::Result<String> {
    let HeadFile { head } = serde_json::from_slice(&read_trusted(path)?)?;
    Ok(head)
}

/// Address of this host on a network interface; the first one of IPv4 if there is one.
///
/// # Errors
/// When there is no such interface, with the names of those that are.
pub(crate) fn address_of(interface: &str) -> Result<IpAddr, String> {
    let found = if_addrs::get_if_addrs().map_err(|error| format!("the network interfaces cannot be read: {error}"))?;
    let mut ours: Vec<IpAddr> = found.iter().filter(|one| one.name == interface).map(if_addrs::Interface::ip).collect();
    ours.sort_by_key(IpAddr::is_ipv6);
    ours.first().copied().ok_or_else(|| {
        let mut names: Vec<&str> = found.iter().map(|one| one.name.as_str()).collect();
        names.dedup();
        format!("this host has no network interface {interface} with an address (agent.replica_interface); it has {}", names.join(", "))
    })
}

/// Network interface with this address.
pub(crate) fn interface_with(address: IpAddr) -> Option<String> {
    let found = if_addrs::get_if_addrs().ok()?;
    found.into_iter().find(|one| one.ip() == address).map(|one| one.name)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[tokio::test]
    async fn members_find_the_head_in_its_file_until_it_withdraws() {
        let folder = tempfile::tempdir().unwrap();
        let address = HeadAddress::File(folder.path().join("head.json"));
        assert!(address.find().await.unwrap_err().contains("head.json"), "the head has not begun");
        let (_listener, bound) = address.bind(false).await.unwrap();
        let published = address.publish(bound, "n1", None).unwrap();
        assert_eq!(address.find().await.unwrap(), [bound], "plain text stays on this host");
        std::fs::set_permissions(folder.path().join("head.json"), std::fs::Permissions::from_mode(0o666)).unwrap();
        assert!(address.find().await.unwrap_err().contains("others may change"), "anybody could have written it");
        std::fs::set_permissions(folder.path().join("head.json"), std::fs::Permissions::from_mode(0o600)).unwrap();
        address.withdraw("127.0.0.1:1");
        assert_eq!(address.find().await.unwrap(), [bound], "another head has written since");
        address.withdraw(&published);
        assert!(address.find().await.is_err());
        rustix::fs::mknodat(rustix::fs::CWD, folder.path().join("head.json"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert!(address.find().await.unwrap_err().contains("no plain file"), "a pipe is not waited for");
    }

    #[test]
    fn an_interface_has_an_address_and_an_address_an_interface() {
        let loopback = address_of("lo").unwrap();
        assert!(loopback.is_loopback());
        assert_eq!(interface_with(loopback).as_deref(), Some("lo"));
        assert!(address_of("none7").unwrap_err().contains("it has lo"));
    }
}
