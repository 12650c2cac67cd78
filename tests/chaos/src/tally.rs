//! Records of the run: verdicts, times, violations, and the figures of routers, which may have been
//! restarted; and their table.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use parking_lot::Mutex;

use crate::verdict::Verdict;

/// Most violations that are listed; one bug makes many.
const MAX_LISTED_VIOLATIONS: usize = 20;

/// All counts. There is one lock, held for a few instructions.
#[derive(Debug)]
pub(crate) struct Tally {
    counts: Mutex<Counts>,
    /// Whether notes are printed as they come.
    tells: bool,
}

#[derive(Debug, Default)]
struct Counts {
    verdicts: BTreeMap<Verdict, u64>,
    /// Milliseconds to the first token of each stream that had one.
    first_tokens: Vec<u32>,
    violations: Vec<String>,
    /// For each router, its counter of retries when last read, and the sum over all its lives.
    retries: BTreeMap<usize, (f64, f64)>,
    /// Most memory that a process of each kind had, in bytes.
    memory: BTreeMap<&'static str, u64>,
    notes: Vec<String>,
}

impl Tally {
    pub(crate) fn new(tells: bool) -> Self {
        Self { counts: Mutex::default(), tells }
    }

    pub(crate) fn verdict(&self, verdict: Verdict, first_token: Option<Duration>) {
        let mut counts = self.counts.lock();
        *counts.verdicts.entry(verdict).or_default() += 1;
        counts.first_tokens.extend(first_token.map(|took| u32::try_from(took.as_millis()).unwrap_or(u32::MAX)));
    }

    pub(crate) fn violation(&self, what: &str) {
        self.counts.lock().violations.push(what.to_owned());
    }

    /// Records a line for an investigation.
    pub(crate) fn note(&self, line: &str) {
        if self.tells {
            crate::say(line);
        }
        self.counts.lock().notes.push(line.to_owned());
    }

    /// Records the present value of a router's counter of retries.
    pub(crate) fn retries(&self, router: usize, now: f64) {
        let mut counts = self.counts.lock();
        let (last, all) = counts.retries.entry(router).or_default();
        // A restarted router counts from zero.
        *all += if now < *last { now } else { now - *last };
        *last = now;
    }

    /// Records the present memory of a process of some kind.
    pub(crate) fn memory(&self, kind: &'static str, bytes: u64) {
        let mut counts = self.counts.lock();
        let most = counts.memory.entry(kind).or_default();
        *most = bytes.max(*most);
    }

    /// Most memory that a process of some kind had.
    pub(crate) fn most_memory(&self, kind: &'static str) -> u64 {
        self.counts.lock().memory.get(kind).copied().unwrap_or(0)
    }

    pub(crate) fn whole(&self) -> u64 {
        self.counts.lock().verdicts.get(&Verdict::Whole).copied().unwrap_or(0)
    }

    /// All notes, for a file.
    pub(crate) fn notes(&self) -> String {
        self.counts.lock().notes.join("\n")
    }

    /// Violations, up to the limit.
    pub(crate) fn violations(&self) -> Vec<String> {
        let counts = self.counts.lock();
        let more = counts.violations.len().saturating_sub(MAX_LISTED_VIOLATIONS);
        let more = (more > 0).then(|| format!("and {more} more"));
        counts.violations.iter().take(MAX_LISTED_VIOLATIONS).cloned().chain(more).collect()
    }

    pub(crate) fn table(&self) -> String {
        let mut counts = self.counts.lock();
        let of = |verdict: Verdict| counts.verdicts.get(&verdict).copied().unwrap_or(0);
        let all: u64 = counts.verdicts.values().sum();
        let retried: f64 = counts.retries.values().map(|(_, all)| all).sum();
        let mut rows = vec![
            ("requests".to_owned(), all.to_string()),
            ("whole".to_owned(), of(Verdict::Whole).to_string()),
            ("attempts made again, at least".to_owned(), retried.to_string()),
            ("broken honestly".to_owned(), of(Verdict::Broken).to_string()),
            ("of a router that was ended or away".to_owned(), of(Verdict::Cut).to_string()),
            ("left by their client".to_owned(), of(Verdict::Left).to_string()),
        ];
        for (verdict, count) in &counts.verdicts {
            if let Verdict::Refused(status) = verdict {
                rows.push((format!("refused with {status}"), count.to_string()));
            }
        }
        for (kind, bytes) in &counts.memory {
            rows.push((format!("most memory of {kind}"), format!("{} MiB", bytes >> 20)));
        }
        counts.first_tokens.sort_unstable();
        let times = &counts.first_tokens;
        for (name, hundredths) in [("half of", 50), ("99 % of", 99), ("all", 100)] {
            let at = (times.len() * hundredths / 100).saturating_sub(1);
            let took = times.get(at).map_or("-".to_owned(), |took| format!("{took} ms"));
            rows.push((format!("first tokens of {name} streams within"), took));
        }
        let mut table = String::new();
        for (name, value) in rows {
            // Writing to memory does not fail.
            let _ = writeln!(table, "{name:<40} {value:>12}");
        }
        table
    }
}
