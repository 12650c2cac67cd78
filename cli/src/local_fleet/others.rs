//! Routers of this user on this host that `hostler up` has not started: other commands name them
//! where nothing else is up, and do not end them.

use std::path::PathBuf;

use hostler_router::find_operators_sockets;
use rustix::process::geteuid;
use tokio::net::UnixStream;

use crate::fleet_state::NOTHING_UP;
use crate::up_record::find_records;

/// A router that a person has started, or a unit of systemd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OtherRouter {
    pid: i32,
    socket: PathBuf,
}

impl OtherRouter {
    /// Which it is, and how it is reached and ended.
    pub(crate) fn describe(&self) -> String {
        let Self { pid, socket } = self;
        format!(
            "a router runs here that was started otherwise (process {pid}): clients reach it at the edge that it said at its start, `hostler ps --admin {}` \
             shows its agents, and `kill {pid}` ends it when its requests have finished; agents that were started by hand end in the same way",
            socket.display()
        )
    }
}

/// Finds them, in the order of their sockets.
pub(crate) async fn find_other_routers() -> Vec<OtherRouter> {
    let known: Vec<PathBuf> = find_records().await.into_iter().map(|record| record.router.operators_socket).collect();
    let mut found = Vec::new();
    for socket in find_operators_sockets().await.into_iter().filter(|socket| !known.contains(socket)) {
        let Ok(stream) = UnixStream::connect(&socket).await else { continue };
        // Root finds those of all users.
        let own = stream.peer_cred().ok().filter(|peer| peer.uid() == geteuid().as_raw());
        found.extend(own.and_then(|peer| Some(OtherRouter { pid: peer.pid()?, socket })));
    }
    found
}

/// What commands say where nothing is up that they could mean.
pub(crate) async fn describe_nothing_up() -> String {
    describe(&find_other_routers().await)
}

fn describe(others: &[OtherRouter]) -> String {
    match others {
        [] => NOTHING_UP.to_owned(),
        others => {
            let others: Vec<String> = others.iter().map(OtherRouter::describe).collect();
            format!("nothing is up that `hostler up` has started; {}", others.join("; "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_router_that_was_started_by_hand_is_named_where_nothing_else_is_up() {
        assert_eq!(describe(&[]), NOTHING_UP);
        let said = describe(&[OtherRouter { pid: 7, socket: "/run/hostler/router-8002.sock".into() }]);
        assert!(said.contains("`hostler ps --admin /run/hostler/router-8002.sock`") && said.contains("`kill 7`"), "{said}");
    }
}
