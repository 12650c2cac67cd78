//! Faults that a test can switch on while the engine runs, through `POST /sim/fault`.
//! The stepping task, the admission of requests and the accept loop read them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde::Deserialize;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Body of `POST /sim/fault`.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Fault {
    /// Every connection drops and `serve` returns an error: the process is gone.
    Die,
    /// Steps stop; `/health` stays 200 and the gauges freeze.
    Hang,
    /// Steps take `factor` times as long.
    Slow {
        /// Factor for the step time; 10 if absent.
        #[serde(default = "default_factor")]
        factor: f64,
    },
    /// Every running stream ends with an error event and `[DONE]`.
    ErrorEvent,
    /// New requests get the 503 of a full queue.
    Busy,
    /// Ends `hang`, `slow` and `busy`.
    Ok,
}

fn default_factor() -> f64 {
    10.0
}

/// Switches for the faults. `ErrorEvent` has none, because it is a command to the stepping task.
#[derive(Debug)]
pub(crate) struct Faults {
    hung: watch::Sender<bool>,
    /// Bits of the factor, an `f64`.
    slow: AtomicU64,
    busy: AtomicBool,
    death: CancellationToken,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            hung: watch::Sender::new(false),
            slow: AtomicU64::new(1.0_f64.to_bits()),
            busy: AtomicBool::new(false),
            death: CancellationToken::new(),
        }
    }
}

impl Faults {
    pub(crate) fn set(&self, fault: Fault) {
        match fault {
            Fault::Die => self.death.cancel(),
            Fault::Hang => drop(self.hung.send_replace(true)),
            Fault::Slow { factor } => self.slow.store(factor.to_bits(), Ordering::Relaxed),
            Fault::Busy => self.busy.store(true, Ordering::Relaxed),
            Fault::ErrorEvent => {}
            Fault::Ok => {
                self.hung.send_replace(false);
                self.slow.store(1.0_f64.to_bits(), Ordering::Relaxed);
                self.busy.store(false, Ordering::Relaxed);
            }
        }
    }

    /// Returns when the engine does not hang, which is usually at once.
    ///
    /// Has no deadline of its own: a hang lasts until the fault ends or the engine stops, and
    /// `Engine::run` bounds the latter.
    pub(crate) async fn wait_not_hung(&self) {
        let mut hung = self.hung.subscribe();
        // `self` owns the sender, so waiting cannot fail.
        let _ = hung.wait_for(|hung| !hung).await;
    }

    pub(crate) fn slowness(&self) -> f64 {
        f64::from_bits(self.slow.load(Ordering::Relaxed))
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Relaxed)
    }

    pub(crate) fn death(&self) -> &CancellationToken {
        &self.death
    }
}
