//! The subcommand `bridge`: stands in the place of an engine that somebody else runs.
//!
//! It listens on the socket that an engine of the agent would have, and passes each connection's
//! bytes to the other one. It waits until that can be reached, and ends when it no longer can, so
//! the agent's supervision of engines applies. The other engine's process is never touched.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hostler_boot::socket::MAX_PATH_BYTES;
use tokio::io::{AsyncRead, AsyncWrite, copy_bidirectional};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// How often an engine that cannot be reached yet is tried.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// Time limit for a connection to the engine.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

mod engine_key;
mod keyed_requests;

pub use engine_key::{EngineKey, EngineKeyError};

/// Where an engine listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttachTarget {
    /// `HOST:PORT`
    Tcp(String),
    Unix(PathBuf),
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AttachTargetError {
    #[error("cannot attach to {0:?}: give http://HOST:PORT, or unix:PATH")]
    Form(String),
    #[error("cannot attach to {0:?}: engines are reached without TLS, on this host or over a network that you trust")]
    Tls(String),
    #[error("cannot attach to {0:?}: an engine's API begins at the root, so leave out the path")]
    Path(String),
    #[error("cannot attach to {0:?}: its port is a number from 1 to 65535")]
    Port(String),
    #[error("cannot attach to {0:?}: a socket's path has at most {MAX_PATH_BYTES} bytes")]
    LongPath(String),
    #[error("cannot attach to {0:?}: no engine takes a name and a password, so leave them out")]
    UserInfo(String),
}

impl AttachTarget {
    /// Parses `http://HOST:PORT`, without a port 80, or `unix:PATH`.
    ///
    /// # Errors
    /// If it is neither.
    pub fn parse(text: &str) -> Result<Self, AttachTargetError> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return match path.len() {
                0 => Err(AttachTargetError::Form(text.to_owned())),
                length if length > MAX_PATH_BYTES => Err(AttachTargetError::LongPath(text.to_owned())),
                _ => Ok(Self::Unix(path.into())),
            };
        }
        if text.starts_with("https:") {
            return Err(AttachTargetError::Tls(text.to_owned()));
        }
        let url: http::Uri = text.parse().map_err(|_| AttachTargetError::Form(text.to_owned()))?;
        let (Some("http"), Some(authority)) = (url.scheme_str(), url.authority()) else {
            return Err(AttachTargetError::Form(text.to_owned()));
        };
        if !matches!(url.path(), "" | "/") || url.query().is_some() || text.contains('#') {
            return Err(AttachTargetError::Path(text.to_owned()));
        }
        let (name, port) = (authority.host(), &authority.as_str()[authority.host().len()..]);
        match (authority.as_str().contains('@'), port) {
            (true, _) => Err(AttachTargetError::UserInfo(text.to_owned())),
            (false, "") => Ok(Self::Tcp(format!("{name}:80"))),
            (false, _) => match authority.port_u16() {
                None | Some(0) => Err(AttachTargetError::Port(text.to_owned())),
                Some(port) => Ok(Self::Tcp(format!("{name}:{port}"))),
            },
        }
    }

    /// Whether both surely name the same server. `localhost` is either loopback address.
    pub(crate) fn is_same_server(&self, other: &Self) -> bool {
        let (Self::Tcp(one), Self::Tcp(another)) = (self, other) else { return self == other };
        let (Some((one, port)), Some((another, other_port))) = (one.rsplit_once(':'), another.rsplit_once(':')) else { return false };
        let is_loopback = |host: &str| parse_address(host).is_some_and(|address| address.is_loopback());
        let is_localhost = |host: &str| host.trim_end_matches('.').eq_ignore_ascii_case("localhost");
        let is_same_host = match (parse_address(one), parse_address(another)) {
            (Some(one), Some(another)) => one == another,
            _ => {
                one.eq_ignore_ascii_case(another) || is_localhost(one) && is_loopback(another) || is_localhost(another) && is_loopback(one)
            }
        };
        port == other_port && is_same_host
    }

    pub(crate) async fn connect(&self) -> io::Result<Box<dyn Stream>> {
        let connected = timeout(CONNECT_TIMEOUT, async {
            Ok(match self {
                Self::Tcp(address) => {
                    let stream = TcpStream::connect(address).await?;
                    stream.set_nodelay(true)?;
                    Box::new(stream) as Box<dyn Stream>
                }
                Self::Unix(path) => Box::new(UnixStream::connect(path).await?),
            })
        });
        connected.await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }
}

/// The address that a host of a URL is; a connection to no address in particular goes to this host.
fn parse_address(host: &str) -> Option<IpAddr> {
    let address: IpAddr = host.trim_start_matches('[').trim_end_matches(']').parse().ok()?;
    Some(match address.to_canonical() {
        IpAddr::V4(address) if address.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(address) if address.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        address => address,
    })
}

impl fmt::Display for AttachTarget {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(out, "http://{address}"),
            Self::Unix(path) => write!(out, "unix:{}", path.display()),
        }
    }
}

pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

#[derive(Debug, thiserror::Error)]
pub enum BridgeError {
    #[error("cannot listen at {}: {source}", path.display())]
    Listen { path: PathBuf, source: io::Error },
    #[error("{target} cannot be reached any more: {source}")]
    Lost { target: AttachTarget, source: io::Error },
}

/// Serves `socket` with the engine at `target`, until `stop` and the end of the connections that
/// there are then. Each request carries `key`, if there is one.
///
/// # Errors
/// If the socket cannot be listened at, or the engine can no longer be reached.
pub async fn run(target: AttachTarget, key: Option<EngineKey>, socket: &Path, stop: CancellationToken) -> Result<(), BridgeError> {
    let is_there = stop.run_until_cancelled(await_engine(&target)).await;
    if is_there.is_none() {
        return Ok(());
    }
    let listener = UnixListener::bind(socket).map_err(|source| BridgeError::Listen { path: socket.to_owned(), source })?;
    let connections = TaskTracker::new();
    let (lost, mut losses) = mpsc::channel(1);
    loop {
        let accepted = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            Some(source) = losses.recv() => return Err(BridgeError::Lost { target, source }),
            accepted = listener.accept() => accepted,
        };
        // Without file descriptors there are connections that will end.
        let Ok((mut client, _)) = accepted else {
            sleep(RETRY_INTERVAL).await;
            continue;
        };
        let (target, key, lost) = (target.clone(), key.clone(), lost.clone());
        connections.spawn(async move {
            match target.connect().await {
                // Either end's fault ends the connection, and the other end sees so.
                Ok(mut engine) => match key {
                    None => drop(copy_bidirectional(&mut client, &mut engine).await),
                    Some(key) => drop(keyed_requests::exchange(client, engine, &key).await),
                },
                Err(source) if is_gone(&source) => drop(lost.try_send(source)),
                // A full queue or a lack of descriptors ends this connection alone. The agent's
                // health checks decide about an engine that answers no more.
                Err(source) => tracing::info!(reason = %source, "a connection was refused"),
            }
        });
    }
    drop(listener);
    connections.close();
    connections.wait().await;
    Ok(())
}

/// Whether nobody listens any more.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound)
}

/// Waits until the engine can be reached, and logs why not.
async fn await_engine(target: &AttachTarget) {
    let mut logged = String::new();
    while let Err(error) = target.connect().await {
        let why = error.to_string();
        if why != logged {
            tracing::info!(%target, reason = why, "the engine cannot be reached yet");
            logged = why;
        }
        sleep(RETRY_INTERVAL).await;
    }
    tracing::info!(%target, "attached");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_engine_is_not_gone() {
        assert!(is_gone(&io::ErrorKind::ConnectionRefused.into()) && is_gone(&io::ErrorKind::NotFound.into()));
        for kind in [io::ErrorKind::WouldBlock, io::ErrorKind::TimedOut, io::ErrorKind::Other] {
            assert!(!is_gone(&kind.into()), "{kind}");
        }
    }

    #[test]
    fn localhost_and_its_addresses_are_one_server() {
        let is_same = |one: &str, another: &str| {
            let [one, another] = [one, another].map(|target| AttachTarget::parse(target).unwrap());
            assert_eq!(one.is_same_server(&another), another.is_same_server(&one));
            one.is_same_server(&another)
        };
        for (one, another) in [
            ("http://127.0.0.1:8000", "http://localhost:8000"),
            ("http://LOCALHOST.:8000", "http://[::1]:8000/"),
            ("http://0.0.0.0:8000", "http://localhost:8000"),
            ("http://[::ffff:127.0.0.1]:8000", "http://127.0.0.1:8000"),
            ("http://Host", "http://host:80"),
            ("unix:///run/v.sock", "unix:/run/v.sock"),
        ] {
            assert!(is_same(one, another), "{one} {another}");
        }
        for (one, another) in [
            ("http://127.0.0.1:8000", "http://localhost:8001"),
            ("http://127.0.0.1:8000", "http://[::1]:8000"),
            ("http://127.0.0.1:8000", "http://127.0.0.2:8000"),
            ("http://host:8000", "http://localhost:8000"),
            ("http://localhost:8000", "unix:/run/v.sock"),
        ] {
            assert!(!is_same(one, another), "{one} {another}");
        }
    }

    #[test]
    fn a_target_is_an_address_or_a_socket() {
        let tcp = |address: &str| Ok(AttachTarget::Tcp(address.to_owned()));
        assert_eq!(AttachTarget::parse("http://127.0.0.1:8000"), tcp("127.0.0.1:8000"));
        assert_eq!(AttachTarget::parse("http://[::1]:8000/"), tcp("[::1]:8000"));
        assert_eq!(AttachTarget::parse("http://host"), tcp("host:80"));
        for path in ["unix:/run/v.sock", "unix:///run/v.sock"] {
            assert_eq!(AttachTarget::parse(path), Ok(AttachTarget::Unix("/run/v.sock".into())));
        }
        for (text, words) in [
            ("https://host", "without TLS"),
            ("host:8000", "http://HOST:PORT"),
            ("unix:", "unix:PATH"),
            ("", "http://HOST:PORT"),
            ("http://host/v1", "leave out the path"),
            ("http://host#v1", "leave out the path"),
            ("http://host:abc", "from 1 to 65535"),
            ("http://host:99999", "from 1 to 65535"),
            ("http://host:0", "from 1 to 65535"),
            ("http://host:", "from 1 to 65535"),
            ("http://me:secret@host:8000", "a name and a password"),
            (&format!("unix:/{}", "a".repeat(107)), "at most 107 bytes"),
        ] {
            let refused = AttachTarget::parse(text).unwrap_err().to_string();
            assert!(refused.contains(words), "{refused}");
        }
    }
}
