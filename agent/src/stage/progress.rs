//! How far staging has come, in numbers that the copying threads count and in words for people.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Time before which a rate says nothing.
const SHORTEST_RATED: Duration = Duration::from_secs(1);

/// What is being done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum StageStep {
    #[default]
    None,
    /// Reading the source's list of files, and choosing a place.
    Looking,
    /// Another agent of this node copies.
    Following,
    Checking,
    Copying,
}

/// Counts of one attempt.
#[derive(Debug, Default)]
pub(super) struct StageProgress {
    step: Mutex<(StageStep, Option<Instant>)>,
    total: AtomicU64,
    done: AtomicU64,
    /// Bytes read from the source.
    read: AtomicU64,
    /// Last sign of another agent that copies.
    others_sign: AtomicU64,
    is_cancelled: AtomicBool,
}

impl StageProgress {
    pub(super) fn enter(&self, step: StageStep, total: u64) {
        *self.step.lock() = (step, Some(Instant::now()));
        self.total.store(total, Ordering::Relaxed);
        self.done.store(0, Ordering::Relaxed);
    }

    pub(super) fn add(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Notes how far another agent's copy is, and its last sign of life.
    pub(super) fn follow(&self, bytes: u64, sign: u64) {
        self.done.store(bytes, Ordering::Relaxed);
        self.others_sign.store(sign, Ordering::Relaxed);
    }

    pub(super) fn add_read(&self, bytes: u64) {
        self.read.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn bytes_read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// A number that changes while anything goes on.
    pub(super) fn sign_of_life(&self) -> ([u64; 3], StageStep) {
        let counts = [&self.done, &self.read, &self.others_sign].map(|count| count.load(Ordering::Relaxed));
        (counts, self.step.lock().0)
    }

    pub(super) fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Relaxed)
    }

    pub(super) fn describe(&self) -> Option<String> {
        let (step, since) = *self.step.lock();
        let (done, total) = (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed));
        let percent = done.min(total).saturating_mul(100).checked_div(total).unwrap_or(0);
        match step {
            StageStep::None => None,
            StageStep::Looking => Some("staging: looks at the model's files".to_owned()),
            StageStep::Checking => Some(format!("staging: checks the copy, {percent} %")),
            StageStep::Following => Some(format!("staging {percent} %, copied by another agent of this node")),
            StageStep::Copying => {
                let took = since.map(|since| since.elapsed()).unwrap_or_default();
                let rate = (took >= SHORTEST_RATED).then(|| format!(", {}", rate_in_words(done, took)));
                Some(format!("staging {percent} %{}", rate.unwrap_or_default()))
            }
        }
    }
}

/// Such as `1.2 GB/s`.
fn rate_in_words(bytes: u64, took: Duration) -> String {
    let megabytes = u128::from(bytes) / took.as_millis().max(1) / 1000;
    match megabytes {
        0..1000 => format!("{megabytes} MB/s"),
        _ => format!("{}.{} GB/s", megabytes / 1000, megabytes % 1000 / 100),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_copy_says_how_far_and_how_fast_it_is() {
        let progress = StageProgress::default();
        assert_eq!(progress.describe(), None);
        progress.enter(StageStep::Copying, 10_000_000_000);
        progress.add(4_300_000_000);
        assert_eq!(progress.describe().unwrap(), "staging 43 %");
        tokio::time::advance(Duration::from_millis(3500)).await;
        assert_eq!(progress.describe().unwrap(), "staging 43 %, 1.2 GB/s");
        progress.enter(StageStep::Following, 0);
        assert_eq!(progress.describe().unwrap(), "staging 0 %, copied by another agent of this node");
    }
}
