//! Stopping in two stages: *drain* (admit nothing new, finish what runs) and *stop* (leave now). A
//! *hurried* drain must be over within the sender's grace.
//!
//! `signals` defines what each signal does. A role holds one `Shutdown`, starts its tasks on the
//! tracker, and returns from `run` when they have ended or stop was called.

mod signals;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

pub use self::signals::SignalSource;
use self::signals::{LeaveSignal, SignalEffect, SignalHistory};

/// The two stages, and the tasks that must end before the role does. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Shutdown {
    drain: CancellationToken,
    hurry: CancellationToken,
    stop: CancellationToken,
    by_hang_up: Arc<AtomicBool>,
    tasks: TaskTracker,
}

impl Shutdown {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Shutdown of a second role in the same process: hurried and stopped with this one, but
    /// drained by itself.
    #[must_use]
    pub fn sibling(&self) -> Self {
        Self {
            drain: self.hurry.child_token(),
            hurry: self.hurry.child_token(),
            stop: self.stop.child_token(),
            by_hang_up: Arc::clone(&self.by_hang_up),
            tasks: TaskTracker::new(),
        }
    }

    /// Shutdown of a part of the same role: drained and stopped with it, but it may be stopped
    /// alone, and its tasks are its own.
    #[must_use]
    pub fn child(&self) -> Self {
        Self {
            drain: self.drain.child_token(),
            hurry: self.hurry.child_token(),
            stop: self.stop.child_token(),
            by_hang_up: Arc::clone(&self.by_hang_up),
            tasks: TaskTracker::new(),
        }
    }

    pub fn drain(&self) {
        self.drain.cancel();
    }

    /// Drains within the grace of the sender, who kills this process when it is over.
    pub fn hurry(&self) {
        self.drain.cancel();
        self.hurry.cancel();
    }

    /// Ends everything now; implies drain.
    pub fn stop(&self) {
        self.hurry();
        self.stop.cancel();
    }

    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.drain.is_cancelled()
    }

    #[must_use]
    pub fn is_hurried(&self) -> bool {
        self.hurry.is_cancelled()
    }

    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.stop.is_cancelled()
    }

    /// Whether SIGHUP began the drain: somebody wants another process in place of this one, or the
    /// terminal was closed.
    #[must_use]
    pub fn is_by_hang_up(&self) -> bool {
        self.by_hang_up.load(Ordering::Relaxed)
    }

    pub fn wait_drain(&self) -> impl Future<Output = ()> + Send + 'static {
        self.drain.clone().cancelled_owned()
    }

    pub fn wait_hurry(&self) -> impl Future<Output = ()> + Send + 'static {
        self.hurry.clone().cancelled_owned()
    }

    pub fn wait_stop(&self) -> impl Future<Output = ()> + Send + 'static {
        self.stop.clone().cancelled_owned()
    }

    #[must_use]
    pub fn tasks(&self) -> &TaskTracker {
        &self.tasks
    }

    /// Waits until every task has ended, stop was called, or `limit` has passed. Returns `true` if
    /// all ended by themselves.
    pub async fn wait_tasks(&self, limit: Duration) -> bool {
        self.tasks.close();
        tokio::select! {
            () = self.tasks.wait() => true,
            () = self.stop.cancelled() => false,
            () = tokio::time::sleep(limit) => false,
        }
    }

    /// Turns SIGINT, SIGTERM, SIGHUP (a closed terminal) and SIGUSR1 into drain, hurry and stop
    /// while the handle is kept. An engine does not listen for SIGUSR1.
    ///
    /// # Errors
    /// When the process may not install signal handlers.
    #[must_use = "signals are heard while it is kept"]
    pub fn install_signal_handlers(&self, source: SignalSource) -> std::io::Result<AbortOnDropHandle<()>> {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut hang_up = if ignores_hang_up() { None } else { Some(signal(SignalKind::hangup())?) };
        let mut user = if source == SignalSource::Agent { None } else { Some(signal(SignalKind::user_defined1())?) };
        let shutdown = self.clone();
        let mut history = SignalHistory::new(source);
        Ok(AbortOnDropHandle::new(tokio::spawn(async move {
            while !shutdown.is_stopped() {
                let signal = tokio::select! {
                    _ = interrupt.recv() => LeaveSignal::Interrupt,
                    _ = terminate.recv() => LeaveSignal::Terminate,
                    _ = async { hang_up.as_mut()?.recv().await }, if hang_up.is_some() => LeaveSignal::HangUp,
                    _ = async { user.as_mut()?.recv().await }, if user.is_some() => LeaveSignal::User1,
                };
                shutdown.apply(signal, history.record(signal));
            }
        })))
    }

    fn apply(&self, signal: LeaveSignal, effect: SignalEffect) {
        match effect {
            SignalEffect::Drain => {
                tracing::info!(event = "drain_begun", ?signal, "draining: running requests may finish; a second SIGINT stops at once");
                // If the role already drains for another reason, it was not replaced.
                self.by_hang_up.store(signal == LeaveSignal::HangUp && !self.is_draining(), Ordering::Relaxed);
                self.drain();
            }
            SignalEffect::Hurry => {
                tracing::warn!(event = "drain_begun", ?signal, "draining within the time that is left before this process is killed");
                self.hurry();
            }
            SignalEffect::Stop => {
                tracing::warn!(event = "stop_forced", ?signal, "another signal: stopping at once");
                self.stop();
            }
            SignalEffect::Ignore => tracing::info!(?signal, "already draining"),
        }
    }
}

/// Whether SIGHUP was ignored when this process began, as under `nohup`. In that case a closed
/// terminal must not end it.
fn ignores_hang_up() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    ignored.is_some_and(|mask| mask & 1 == 1)
}

/// Waits up to `limit` for a task that was told to end, then aborts it. A panic in the task is
/// logged.
pub async fn join_within(limit: Duration, mut task: JoinHandle<()>) {
    match tokio::time::timeout(limit, &mut task).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::error!(%error, "a task broke"),
        Err(_) => task.abort(),
    }
}
