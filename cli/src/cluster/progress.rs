//! Describes an entry's jobs to somebody who waits for them: each line once, until it changes.
//! Pure.

use std::collections::BTreeSet;

use hostler_cluster::BudgetLeft;
use hostler_controller::{EntryStatus, JobStatus};

use crate::fleet_state::{LIMITED, describe_budget};
use crate::output::time_in_words;

/// Number of jobs named in a line.
const NAMED_JOBS: usize = 3;

/// Failures during a wait after which the wait is given up.
const MOST_FAILURES: u32 = 3;

/// Lines already shown for an entry.
#[derive(Debug, Default)]
pub(super) struct EntryProgress {
    printed: BTreeSet<String>,
}

/// Outlook of an entry for those who wait for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outlook {
    /// Jobs of the entry are on their way.
    Coming,
    /// The entry has all the nodes that it wants.
    Ready,
    /// Jobs of the entry fail, or the scheduler takes none.
    Failing,
}

/// A line, and the part that has to change for it to be shown again.
#[derive(Debug)]
struct ProgressNote {
    key: String,
    line: String,
}

impl ProgressNote {
    fn plain(line: String) -> Self {
        Self { key: line.clone(), line }
    }
}

impl EntryProgress {
    /// Lines to show now.
    pub(super) fn lines(&mut self, entry: &EntryStatus, trouble: &str) -> Vec<String> {
        let mut notes = describe(entry);
        notes.extend(describe_trouble(trouble));
        self.take(notes)
    }

    /// Lines to show while nothing is known of the entry.
    pub(super) fn trouble_lines(&mut self, trouble: &str) -> Vec<String> {
        self.take(describe_trouble(trouble).into_iter().collect())
    }

    fn take(&mut self, notes: Vec<ProgressNote>) -> Vec<String> {
        let new = notes.iter().filter(|notes| !self.printed.contains(&notes.key)).map(|notes| notes.line.clone()).collect();
        self.printed = notes.into_iter().map(|notes| notes.key).collect();
        new
    }
}

/// Judges an entry that had this many failures before somebody began to wait.
pub(super) fn judge(entry: &EntryStatus, failures_before: u32) -> Outlook {
    if entry.budget.as_ref().is_some_and(BudgetLeft::is_over) {
        return Outlook::Failing;
    }
    if entry.ready >= entry.wanted {
        return Outlook::Ready;
    }
    let is_coming = |job: &JobStatus| !matches!(job.state.as_str(), "failed" | "draining" | "ending");
    let nothing_comes = entry.ready == 0 && (entry.pause.is_some() || entry.given_up) && !entry.jobs.iter().any(is_coming);
    let fails_again = entry.failures >= failures_before.saturating_add(MOST_FAILURES);
    if nothing_comes || fails_again { Outlook::Failing } else { Outlook::Coming }
}

/// Describes the jobs left of an ending entry, whatever state they are in.
pub(super) fn describe_ending(entry: &EntryStatus) -> String {
    format!("ending    {}", name_jobs(&entry.jobs.iter().collect::<Vec<_>>()))
}

/// Describes what happens to these jobs because the settings have changed since their submission.
pub(super) fn describe_changed_settings(jobs: &[&JobStatus]) -> Vec<String> {
    let (waiting, others): (Vec<&JobStatus>, Vec<&JobStatus>) =
        jobs.iter().partition(|job| matches!(job.state.as_str(), "queued" | "held"));
    let mut lines = Vec::new();
    if !waiting.is_empty() {
        lines.push(format!("settings  changed: what waits is submitted anew ({})", name_jobs(&waiting)));
    }
    if !others.is_empty() {
        lines.push(format!("settings  changed: what runs stays, and its replacements have the new ones ({})", name_jobs(&others)));
    }
    lines
}

fn describe_trouble(trouble: &str) -> Option<ProgressNote> {
    Some(ProgressNote::plain(format!("trouble   {}", trouble.trim()))).filter(|_| !trouble.is_empty())
}

fn describe(entry: &EntryStatus) -> Vec<ProgressNote> {
    let mut notes = Vec::new();
    let mut rest: Vec<&JobStatus> = entry.jobs.iter().filter(|job| job.state != "ready").collect();
    while let Some(first) = rest.first().copied() {
        let (same, others): (Vec<_>, Vec<_>) = rest.into_iter().partition(|job| job.state == first.state && job.comment == first.comment);
        notes.push(describe_jobs(first, &same));
        rest = others;
    }
    if entry.ready > 0 {
        notes.push(ProgressNote::plain(format!("ready     {} of {}", entry.ready.min(entry.wanted), count(entry.wanted, "node"))));
    }
    if entry.given_up {
        let failed = count(entry.failures, "time");
        notes.push(ProgressNote::plain(format!(
            "given up  failed {failed} in a row: mend the cause, and `hostler up` or `hostler scale` tries again"
        )));
    } else if let Some(pause) = entry.pause.filter(|_| entry.failures > 0) {
        let failed = format!("failed    {} in a row", count(entry.failures, "time"));
        notes.push(ProgressNote { line: format!("{failed}; submitted again in {}", time_in_words(pause)), key: failed });
    }
    if let Some(seconds) = entry.limited {
        let limited = format!("limited   {LIMITED}");
        notes.push(ProgressNote { line: format!("{limited}; the next in {}", time_in_words(seconds)), key: limited });
    }
    if let Some(left) = describe_budget(entry) {
        let key = format!("budget    {}", entry.budget.as_ref().is_some_and(BudgetLeft::is_over));
        notes.push(ProgressNote { key, line: format!("budget    {left}") });
    }
    if !entry.refusal.is_empty() {
        notes.push(ProgressNote::plain(format!("refused   {}", entry.refusal.trim())));
    }
    notes
}

/// Describes jobs in the same state for which the scheduler gives the same reason.
fn describe_jobs(first: &JobStatus, jobs: &[&JobStatus]) -> ProgressNote {
    let (word, remark) = match first.state.as_str() {
        "waiting for its agent" => ("running", " its agent is starting".to_owned()),
        "queued" | "held" => (first.state.as_str(), format!(" {}", first.comment)),
        state => (state, String::new()),
    };
    let colon = if remark.trim().is_empty() { "" } else { ":" };
    let text = format!("{word:<9} {}{colon}{}", name_jobs(jobs), remark.trim_end());
    let next_start = jobs.iter().filter_map(|job| job.starts_in).min();
    let estimate = next_start.map(|seconds| format!("; expected to start in {}", time_in_words(seconds))).unwrap_or_default();
    ProgressNote { key: format!("{text}{}", next_start.is_some()), line: format!("{text}{estimate}") }
}

fn name_jobs(jobs: &[&JobStatus]) -> String {
    let named: Vec<String> = jobs.iter().take(NAMED_JOBS).map(|job| name_job(job)).collect();
    let more = if jobs.len() > NAMED_JOBS { format!(" and {} more", jobs.len() - NAMED_JOBS) } else { String::new() };
    format!("{}{more}", named.join(", "))
}

fn name_job(job: &JobStatus) -> String {
    if job.host.is_empty() { job.id.clone() } else { format!("{} on {}", job.id, job.host) }
}

fn count(number: u32, thing: &str) -> String {
    if number == 1 { format!("1 {thing}") } else { format!("{number} {thing}s") }
}

#[cfg(test)]
mod tests;
