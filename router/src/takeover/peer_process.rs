//! The process at the other end of a Unix socket, and whether it still lives.

use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::message::ANSWER_TIMEOUT;

/// A process, even if another one gets its number. `None` if the kernel cannot tell: before Linux
/// 5.3, or in another PID namespace.
#[derive(Debug)]
pub(super) struct PeerProcess(Option<AsyncFd<OwnedFd>>);

impl PeerProcess {
    /// Finds the peer's process. Call this while the other side still answers.
    pub(super) fn of(stream: &UnixStream) -> Self {
        Self(stream.peer_cred().ok().and_then(|peer| open(Pid::from_raw(peer.pid()?)?)))
    }

    /// Whether the process has ended, or will soon: the kernel closes its sockets a moment before.
    /// An unknown process counts as alive.
    pub(super) async fn has_ended(&self) -> bool {
        let Some(process) = &self.0 else { return false };
        timeout(ANSWER_TIMEOUT, process.readable()).await.is_ok_and(|ended| ended.is_ok())
    }
}

#[expect(deprecated, reason = "unsound only for types that do not own their descriptor; what replaces it is unsafe")]
fn open(pid: Pid) -> Option<AsyncFd<OwnedFd>> {
    let process = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    // The descriptor becomes readable when the process has ended.
    AsyncFd::with_interest(process, Interest::READABLE).ok()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_only_hung_up_counts_as_alive() {
        let (here, there) = UnixStream::pair().unwrap();
        let process = PeerProcess::of(&here);
        drop(there);
        assert!(!process.has_ended().await, "it is this one");
    }

    #[tokio::test]
    async fn a_killed_peer_has_ended() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = Pid::from_raw(child.id().try_into().unwrap()).unwrap();
        let process = PeerProcess(open(pid));
        child.kill().unwrap();
        assert!(process.has_ended().await);
        child.wait().unwrap();
        assert!(process.has_ended().await, "whoever has its number now");
    }
}
