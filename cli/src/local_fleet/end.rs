//! `hostler down` where no fleet of jobs is up: ends what `hostler up` serves from this machine.
//!
//! A process whose router serves other models stays; its own engines end as by `hostler drain`.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use hostler_proto::agent::v1::Phase;
use hostler_proto::fleet::v1::TargetRequest;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{sleep, timeout};

use super::{LocalFleet, describe_all, describe_nothing_up, find_called, find_local_fleets, list};
use crate::admin::{connect_to_socket, status_error};
use crate::fleet_state::NOTHING_UP;
use crate::output::say;
use crate::suspension::is_suspended;

/// Deadline for one `hostler up` to leave. By itself it gives running requests
/// `agent.drain_timeout`, and then its engines `agent.stop_grace`.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(20 * 60);

/// How long the router of a process that is to leave may answer nothing before the process is
/// killed. A router on a busy machine was seen to take two seconds.
const UNRESPONSIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// How often engines that drain, and routers that leave, are looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Ends those of these names or processes, or all, and waits until they are gone.
///
/// # Errors
/// When there is none, or a name is nobody's or that of several.
pub(crate) async fn down(names: &[String]) -> anyhow::Result<()> {
    let fleets = find_resumed(names).await?;
    for ending in plan_endings(&fleets, names) {
        let words = ending.fleet.describe();
        let ended = async { if ending.keeps_process { drain(ending.fleet).await } else { end_process(ending.fleet).await } };
        tokio::select! {
            ended = timeout(LEAVE_TIMEOUT, ended) => {
                ended.with_context(|| {
                    let limit = humantime::format_duration(LEAVE_TIMEOUT);
                    format!("{words} has not left within {limit}; its log may say why, and `kill -KILL {}` ends it at once", ending.fleet.record.pid)
                })??;
            }
            interrupted = tokio::signal::ctrl_c() => {
                interrupted?;
                bail!("{words} goes on leaving without this command");
            }
        }
        let kept = if ending.keeps_process { "; its process goes on as the router of the others" } else { "" };
        say(&format!("ended     {words}{kept}"));
    }
    Ok(())
}

/// Checks the names, and finds what is up, once those processes that are to end and that a signal
/// has suspended go on: only then can they leave.
async fn find_resumed(names: &[String]) -> anyhow::Result<Vec<LocalFleet>> {
    let fleets = find_local_fleets().await;
    for name in names {
        if find_called(&fleets, name)?.is_none() {
            let up = if fleets.is_empty() { String::new() } else { format!("; up is {}", describe_all(&fleets)) };
            bail!("{name} is not up here{up}");
        }
    }
    if fleets.is_empty() {
        bail!(describe_nothing_up().await);
    }
    let suspended = plan_endings(&fleets, names).into_iter().filter(|ending| is_suspended(ending.fleet.record.pid));
    let suspended: Vec<&LocalFleet> = suspended.map(|ending| ending.fleet).collect();
    if suspended.is_empty() {
        return Ok(fleets);
    }
    for fleet in suspended {
        let words = fleet.describe();
        pidfd_send_signal(process_of(fleet)?, Signal::CONT).with_context(|| format!("cannot resume {words}"))?;
        say(&format!("resumed   {words}: it was suspended (state T), and goes on in order to leave"));
    }
    Ok(find_local_fleets().await)
}

/// How one of them is ended.
#[derive(Debug)]
struct Ending<'a> {
    fleet: &'a LocalFleet,
    /// Whether only its engines end, because others need its router.
    keeps_process: bool,
}

/// Those of these names or processes, or all, in the order in which they end: a router after those
/// that it serves. A router without any engine left ends with the last of them.
fn plan_endings<'a>(fleets: &'a [LocalFleet], names: &[String]) -> Vec<Ending<'a>> {
    let is_named = |fleet: &LocalFleet| names.is_empty() || names.iter().any(|name| fleet.is_called(name));
    let (first, joined): (Vec<_>, Vec<_>) = fleets.iter().partition(|fleet| fleet.has_router());
    let ends_joined = joined.iter().filter(|fleet| is_named(fleet)).map(|fleet| Ending { fleet, keeps_process: false });
    let ends_first = first.iter().filter_map(|fleet| {
        let mut others = joined.iter().filter(|other| other.shares_router(fleet));
        let keeps_process = others.clone().any(|other| !is_named(other));
        let loses_last = fleet.is_taken_down() && !keeps_process && others.next().is_some();
        (is_named(fleet) || loses_last).then_some(Ending { fleet, keeps_process })
    });
    ends_joined.chain(ends_first).collect()
}

impl LocalFleet {
    /// Tells its process to finish what runs there and to end.
    ///
    /// # Errors
    /// When it is gone.
    pub(crate) fn ask_to_leave(&self) -> anyhow::Result<OwnedFd> {
        let process = process_of(self)?;
        pidfd_send_signal(&process, Signal::TERM).with_context(|| format!("cannot end {}", self.describe()))?;
        Ok(process)
    }
}

async fn end_process(fleet: &LocalFleet) -> anyhow::Result<()> {
    let words = fleet.describe();
    // A second signal would cut what runs there.
    let process = if fleet.record.is_leaving { process_of(fleet)? } else { fleet.ask_to_leave()? };
    say(&format!("ending    {words}: running requests may finish"));
    let ended = until_ended(process.try_clone()?);
    tokio::pin!(ended);
    tokio::select! {
        ended = &mut ended => return Ok(ended?),
        () = until_unresponsive(fleet) => {}
    }
    let limit = humantime::format_duration(UNRESPONSIVE_TIMEOUT);
    say(&format!("killing   {words}: it has answered nothing for {limit}, so it does not leave by itself"));
    pidfd_send_signal(&process, Signal::KILL).with_context(|| format!("cannot kill {words}"))?;
    Ok(ended.await?)
}

fn process_of(fleet: &LocalFleet) -> anyhow::Result<OwnedFd> {
    let pid = Pid::from_raw(fleet.record.pid).context(NOTHING_UP)?;
    let process = pidfd_open(pid, PidfdFlags::empty()).with_context(|| format!("cannot end {}", fleet.describe()))?;
    ensure!(!fleet.record.is_process_gone(), "{} has ended", fleet.describe());
    Ok(process)
}

/// Waits until this process's router takes connections and answers nothing for long. One that has
/// left takes none. Of a process without a router only a suspension can be seen.
async fn until_unresponsive(fleet: &LocalFleet) {
    let mut answered = Instant::now();
    while answered.elapsed() < UNRESPONSIVE_TIMEOUT {
        sleep(POLL_INTERVAL).await;
        let answers = if fleet.has_router() { list(&fleet.record).await.is_ok() } else { !is_suspended(fleet.record.pid) };
        if answers {
            answered = Instant::now();
        }
    }
}

/// Waits for the end of a process, whose descriptor then becomes readable.
async fn until_ended(process: OwnedFd) -> std::io::Result<()> {
    #[expect(deprecated, reason = "what replaces it is unsafe; an OwnedFd stays open while it is here")]
    let process = AsyncFd::with_interest(process, Interest::READABLE)?;
    process.readable().await.map(|_| ())
}

/// Has its nodes empty and stop their engines, and waits for that.
async fn drain(fleet: &LocalFleet) -> anyhow::Result<()> {
    let nodes: BTreeSet<&str> = fleet.replicas.iter().filter_map(|replica| Some(replica.id.rsplit_once('/')?.0)).collect();
    if let Some(silence) = &fleet.silence {
        bail!("its router is needed to end {} alone, and does not answer: {silence}", fleet.describe());
    }
    let mut router = connect_to_socket(&fleet.record.router.operators_socket).await?;
    for node in nodes {
        router.drain(TargetRequest { target: node.to_owned() }).await.map_err(status_error)?;
    }
    say(&format!("ending    {}: running requests may finish", fleet.describe()));
    let is_left = |now: &LocalFleet| now.record == fleet.record && now.replicas.iter().any(|replica| replica.phase() != Phase::Stopped);
    while find_local_fleets().await.iter().any(is_left) {
        sleep(POLL_INTERVAL).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use hostler_proto::agent::v1::ReplicaState;
    use hostler_proto::fleet::v1::Replica;

    use super::*;
    use crate::local_fleet::tests::{fleet, joined};

    fn replica(phase: Phase) -> Replica {
        Replica { id: "n0/0".into(), state: Some(ReplicaState { phase: phase.into(), ..ReplicaState::default() }), ..Replica::default() }
    }

    /// Processes that end, and those of which only the engines do.
    fn endings(first: Phase, names: &[&str]) -> Vec<(i32, bool)> {
        let mut a = fleet(7, vec![replica(first)]);
        a.record.name = "a".into();
        let (b, c) = (joined(8, &a, "b", Vec::new()), joined(9, &a, "c", Vec::new()));
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        plan_endings(&[a, b, c], &names).iter().map(|ending| (ending.fleet.record.pid, ending.keeps_process)).collect()
    }

    #[test]
    fn a_model_ends_alone_and_a_router_after_those_that_it_serves() {
        assert_eq!(endings(Phase::Ready, &["b"]), [(8, false)]);
        assert_eq!(endings(Phase::Ready, &["a"]), [(7, true)], "b and c need its router");
        assert_eq!(endings(Phase::Ready, &[]), [(8, false), (9, false), (7, false)]);
        assert_eq!(endings(Phase::Ready, &["a", "b"]), [(8, false), (7, true)]);
    }

    #[test]
    fn a_router_without_an_engine_ends_with_the_last_model() {
        assert_eq!(endings(Phase::Stopped, &["b"]), [(8, false)]);
        assert_eq!(endings(Phase::Stopped, &["b", "c"]), [(8, false), (9, false), (7, false)]);
        assert_eq!(endings(Phase::Ready, &["b", "c"]), [(8, false), (9, false)]);
    }
}
