//! Places a request that somebody else will send, and counts it where it goes.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::poison::{self, Clearance};
use super::{Dispatch, Outgoing, Refusal};
use crate::fleet::{InFlight, Replica};
use crate::placement::Record;

/// When to ask again for a place for a request that engines may die of.
const SUSPECT_RETRY_SECONDS: u64 = 5;

/// Most that a prompt is taken to be computed for, whatever was predicted.
const MOST_COMPUTING_SECONDS: f64 = 600.0;

/// A replica that was chosen for a request of somebody else's.
#[derive(Debug)]
pub(crate) struct Reserved {
    pub(crate) replica: Arc<Replica>,
    /// Counts it there.
    pub(crate) in_flight: InFlight,
    /// Why there.
    pub(crate) record: Arc<Record>,
    /// How long its prompt takes, as predicted.
    pub(crate) computing: Duration,
}

impl Dispatch {
    /// The replica where the request would be answered soonest. Nothing is sent, and nothing waits for room.
    ///
    /// # Errors
    /// When no replica can take it, or it is one that engines die of.
    pub(crate) async fn place(&self, mut outgoing: Box<Outgoing>) -> Result<Reserved, Refusal> {
        let watched = self.poison.watch(poison::fingerprint(outgoing.tenant, &outgoing.head.path, &outgoing.body));
        if watched.clearance()? != Clearance::Free {
            let message = "this request was in flight when an engine died: send it through the router, which tries it alone";
            return Err(Refusal::Overloaded { message: message.into(), retry_after: SUSPECT_RETRY_SECONDS });
        }
        let deadline = outgoing.begun + self.answer_timeout;
        let found = async {
            self.settled(outgoing.asked.model.as_deref()).await;
            self.placer.read(std::mem::take(&mut outgoing.asked), false).await
        };
        let prompt = timeout_at(deadline, found).await.map_err(|_| Refusal::TooSlow(self.answer_timeout))?;
        let now = Instant::now();
        let Some(chosen) = self.placer.choose(&prompt, &[], now) else { return Err(Refusal::of(&self.fleet.view(), prompt.model())) };
        let in_flight = self.placer.enter(&prompt, &chosen, now);
        let computing = Duration::from_secs_f64(chosen.first_token().clamp(0.001, MOST_COMPUTING_SECONDS));
        let replica = chosen.replica.clone();
        self.metrics.placed(chosen.level);
        let record = Record { client_id: outgoing.client_id, ..Record::new(outgoing.id, &prompt, chosen) };
        let record = Arc::new(record);
        self.placer.ring.record(record.clone());
        Ok(Reserved { replica, in_flight, record, computing })
    }
}
