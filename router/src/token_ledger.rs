//! Requests and tokens by day, key, tenant and model, as files that outlive the router.
//!
//! Each life of a router has a file of its own for each day, `DAY/tokens-LIFE.json`, and only adds
//! to it. So the sum of all files is right whoever takes whose place, and whoever was killed: a
//! killed router loses what ended within its last second. A day is one of UTC.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{fs, process};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use crate::folder_names::folder_names;
use crate::sse::TokenUsage;

/// How often changes are written: what a killed router loses.
const WRITE_INTERVAL: Duration = Duration::from_secs(1);

const SECONDS_OF_DAY: u64 = 24 * 60 * 60;

/// Most rows of a day. Keys and tenants are those of the keys file, but there may be many models.
/// Further ones count in one row without names.
const MAX_ROWS: usize = 10_000;

/// Most bytes of a file. A row has some 200.
const MAX_FILE_BYTES: u64 = 16 * 1024 * 1024;

/// What is added up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenCounts {
    pub requests: u64,
    /// Requests without a complete answer.
    pub failed: u64,
    pub prompt_tokens: u64,
    /// Prompt tokens that were cached, as far as engines say.
    pub cached_tokens: u64,
    pub answer_tokens: u64,
}

/// Whose requests they are, and for what.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct UsageHolder {
    /// Public id; empty without keys.
    pub key: Box<str>,
    pub tenant: Box<str>,
    /// As the request named it; empty if it named none.
    pub model: Box<str>,
}

/// A row of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageRow {
    #[serde(flatten)]
    pub holder: UsageHolder,
    #[serde(flatten)]
    pub counts: TokenCounts,
}

impl TokenCounts {
    /// Those of one request.
    pub(crate) fn of_request(usage: Option<TokenUsage>, has_failed: bool) -> Self {
        Self {
            requests: 1,
            failed: has_failed.into(),
            prompt_tokens: usage.map_or(0, |usage| usage.prompt_tokens),
            cached_tokens: usage.and_then(|usage| usage.cached_tokens).unwrap_or(0),
            answer_tokens: usage.map_or(0, |usage| usage.completion_tokens),
        }
    }

    pub fn add(&mut self, other: &Self) {
        let fields = |counts: Self| [counts.requests, counts.failed, counts.prompt_tokens, counts.cached_tokens, counts.answer_tokens];
        let (own, more) = (fields(*self), fields(*other));
        let [requests, failed, prompt_tokens, cached_tokens, answer_tokens] = std::array::from_fn(|at| own[at].saturating_add(more[at]));
        *self = Self { requests, failed, prompt_tokens, cached_tokens, answer_tokens };
    }
}

/// The counts of this life of the router. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct TokenLedger(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    folder: PathBuf,
    /// Part of the names of this life's files.
    life: String,
    days: Mutex<BTreeMap<u64, Day>>,
    /// Days that are in files alone.
    forgotten: AtomicU64,
}

#[derive(Debug, Default)]
struct Day {
    rows: BTreeMap<UsageHolder, TokenCounts>,
    is_written: bool,
    /// A day that comes again, after a clock was set back, has another file.
    file: u64,
}

impl TokenLedger {
    /// The ledger of this folder; none without a folder.
    pub(crate) fn open(folder: &Path) -> Option<Self> {
        (!folder.as_os_str().is_empty()).then(|| Self::new(folder))
    }

    /// Writes what is left.
    pub(crate) async fn finish(ledger: Option<Self>) {
        if let Some(ledger) = ledger
            && let Err(error) = ledger.flush().await
        {
            tracing::warn!(event = "usage_not_written", %error, "the last second of usage is lost");
        }
    }

    /// A ledger with files below this folder, which is made when there is something to write.
    fn new(folder: &Path) -> Self {
        let began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let life = format!("{began:x}-{:x}", process::id());
        Self(Arc::new(Shared { folder: folder.to_owned(), life, days: Mutex::default(), forgotten: AtomicU64::new(0) }))
    }

    /// Adds an ended request.
    pub(crate) fn record(&self, holder: UsageHolder, counts: &TokenCounts, ended_at: SystemTime) {
        let mut days = self.0.days.lock();
        let new_day = || Day { file: self.0.forgotten.load(Ordering::Relaxed), ..Day::default() };
        let day = days.entry(day_of(ended_at)).or_insert_with(new_day);
        let is_known = day.rows.contains_key(&holder) || day.rows.len() < MAX_ROWS;
        day.rows.entry(if is_known { holder } else { UsageHolder::default() }).or_default().add(counts);
        day.is_written = false;
    }

    /// Writes changes until the end.
    pub(crate) async fn keep_written(self, end: CancellationToken) {
        let mut has_failed = false;
        loop {
            tokio::select! {
                () = tokio::time::sleep(WRITE_INTERVAL) => {}
                () = end.cancelled() => return,
            }
            let written = self.flush().await;
            if let Err(error) = &written
                && !has_failed
            {
                let folder = self.0.folder.display();
                tracing::warn!(event = "usage_not_written", %folder, %error, "usage is kept in memory until it can be written");
            }
            has_failed = written.is_err();
        }
    }

    /// Writes what has changed.
    async fn flush(&self) -> io::Result<()> {
        let ledger = self.clone();
        tokio::task::spawn_blocking(move || ledger.write()).await.unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    fn write(&self) -> io::Result<()> {
        let Shared { folder, life, days, forgotten } = &*self.0;
        let changed: Vec<u64> = days.lock().iter().filter(|(_, day)| !day.is_written).map(|(number, _)| *number).collect();
        for number in changed {
            let (file, rows): (u64, Vec<UsageRow>) = {
                let mut days = days.lock();
                let Some(day) = days.get_mut(&number) else { continue };
                day.is_written = true;
                (day.file, day.rows.iter().map(|(holder, counts)| UsageRow { holder: holder.clone(), counts: *counts }).collect())
            };
            let written = write_rows(&folder.join(day_name(number)), &format!("{life}-{file}"), &rows);
            if written.is_err() {
                days.lock().entry(number).and_modify(|day| day.is_written = false);
                return written;
            }
        }
        // A request that ends now belongs to today, or to yesterday at midnight.
        let today = day_of(SystemTime::now());
        let over = days.lock().extract_if(.., |number, day| *number + 1 < today && day.is_written).count();
        forgotten.fetch_add(over as u64, Ordering::Relaxed);
        Ok(())
    }
}

fn write_rows(folder: &Path, life: &str, rows: &[UsageRow]) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    // Files of `tempfile` are their owner's alone.
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(&serde_json::to_vec(rows)?)?;
    file.persist(folder.join(format!("tokens-{life}.json")))?;
    Ok(())
}

/// The day of UTC in which this moment is, numbered since 1970.
#[must_use]
pub fn day_of(moment: SystemTime) -> u64 {
    moment.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() / SECONDS_OF_DAY
}

/// Such as `2026-11-28`.
#[must_use]
pub fn day_name(day: u64) -> String {
    let moment = UNIX_EPOCH + Duration::from_secs(day.saturating_mul(SECONDS_OF_DAY));
    humantime::format_rfc3339_seconds(moment).to_string()[..10].to_owned()
}

/// The rows of each day since this one (such as `2026-11-28`) in the files below `folder`, of all
/// routers together. Files that are none of a router's are left out.
///
/// # Errors
/// If a file cannot be read, or is damaged.
pub fn read_usage(folder: &Path, since: &str) -> io::Result<BTreeMap<String, Vec<UsageRow>>> {
    let mut days: BTreeMap<String, Vec<UsageRow>> = BTreeMap::new();
    for day in folder_names(folder)?.into_iter().filter(|day| day.len() == 10 && day.as_str() >= since) {
        for name in folder_names(&folder.join(&day))? {
            if name.starts_with("tokens-") && name.ends_with(".json") {
                let path = folder.join(&day).join(name);
                let rows = read_rows(&path).map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))?;
                days.entry(day.clone()).or_default().extend(rows);
            }
        }
    }
    Ok(days)
}

fn read_rows(path: &Path) -> io::Result<Vec<UsageRow>> {
    let about = fs::metadata(path)?;
    if !about.is_file() || about.len() > MAX_FILE_BYTES {
        return Err(io::Error::new(ErrorKind::InvalidData, "it is no file of usage: move it away"));
    }
    serde_json::from_slice(&fs::read(path)?)
        .map_err(|error| io::Error::new(ErrorKind::InvalidData, format!("it is no file of usage, so move it away: {error}")))
}

#[cfg(test)]
mod tests;
