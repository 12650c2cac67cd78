//! One load against one target, from its warm-up to the end of its last request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::{sleep_until, timeout_at};

use super::conversation::{Endpoint, LoadContext};
use super::session_feed::feed_sessions;
use crate::error::Error;
use crate::figures::Figures;
use crate::fleet::FleetProbe;
use crate::progress::{Phase, Progress};
use crate::record::{Limits, Recorder};
use crate::session::Session;

/// How often progress is reported and metrics are read.
const TICK: Duration = Duration::from_secs(1);

/// Plan of a load.
pub(super) struct Plan {
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) at_once: u32,
    /// Time before counting begins.
    pub(super) warm_up: Duration,
    /// Time in which counted requests begin.
    pub(super) duration: Option<Duration>,
    /// Most counted requests.
    pub(super) requests: Option<u64>,
    pub(super) limits: Limits,
    /// Whether the load is even over time, so that the answers within its duration give the
    /// target's rate.
    pub(super) is_even: bool,
    /// Name of the load while it runs.
    pub(super) phase: Phase,
}

/// Makes the load and waits until everything begun has ended.
///
/// The warm-up uses the first sessions. Counting begins in their midst, so that the target is
/// already busy.
pub(super) async fn load<S>(plan: &Plan, sessions: S, show: &mut impl FnMut(Progress)) -> Result<Figures, Error>
where
    S: Iterator<Item = Session> + Send + 'static,
{
    let began = Instant::now();
    let counted_from = began + plan.warm_up;
    let until = plan.duration.map(|duration| counted_from + duration);
    let talks = Arc::new(LoadContext {
        endpoint: plan.endpoint.clone(),
        recorder: Recorder::new(counted_from, until.filter(|_| plan.is_even), plan.limits),
        counted_from,
        until,
        left: plan.requests.map(AtomicU64::new),
        idle: Mutex::default(),
    });
    let sessions = feed_sessions(sessions, began, until)?;
    let all = SessionStarter { talks: talks.clone(), sessions, waiting: None, began }.all(plan.at_once);

    let mut fleet = plan.endpoint.metrics.clone().map(FleetProbe::new);
    let kv_use = Mutex::new(None);
    let mut tracker = ProgressTracker::new(plan, began);
    {
        let watching = watch(fleet.as_mut(), counted_from, &kv_use);
        tokio::pin!(all, watching);
        loop {
            tokio::select! {
                () = &mut all => break,
                () = &mut watching => {}
                () = sleep_until(tracker.next.into()) => {
                    if tracker.next > counted_from {
                        talks.recorder.tick(*kv_use.lock());
                    }
                    show(tracker.tick(&talks));
                }
            }
        }
    }
    show(tracker.progress(&talks, Instant::now()));
    let fleet = match &mut fleet {
        None => None,
        Some(fleet) => {
            fleet.ask().await;
            fleet.figures()
        }
    };
    Ok(talks.recorder.figures(fleet))
}

/// Reads the fleet's metrics once a second, for as long as this is polled.
async fn watch(fleet: Option<&mut FleetProbe>, from: Instant, kv_use: &Mutex<Option<f64>>) {
    let Some(fleet) = fleet else { return std::future::pending().await };
    let mut next = from;
    loop {
        sleep_until(next.into()).await;
        let seen = fleet.ask().await;
        *kv_use.lock() = seen;
        next = (next + TICK).max(Instant::now());
    }
}

/// Starter of the conversations.
struct SessionStarter {
    talks: Arc<LoadContext>,
    sessions: mpsc::Receiver<Session>,
    /// Session that waits for a client.
    waiting: Option<Session>,
    began: Instant,
}

impl SessionStarter {
    /// Begins all conversations and waits until they are over.
    ///
    /// Each of their requests has a time limit.
    async fn all(mut self, at_once: u32) {
        // The conversations end with this set when a load is given up. A flag that each of them
        // watches would cost a lock per event.
        let mut begun = JoinSet::new();
        // A due session begins late if the target holds all clients, but it does not wait forever.
        match self.talks.until.map(|until| until + self.talks.endpoint.request_timeout) {
            None => self.begin(at_once, &mut begun).await,
            Some(at) => {
                if timeout_at(at.into(), self.begin(at_once, &mut begun)).await.is_err() {
                    self.give_up().await;
                }
            }
        }
        drop(self.sessions);
        while begun.join_next().await.is_some() {}
    }

    async fn begin(&mut self, at_once: u32, begun: &mut JoinSet<()>) {
        let clients = Arc::new(Semaphore::new(at_once as usize));
        while let Some(session) = self.sessions.recv().await {
            let due = session.begins.map(|begins| self.began + begins);
            self.waiting = Some(session);
            let free = clients.clone().acquire_owned();
            let free = match self.talks.until.filter(|_| due.is_none()) {
                None => free.await,
                // In a closed loop nothing is due after the end.
                Some(until) => match timeout_at(until.into(), free).await {
                    Ok(free) => free,
                    Err(_) => return,
                },
            };
            let Ok(client) = free else { return };
            let Some(session) = self.waiting.take() else { return };
            if self.talks.is_exhausted() || (due.is_none() && self.talks.is_over(Instant::now())) {
                return;
            }
            // Forget the conversations that are over.
            while begun.try_join_next().is_some() {}
            let talks = self.talks.clone();
            begun.spawn(async move {
                talks.run_conversation(session, due).await;
                drop(client);
            });
        }
    }

    /// Counts the sessions that were due and did not begin.
    async fn give_up(&mut self) {
        let mut next = self.waiting.take();
        while let Some(session) = next {
            if let Some(begins) = session.begins {
                self.talks.record_unsent(&session, self.began + begins);
            }
            next = self.sessions.recv().await;
        }
    }
}

/// Progress of a load reported so far.
struct ProgressTracker<'a> {
    plan: &'a Plan,
    began: Instant,
    counted_from: Instant,
    /// Time of the next report.
    next: Instant,
    at: Instant,
    tokens: u64,
    /// Requests of the warm-up, complete and failed.
    before: (u64, u64),
}

impl<'a> ProgressTracker<'a> {
    fn new(plan: &'a Plan, began: Instant) -> Self {
        let counted_from = began + plan.warm_up;
        let next = (began + TICK).min(if plan.warm_up.is_zero() { began + TICK } else { counted_from });
        Self { plan, began, counted_from, next, at: began, tokens: 0, before: (0, 0) }
    }

    /// Progress at the end of a second. One report falls on the end of the warm-up.
    fn tick(&mut self, talks: &LoadContext) -> Progress {
        let progress = self.progress(talks, self.next);
        let live = &talks.recorder.live;
        (self.at, self.tokens) = (self.next, live.tokens.load(Ordering::Relaxed));
        if self.next == self.counted_from {
            self.before = (live.complete.load(Ordering::Relaxed), live.failed.load(Ordering::Relaxed));
            live.forget_first_tokens();
        }
        self.next = if self.next < self.counted_from { (self.next + TICK).min(self.counted_from) } else { self.next + TICK };
        progress
    }

    fn progress(&self, talks: &LoadContext, now: Instant) -> Progress {
        let live = &talks.recorder.live;
        let warming = now <= self.counted_from && !self.plan.warm_up.is_zero();
        let (phase, from, most) = if warming {
            (Phase::WarmUp, self.began, Some(self.plan.warm_up))
        } else {
            (self.plan.phase, self.counted_from, self.plan.duration)
        };
        let seconds = now.saturating_duration_since(self.at).as_secs_f64();
        let tokens = live.tokens.load(Ordering::Relaxed) - self.tokens;
        #[expect(clippy::cast_precision_loss, reason = "tokens of a second are far below 2^52")]
        let tokens_per_second = if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
        Progress {
            target: self.plan.endpoint.name.clone(),
            phase,
            elapsed: now.saturating_duration_since(from),
            most,
            in_flight: live.in_flight.load(Ordering::Relaxed),
            complete: live.complete.load(Ordering::Relaxed) - self.before.0,
            failed: live.failed.load(Ordering::Relaxed) - self.before.1,
            tokens_per_second,
            ttft_p50_ms: live.ttft_p50_ms(),
        }
    }
}
