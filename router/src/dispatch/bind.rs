//! Which replica an attempt goes to, and when: at once, when it has room and it is the request's turn, or alone among suspects.

use std::sync::Arc;
use std::time::Duration;

use hostler_placement::hold::Waiting;
use tokio::time::Instant;

use super::poison::{Bars, Clearance, Expected, Watched};
use super::{Dispatch, MOST_SETTLE_SECONDS, Outgoing, Refusal};
use crate::fleet::Replica;
use crate::placement::{Chosen, Prompt, Turn};

/// Attempts for one request, the first included.
const ATTEMPTS: usize = 3;

/// The same for one that engines were too full for: they have done nothing for it, and another may have room.
const ATTEMPTS_AT_FULL: usize = 8;

/// A replica that a request may be sent to now.
pub(super) struct Bound {
    pub(super) chosen: Chosen,
    /// How long the request was held before.
    pub(super) held: Duration,
    /// Dropped when the request has been counted.
    pub(super) turn: Option<Turn>,
}

impl Bound {
    /// Whether the replica has room, as far as is known: then sending a request there that another was too full for is no retry that
    /// would multiply a failing fleet's load.
    pub(super) fn has_room(&self) -> bool {
        self.chosen.has_room() && !self.chosen.decision.choice().candidate.doubtful
    }
}

/// Whether a request may be tried once more; `full` where the last engine had no room for it.
pub(super) fn may_try(tried: usize, full: bool) -> bool {
    tried < if full { ATTEMPTS_AT_FULL } else { ATTEMPTS }
}

impl Dispatch {
    /// A replica for the next attempt of a request that came back from those it has `tried`; `None` when there is none.
    ///
    /// # Errors
    /// When it may not wait, or is refused.
    pub(super) async fn bind(
        &self,
        prompt: &Arc<Prompt>,
        outgoing: &mut Outgoing,
        tried: &[Arc<str>],
        watched: &mut Watched,
    ) -> Result<Option<Bound>, Refusal> {
        let since = Instant::now();
        let mut place = None;
        loop {
            let clearance = watched.clearance()?;
            if clearance == Clearance::Free {
                let bound = if tried.is_empty() { self.bind_first(prompt, outgoing).await? } else { self.bind_again(prompt, tried) };
                // It may have become a suspect while it waited for room.
                if bound.is_none() || watched.clearance()? == Clearance::Free {
                    return Ok(bound);
                }
                continue;
            }
            let is_home = |replica: &Replica| prompt.only().is_none_or(|home| home.is(replica));
            let eligible = self.fleet.view().eligible(prompt.model(), tried).filter(|(_, replica)| is_home(replica)).count();
            if eligible == 0 {
                return Ok(None);
            }
            let bars = (clearance == Clearance::Suspect).then(|| watched.bars(eligible, place.as_ref()));
            if let Some(bars) = bars
                && let Some(chosen) = self.choose_within(prompt, tried, &bars)
                && watched.begin_trial(&chosen.replica, expected(prompt, &chosen, &bars))
            {
                return Ok(Some(Bound { chosen, held: since.elapsed(), turn: None }));
            }
            match &place {
                None => place = Some(watched.queue()?),
                Some(waiting) => waiting.moment().await,
            }
        }
    }

    /// A replica for a request's first attempt, as soon as it has room and it is the request's turn. `None` when there is no replica.
    async fn bind_first(&self, prompt: &Arc<Prompt>, outgoing: &mut Outgoing) -> Result<Option<Bound>, Refusal> {
        let spot = outgoing.spot.take();
        let Some(chosen) = self.placer.choose(prompt, &[], Instant::now()) else { return Ok(None) };
        let since = Instant::now();
        let waiting = Waiting {
            priority: outgoing.priority,
            tenant: outgoing.guest.tenant,
            weight: outgoing.guest.weight,
            uncached: chosen.uncached(),
            output: tokens(chosen.output),
            since: self.fleet.view().seconds(since),
        };
        // One that only one engine can answer overtakes: it ends a generation, or costs nothing, or waits in that engine.
        if prompt.only().is_some() || chosen.has_room() && !self.hold.is_held(prompt.model()) {
            self.hold.passed(prompt.model(), &waiting);
            return Ok(Some(Bound { chosen, held: Duration::ZERO, turn: None }));
        }
        let spot = spot.map_or_else(|| self.hold.take(outgoing.guest), Ok)?;
        let outlook = chosen.outlook();
        drop(chosen);
        let (chosen, turn) = self.hold.turn(prompt, waiting, spot, outlook).await?;
        let held = since.elapsed();
        self.metrics.held(held);
        Ok(chosen.map(|chosen| Bound { chosen, held, turn: Some(turn) }))
    }

    /// A replica that was not `tried` and where a trial may begin.
    fn choose_within(&self, prompt: &Prompt, tried: &[Arc<str>], bars: &Bars) -> Option<Chosen> {
        let view = self.fleet.view();
        let beside = |is_open: &dyn Fn(&Replica) -> bool| {
            view.eligible(prompt.model(), tried).any(|(_, replica)| is_open(replica)).then(|| {
                let closed = view.replicas.iter().filter(|replica| !is_open(replica)).map(|replica| replica.id.clone());
                let elsewhere: Vec<Arc<str>> = tried.iter().cloned().chain(closed).collect();
                self.placer.choose(prompt, &elsewhere, Instant::now())
            })
        };
        let alone = beside(&|replica| bars.admit(replica) && !bars.is_occupied(replica)).flatten();
        alone.or_else(|| beside(&|replica| bars.admit(replica)).flatten())
    }

    fn bind_again(&self, prompt: &Prompt, tried: &[Arc<str>]) -> Option<Bound> {
        let chosen = self.placer.choose(prompt, tried, Instant::now())?;
        Some(Bound { chosen, held: Duration::ZERO, turn: None })
    }
}

fn expected(prompt: &Prompt, chosen: &Chosen, bars: &Bars) -> Expected {
    let first_token = Duration::from_secs_f64(chosen.first_token().clamp(0.001, MOST_SETTLE_SECONDS));
    Expected { first_token, streams: prompt.streams(), together: bars.together() }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "no answer has 2^32 tokens, and `as` saturates")]
fn tokens(expected: f64) -> u32 {
    expected as u32
}
