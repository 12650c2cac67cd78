//! Record of the requests that were in flight when an engine of one replica crashed.
//!
//! Any of them may be the cause. The supervisor writes the record, and every router's report reads
//! it. A router that attaches later still learns about the last ten minutes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

/// How long a crash is remembered: as long as routers refuse a request that killed engines.
pub(crate) const CRASH_RETENTION: Duration = Duration::from_secs(10 * 60);

/// Most crashes that are remembered.
///
/// An engine that keeps crashing pauses between starts (1, 2, 4, … s), so ten minutes hold about
/// nine.
const MAX_CRASHES: usize = 32;

/// Most requests of one crash.
///
/// An engine runs 256 to 1,024 at once, and requests that only wait in it cannot have killed it.
const MAX_REQUESTS_PER_CRASH: usize = 4096;

/// Identifies a request by its content; see `Fingerprint` in the contract between agent and router.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestFingerprint(pub u128);

/// Time after a crash within which another cause may excuse the requests.
///
/// A GPU's fault is reported, or found by the reading of each second, sooner than that.
const EXCUSE_PERIOD: Duration = Duration::from_secs(5);

/// An end of an engine's life that nobody had ordered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Crash {
    pub epoch: u64,
    pub at: Instant,
    /// Requests that may each be the cause.
    ///
    /// Empty if none is; routers must hear that, too, because they have seen the connections break.
    pub requests: Arc<[RequestFingerprint]>,
}

/// Remembered crashes of one replica's engines, and their total number.
#[derive(Debug, Default)]
struct CrashHistory {
    /// Remembered crashes, oldest first.
    recent: VecDeque<Crash>,
    /// Number of crashes so far, including forgotten ones.
    version: u64,
}

impl CrashHistory {
    fn push(&mut self, crash: Crash, now: Instant) {
        self.recent.retain(|known| now.saturating_duration_since(known.at) < CRASH_RETENTION);
        if self.recent.len() == MAX_CRASHES {
            self.recent.pop_front();
        }
        self.recent.push_back(crash);
        self.version += 1;
    }
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

/// Signal that wakes when an engine has crashed and carries no other information.
#[derive(Debug)]
pub struct CrashSignal(watch::Receiver<CrashHistory>);

impl CrashSignal {
    /// Resolves after the next crash; `false` if no further one can come.
    pub async fn changed(&mut self) -> bool {
        self.0.changed().await.is_ok()
    }
}

impl CrashLog {
    /// Records that this life ended with these requests in flight.
    ///
    /// An empty list is not recorded: no request can have been the cause.
    pub fn record(&self, epoch: u64, mut requests: Vec<RequestFingerprint>) {
        if requests.is_empty() {
            return;
        }
        requests.truncate(MAX_REQUESTS_PER_CRASH);
        self.push(epoch, requests.into());
    }

    /// Records that this life ended with requests in flight that are not to blame.
    pub fn record_blameless(&self, epoch: u64) {
        self.push(epoch, Arc::default());
    }

    /// Clears the requests of blame for the end of this life, if it ended a moment ago and another
    /// cause was found.
    ///
    /// `true` if that is new.
    pub fn excuse(&self, epoch: u64) -> bool {
        let now = Instant::now();
        let is_it =
            |crash: &Crash| crash.epoch == epoch && !crash.requests.is_empty() && now.saturating_duration_since(crash.at) <= EXCUSE_PERIOD;
        self.record.send_if_modified(|record| {
            let Some(crash) = record.recent.iter().position(is_it).and_then(|place| record.recent.remove(place)) else { return false };
            // Push to the end, so that it is reported again.
            record.push(Crash { requests: Arc::default(), ..crash }, now);
            true
        })
    }

    fn push(&self, epoch: u64, requests: Arc<[RequestFingerprint]>) {
        let at = Instant::now();
        self.record.send_modify(|record| record.push(Crash { epoch, at, requests }, at));
    }

    pub fn version(&self) -> u64 {
        self.record.borrow().version
    }

    /// Remembered crashes after that version, oldest first, and the version for the next call.
    ///
    /// Version 0 returns all.
    pub fn crashes_since(&self, version: u64) -> (Vec<Crash>, u64) {
        let now = Instant::now();
        let record = self.record.borrow();
        let new = usize::try_from(record.version.saturating_sub(version)).unwrap_or(usize::MAX);
        let skipped = record.recent.len().saturating_sub(new);
        let found = record.recent.iter().skip(skipped).filter(|death| now.saturating_duration_since(death.at) < CRASH_RETENTION).cloned();
        (found.collect(), record.version)
    }

    /// All remembered crashes, oldest first.
    pub fn recent_crashes(&self) -> Vec<Crash> {
        self.crashes_since(0).0
    }

    pub fn subscribe(&self) -> CrashSignal {
        CrashSignal(self.record.subscribe())
    }
}

#[cfg(test)]
mod tests;
