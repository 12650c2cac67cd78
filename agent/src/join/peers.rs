//! Access between agents of one replica: both show their node's certificate, or both are on one
//! host.

use std::net::IpAddr;
use std::time::Duration;

use hostler_tls::{PeerTls, Stream};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{JoinError, RouterAccess};
use crate::router_target::RouterTarget;

#[derive(Debug, Clone)]
pub(crate) struct PeerAccess {
    access: RouterAccess,
    /// Routers that sign a certificate for this node if it has none.
    routers: Vec<RouterTarget>,
}

impl PeerAccess {
    pub(crate) fn new(access: RouterAccess, routers: Vec<RouterTarget>) -> Self {
        Self { access, routers }
    }

    /// Whether other hosts may connect at all.
    pub(crate) fn is_beyond_host(&self) -> bool {
        !matches!(self.access, RouterAccess::Plain { beyond_host: false })
    }

    /// Does the server's part of a handshake.
    ///
    /// # Errors
    /// Why the other end is not trusted, or this node has no certificate.
    pub(crate) async fn accept(&self, stream: TcpStream, limit: Duration) -> Result<Stream, String> {
        let peer = stream.peer_addr().map_err(|error| error.to_string())?.ip();
        match self.tls(peer).await? {
            None => Ok(Stream::Plain(stream)),
            Some(tls) => hostler_tls::accept(stream, tls.handshake(), limit).await.map_err(|error| hostler_boot::root_cause(&error)),
        }
    }

    /// Does the client's part of a handshake within `limit`.
    ///
    /// # Errors
    /// Same as `accept`.
    pub(crate) async fn connect(&self, stream: TcpStream, limit: Duration) -> Result<Stream, String> {
        let peer = stream.peer_addr().map_err(|error| error.to_string())?.ip();
        let Some(tls) = self.tls(peer).await? else { return Ok(Stream::Plain(stream)) };
        let secured = timeout(limit, tls.connect(stream)).await.map_err(|_| format!("no TLS handshake within {} s", limit.as_secs()))?;
        secured.map_err(|error| hostler_boot::root_cause(&error))
    }

    async fn tls(&self, peer: IpAddr) -> Result<Option<PeerTls>, String> {
        let membership = match &self.access {
            RouterAccess::Fleet(membership) => membership,
            RouterAccess::Plain { beyond_host } if *beyond_host || peer.is_loopback() => return Ok(None),
            RouterAccess::Plain { .. } => {
                return Err(format!(
                    "{peer} is on another host, and this agent has no join token: give it one (agent.join_token_file), or permit plain \
                     text with --allow-plain-text"
                ));
            }
        };
        if let Some(known) = membership.identity.lock().clone().filter(|known| known.is_valid()) {
            return known.peer_tls(&membership.key, &membership.folder).map(Some).map_err(|error| error.to_string());
        }
        let mut reason = "no router is named that could sign for this node".to_owned();
        for router in &self.routers {
            let addresses = match router.resolve().await {
                Ok(addresses) => addresses,
                Err(error) => {
                    reason = format!("{router}: {error}");
                    continue;
                }
            };
            for address in addresses {
                let signed = membership.identity(address).await;
                let tls = signed.and_then(|identity| identity.peer_tls(&membership.key, &membership.folder).map_err(JoinError::from));
                match tls {
                    Ok(tls) => return Ok(Some(tls)),
                    Err(error) => reason = format!("{address}: {error}"),
                }
            }
        }
        Err(format!("this node has no certificate of its fleet: {reason}"))
    }
}
