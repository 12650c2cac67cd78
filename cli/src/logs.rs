//! `hostler logs`: the last lines of an engine's log, and those that follow.

use std::time::Duration;

use anyhow::bail;
use clap::Args;
use hostler_proto::fleet::v1::{LogsRequest, LogsResponse};
use tokio::time::sleep;

use crate::admin::{AdminArgs, AdminClient, connect, status_error};
use crate::output::{complain, say};

/// Most lines that a router passes on at once.
const MAX_LINES: u32 = 200;

/// How often a follower asks for new lines.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(500);

#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// A replica, as `node/index`; without it the only one there is.
    replica: Option<String>,
    /// How many lines, 200 at most.
    #[arg(short = 'n', long, default_value_t = 50)]
    lines: u32,
    /// Go on with the lines that the engine prints from now on, until Ctrl-C.
    #[arg(short, long)]
    follow: bool,
    #[command(flatten)]
    pub(crate) admin: AdminArgs,
}

pub(crate) async fn logs(args: &LogsArgs) -> anyhow::Result<()> {
    let mut fleet = connect(&args.admin).await?;
    let replica = match &args.replica {
        Some(named) => named.clone(),
        None => single_replica(&mut fleet).await?,
    };
    let mut read = read(&mut fleet, &replica, args.lines).await?;
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
        read = self::read(&mut fleet, &replica, MAX_LINES).await?;
        let Unseen { missed, lines } = unseen(&read, seen);
        if missed > 0 {
            complain(&format!("{missed} lines are left out: the engine prints faster than they are read; its log file has them"));
        }
        lines.iter().for_each(|line| say(line));
    }
}

async fn read(fleet: &mut AdminClient, replica: &str, lines: u32) -> anyhow::Result<LogsResponse> {
    let request = LogsRequest { replica: replica.to_owned(), lines };
    Ok(fleet.logs(request).await.map_err(status_error)?.into_inner())
}

/// Name of the fleet's only replica.
async fn single_replica(fleet: &mut AdminClient) -> anyhow::Result<String> {
    let nodes = crate::admin::list_fleet(fleet).await?.nodes;
    let names: Vec<&str> = nodes.iter().flat_map(|node| &node.replicas).map(|replica| replica.id.as_str()).collect();
    match &names[..] {
        [only] => Ok((*only).to_owned()),
        [] => bail!("there are no replicas yet"),
        several => bail!("there are {} replicas, so name one of them: {}", several.len(), several.join(", ")),
    }
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
    use super::*;

    fn log(lines: &[&str], end: u64) -> LogsResponse {
        LogsResponse { lines: lines.iter().map(|line| (*line).to_owned()).collect(), end }
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
