//! Detection of engines that have work but make no progress.
//!
//! A hung vLLM core answers `/health` with 200 and shows frozen gauges, so only its output counts:
//! bytes of answers, and counters that move. `judge` decides; the rest waits and observes.

use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};

use super::SUSPENDED_AFTER;
use super::canary::{Canary, CanaryOutcome};
use super::diagnosis::EndCause;
use super::monitored_engine::{MonitoredEngine, WorkCounters};
use crate::process::activity::{ProcessActivity, ProcessSnapshot};

/// How often progress is checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// Most time that one check may add to a stall.
///
/// Time in which this program itself did not run does not count against the engine.
const MAX_STALL_PER_CHECK: Duration = Duration::from_secs(1);

/// The stall limit is at least this many times the 99th percentile of pauses.
const P99_FACTOR: u32 = 20;

/// Upper bound of the stall limit.
///
/// Streams that usually pause for more than six seconds are of no use to anybody, so the limit
/// stays below twenty times that.
const MAX_STALL_LIMIT: Duration = Duration::from_secs(120);

/// An engine that computes gets this many times the limit.
///
/// One long step moves no counter: a prefill on a CPU, or a kernel compiled for a new shape. But a
/// hung engine may compute, too: collectives of NCCL wait at 100 % of a core. So the wait must end
/// at some time.
const BUSY_FACTOR: u32 = 6;

/// Factor for a computing engine without GPUs.
///
/// There are no kernels to compile and no NCCL to wait in, but a step of 2,048 prompt tokens of a
/// model with 3 billion parameters takes two cores four minutes.
const BUSY_FACTOR_ON_CPU: u32 = 60;

/// Time limit for a test completion that decides about a stall. The engine does nothing else then.
const CANARY_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, PartialEq, Eq)]
enum StallVerdict {
    /// The engine may still move.
    Wait,
    /// A test completion decides.
    ///
    /// The requests seem not to have reached the core, as while the front-end fetches an image.
    RunCanary,
    /// The engine does not move any more, for this reason.
    Hung(String),
}

/// How long an engine may make no progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct StallLimits {
    idle: Duration,
    busy: Duration,
}

impl StallLimits {
    /// Limits for an engine whose streams usually pause for `p99`.
    fn new(stall_timeout: Duration, p99: Option<Duration>, on_gpus: bool) -> Self {
        let usual = p99.unwrap_or_default().saturating_mul(P99_FACTOR).min(MAX_STALL_LIMIT);
        let idle = stall_timeout.max(usual);
        Self { idle, busy: idle * if on_gpus { BUSY_FACTOR } else { BUSY_FACTOR_ON_CPU } }
    }
}

/// Decides about a stall that has lasted this long.
///
/// `holds` says whether the engine itself reports requests, `testable` whether it takes test
/// completions.
fn judge(lasted: Duration, limits: StallLimits, holds: bool, testable: bool, activity: &ProcessActivity) -> StallVerdict {
    if lasted < limits.idle {
        return StallVerdict::Wait;
    }
    let at_last = lasted >= limits.idle * BUSY_FACTOR;
    match activity {
        ProcessActivity::Stopped(process) => StallVerdict::Hung(format!("its process {process} is stopped")),
        ProcessActivity::Idle if holds => StallVerdict::Hung("its processes do nothing".to_owned()),
        ProcessActivity::Idle if testable => StallVerdict::RunCanary,
        ProcessActivity::Idle if at_last => StallVerdict::Hung("its processes do nothing".to_owned()),
        ProcessActivity::Computing if lasted >= limits.busy => StallVerdict::Hung("its processes compute, but for too long".to_owned()),
        ProcessActivity::Unknown if at_last => StallVerdict::Hung("its processes cannot be seen".to_owned()),
        ProcessActivity::Idle | ProcessActivity::Computing | ProcessActivity::Unknown => StallVerdict::Wait,
    }
}

/// How long requests have waited without any progress.
///
/// Time in which no request waits neither counts nor clears the stall: a hung engine does not move
/// because its clients gave up.
///
/// Time in which another node's part is out of reach does not count, and as much after it: TCP
/// tries again after twice the time that a network was down.
#[derive(Debug)]
struct StallTimer {
    counters: WorkCounters,
    checked_at: Instant,
    duration: Duration,
    excused: Duration,
}

impl StallTimer {
    fn new(progress: WorkCounters, now: Instant) -> Self {
        Self { counters: progress, checked_at: now, duration: Duration::ZERO, excused: Duration::ZERO }
    }

    /// Adds an observation, and returns how long the stall has lasted.
    fn update(&mut self, waiting: u32, progress: WorkCounters, is_cut_off: bool, now: Instant) -> Duration {
        let passed = now.saturating_duration_since(self.checked_at).min(MAX_STALL_PER_CHECK);
        self.checked_at = now;
        if progress != self.counters {
            *self = Self::new(progress, now);
        } else if is_cut_off {
            self.excused += passed;
        } else if waiting > 0 {
            self.duration += passed;
        }
        self.duration.saturating_sub(self.excused)
    }
}

/// Watches a ready engine until it hangs, and returns why to give it up.
pub(super) async fn watch(subject: &MonitoredEngine) -> EndCause {
    let flow = subject.traffic.flow();
    let mut tests = Canary::new(subject);
    let mut testable = true;
    let mut stall = StallTimer::new(subject.work_counters(), Instant::now());
    // Last snapshot of the processes, and how long the stall had lasted then.
    let mut looked: Option<(ProcessSnapshot, Duration)> = None;
    let mut ticks = interval(CHECK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        // An idle engine costs no wake-ups.
        subject.traffic.wait_busy().await;
        let waited_since = Instant::now();
        ticks.tick().await;
        if waited_since.elapsed() > SUSPENDED_AFTER {
            // The job was suspended. Its engine resumes a moment after this program, and that gap
            // must not count against it.
            looked = None;
        }
        let Some(model) = subject.model_if_ready() else {
            stall = StallTimer::new(subject.work_counters(), Instant::now());
            continue;
        };
        flow.gaps().decay();
        let waiting = flow.waiting();
        let lasted = stall.update(waiting, subject.work_counters(), subject.is_cut_off(), Instant::now());
        let limits = StallLimits::new(subject.stall_timeout, flow.gaps().p99(), subject.uses_gpus);
        if lasted < limits.idle / 2 {
            looked = None;
            continue;
        }
        // Examine the processes after half of the time, and again each time that as much has
        // passed.
        let Some((earlier, before)) = &looked else {
            looked = Some((ProcessSnapshot::take(subject.process_group()).await, lasted));
            continue;
        };
        if waiting == 0 || lasted < limits.idle || lasted.saturating_sub(*before) < limits.idle / 2 {
            continue;
        }
        let look = ProcessSnapshot::take(subject.process_group()).await;
        // Hours may have passed in which no request waited and nothing was computed.
        let activity = subject.activity(&look, earlier, lasted.saturating_sub(*before));
        let why = match judge(lasted, limits, subject.has_requests(), testable, &activity) {
            StallVerdict::Wait => {
                looked = Some((look, lasted));
                continue;
            }
            StallVerdict::Hung(why) => why,
            StallVerdict::RunCanary => match tests.run_test_within(&model, CANARY_TIMEOUT).await {
                CanaryOutcome::Computed => {
                    tracing::info!(socket = %subject.socket.display(), seconds = lasted.as_secs(), waiting, "no answer moves, but a test completion does: the requests wait for something else");
                    stall = StallTimer::new(subject.work_counters(), Instant::now());
                    continue;
                }
                CanaryOutcome::Unsupported(_) => {
                    testable = false;
                    looked = Some((look, lasted));
                    continue;
                }
                CanaryOutcome::Suspended => {
                    looked = Some((look, lasted));
                    continue;
                }
                CanaryOutcome::Failed(reason) => format!("a test completion failed: {reason}"),
                // The first use of a kernel may compile it.
                CanaryOutcome::TimedOut(deadline)
                    if subject.activity(&ProcessSnapshot::take(subject.process_group()).await, &look, deadline)
                        == ProcessActivity::Computing =>
                {
                    looked = Some((look, lasted));
                    continue;
                }
                CanaryOutcome::TimedOut(deadline) => format!("a test completion got no answer within {} s", deadline.as_secs()),
            },
        };
        // Examining and testing took time. Meanwhile the engine may have made progress after all,
        // or been told to stop.
        if subject.work_counters() == stall.counters && subject.model_if_ready().is_some() {
            return EndCause::Stalled { lasted, waiting, why };
        }
    }
}

#[cfg(test)]
mod tests;
