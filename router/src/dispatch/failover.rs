//! Attempts whose agent falls silent before a byte of the answer has come: its host is gone, it was stopped, or the network swallows everything.
//! The connection notices only by its keepalive, seconds after the lease; so an attempt looks at the lease itself, and the request goes to
//! another replica as soon as it has lapsed. Where there is none it goes on waiting, and takes the answer of whichever agent comes back first.
//!
//! The price: a plain answer comes whole, so one that its engine was computing when the agent fell silent for longer than the lease is
//! computed anew elsewhere, also where the agent would have been back with it a moment later.

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

/// How often an attempt without an answer checks its replica's lease, which lasts seconds.
const LEASE_CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// A request that is tried on one replica after the other.
pub(super) struct RetryContext<'a> {
    pub(super) prompt: &'a Prompt,
    pub(super) outgoing: &'a OutboundRequest,
    pub(super) attempts: &'a mut Attempts,
    pub(super) crash_watch: &'a mut CrashWatch,
}

impl Dispatch {
    /// Sends the request to the replica that it is bound to, adds that to the tried ones, and waits
    /// for the answer to begin. When the agent falls silent it does the same with another replica,
    /// and cancels what the silent agent may still answer. Returns where the answer or the loss
    /// came from.
    ///
    /// # Errors
    /// When the first byte does not come in time.
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

    /// Another replica for a request that waits on `replica`, if its agent is silent and another one is heard; it is paid for as the retry of a
    /// lost attempt. A suspect stays: whether it has crashed its engine is for the silent agent to
    /// say, and until then it takes no other. So does one whose tenant may use no other.
    fn choose_failover(&self, replica: &Replica, prompt: &Prompt, tried: &[Arc<str>], crash_watch: &mut CrashWatch) -> Option<Binding> {
        let is_free = |watch: &CrashWatch| matches!(watch.clearance(), Ok(Clearance::Free)) && !watch.is_confined();
        if !self.fleet.view().has_lapsed_lease(replica) || !is_free(crash_watch) {
            return None;
        }
        let chosen = self.placer.choose(prompt, tried, Instant::now())?;
        if chosen.decision.choice().candidate.doubtful || !self.retries.lost.withdraw() {
            return None;
        }
        // It was a suspect and has been cleared.
        crash_watch.end_trial();
        Some(Binding { chosen, queued_for: Duration::ZERO, turn: None })
    }
}
