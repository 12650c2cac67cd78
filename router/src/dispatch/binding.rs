//! Chooses the replica of an attempt and the moment to send: at once, when the replica has room and
//! it is the request's turn, or alone as a trial of a crash suspect.

use std::sync::Arc;
use std::time::Duration;

use hostler_placement::queue::TurnFactors;
use tokio::time::Instant;

use super::attempts::Attempts;
use super::{Dispatch, MAX_PREFILL_SECONDS, OutboundRequest, Refusal};
use crate::crash_suspects::{Clearance, CrashWatch, TrialConstraints, TrialEstimate};
use crate::fleet::Replica;
use crate::placement::{ChosenReplica, DispatchTurn, Prompt};

/// A replica that a request may be sent to now.
pub(super) struct Binding {
    pub(super) chosen: ChosenReplica,
    pub(super) queued_for: Duration,
    /// Dropped when the request has been counted at its replica.
    pub(super) turn: Option<DispatchTurn>,
}

impl Binding {
    /// A replica for a request that did not wait for it.
    pub(super) fn at_once(chosen: ChosenReplica) -> Self {
        Self { chosen, queued_for: Duration::ZERO, turn: None }
    }

    /// Whether the replica has room, as far as is known. A retry there after a full replica does
    /// not multiply a failing fleet's load.
    pub(super) fn has_room(&self) -> bool {
        self.chosen.has_room() && !self.chosen.decision.choice().candidate.doubtful
    }
}

impl Dispatch {
    /// A replica for the next attempt that was not tried yet, or `None`.
    ///
    /// # Errors
    /// If the request may not wait, or is refused.
    pub(super) async fn bind(
        &self,
        prompt: &Arc<Prompt>,
        outgoing: &mut OutboundRequest,
        attempts: &Attempts,
        crash_watch: &mut CrashWatch,
    ) -> Result<Option<Binding>, Refusal> {
        let tried = attempts.tried.as_slice();
        let mut place = None;
        let mut queued_for = Duration::ZERO;
        loop {
            let clearance = crash_watch.clearance()?;
            let confined = self.confine(prompt.model(), outgoing, tried, crash_watch);
            let no_replica = || match &confined {
                Some(confined) if tried.is_empty() => Err(confined.refusal()),
                _ => Ok(None),
            };
            let tried = confined.as_ref().map_or(tried, |confined| confined.closed.as_slice());
            if clearance == Clearance::Free {
                let bound = if attempts.may_wait() && tried.is_empty() {
                    self.bind_in_turn(prompt, outgoing, attempts, &[]).await?
                } else {
                    self.bind_retry(prompt, outgoing, attempts, tried).await?
                };
                let Some(bound) = bound else { return no_replica() };
                queued_for += bound.queued_for;
                // The request may have become a suspect, or its tenant confined, while it waited.
                if crash_watch.clearance()? == Clearance::Free && (confined.is_some() || !crash_watch.is_confined()) {
                    return Ok(Some(Binding { queued_for, ..bound }));
                }
                continue;
            }
            let eligible =
                self.fleet.view().eligible(prompt.model(), tried).filter(|(_, replica)| prompt.is_answerable_by(replica)).count();
            if eligible == 0 {
                return no_replica();
            }
            let constraints = (clearance == Clearance::NeedsTrial).then(|| crash_watch.trial_constraints(eligible, place.as_ref()));
            if let Some(constraints) = constraints
                && let Some(chosen) = self.choose_for_trial(prompt, tried, &constraints)
                && let Some(bound) = self.bind_trial(chosen, prompt, outgoing, attempts).await?
            {
                queued_for += bound.queued_for;
                let expected = trial_estimate(prompt, &bound.chosen, &constraints);
                // The request may have been cleared while it waited.
                match crash_watch.clearance()? {
                    Clearance::NeedsTrial if crash_watch.begin_trial(&bound.chosen.replica.engine_life(), expected) => {
                        return Ok(Some(Binding { queued_for, ..bound }));
                    }
                    Clearance::Free => continue,
                    _ => {}
                }
            }
            match &place {
                None => place = Some(crash_watch.queue_for_trial()?),
                Some(waiting) => {
                    let since = Instant::now();
                    waiting.wait_for_change().await;
                    queued_for += since.elapsed();
                }
            }
        }
    }

    /// A replica that was not `tried`, once one has come, has room, and it is the request's turn.
    /// `None` if there is no replica and none is expected.
    async fn bind_in_turn(
        &self,
        prompt: &Arc<Prompt>,
        outgoing: &mut OutboundRequest,
        attempts: &Attempts,
        tried: &[Arc<str>],
    ) -> Result<Option<Binding>, Refusal> {
        let queue_slot = outgoing.queue_slot.take();
        let mut chosen = self.placer.choose(prompt, tried, Instant::now());
        if chosen.is_none() {
            self.record_miss(prompt);
        }
        let outlook = chosen.as_ref().map_or_else(|| self.queue.estimate_arrival(prompt), |chosen| Some(chosen.wait_estimate()));
        let Some(outlook) = outlook else { return Ok(None) };
        let since = Instant::now();
        let waiting = TurnFactors {
            priority: outgoing.priority,
            tenant: outgoing.queue_share.tenant,
            weight: outgoing.queue_share.weight,
            uncached_tokens: chosen.as_ref().map_or(prompt.token_count(), ChosenReplica::uncached_tokens),
            output_tokens: chosen.as_ref().map_or(0, |chosen| tokens(chosen.expected_output_tokens)),
            queued_at: match attempts.policy.attempts() {
                0 => self.fleet.view().seconds(since),
                // A request that comes back from a full engine goes before those that came later.
                _ if attempts.losses.is_empty() => self.fleet.view().seconds(outgoing.received_at),
                // A request that has lost its engine goes first: its stream may stand still.
                _ => 0.0,
            },
        };
        // A request that only one engine can answer overtakes the queue: it ends a generation,
        // costs nothing, or waits in that engine.
        let overtakes =
            |chosen: &mut ChosenReplica| prompt.required_engine().is_some() || chosen.has_room() && !self.queue.has_waiting(prompt.model());
        if let Some(chosen) = chosen.take_if(overtakes) {
            self.queue.record_bypass(prompt.model(), &waiting, self.fleet.view().seconds(since));
            return Ok(Some(Binding::at_once(chosen)));
        }
        let queue_slot = queue_slot.map_or_else(|| self.queue.take_slot(outgoing.queue_share), Ok)?;
        drop(chosen);
        let (chosen, turn) = self.queue.wait_for_turn((prompt, tried), waiting, queue_slot, outlook).await?;
        let queued_for = since.elapsed();
        self.metrics.observe_queue_time(queued_for);
        Ok(chosen.map(|chosen| Binding { chosen, queued_for, turn: Some(turn) }))
    }

    /// Records that the model has no replica now, for the controller that can bring one.
    pub(super) fn record_miss(&self, prompt: &Prompt) {
        self.fleet.view().expectation(prompt.model()).inspect(|expectation| expectation.record_miss(Instant::now()));
    }

    /// The chosen replica of a trial, once its engine would not refuse the request.
    async fn bind_trial(
        &self,
        chosen: ChosenReplica,
        prompt: &Arc<Prompt>,
        outgoing: &mut OutboundRequest,
        attempts: &Attempts,
    ) -> Result<Option<Binding>, Refusal> {
        if !chosen.is_refused() {
            return Ok(Some(Binding::at_once(chosen)));
        }
        let ids = chosen.view.replicas.iter().map(|replica| replica.id.clone());
        let others: Vec<Arc<str>> = ids.filter(|id| *id != chosen.replica.id).collect();
        self.bind_retry(prompt, outgoing, attempts, &others).await
    }

    /// An untried replica where a trial may begin.
    fn choose_for_trial(&self, prompt: &Prompt, tried: &[Arc<str>], constraints: &TrialConstraints) -> Option<ChosenReplica> {
        let view = self.fleet.view();
        let beside = |is_open: &dyn Fn(&Replica) -> bool| {
            view.eligible(prompt.model(), tried).any(|(_, replica)| is_open(replica)).then(|| {
                let closed = view.replicas.iter().filter(|replica| !is_open(replica)).map(|replica| replica.id.clone());
                let elsewhere: Vec<Arc<str>> = tried.iter().cloned().chain(closed).collect();
                self.placer.choose(prompt, &elsewhere, Instant::now())
            })
        };
        let alone = beside(&|replica| constraints.is_allowed(&replica.engine_life()) && !constraints.is_occupied(&replica.id)).flatten();
        match alone {
            Some(alone) if !alone.ends_first() => Some(alone),
            // Prefer a place beside another trial to one where the answer would be cut.
            alone => beside(&|replica| constraints.is_allowed(&replica.engine_life())).flatten().or(alone),
        }
    }

    /// A replica for a request that was sent before, or whose tenant is confined. It waits in the
    /// engine that it gets, as it has no turn for others, unless that engine would refuse it.
    async fn bind_retry(
        &self,
        prompt: &Arc<Prompt>,
        outgoing: &mut OutboundRequest,
        attempts: &Attempts,
        tried: &[Arc<str>],
    ) -> Result<Option<Binding>, Refusal> {
        let queue_slot = outgoing.queue_slot.take();
        let Some(chosen) = self.placer.choose(prompt, tried, Instant::now()) else { return Ok(None) };
        if chosen.is_refused()
            && let Ok(slot) = queue_slot.map_or_else(|| self.queue.take_slot(outgoing.queue_share), Ok)
        {
            outgoing.queue_slot = Some(slot);
            return self.bind_in_turn(prompt, outgoing, attempts, tried).await;
        }
        Ok(Some(Binding::at_once(chosen)))
    }
}

fn trial_estimate(prompt: &Prompt, chosen: &ChosenReplica, constraints: &TrialConstraints) -> TrialEstimate {
    let first_token = Duration::from_secs_f64(chosen.first_token_seconds().clamp(0.001, MAX_PREFILL_SECONDS));
    TrialEstimate { first_token, is_stream: prompt.is_stream(), max_concurrent: constraints.max_concurrent() }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "no answer has 2^32 tokens, and `as` saturates")]
fn tokens(expected: f64) -> u32 {
    expected as u32
}
