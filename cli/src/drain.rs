//! `hostler drain`: empties a node or a replica, and says what became of the streams there.

use std::time::{Duration, Instant};

use clap::Args;
use hostler_proto::fleet::v1::{Replica, TargetRequest};

use crate::admin::{AdminArgs, AdminClient, connect, list_fleet, status_error};
use crate::output::say;
use crate::rolling;

/// How often the replicas are checked while their streams move.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Time without a request moving or ending after which the rest is reported and left to the agent.
const PATIENCE: Duration = Duration::from_secs(3);

#[derive(Debug, Args)]
pub(crate) struct DrainArgs {
    /// A node, or a replica as `node/index`.
    target: String,
    /// Even where nobody serves a model then.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    pub(crate) admin: AdminArgs,
}

/// Requests left on the draining replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DrainProgress {
    moved: u64,
    running: u64,
}

impl DrainProgress {
    fn since(self, before: Self) -> Self {
        Self { moved: self.moved.saturating_sub(before.moved), ..self }
    }

    /// Describes the progress; `None` if nothing ran there.
    fn describe(self) -> Option<String> {
        let requests = |count: u64| if count == 1 { "1 request still runs".to_owned() } else { format!("{count} requests still run") };
        let streams = |count: u64| if count == 1 { "1 stream was".to_owned() } else { format!("{count} streams were") };
        match self {
            Self { moved: 0, running: 0 } => None,
            Self { moved, running: 0 } => Some(format!("{} moved to other replicas", streams(moved))),
            Self { moved: 0, running } => Some(format!("{} there; each may finish within agent.drain_timeout", requests(running))),
            Self { moved, running } => {
                Some(format!("{} moved to other replicas; {} there, within agent.drain_timeout", streams(moved), requests(running)))
            }
        }
    }
}

/// `hostler drain`.
pub(crate) async fn drain(args: &DrainArgs) -> anyhow::Result<()> {
    let mut fleet = connect(&args.admin).await?;
    if !args.force {
        rolling::check_models_stay_served(&mut fleet, &args.target).await?;
    }
    let before = list(&mut fleet).await?;
    let drained = fleet.drain(TargetRequest { target: args.target.clone() }).await.map_err(status_error)?.into_inner().replicas;
    say(&format!("draining {}", drained.join(", ")));
    let before = progress(&before, &drained);
    // The drain is ordered, even if watching it fails.
    if before.running > 0
        && let Ok(progress) = await_progress(&mut fleet, &drained).await
        && let Some(words) = progress.since(before).describe()
    {
        say(&words);
    }
    Ok(())
}

/// Waits until the replicas have no request of this router, or nothing changes any more.
async fn await_progress(fleet: &mut AdminClient, drained: &[String]) -> anyhow::Result<DrainProgress> {
    let mut last = (None, Instant::now());
    loop {
        let seen = progress(&list(fleet).await?, drained);
        if last.0 != Some(seen) {
            last = (Some(seen), Instant::now());
        }
        if seen.running == 0 || last.1.elapsed() > PATIENCE {
            return Ok(seen);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

async fn list(fleet: &mut AdminClient) -> anyhow::Result<Vec<Replica>> {
    let nodes = list_fleet(fleet).await?.nodes;
    Ok(nodes.into_iter().flat_map(|node| node.replicas).collect())
}

fn progress(replicas: &[Replica], drained: &[String]) -> DrainProgress {
    let of_drain = || replicas.iter().filter(|replica| drained.contains(&replica.id));
    DrainProgress {
        moved: of_drain().map(|replica| replica.streams_moved).sum(),
        running: of_drain().map(|replica| u64::from(replica.local_in_flight)).sum(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fate_of_a_drained_replicas_streams_is_described() {
        let message =
            |moved: u64, running: u64| DrainProgress { moved: moved + 5, running }.since(DrainProgress { moved: 5, running: 9 }).describe();
        assert_eq!(message(0, 0), None);
        assert_eq!(message(512, 0).unwrap(), "512 streams were moved to other replicas");
        assert_eq!(message(0, 1).unwrap(), "1 request still runs there; each may finish within agent.drain_timeout");
        assert_eq!(message(1, 3).unwrap(), "1 stream was moved to other replicas; 3 requests still run there, within agent.drain_timeout");
    }
}
