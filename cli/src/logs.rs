//! `hostler logs`: the last lines of an engine's log, and those that follow.

use std::time::Duration;

use anyhow::bail;
use clap::Args;
use hostler_proto::agent::v1::Phase;
use hostler_proto::fleet::v1::{LogsRequest, LogsResponse, Replica};
use tokio::time::sleep;

use crate::admin::{AdminArgs, AdminClient, connect, list_fleet, status_error};
use crate::output::{complain, say};

/// Most lines that a router passes on at once.
const MAX_LINES: u32 = 200;

/// How often a follower asks for new lines.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(500);

#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// A replica, as `node/index`, or a model that only one serves; without it the only one there
    /// is.
    #[arg(value_name = "REPLICA|MODEL")]
    replica: Option<String>,
    /// How many lines, 200 at most.
    #[arg(short = 'n', long, default_value_t = 50)]
    lines: u32,
    /// Go on with the lines that the engine prints from now on, until Ctrl-C.
    #[arg(short, long)]
    follow: bool,
    /// Only the lines of this node of a replica over several; 0 is its head, and `hostler ps
    /// --json` shows the others.
    #[arg(long, value_name = "N")]
    member: Option<u32>,
    #[command(flatten)]
    pub(crate) admin: AdminArgs,
}

pub(crate) async fn logs(args: &LogsArgs) -> anyhow::Result<()> {
    let mut fleet = connect(&args.admin).await?;
    let nodes = list_fleet(&mut fleet).await?.nodes;
    let replicas: Vec<&Replica> = nodes.iter().flat_map(|node| &node.replicas).collect();
    let replica = choose(args.replica.as_deref(), &replicas)?;
    let mut read = read(&mut fleet, &replica, args.lines, args.member).await?;
    read.lines.iter().for_each(|line| say(line));
    if !args.follow {
        return Ok(());
    }
    if read.end == 0 && !read.lines.is_empty() {
        bail!("{replica} is of an older release, whose log cannot be followed: leave out --follow, or upgrade its agent and router");
    }
    loop {
        sleep(FOLLOW_INTERVAL).await;
        let seen = read.end;
        read = self::read(&mut fleet, &replica, MAX_LINES, args.member).await?;
        let Unseen { missed, lines } = unseen(&read, seen);
        if missed > 0 {
            complain(&format!("{missed} lines are left out: the engine prints faster than they are read; its log file has them"));
        }
        lines.iter().for_each(|line| say(line));
    }
}

async fn read(fleet: &mut AdminClient, replica: &str, lines: u32, member: Option<u32>) -> anyhow::Result<LogsResponse> {
    let request = LogsRequest { replica: replica.to_owned(), lines, member };
    Ok(fleet.logs(request).await.map_err(status_error)?.into_inner())
}

/// The replica of this name, or the only one of this model, or the only one. Those that were
/// stopped on purpose count only where there are no others.
fn choose(named: Option<&str>, replicas: &[&Replica]) -> anyhow::Result<String> {
    if let Some(named) = named.filter(|named| replicas.iter().any(|replica| replica.id == *named)) {
        return Ok(named.to_owned());
    }
    let is_meant = |replica: &&&Replica| named.is_none_or(|named| serves(replica, named));
    let meant: Vec<&&Replica> = replicas.iter().filter(is_meant).collect();
    let in_service: Vec<&&Replica> = meant.iter().copied().filter(|replica| replica.phase() != Phase::Stopped).collect();
    let names = |replicas: &[&&Replica]| replicas.iter().map(|replica| replica.id.as_str()).collect::<Vec<_>>().join(", ");
    match (if in_service.is_empty() { &meant[..] } else { &in_service[..] }, named) {
        ([only], _) => Ok(only.id.clone()),
        ([], _) if replicas.is_empty() => bail!("there are no replicas yet"),
        ([], named) => {
            let all: Vec<&&Replica> = replicas.iter().collect();
            bail!("no replica and no model has the name {}; there are {}", named.unwrap_or_default(), names(&all))
        }
        (several, None) => bail!("there are {} replicas, so name one of them: {}", several.len(), names(several)),
        (several, Some(model)) => bail!("{model} has {} replicas, so name one of them: {}", several.len(), names(several)),
    }
}

/// Whether it serves a model of this name, or whose path ends with it.
fn serves(replica: &Replica, name: &str) -> bool {
    replica.model_ids().any(|model| model == name || model.rsplit('/').next() == Some(name))
}

/// Lines that a follower has not seen.
#[derive(Debug, PartialEq, Eq)]
struct Unseen<'a> {
    /// How many of them are older than those that were read.
    missed: u64,
    lines: &'a [String],
}

/// What of this log comes after its first `seen` lines. A log that has fewer has begun anew.
fn unseen(read: &LogsResponse, seen: u64) -> Unseen<'_> {
    let new = read.end.checked_sub(seen).unwrap_or(read.end);
    let shown = usize::try_from(new).unwrap_or(usize::MAX).min(read.lines.len());
    Unseen { missed: new - shown as u64, lines: &read.lines[read.lines.len() - shown..] }
}

#[cfg(test)]
mod tests {
    use hostler_proto::agent::v1::{Model, ReplicaState};

    use super::*;

    fn log(lines: &[&str], end: u64) -> LogsResponse {
        LogsResponse { lines: lines.iter().map(|line| (*line).to_owned()).collect(), end }
    }

    fn replica(id: &str, model: &str, phase: Phase) -> Replica {
        let models = vec![Model { id: model.into(), ..Model::default() }];
        Replica {
            id: id.into(),
            state: Some(ReplicaState { phase: phase.into(), models, ..ReplicaState::default() }),
            ..Replica::default()
        }
    }

    #[test]
    fn a_replica_is_meant_by_its_name_or_as_the_only_one_of_a_model() {
        let [a, b, c] = [("n/0", "org/a"), ("n/1", "org/a"), ("n.b/0", "b")].map(|(id, model)| replica(id, model, Phase::Ready));
        let all = [&a, &b, &c];
        for (named, chosen) in [("n/1", "n/1"), ("b", "n.b/0")] {
            assert_eq!(choose(Some(named), &all).unwrap(), chosen);
        }
        for (named, refusal) in [
            (Some("a"), "a has 2 replicas, so name one of them: n/0, n/1"),
            (Some("d"), "no replica and no model has the name d; there are n/0, n/1, n.b/0"),
            (None, "there are 3 replicas, so name one of them: n/0, n/1, n.b/0"),
        ] {
            assert_eq!(choose(named, &all).unwrap_err().to_string(), refusal);
        }
        assert_eq!(choose(None, &[]).unwrap_err().to_string(), "there are no replicas yet");
    }

    #[test]
    fn a_replica_that_was_taken_down_is_meant_only_where_no_other_is() {
        let [gone, left] = [("n/0", Phase::Stopped), ("n.b/0", Phase::Loading)].map(|(id, phase)| replica(id, "a", phase));
        assert_eq!(choose(None, &[&gone, &left]).unwrap(), "n.b/0");
        assert_eq!(choose(Some("a"), &[&gone]).unwrap(), "n/0", "its last lines may be wanted");
    }

    #[test]
    fn a_follower_sees_each_line_once_and_learns_what_it_missed() {
        let read = log(&["same", "same", "same"], 7);
        assert_eq!(unseen(&read, 7), Unseen { missed: 0, lines: &[] });
        assert_eq!(unseen(&read, 5), Unseen { missed: 0, lines: &read.lines[1..] });
        assert_eq!(unseen(&read, 2), Unseen { missed: 2, lines: &read.lines });
    }

    #[test]
    fn a_log_that_begins_anew_is_followed_from_its_beginning() {
        let read = log(&["first", "second"], 2);
        assert_eq!(unseen(&read, 900), Unseen { missed: 0, lines: &read.lines });
    }
}
