//! Holds a stream that has lost its engine while one that can go on with it is expected.
//!
//! The engine loads or starts again, its agent may come back, or a controller brings another node.
//! `placement::queue` and `fleet::arrival` decide what is expected and how long to wait for it, as
//! for new requests.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{Resumption, SearchEnd};
use crate::crash_suspects::CrashWatch;
use crate::dispatch::StartedAnswer;
use crate::dispatch::attempts::Attempts;
use crate::fleet::Replica;

/// How often a waiting stream looks for a replica.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// How long a replica that has lost a stream may still look healthy. Its connections break first,
/// and its process may end 8 s later (`crash_suspects`).
const REPORT_DUE: Duration = Duration::from_secs(10);

/// How long a stream waits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    since: Instant,
    max_wait: Duration,
    has_waited: bool,
}

/// The prospects of a stream that lost its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Prospect {
    /// A replica can go on with it now.
    Present,
    Expected,
    Hopeless,
}

impl Patience {
    pub(super) fn from(since: Instant, max_wait: Duration) -> Self {
        Self { since, max_wait, has_waited: false }
    }

    fn is_over(self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= self.max_wait
    }

    /// The client's message if its stream could not go on.
    fn explain(self, reason: String, now: Instant) -> String {
        if !self.has_waited {
            return reason;
        }
        let waited = now.saturating_duration_since(self.since).as_secs_f64();
        let limit = if self.is_over(now) { ", as long as router.max_queue_wait allows" } else { "" };
        format!("{reason}; it waited {waited:.1} s for a replica{limit}")
    }
}

impl Resumption {
    /// Continues the stream on another engine as soon as there is one.
    pub(super) async fn await_continuation(
        &mut self,
        mut patience: Patience,
        crash_watch: &mut CrashWatch,
    ) -> Result<Box<StartedAnswer>, String> {
        let mut attempts = self.attempts();
        loop {
            self.await_replica(&attempts, &mut patience, crash_watch).await;
            self.outgoing.received_at = Instant::now();
            let losses = attempts.losses.len();
            let end = match self.find_continuation(&mut attempts, None, crash_watch).await {
                Ok(begun) => return Ok(begun),
                Err(end) => end,
            };
            let now = Instant::now();
            let may_search = matches!(end, SearchEnd::NoReplica(_)) && attempts.policy.allows_attempt() && !crash_watch.is_confined();
            let is_worthwhile = match self.prospect(&attempts, now) {
                Prospect::Present => attempts.losses.len() > losses,
                Prospect::Expected => !patience.is_over(now),
                Prospect::Hopeless => false,
            };
            if !may_search || !is_worthwhile {
                return Err(patience.explain(end.into_words(), now));
            }
        }
    }

    /// Waits until there is a replica, none is expected, time is over, or no attempt is left.
    async fn await_replica(&self, attempts: &Attempts, patience: &mut Patience, crash_watch: &CrashWatch) {
        while attempts.policy.allows_attempt()
            && crash_watch.clearance().is_ok()
            && !patience.is_over(Instant::now())
            && self.prospect(attempts, Instant::now()) == Prospect::Expected
        {
            if !std::mem::replace(&mut patience.has_waited, true) {
                tracing::info!(model = self.origin.model(), "a stream that has lost its engine waits for a replica");
            }
            sleep(CHECK_INTERVAL).await;
        }
    }

    fn prospect(&self, attempts: &Attempts, now: Instant) -> Prospect {
        let view = self.dispatch.fleet.view();
        let model = self.origin.model();
        let mut has_lost_it = Vec::new();
        for replica in view.replicas.iter().filter(|replica| replica.accepts(model) && self.may_go_on_at(replica)) {
            match self.losses(attempts).find(|loss| loss.holds(replica)) {
                None => return Prospect::Present,
                Some(loss) if now.saturating_duration_since(loss.at) < REPORT_DUE => has_lost_it.push(replica.id.clone()),
                Some(_) => {}
            }
        }
        view.expectation(model).inspect(|expectation| expectation.record_miss(now));
        // A replica that serves and is of no use now will never be.
        let may_take = |replica: &Replica| !replica.is_ready() || has_lost_it.contains(&replica.id);
        let is_expected = self.dispatch.queue.may_wait_for(view.arrival_among(model, now, may_take));
        if is_expected { Prospect::Expected } else { Prospect::Hopeless }
    }
}
