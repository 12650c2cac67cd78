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

use super::bind::{Bound, may_try};
use super::poison::{Clearance, Watched};
use super::{Attempt, Dispatch, Outgoing, Refusal};
use crate::fleet::Replica;
use crate::placement::Prompt;

/// How often an attempt without an answer looks at its replica's lease, which is seconds long.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// A request that is tried on one replica after the other.
pub(super) struct Tries<'a> {
    pub(super) prompt: &'a Prompt,
    pub(super) outgoing: &'a Outgoing,
    /// The replicas so far.
    pub(super) tried: &'a mut Vec<Arc<str>>,
    /// How many of them do not count: those that were full, and those lost to others' doing.
    pub(super) spared: usize,
    pub(super) watched: &'a mut Watched,
}

impl Dispatch {
    /// Sends the request to the replica that it is bound to, notes that as tried, and waits for its answer to begin; so again on another
    /// replica each time that the agent falls silent. What a silent agent still answers is cancelled. Gives back where the answer or the loss
    /// came from.
    ///
    /// # Errors
    /// When the first byte does not come in time.
    pub(super) async fn attempt_where_heard(&self, mut bound: Bound, tries: Tries<'_>) -> Result<(Arc<Replica>, Attempt), Refusal> {
        let Tries { prompt, outgoing, tried, spared, watched } = tries;
        let deadline = outgoing.begun + self.answer_timeout;
        loop {
            let replica = bound.chosen.replica.clone();
            tried.push(replica.id.clone());
            let now = Instant::now();
            watched.sent(now);
            let sent = self.sent(prompt, outgoing, bound, tried.len());
            let mut attempt = pin!(self.attempt(sent, prompt, outgoing.work));
            let mut look = now;
            bound = loop {
                look = (look + LOOK_INTERVAL).min(deadline);
                match timeout_at(look, attempt.as_mut()).await {
                    Ok(attempt) => return Ok((replica, attempt)),
                    Err(_) if look >= deadline => return Err(Refusal::TooSlow(self.answer_timeout)),
                    Err(_) => {
                        let may_try = may_try(tried.len() - spared, false);
                        if may_try && let Some(elsewhere) = self.beside_silent(&replica, prompt, tried, watched) {
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
    /// lost attempt. A suspect stays: whether its engine has died of it is for the silent agent to say, and until then it takes no other.
    fn beside_silent(&self, replica: &Replica, prompt: &Prompt, tried: &[Arc<str>], watched: &mut Watched) -> Option<Bound> {
        if !self.fleet.view().is_silent(replica) || !matches!(watched.clearance(), Ok(Clearance::Free)) {
            return None;
        }
        let chosen = self.placer.choose(prompt, tried, Instant::now())?;
        if chosen.decision.choice().candidate.doubtful || !self.retries.lost.withdraw() {
            return None;
        }
        // It was a suspect and is cleared.
        watched.end_trial();
        Some(Bound { chosen, held: Duration::ZERO, turn: None })
    }
}
