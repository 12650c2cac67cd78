//! Records what happened in a run, and when: for readers of a failed seed, and for the test that a
//! seed gives the same run twice.

use std::fmt::{Display, Write};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_64;

/// Most lines shown of a failed run.
const SHOWN_LINES: usize = 60;

/// A record of a run. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct Trace(Arc<TraceLog>);

#[derive(Debug)]
struct TraceLog {
    begun: Instant,
    lines: Mutex<Vec<String>>,
    violations: Mutex<Vec<String>>,
}

impl Trace {
    pub(super) fn begin() -> Self {
        Self(Arc::new(TraceLog { begun: Instant::now(), lines: Mutex::default(), violations: Mutex::default() }))
    }

    pub(super) fn note(&self, what: impl Display) {
        self.0.lines.lock().push(format!("{:9.3} {what}", self.0.begun.elapsed().as_secs_f64()));
    }

    /// Records something that must not happen.
    pub(super) fn violation(&self, what: impl Display) {
        self.note(format_args!("VIOLATION {what}"));
        self.0.violations.lock().push(what.to_string());
    }

    pub(super) fn violations(&self) -> Vec<String> {
        self.0.violations.lock().clone()
    }

    /// Hash of everything recorded.
    pub(super) fn hash(&self) -> u64 {
        xxh3_64(self.0.lines.lock().join("\n").as_bytes())
    }

    pub(super) fn lines(&self) -> Vec<String> {
        self.0.lines.lock().clone()
    }

    /// The faults, and the last lines that contain one of the words.
    pub(super) fn excerpt(&self, words: &[String]) -> String {
        let lines = self.0.lines.lock();
        let is_shown = |line: &&String| line.contains("fault:") || words.iter().any(|word| line.contains(&**word));
        let shown: Vec<&String> = lines.iter().filter(is_shown).collect();
        let mut excerpt = String::new();
        for line in &shown[shown.len().saturating_sub(SHOWN_LINES)..] {
            let _ = writeln!(excerpt, "{line}");
        }
        excerpt
    }
}
