//! Which requests were in flight when an engine of one replica crashed: any of them may be the cause. The supervisor records, every router's report reads; a router that attaches later still learns what happened within the last ten minutes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

/// How long a crash is remembered: as long as routers refuse a request that killed engines.
pub(crate) const CRASH_RETENTION: Duration = Duration::from_secs(10 * 60);

/// The most crashes that are remembered. With the pauses between the starts of an engine that keeps
/// crashing (1, 2, 4, … s) ten minutes hold about nine.
const MAX_CRASHES: usize = 32;

/// The most requests of one crash. An engine runs 256 to 1,024 at once, and the others that wait in
/// it cannot have killed it.
const MAX_REQUESTS_PER_CRASH: usize = 4096;

/// Names a request by its content; see `Fingerprint` in the contract between agent and router.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestFingerprint(pub u128);

/// The end of one life of an engine that nobody had ordered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Crash {
    pub epoch: u64,
    pub at: Instant,
    pub requests: Arc<[RequestFingerprint]>,
}

/// The crashes of one replica's engines that are remembered, and how many there were in all.
#[derive(Debug, Default)]
struct CrashHistory {
    /// Oldest first.
    recent: VecDeque<Crash>,
    /// Crashes so far, forgotten ones included.
    version: u64,
}

#[derive(Debug)]
pub struct CrashLog {
    record: watch::Sender<CrashHistory>,
}

impl Default for CrashLog {
    fn default() -> Self {
        Self { record: watch::Sender::new(CrashHistory::default()) }
    }
}

/// Wakes when an engine has crashed; says nothing else.
#[derive(Debug)]
pub struct CrashSignal(watch::Receiver<CrashHistory>);

impl CrashSignal {
    /// Resolves after the next crash; `false` when there can be no further one.
    pub async fn changed(&mut self) -> bool {
        self.0.changed().await.is_ok()
    }
}

impl CrashLog {
    /// Remembers that this life ended with these requests in flight. Without any there is nothing
    /// to report: no request can have been the cause.
    pub fn record(&self, epoch: u64, mut requests: Vec<RequestFingerprint>) {
        if requests.is_empty() {
            return;
        }
        requests.truncate(MAX_REQUESTS_PER_CRASH);
        let at = Instant::now();
        self.record.send_modify(|record| {
            record.recent.retain(|death| at.saturating_duration_since(death.at) < CRASH_RETENTION);
            if record.recent.len() == MAX_CRASHES {
                record.recent.pop_front();
            }
            record.recent.push_back(Crash { epoch, at, requests: requests.into() });
            record.version += 1;
        });
    }

    pub fn version(&self) -> u64 {
        self.record.borrow().version
    }

    /// The remembered crashes after that version, oldest first, and the version for the next call;
    /// 0 gives all.
    pub fn crashes_since(&self, version: u64) -> (Vec<Crash>, u64) {
        let now = Instant::now();
        let record = self.record.borrow();
        let new = usize::try_from(record.version.saturating_sub(version)).unwrap_or(usize::MAX);
        let skipped = record.recent.len().saturating_sub(new);
        let found = record.recent.iter().skip(skipped).filter(|death| now.saturating_duration_since(death.at) < CRASH_RETENTION).cloned();
        (found.collect(), record.version)
    }

    /// All crashes that are remembered, oldest first.
    pub fn recent_crashes(&self) -> Vec<Crash> {
        self.crashes_since(0).0
    }

    pub fn subscribe(&self) -> CrashSignal {
        CrashSignal(self.record.subscribe())
    }
}

#[cfg(test)]
mod tests;
