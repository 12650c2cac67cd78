//! Fleets of one machine, each of which is a running `hostler up` without jobs: which there are, what
//! they serve, and how they are ended.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use hostler_router::find_operators_sockets;
use rustix::process::{Pid, PidfdFlags, Signal, geteuid, pidfd_open, pidfd_send_signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;

use crate::admin::{connect_to_socket, list_fleet};
use crate::output::say;

/// Deadline for one `hostler up` to leave. By itself it gives running requests
/// `agent.drain_timeout`, and then its engines `agent.stop_grace`.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(20 * 60);

/// A running `hostler up` of this user.
#[derive(Debug)]
pub(crate) struct LocalFleet {
    pub(crate) pid: Pid,
    /// Names that clients may use.
    pub(crate) models: Vec<String>,
}

impl LocalFleet {
    /// Such as `tiny (hostler up, process 4711)`.
    pub(crate) fn describe(&self) -> String {
        let models = if self.models.is_empty() { "no model yet".to_owned() } else { self.models.join(", ") };
        format!("{models} (`hostler up`, process {})", self.pid.as_raw_nonzero())
    }

    fn serves(&self, name: &str) -> bool {
        self.models.iter().any(|model| model == name)
    }
}

/// Finds all of this user's on this host. A router that does not answer has no models.
pub(crate) async fn find_local_fleets() -> Vec<LocalFleet> {
    let mut found = Vec::new();
    for socket in find_operators_sockets().await {
        if let Some(pid) = up_behind(&socket).await {
            found.push(LocalFleet { pid, models: models_of(socket).await.unwrap_or_default() });
        }
    }
    found
}

/// The `hostler up` that listens on this socket, if it is this user's.
///
/// Other routers belong to somebody who has started them on purpose: a service, or a controller.
async fn up_behind(socket: &PathBuf) -> Option<Pid> {
    let peer = UnixStream::connect(socket).await.ok()?.peer_cred().ok()?;
    let pid = peer.pid().filter(|_| peer.uid() == geteuid().as_raw())?;
    let command = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let mut words = command.split(|byte| *byte == 0).skip(1);
    words.next().filter(|first| *first == b"up").and(Pid::from_raw(pid))
}

async fn models_of(socket: PathBuf) -> anyhow::Result<Vec<String>> {
    let nodes = list_fleet(&mut connect_to_socket(&socket).await?).await?.nodes;
    let replicas = nodes.iter().flat_map(|node| &node.replicas);
    let mut models: Vec<String> = replicas.flat_map(|replica| replica.model_ids().map(str::to_owned).collect::<Vec<_>>()).collect();
    models.sort();
    models.dedup();
    Ok(models)
}

/// Ends those that serve one of these names, or all, and waits until they are gone.
///
/// # Errors
/// When there is none, or a name is nobody's.
pub(crate) async fn down(names: &[String]) -> anyhow::Result<()> {
    let mut fleets = find_local_fleets().await;
    if let Some(unknown) = names.iter().find(|name| !fleets.iter().any(|fleet| fleet.serves(name))) {
        let up: Vec<String> = fleets.iter().map(LocalFleet::describe).collect();
        bail!("{unknown} is not up here{}", if up.is_empty() { String::new() } else { format!("; up is {}", up.join(", ")) });
    }
    fleets.retain(|fleet| names.is_empty() || names.iter().any(|name| fleet.serves(name)));
    if fleets.is_empty() {
        bail!("nothing is up");
    }
    for fleet in fleets {
        let words = fleet.describe();
        let process = pidfd_open(fleet.pid, PidfdFlags::empty()).with_context(|| format!("cannot end {words}"))?;
        pidfd_send_signal(&process, Signal::TERM).with_context(|| format!("cannot end {words}"))?;
        say(&format!("ending    {words}: running requests may finish"));
        tokio::select! {
            ended = tokio::time::timeout(LEAVE_TIMEOUT, until_ended(process)) => {
                ended.with_context(|| format!("{words} has not left within {}", humantime::format_duration(LEAVE_TIMEOUT)))??;
            }
            interrupted = tokio::signal::ctrl_c() => {
                interrupted?;
                bail!("{words} goes on leaving without this command");
            }
        }
        say(&format!("ended     {words}"));
    }
    Ok(())
}

/// Waits for the end of a process, whose descriptor then becomes readable.
async fn until_ended(process: OwnedFd) -> std::io::Result<()> {
    #[expect(deprecated, reason = "what replaces it is unsafe; an OwnedFd stays open while it is here")]
    let process = AsyncFd::with_interest(process, Interest::READABLE)?;
    process.readable().await.map(|_| ())
}
