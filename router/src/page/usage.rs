//! What was used in the last month, as the files of `usage_dir` have it, and what the fleet's
//! controller says of its nodes. Asked for when somebody opens it.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::Serialize;
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::fleet::EntryUse;
use crate::token_ledger::{TokenCounts, UsageHolder, UsageRow, day_name, day_of, read_usage};

/// Days that are shown.
const DAYS: u64 = 30;

/// Most rows of keys, tenants and models: those with the most tokens.
const MAX_HOLDERS: usize = 100;

/// How long an answer is given again. A month of many routers is a file for each of their days.
const KEPT_FOR: Duration = Duration::from_secs(10);

/// Sums of the last month. Clones are cheap enough to be given to each viewer.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Usage {
    /// Each day with requests, the latest first.
    days: Vec<(String, TokenCounts)>,
    /// The whole month by key, tenant and model, most tokens first.
    holders: Vec<UsageRow>,
    /// How many holders are left out.
    others: usize,
}

/// Use of the nodes of a fleet's entry.
#[derive(Debug, Serialize)]
pub(super) struct EntryPicture<'a> {
    name: &'a str,
    node_seconds: &'a BTreeMap<String, f64>,
    budget: &'a str,
}

impl<'a> From<&'a EntryUse> for EntryPicture<'a> {
    fn from(entry: &'a EntryUse) -> Self {
        Self { name: &entry.name, node_seconds: &entry.node_seconds, budget: &entry.budget }
    }
}

/// Reads the files for all viewers, one at a time.
#[derive(Debug, Default)]
pub(super) struct UsageReader {
    folder: PathBuf,
    latest: Mutex<Option<(Instant, Usage)>>,
}

impl UsageReader {
    /// A reader of this folder. An empty path is a router that counts nothing.
    pub(super) fn new(folder: PathBuf) -> Self {
        Self { folder, latest: Mutex::default() }
    }

    /// # Errors
    /// When a file cannot be read.
    pub(super) async fn read(&self) -> io::Result<Usage> {
        let mut latest = self.latest.lock().await;
        if let Some((_, usage)) = latest.as_ref().filter(|(at, _)| at.elapsed() < KEPT_FOR) {
            return Ok(usage.clone());
        }
        let folder = self.folder.clone();
        let usage = tokio::task::spawn_blocking(move || sum(&folder, SystemTime::now())).await.map_err(io::Error::other)??;
        *latest = Some((Instant::now(), usage.clone()));
        Ok(usage)
    }
}

fn sum(folder: &Path, now: SystemTime) -> io::Result<Usage> {
    if folder.as_os_str().is_empty() {
        return Ok(Usage::default());
    }
    let mut holders: BTreeMap<UsageHolder, TokenCounts> = BTreeMap::new();
    let mut days = Vec::new();
    for (day, rows) in read_usage(folder, &day_name(day_of(now).saturating_sub(DAYS - 1)))? {
        let mut of_day = TokenCounts::default();
        for UsageRow { holder, counts } in rows {
            of_day.add(&counts);
            holders.entry(holder).or_default().add(&counts);
        }
        days.push((day, of_day));
    }
    days.reverse();
    let mut holders: Vec<UsageRow> = holders.into_iter().map(|(holder, counts)| UsageRow { holder, counts }).collect();
    holders.sort_by_key(|row| std::cmp::Reverse(row.counts.prompt_tokens.saturating_add(row.counts.answer_tokens)));
    let others = holders.len().saturating_sub(MAX_HOLDERS);
    holders.truncate(MAX_HOLDERS);
    Ok(Usage { days, holders, others })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[tokio::test]
    async fn a_month_is_summed_by_day_and_by_holder() {
        let folder = tempfile::tempdir().unwrap();
        let today = day_of(SystemTime::now());
        let write = |days_ago: u64, life: &str, tenant: &str, tokens: u64| {
            let day = folder.path().join(day_name(today - days_ago));
            fs::create_dir_all(&day).unwrap();
            let holder = UsageHolder { tenant: tenant.into(), ..UsageHolder::default() };
            let counts = TokenCounts { requests: 1, answer_tokens: tokens, ..TokenCounts::default() };
            fs::write(day.join(format!("tokens-{life}.json")), serde_json::to_vec(&[UsageRow { holder, counts }]).unwrap()).unwrap();
        };
        write(0, "a", "one", 5);
        write(0, "b", "two", 7);
        write(3, "a", "one", 9);
        write(DAYS, "a", "one", 1000);
        let usage = UsageReader::new(folder.path().to_owned()).read().await.unwrap();
        let days: Vec<_> = usage.days.iter().map(|(day, counts)| (day.clone(), counts.answer_tokens)).collect();
        assert_eq!(days, [(day_name(today), 12), (day_name(today - 3), 9)]);
        let holders: Vec<_> = usage.holders.iter().map(|row| (&*row.holder.tenant, row.counts.answer_tokens)).collect();
        assert_eq!((holders, usage.others), (vec![("one", 14), ("two", 7)], 0));
        assert!(UsageReader::default().read().await.unwrap().days.is_empty());
    }
}
