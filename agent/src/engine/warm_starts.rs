//! Warm starts of a node's engines: the spare that has imported vLLM and waits, and starts from a
//! process that imports for one engine alone.
//!
//! A start that fails is repeated as `vllm serve` starts by itself. If that one succeeds, there are
//! no more warm starts under this agent.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::keeper::wire::ProcessSpec;
use crate::keeper::{self, KeeperSource, PreparedKeeper, SpareState};

/// How often the spare is looked at.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Pause before a spare that has ended is replaced; it doubles with each that never waited.
const REPLACE_AFTER: Duration = Duration::from_secs(10);

/// Spares in a row that end before they wait, after which no more are created.
const MAX_FAILED_SPARES: u32 = 3;

/// Warm starts of one node.
#[derive(Debug)]
pub(crate) struct WarmStarts {
    keepers: KeeperSource,
    /// Process that becomes an engine.
    process: ProcessSpec,
    /// Whether a spare waits while all is well.
    keeps_spare: bool,
    state: Mutex<WarmState>,
}

#[derive(Debug, Default)]
struct WarmState {
    /// Reason why engines start plainly from now on.
    off: Option<String>,
    spare: Option<(PreparedKeeper, SpareState)>,
    /// Number of keepers that were prepared.
    made: u32,
    is_spare_wanted: bool,
    failed_spares: u32,
    replace_at: Option<Instant>,
}

/// A keeper for a start.
#[derive(Debug)]
pub(crate) struct WarmKeeper {
    pub(crate) keeper: PreparedKeeper,
    pub(crate) origin: StartOrigin,
}

/// Process that becomes an engine's first one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StartOrigin {
    /// A process that has imported vLLM before.
    Spare,
    /// A process that imports vLLM for this engine and is then forked.
    Fork,
    /// vLLM's own program.
    Plain,
}

impl StartOrigin {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Spare => "spare",
            Self::Fork => "fork",
            Self::Plain => "plain",
        }
    }
}

impl WarmStarts {
    pub(crate) fn new(keepers: KeeperSource, process: ProcessSpec, keeps_spare: bool) -> Self {
        Self { keepers, process, keeps_spare, state: Mutex::default() }
    }

    /// The spare, or else a keeper whose process begins to import now; `None` for a plain start.
    pub(crate) fn take(&self) -> Option<WarmKeeper> {
        let mut state = self.state.lock();
        if state.off.is_some() {
            return None;
        }
        state.look(Instant::now());
        state.is_spare_wanted = false;
        match state.spare.take() {
            Some((keeper, SpareState::Waiting)) => Some(WarmKeeper { keeper, origin: StartOrigin::Spare }),
            Some((keeper, _)) => Some(WarmKeeper { keeper, origin: StartOrigin::Fork }),
            None => self.prepare(&mut state).map(|keeper| WarmKeeper { keeper, origin: StartOrigin::Fork }),
        }
    }

    /// Has a spare wait from now on, because an engine has started.
    pub(crate) fn request_spare(&self) {
        self.state.lock().is_spare_wanted = self.keeps_spare;
    }

    /// Has all engines start plainly from now on.
    pub(crate) fn turn_off(&self, because: &str) {
        let mut state = self.state.lock();
        if state.off.is_none() {
            tracing::warn!(event = "warm_starts_off", "engines of this node start without a spare from now on: {because}");
            (state.off, state.spare) = (Some(because.to_owned()), None);
        }
    }

    #[cfg(test)]
    pub(crate) fn has_waiting_spare(&self) -> bool {
        matches!(self.state.lock().spare, Some((_, SpareState::Waiting)))
    }

    /// Creates spares and sees how they are, until the end. The spare ends then, too.
    pub(crate) async fn tend(self: Arc<Self>, end: CancellationToken) {
        let mut looks = interval(LOOK_INTERVAL);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while end.run_until_cancelled(looks.tick()).await.is_some() {
            let mut state = self.state.lock();
            state.look(Instant::now());
            if state.needs_spare(Instant::now())
                && let Some(keeper) = self.prepare(&mut state)
            {
                state.spare = Some((keeper, SpareState::Importing));
            }
        }
        self.state.lock().spare = None;
    }

    fn prepare(&self, state: &mut WarmState) -> Option<PreparedKeeper> {
        // The kernel shows a process's first environment only, and by this name its keeper and its
        // processes are found if the engine's own keeper and agent are gone.
        state.made += 1;
        let mut process = self.process.clone();
        process.mark(state.made);
        let made = keeper::prepare(&self.keepers, process);
        made.inspect_err(|error| tracing::warn!(%error, "cannot start the keeper of a spare; the engine starts plainly")).ok()
    }
}

impl WarmState {
    /// Takes notice of what the spare's keeper has reported.
    fn look(&mut self, now: Instant) {
        let Some((mut keeper, before)) = self.spare.take() else { return };
        let after = keeper.state(before.clone());
        match &after {
            SpareState::Ended(cause) => {
                self.failed_spares = if before == SpareState::Waiting { 0 } else { self.failed_spares + 1 };
                self.replace_at = Some(now + REPLACE_AFTER * 2_u32.pow(self.failed_spares));
                tracing::warn!(event = "spare_ended", cause, "the spare of this node has ended");
                return;
            }
            SpareState::Waiting if before != after => {
                self.failed_spares = 0;
                tracing::info!(event = "spare_waits", "a spare has imported vLLM and waits for the next start");
            }
            SpareState::Waiting | SpareState::Importing => {}
        }
        self.spare = Some((keeper, after));
    }

    fn needs_spare(&self, now: Instant) -> bool {
        self.is_spare_wanted
            && self.off.is_none()
            && self.spare.is_none()
            && self.failed_spares < MAX_FAILED_SPARES
            && self.replace_at.is_none_or(|at| now >= at)
    }
}
