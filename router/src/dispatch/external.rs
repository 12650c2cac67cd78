//! Places a request that the caller sends itself, and counts it at its replica.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::{Dispatch, OutboundRequest, Refusal};
use crate::crash_suspects::{self, Clearance};
use crate::fleet::{InFlight, Replica};
use crate::placement::PlacementDecision;
use crate::resumption::unasked_part;

/// Seconds after which a caller may ask again for a placement of a crash suspect.
const SUSPECT_RETRY_SECONDS: u64 = 5;

/// Upper bound of a prompt's predicted prefill, in seconds.
const MAX_PREFILL_SECONDS: f64 = 600.0;

/// A replica chosen for a request that the caller sends itself.
#[derive(Debug)]
pub(crate) struct ExternalPlacement {
    pub(crate) replica: Arc<Replica>,
    pub(crate) in_flight: InFlight,
    pub(crate) decision: Arc<PlacementDecision>,
    pub(crate) prefill_estimate: Duration,
}

impl Dispatch {
    /// The replica that would answer the request soonest. This sends nothing and does not wait for
    /// room.
    ///
    /// # Errors
    /// If no replica can take the request, or the request is suspected of crashing engines.
    pub(crate) async fn place_external(&self, mut outgoing: Box<OutboundRequest>) -> Result<ExternalPlacement, Refusal> {
        let crash_watch =
            self.crash_suspects.watch(crash_suspects::fingerprint(outgoing.tenant, &outgoing.head.path, unasked_part(&outgoing.body)));
        if crash_watch.clearance()? != Clearance::Free {
            let message = "this request was in flight when an engine crashed: send it through the router, which tries it alone";
            return Err(Refusal::Overloaded { message: message.into(), retry_after: SUSPECT_RETRY_SECONDS });
        }
        outgoing.placement_request.is_suspect = crash_watch.is_confined();
        let deadline = outgoing.received_at + self.answer_timeout;
        let found = async {
            self.await_startup_grace(outgoing.placement_request.model.as_deref()).await;
            self.placer.read_prompt(std::mem::take(&mut outgoing.placement_request), false).await
        };
        let prompt = timeout_at(deadline, found).await.map_err(|_| Refusal::TooSlow(self.answer_timeout))?;
        let now = Instant::now();
        let confined = self.confine(prompt.model(), &outgoing, &[], &crash_watch);
        let closed = confined.as_ref().map_or(&[][..], |confined| confined.closed.as_slice());
        let Some(chosen) = self.placer.choose(&prompt, closed, now) else {
            if let Some(confined) = confined {
                return Err(confined.refusal());
            }
            self.record_miss(&prompt);
            return Err(Refusal::for_request(&self.fleet.view(), prompt.model(), prompt.path()));
        };
        let in_flight = self.placer.count_in_flight(&prompt, &chosen, now);
        let prefill_estimate = Duration::from_secs_f64(chosen.first_token_seconds().clamp(0.001, MAX_PREFILL_SECONDS));
        let replica = chosen.replica.clone();
        self.metrics.count_placement(chosen.level);
        let decision = PlacementDecision { client_id: outgoing.client_id, ..PlacementDecision::new(outgoing.id, &prompt, chosen) };
        let decision = Arc::new(decision);
        self.placer.decisions.push(decision.clone());
        Ok(ExternalPlacement { replica, in_flight, decision, prefill_estimate })
    }
}
