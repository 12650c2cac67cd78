//! Fails over attempts whose agent falls silent before the first byte of the answer.
//!
//! The agent's host is gone, the agent was stopped, or the network drops everything. The
//! connection's keepalive notices only seconds after the lease has lapsed. So an attempt checks the
//! lease itself and sends the request to another replica as soon as the lease lapses. Without
//! another replica it keeps waiting, and takes the answer of whichever agent comes back first.
//!
//! The price: a plain answer arrives whole. If its engine was computing it when the agent fell
//! silent for longer than the lease, it is computed anew elsewhere, even if the agent would have
//! delivered it a moment later.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::attempts::Attempts;
use super::binding::Binding;
use super::{AttemptOutcome, Dispatch, OutboundRequest, Refusal};
use crate::crash_suspects::{Clearance, CrashWatch};
use crate::fleet::Replica;
use crate::placement::Prompt;

/// How often an attempt without an answer checks its replica's lease. Leases last seconds.
const LEASE_CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// A request that is tried on one replica after another.
pub(super) struct RetryContext<'a> {
    pub(super) prompt: &'a Prompt,
    pub(super) outgoing: &'a OutboundRequest,
    pub(super) attempts: &'a mut Attempts,
    pub(super) crash_watch: &'a mut CrashWatch,
}

impl Dispatch {
    /// Sends the request to its bound replica and waits for the answer to begin.
    ///
    /// The replica joins the tried ones. If its agent falls silent, this attempt is cancelled and
    /// the request goes to another replica. Returns the replica that the answer or the loss came
    /// from.
    ///
    /// # Errors
    /// If the first byte does not come in time.
    pub(super) async fn attempt_with_failover(
        &self,
        mut bound: Binding,
        tries: RetryContext<'_>,
    ) -> Result<(Arc<Replica>, AttemptOutcome), Refusal> {
        let RetryContext { prompt, outgoing, attempts, crash_watch } = tries;
        let Attempts { tried, policy, .. } = attempts;
        let deadline = outgoing.received_at + self.answer_timeout;
        loop {
            let replica = bound.chosen.replica.clone();
            tried.push(replica.id.clone());
            policy.begin_attempt();
            let now = Instant::now();
            crash_watch.mark_sent(now);
            let sent = self.send_to(prompt, outgoing, bound, policy.attempts());
            let mut attempt = pin!(self.await_answer_start(sent, prompt, outgoing));
            let mut next_check = now;
            bound = loop {
                next_check = (next_check + LEASE_CHECK_INTERVAL).min(deadline);
                match timeout_at(next_check, attempt.as_mut()).await {
                    Ok(attempt) => return Ok((replica, attempt)),
                    Err(_) if next_check >= deadline => return Err(Refusal::TooSlow(self.answer_timeout)),
                    Err(_) => {
                        if policy.allows_failover()
                            && let Some(elsewhere) = self.choose_failover(&replica, prompt, tried, crash_watch)
                        {
                            break elsewhere;
                        }
                    }
                }
            };
            tracing::info!(replica = %replica.id, "an attempt was given up before its first byte: its agent is silent");
            self.metrics.retries.inc();
        }
    }

    /// Another replica for a request that waits on `replica`, if that agent is silent and another
    /// is heard.
    ///
    /// The retry budget for lost attempts pays for it. A suspect stays: only the silent agent can
    /// say whether it crashed its engine, and until then it must not take another. A request of a
    /// confined tenant stays too, because its tenant may use no other replica.
    fn choose_failover(&self, replica: &Replica, prompt: &Prompt, tried: &[Arc<str>], crash_watch: &mut CrashWatch) -> Option<Binding> {
        let is_free = |watch: &CrashWatch| matches!(watch.clearance(), Ok(Clearance::Free)) && !watch.is_confined();
        if !self.fleet.view().has_lapsed_lease(replica) || !is_free(crash_watch) {
            return None;
        }
        let chosen = self.placer.choose(prompt, tried, Instant::now())?;
        if chosen.decision.choice().candidate.doubtful || !self.retries.lost.withdraw() {
            return None;
        }
        // The request was a suspect and has been cleared.
        crash_watch.end_trial();
        Some(Binding::at_once(chosen))
    }
}
