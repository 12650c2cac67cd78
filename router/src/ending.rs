//! Ends a router's requests: they may finish while there is time, and the rest is cut off with a
//! reason. `Router::run` calls this once, when no client is accepted any more.

use std::time::Duration;

use hostler_boot::Shutdown;
use tokio::time::sleep;

use crate::shared_state::SharedState;

/// How long the requests of a replaced router may take. Nobody waits for them, so this is for
/// requests that never end.
const REPLACED_DRAIN_TIMEOUT: Duration = Duration::from_secs(3600);

/// How long the error events of cut-off answers may take. A connection has a fifth of a second for
/// its last bytes; the rest is for a busy host.
const FAREWELL_TIMEOUT: Duration = Duration::from_secs(1);

/// The part of a grace period that the process needs afterwards, to close connections to agents and
/// operators.
const CLOSE_MARGIN: Duration = Duration::from_secs(1);

/// How long requests may take to finish.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EndTerms {
    /// `router.drain_timeout`.
    pub(crate) drain: Duration,
    /// Time from a scheduler's SIGTERM until it kills this process; `None` if nothing does.
    pub(crate) kill_grace: Option<Duration>,
}

impl EndTerms {
    /// The time from that SIGTERM until the remaining requests are cut off. A grace of few seconds
    /// is halved.
    fn hurried(self) -> Option<Duration> {
        let grace = self.kill_grace?;
        Some(self.drain.min(grace - (FAREWELL_TIMEOUT + CLOSE_MARGIN).min(grace / 2)))
    }

    /// Resolves when the time is over.
    async fn wait_over(self, state: &SharedState, shutdown: &Shutdown) {
        let at_leisure = async {
            let was_replaced = state.succession.is_replaced();
            if was_replaced {
                // Time is short only once somebody wants this process to end.
                shutdown.wait_drain().await;
            }
            sleep(state.succession.time_to_finish().unwrap_or(self.drain)).await;
            if !was_replaced && state.succession.is_replaced() {
                // A successor has come during the drain, so nobody waits for it.
                std::future::pending::<()>().await;
            }
        };
        let hurried = async {
            match self.hurried() {
                Some(limit) => {
                    shutdown.wait_hurry().await;
                    sleep(limit).await;
                }
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = at_leisure => {}
            () = hurried => {}
        }
    }
}

/// Waits until the running requests have ended. Once their time is over they are cut off; once the
/// shutdown stops they are abandoned.
pub(crate) async fn end_requests(state: &SharedState, shutdown: &Shutdown, terms: EndTerms) {
    let longest = state.succession.time_to_finish().map_or(REPLACED_DRAIN_TIMEOUT, |time| time.max(REPLACED_DRAIN_TIMEOUT));
    let has_ended = tokio::select! {
        ended = state.serving.wait_tasks(longest) => ended,
        () = terms.wait_over(state, shutdown) => false,
    };
    if has_ended {
        return;
    }
    let in_flight = state.admission.in_flight();
    if in_flight > 0 {
        tracing::warn!(event = "answers_cut", in_flight, "leaving with requests unfinished");
    }
    state.fleet.cut_off(if shutdown.is_hurried() {
        "the router's batch job is being ended by its scheduler: the answer was not complete in time"
    } else {
        "the router is leaving: the answer was not complete in time"
    });
    state.serving.wait_tasks(FAREWELL_TIMEOUT).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hurried_routers_end_fits_the_schedulers_grace() {
        let second = Duration::from_secs(1);
        let hurried = |drain, grace: Option<Duration>| EndTerms { drain, kill_grace: grace }.hurried();
        assert_eq!(hurried(30 * second, Some(6 * second)), Some(4 * second), "PBS");
        assert_eq!(hurried(30 * second, Some(25 * second)), Some(23 * second), "Slurm");
        assert_eq!(hurried(second, Some(25 * second)), Some(second), "no longer than it is set");
        assert_eq!(hurried(30 * second, Some(2 * second)), Some(second));
        assert_eq!(hurried(30 * second, Some(Duration::ZERO)), Some(Duration::ZERO));
        assert_eq!(hurried(30 * second, None), None, "nobody kills it");
    }
}
