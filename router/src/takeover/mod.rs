//! Lets a router take the place of another one of its user without clients noticing.
//!
//! The new router gets the listening sockets, waits until the agents are attached to it too, and
//! then takes the clients. The other one, its *predecessor*, finishes its requests and leaves.
//! Decision 21 gives the reasons. The two communicate over a private Unix socket beside the
//! operators' one. `predecessor` is the running router's end, `successor` the starting router's.
//! Until the successor says that it serves, the predecessor can go on as if nothing had happened.

mod message;
mod peer_process;
mod predecessor;
mod successor;

use std::io;
use std::path::{Path, PathBuf};

use hostler_boot::SocketError;
use hostler_boot::socket::is_live;

pub(crate) use predecessor::{ListeningSockets, Predecessor};
pub(crate) use successor::{Successor, SuccessorParts, is_offered};

/// Why a router does not get another one's place. The other one serves on.
#[derive(Debug, thiserror::Error)]
pub enum TakeoverError {
    #[error("the running router does not give its place away: {0}")]
    Refused(String),
    #[error("the running router does not answer ({0}); it serves on: see its log, or stop it and start the new one without --takeover")]
    Lost(#[from] io::Error),
    /// Some agents have not come.
    #[error("within {seconds} s no replica of {models} has come here; the running router serves on: see the agents' logs")]
    NoReplicas { seconds: u64, models: String },
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error("stopped before the running router's place was taken")]
    Stopped,
    #[error("the socket {} is {owner}'s, and a router takes only the place of one of its own user", path.display())]
    OtherUser { path: PathBuf, owner: u32 },
}

impl TakeoverError {
    /// Whether the other router has hung up. It may still live: a step may have failed there.
    fn is_hang_up(&self) -> bool {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        matches!(self, Self::Lost(error) if matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof))
    }
}

/// Whether a router of this user with its operators' socket there can be replaced.
pub async fn is_replaceable(operators_socket: &Path) -> bool {
    is_live(&socket_path(operators_socket)).await
}

/// The takeover socket of the router whose operators' socket is at `path`.
pub(crate) fn socket_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".takeover");
    name.into()
}
