//! `hostler usage`: requests, tokens and node-hours by day, key, tenant or model, of all that has
//! served from this user's fleet and from this machine. It reads their files, so that nothing has
//! to be up.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, ensure};
use clap::{Args, ValueEnum};
use hostler_cluster::NodeTime;
use hostler_controller::{FleetFolder, NodeUsage};
use hostler_router::{TokenCounts, UsageRow, day_name, day_of, read_usage};
use serde::Serialize;
use serde_json::json;

use crate::output::{Side, say, table};
use crate::router::local_state;
use crate::settings::{cluster_config, router_config};

#[derive(Debug, Args)]
pub(crate) struct UsageArgs {
    /// From this day (UTC) on, or from so many days ago, such as 2026-11-01 or 30d; without it all.
    #[arg(long, value_name = "DATE|DAYS", value_parser = parse_since)]
    since: Option<String>,
    /// What each line is for.
    #[arg(long, value_enum, default_value_t)]
    by: By,
    /// JSON, for scripts: all rows by day, key, tenant and model.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum By {
    #[default]
    Day,
    /// By the public id of the key, which `hostler keys list` names.
    Key,
    Tenant,
    Model,
}

impl By {
    fn heading(self) -> &'static str {
        match self {
            Self::Day => "DAY",
            Self::Key => "KEY",
            Self::Tenant => "TENANT",
            Self::Model => "MODEL",
        }
    }
}

/// Rows of a day, as they are printed for scripts.
#[derive(Debug, Serialize)]
struct DayRow<'a> {
    day: &'a str,
    #[serde(flatten)]
    row: &'a UsageRow,
}

pub(crate) fn usage(args: &UsageArgs, file: Option<&Path>) -> anyhow::Result<()> {
    let since = args.since.as_deref().unwrap_or_default();
    let fleet = FleetFolder::find(&cluster_config(file)?)?;
    let folders = token_folders(fleet.as_ref(), file)?;
    let mut days: BTreeMap<String, Vec<UsageRow>> = BTreeMap::new();
    for folder in &folders {
        let read = read_usage(folder, since).with_context(|| format!("cannot read the usage in {}", folder.display()))?;
        read.into_iter().for_each(|(day, rows)| days.entry(day).or_default().extend(rows));
    }
    let nodes = fleet.as_ref().map(FleetFolder::node_usage).transpose()?.unwrap_or_default();
    if args.json {
        let rows: Vec<DayRow<'_>> = days.iter().flat_map(|(day, rows)| rows.iter().map(move |row| DayRow { day, row })).collect();
        let nodes: Vec<_> = node_rows(&nodes, since)
            .iter()
            .map(|row| json!({"day": row.day, "entry": row.entry, "model": row.model, "node_seconds": row.time}))
            .collect();
        say(&serde_json::to_string_pretty(&json!({ "tokens": rows, "nodes": nodes }))?);
        return Ok(());
    }
    ensure!(
        !days.is_empty() || !nodes.is_empty(),
        "nothing was counted yet: `hostler up` and a fleet's controller count from their start on"
    );
    token_lines(&days, args.by).iter().for_each(|line| say(line));
    let hours = node_lines(&node_rows(&nodes, since), args.by);
    if !hours.is_empty() {
        say("");
        hours.iter().for_each(|line| say(line));
    }
    Ok(())
}

/// Folders in which routers of this user have counted.
fn token_folders(fleet: Option<&FleetFolder>, file: Option<&Path>) -> anyhow::Result<Vec<PathBuf>> {
    let configured = Some(router_config(file)?.usage_dir).filter(|folder| !folder.as_os_str().is_empty());
    let mut folders: Vec<PathBuf> =
        configured.into_iter().chain(fleet.map(FleetFolder::usage)).chain(local_state().map(|state| state.join("usage"))).collect();
    folders.sort_unstable();
    folders.dedup();
    Ok(folders)
}

/// A day in the form of the files' names.
fn parse_since(text: &str) -> Result<String, String> {
    let days_ago = text.strip_suffix('d').and_then(|days| days.parse::<u64>().ok());
    if let Some(days) = days_ago {
        return Ok(day_name(day_of(SystemTime::now()).saturating_sub(days)));
    }
    let is_day = text.len() == 10 && humantime::parse_rfc3339(&format!("{text}T00:00:00Z")).is_ok();
    if is_day { Ok(text.to_owned()) } else { Err("a day such as 2026-11-01 was expected, or a number of days such as 30d".to_owned()) }
}

fn token_lines(days: &BTreeMap<String, Vec<UsageRow>>, by: By) -> Vec<String> {
    let (mut sums, mut total) = (BTreeMap::<&str, TokenCounts>::new(), TokenCounts::default());
    for (day, row) in days.iter().flat_map(|(day, rows)| rows.iter().map(move |row| (day, row))) {
        let name = match by {
            By::Day => day,
            By::Key => &*row.holder.key,
            By::Tenant => &*row.holder.tenant,
            By::Model => &*row.holder.model,
        };
        sums.entry(name).or_default().add(&row.counts);
        total.add(&row.counts);
    }
    let cells = |name: &str, counts: &TokenCounts| {
        let TokenCounts { requests, failed, prompt_tokens, cached_tokens, answer_tokens } = *counts;
        let name = if name.is_empty() { "-" } else { name };
        [name.to_owned(), grouped(requests), grouped(failed), grouped(prompt_tokens), grouped(cached_tokens), grouped(answer_tokens)]
    };
    let heading = [by.heading(), "REQUESTS", "FAILED", "PROMPT TOKENS", "OF THEM CACHED", "ANSWER TOKENS"].map(String::from);
    let rows: Vec<[String; 6]> =
        [heading].into_iter().chain(sums.iter().map(|(name, counts)| cells(name, counts))).chain([cells("all", &total)]).collect();
    let mut sides = [Side::Right; 6];
    sides[0] = Side::Left;
    table(sides, &rows)
}

/// Node time of an entry on a day.
#[derive(Debug)]
struct NodeRow {
    day: String,
    entry: String,
    model: String,
    time: NodeTime,
}

fn node_rows(nodes: &[NodeUsage], since: &str) -> Vec<NodeRow> {
    let rows = nodes.iter().flat_map(|usage| {
        let NodeUsage { entry, node_time } = usage;
        node_time.days.iter().map(|(day, time)| NodeRow {
            day: day_name(*day),
            entry: entry.clone(),
            model: node_time.model.clone(),
            time: *time,
        })
    });
    rows.filter(|row| row.day.as_str() >= since).collect()
}

/// Node-hours by model, or by day; nodes have no keys.
fn node_lines(rows: &[NodeRow], by: By) -> Vec<String> {
    if rows.is_empty() {
        return Vec::new();
    }
    let (mut sums, mut total) = (BTreeMap::<&str, NodeTime>::new(), NodeTime::default());
    for row in rows {
        sums.entry(if by == By::Day { &row.day } else { &row.model }).or_default().add(&row.time);
        total.add(&row.time);
    }
    let hours = |seconds: f64| format!("{:.2}", seconds / 3600.0);
    let cells = |name: &str, time: &NodeTime| {
        let NodeTime { starting, loading, serving, idle, overlap, leaving } = *time;
        let [serving, idle, loading, starting, overlap, leaving] = [serving, idle, loading, starting, overlap, leaving].map(hours);
        [name.to_owned(), hours(time.total()), serving, idle, loading, starting, overlap, leaving]
    };
    let what = if by == By::Day { "DAY" } else { "MODEL" };
    let heading = [what, "NODE-HOURS", "SERVING", "IDLE", "LOADING", "STARTING", "OVERLAP", "LEAVING"].map(String::from);
    let rows: Vec<[String; 8]> =
        [heading].into_iter().chain(sums.iter().map(|(name, time)| cells(name, time))).chain([cells("all", &total)]).collect();
    let mut sides = [Side::Right; 8];
    sides[0] = Side::Left;
    table(sides, &rows)
}

/// Such as `1,234,567`.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> = digits.as_bytes().rchunks(3).rev().map(|group| std::str::from_utf8(group).unwrap_or_default()).collect();
    groups.join(",")
}

#[cfg(test)]
mod tests {
    use hostler_cluster::NodeLedger;
    use hostler_router::UsageHolder;

    use super::*;

    fn row(key: &str, model: &str, prompt_tokens: u64) -> UsageRow {
        let holder = UsageHolder { key: key.into(), tenant: "t".into(), model: model.into() };
        UsageRow { holder, counts: TokenCounts { requests: 1, prompt_tokens, answer_tokens: 7, ..TokenCounts::default() } }
    }

    #[test]
    fn usage_adds_up_by_whatever_one_asks_for() {
        let days = BTreeMap::from([
            ("2026-11-27".to_owned(), vec![row("k1", "a", 1_234_567), row("", "b", 10)]),
            ("2026-11-28".to_owned(), vec![row("k1", "b", 5)]),
        ]);
        insta::assert_snapshot!(token_lines(&days, By::Key).join("\n"), @r"
        KEY  REQUESTS  FAILED  PROMPT TOKENS  OF THEM CACHED  ANSWER TOKENS
        -           1       0             10               0              7
        k1          2       0      1,234,572               0             14
        all         3       0      1,234,582               0             21
        ");
        assert_eq!(token_lines(&days, By::Day).len(), 4);
    }

    #[test]
    fn node_hours_add_up_by_model_and_day() {
        let time = |serving, idle| NodeTime { serving, idle, ..NodeTime::default() };
        let ledger = NodeLedger {
            model: "org/a".into(),
            days: [(20_000, time(3600.0, 1800.0)), (20_001, time(0.0, 36.0))].into(),
            ..NodeLedger::default()
        };
        let usage = [NodeUsage { entry: "a".into(), node_time: ledger }];
        insta::assert_snapshot!(node_lines(&node_rows(&usage, ""), By::Model).join("\n"), @r"
        MODEL  NODE-HOURS  SERVING  IDLE  LOADING  STARTING  OVERLAP  LEAVING
        org/a        1.51     1.00  0.51     0.00      0.00     0.00     0.00
        all          1.51     1.00  0.51     0.00      0.00     0.00     0.00
        ");
        let since = node_rows(&usage, "2024-10-05");
        assert_eq!((since.len(), since[0].day.as_str()), (1, "2024-10-05"));
    }

    #[test]
    fn a_beginning_is_a_day_or_a_number_of_days() {
        assert_eq!(parse_since("2026-11-01").unwrap(), "2026-11-01");
        assert!(parse_since("0d").unwrap() > parse_since("30d").unwrap());
        for wrong in ["yesterday", "2026-13-01", "2026-11-1", "d", ""] {
            assert!(parse_since(wrong).is_err(), "{wrong}");
        }
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }
}
