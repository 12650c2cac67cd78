//! Connections to a fleet's router, in TLS, at the address in `endpoint.json`. The peer must show a
//! certificate of the fleet's authority.

use std::time::Duration;

use anyhow::Context;
use hostler_controller::{Endpoint, FleetFolder};
use hostler_tls::{Stream, connect_to_host};
use rustix::net::sockopt::{set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// How long the router may take to accept.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Silence after which a host is probed, because a dead one says nothing. It is given up after
/// three times that.
const KEEPALIVE: Duration = Duration::from_secs(20);

/// Connects to the admin listener of a fleet whose controller runs in a batch job.
pub(crate) async fn open_admin(folder: &FleetFolder, protocol: &[u8]) -> anyhow::Result<Stream> {
    let endpoint = read_endpoint(folder)?;
    open(&endpoint, &endpoint.admin, protocol).await
}

/// Connects to the fleet's edge, for HTTP/1.1.
pub(crate) async fn open_edge(folder: &FleetFolder) -> anyhow::Result<Stream> {
    let endpoint = read_endpoint(folder)?;
    open(&endpoint, endpoint.edge.strip_prefix("https://").context("the fleet's address has no TLS")?, b"http/1.1").await
}

fn read_endpoint(folder: &FleetFolder) -> anyhow::Result<Endpoint> {
    folder.endpoint()?.context("the fleet's controller has ended: `hostler wait` says when the next one runs")
}

async fn open(endpoint: &Endpoint, address: &str, protocol: &[u8]) -> anyhow::Result<Stream> {
    let authority = endpoint.authority.as_ref().context("the fleet's router shows a certificate of another authority (router.tls_cert)")?;
    let (host, _) = address.rsplit_once(':').with_context(|| format!("the fleet's address is none: {address}"))?;
    let connected = timeout(CONNECT_TIMEOUT, async {
        let stream = TcpStream::connect(address).await?;
        watch_peer(&stream)?;
        connect_to_host(stream, authority, host, protocol).await
    });
    let reached = connected.await.with_context(|| format!("{address} does not answer within {} s", CONNECT_TIMEOUT.as_secs()))?;
    reached.with_context(|| match &endpoint.job {
        Some(_) => format!("cannot reach the fleet's router at {address}; this host has to reach ports of compute nodes"),
        None => format!("cannot reach the fleet's router at {address}"),
    })
}

fn watch_peer(stream: &TcpStream) -> std::io::Result<()> {
    set_socket_keepalive(stream, true)?;
    set_tcp_keepidle(stream, KEEPALIVE)?;
    set_tcp_keepintvl(stream, KEEPALIVE)?;
    Ok(set_tcp_keepcnt(stream, 2)?)
}
