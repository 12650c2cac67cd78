//! Lines shown while engines start. Pure: the time is an argument.
//!
//! They show how far each engine has come, on changes and now and then, and for a failed engine the
//! cause and the remedy.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use hostler_proto::agent::v1::Phase;
use hostler_proto::fleet::v1::Replica;

/// Interval at which progress within a stage is shown again. Loading takes minutes.
const REPEAT_INTERVAL: Duration = Duration::from_secs(30);

/// How the reason of a replica begins that waits for another one, for an engine that somebody else
/// runs, for its turn, or for its model.
const WAITS: [&str; 2] = ["waits for ", "staging"];

/// Last line shown about each replica.
#[derive(Debug, Default)]
pub(crate) struct StartupProgress {
    last_lines: HashMap<String, LastLine>,
}

#[derive(Debug)]
struct LastLine {
    phase: Phase,
    /// Stage of the start; for a replica that is down, the reason.
    what: String,
    lines: Vec<String>,
    at: Instant,
}

impl StartupProgress {
    /// Lines to show now.
    pub(crate) fn lines(&mut self, replicas: &[Replica], now: Instant) -> Vec<String> {
        replicas.iter().filter_map(|replica| self.of(replica, now)).flatten().collect()
    }

    fn of(&mut self, replica: &Replica, now: Instant) -> Option<Vec<String>> {
        let (what, lines) = if replica.is_coming() {
            match &replica.state().progress {
                Some(progress) => (progress.stage.clone(), vec![format!("{}  {}", replica.id, progress.sentence())]),
                None if WAITS.iter().any(|begin| replica.first_reason().starts_with(begin)) => {
                    let reason = replica.first_reason();
                    (reason.to_owned(), vec![format!("{}  {reason}", replica.id)])
                }
                None => return None,
            }
        } else if matches!(replica.phase(), Phase::Failed | Phase::Quarantined) {
            down(replica)
        } else {
            return None;
        };
        let last = self.last_lines.get(&replica.id);
        let is_known = last.is_some_and(|last| last.phase == replica.phase() && last.what == what);
        // A cause is shown once, progress repeatedly.
        let is_due = last.is_some_and(|last| replica.is_coming() && last.lines != lines && now.duration_since(last.at) >= REPEAT_INTERVAL);
        if is_known && !is_due {
            return None;
        }
        self.last_lines.insert(replica.id.clone(), LastLine { phase: replica.phase(), what, lines: lines.clone(), at: now });
        Some(lines)
    }
}

/// Why a replica is down, and the lines about it.
fn down(replica: &Replica) -> (String, Vec<String>) {
    let (id, phase) = (&replica.id, replica.phase().as_str());
    let Some(failure) = &replica.state().failure else {
        let reason = replica.first_reason();
        return (reason.to_owned(), vec![format!("{id}  {phase}: {reason}")]);
    };
    let mut lines = vec![format!("{id}  {phase}: {}", failure.cause)];
    if !failure.remedy.is_empty() {
        lines.push(format!("  do    {}", failure.remedy));
    }
    lines.push(format!("  log   hostler logs {id}"));
    (failure.cause.clone(), lines)
}

#[cfg(test)]
mod tests;
