//! Fleets of one machine, each of which is a running `hostler up` without jobs: which there are, what
//! they serve, and how they are waited for and ended.

mod record;
mod wait;

use std::os::fd::OwnedFd;
use std::time::Duration;

use anyhow::{Context, bail};
use hostler_proto::fleet::v1::Replica;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::admin::{connect_to_socket, list_fleet};
use crate::fleet_state::NOTHING_UP;
use crate::output::say;

use self::record::find_records;
pub(crate) use self::record::{PublishedRecord, UpRecord};
pub(crate) use self::wait::{LocalWaitError, wait};

/// Deadline for one `hostler up` to leave. By itself it gives running requests
/// `agent.drain_timeout`, and then its engines `agent.stop_grace`.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(20 * 60);

/// A running `hostler up` of this user.
#[derive(Debug)]
pub(crate) struct LocalFleet {
    pub(crate) record: UpRecord,
    pub(crate) replicas: Vec<Replica>,
}

impl LocalFleet {
    /// Such as `tiny (hostler up, process 4711)`.
    pub(crate) fn describe(&self) -> String {
        let models = self.models();
        let models = if models.is_empty() { "no model yet".to_owned() } else { models.join(", ") };
        let simulated = if self.record.is_simulated { "simulated, " } else { "" };
        format!("{models} ({simulated}`hostler up`, process {})", self.record.pid)
    }

    /// Names that clients may use.
    pub(crate) fn models(&self) -> Vec<&str> {
        let mut models: Vec<&str> = self.replicas.iter().flat_map(Replica::model_ids).collect();
        models.sort_unstable();
        models.dedup();
        models
    }

    pub(crate) fn serves(&self, name: &str) -> bool {
        self.replicas.iter().any(|replica| replica.model_ids().any(|model| model == name))
    }
}

/// Finds all of this user's on this host. A router that does not answer has no replicas.
pub(crate) async fn find_local_fleets() -> Vec<LocalFleet> {
    let mut found = Vec::new();
    for record in find_records().await {
        let replicas = replicas_of(&record).await.unwrap_or_default();
        found.push(LocalFleet { record, replicas });
    }
    found
}

async fn replicas_of(record: &UpRecord) -> anyhow::Result<Vec<Replica>> {
    let nodes = list_fleet(&mut connect_to_socket(&record.operators_socket).await?).await?.nodes;
    Ok(nodes.into_iter().flat_map(|node| node.replicas).collect())
}

/// The one that serves this model; without a name, the only one.
///
/// # Errors
/// When there is none, or several and no name chooses.
pub(crate) async fn find_local_fleet(name: Option<&str>) -> anyhow::Result<LocalFleet> {
    let mut fleets = find_local_fleets().await;
    let up: Vec<String> = fleets.iter().map(LocalFleet::describe).collect();
    match (name, fleets.len()) {
        (_, 0) => bail!(NOTHING_UP),
        (Some(name), _) => match fleets.into_iter().find(|fleet| fleet.serves(name)) {
            Some(fleet) => Ok(fleet),
            None => bail!("{name} is not up here; up is {}", up.join(", ")),
        },
        (None, 1) => Ok(fleets.remove(0)),
        (None, several) => bail!("{several} models are up, so name one of them: {}", up.join(", ")),
    }
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
        bail!(NOTHING_UP);
    }
    for fleet in fleets {
        let words = fleet.describe();
        let process = pidfd_open(Pid::from_raw(fleet.record.pid).context(NOTHING_UP)?, PidfdFlags::empty())
            .with_context(|| format!("cannot end {words}"))?;
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

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// One whose process has this number, and whose edge this port.
    pub(crate) fn fleet(number: i32, replicas: Vec<Replica>) -> LocalFleet {
        let record = record::tests::record(number, format!("/run/router-{number}.sock").as_ref());
        LocalFleet { record, replicas }
    }

    #[test]
    fn a_fleet_without_an_answering_engine_says_so() {
        let mut starting = fleet(7, vec![Replica::default()]);
        assert_eq!(starting.describe(), "no model yet (`hostler up`, process 7)");
        starting.record.is_simulated = true;
        assert_eq!(starting.describe(), "no model yet (simulated, `hostler up`, process 7)");
    }
}
