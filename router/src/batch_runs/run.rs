//! The course of one batch: its input is checked, its requests are answered, its results written.
//! All that blocks is done on a thread for that, to which the open batch moves.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use hostler_boot::Shutdown;
use http::uri::PathAndQuery;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
use tokio_util::sync::CancellationToken;

use super::asking::{AskEnd, Asking};
use crate::batches::{BatchEnding, BatchFault, BatchRequest, Batches, BatchesError, FoundBatch, ObjectId, OpenBatch, now};
use crate::inbound::Edge;

/// How often a batch looks whether somebody has cancelled it.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// How long the answers on their way are awaited after a cancel, as OpenAI does.
const CANCEL_PATIENCE: Duration = Duration::from_secs(600);

/// Most bytes of bodies in flight of a batch, unless a single one has more.
const MAX_BYTES_IN_FLIGHT: usize = 64 << 20;

/// How a run ends.
#[derive(Debug)]
pub(super) enum RunEnd {
    /// The batch has ended.
    Ended,
    /// The router leaves; the next one goes on.
    Paused,
    /// Another router has the batch.
    Taken,
    Suspended(BatchesError),
}

/// A batch that this router is to run.
#[derive(Debug)]
pub(super) struct BatchRun {
    pub(super) edge: Arc<Edge>,
    pub(super) batches: Batches,
    pub(super) serving: Shutdown,
    pub(super) in_flight: Arc<Semaphore>,
    pub(super) id: ObjectId,
}

/// Why no further request is sent, and what the batch's error says then.
type Conclusion = (BatchEnding, Vec<BatchFault>);

impl BatchRun {
    pub(super) async fn run(self, found: FoundBatch) -> RunEnd {
        let batches = self.batches.clone();
        let opened = tokio::task::spawn_blocking(move || OpenBatch::open(&batches, &found));
        match opened.await.unwrap_or_else(|error| Err(lost_thread(&error))) {
            Ok(Some(open)) => self.run_open(open).await.unwrap_or_else(RunEnd::Suspended),
            Ok(None) => RunEnd::Taken,
            Err(error) => RunEnd::Suspended(error),
        }
    }

    async fn run_open(&self, open: OpenBatch) -> Result<RunEnd, BatchesError> {
        let (mut open, ()) = block(open, OpenBatch::begin).await?;
        if open.record().status.is_ended() {
            tracing::info!(batch = %self.id, "a batch failed: its input is no batch of requests");
            return Ok(RunEnd::Ended);
        }
        // After a crash the results may have been begun.
        let mut conclusion = open.record().ending.map(|ending| (ending, Vec::new()));
        if conclusion.is_none() {
            open.check_room()?;
            (open, conclusion) = self.answer_all(open).await?;
        }
        let Some((ending, faults)) = conclusion else {
            block(open, OpenBatch::pause).await?;
            return Ok(RunEnd::Paused);
        };
        let (open, ()) = block(open, move |open| open.finish(ending, faults)).await?;
        let (status, counts) = (open.record().status.as_str(), open.record().counts);
        tracing::info!(batch = %self.id, status, completed = counts.completed, failed = counts.failed, "a batch has ended");
        Ok(RunEnd::Ended)
    }

    /// Has the requests answered, until all are or the batch ends early. No conclusion: the router
    /// leaves.
    async fn answer_all(&self, open: OpenBatch) -> Result<(OpenBatch, Option<Conclusion>), BatchesError> {
        // The router before this one may have had models that this one awaits: `hostler up` may
        // serve another one meanwhile.
        let served = std::iter::repeat_with(|| AtomicBool::new(open.is_resumed())).take(open.model_count());
        let asking = Arc::new(Asking {
            edge: self.edge.clone(),
            caller: open.record().caller.clone(),
            path: PathAndQuery::try_from(&open.record().endpoint).map_err(|error| BatchesError::Disk(error.to_string()))?,
            served: served.collect(),
            in_flight: self.in_flight.clone(),
            stop: CancellationToken::new(),
        });
        let mut most = self.edge.config.batches_in_flight_each.max(1);
        if let Some(limit) = asking.find_caller().ok().and_then(|caller| caller.limits.in_flight) {
            most = most.min(limit as usize / 2).max(1);
        }
        let expires = Instant::now() + Duration::from_secs(open.record().expires_at.saturating_sub(now()));
        let mut requests = RequestsInFlight { asking, tasks: JoinSet::new(), bytes: 0, most };
        let ended = self.drive(open, &mut requests, expires).await;
        requests.tasks.shutdown().await;
        ended
    }

    async fn drive(
        &self,
        mut open: OpenBatch,
        requests: &mut RequestsInFlight,
        expires: Instant,
    ) -> Result<(OpenBatch, Option<Conclusion>), BatchesError> {
        let mut ticks = interval(LOOK_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut conclusion, mut patience): (Option<Conclusion>, Option<Instant>) = (None, None);
        let mut answered = Vec::new();
        loop {
            let is_stopping = conclusion.is_some() || self.serving.is_draining();
            let room = if is_stopping { 0 } else { requests.room() };
            let step;
            (open, step) = block(open, move |open| open.advance(answered, room)).await?;
            answered = Vec::new();
            self.batches.set_progress(&self.id, Some(step.counts));
            if let Some(asked_at) = step.cancelled_at.filter(|_| conclusion.is_none()) {
                (open, ()) = block(open, move |open| open.cancel(asked_at)).await?;
                (conclusion, patience) = (Some((BatchEnding::Cancelled, Vec::new())), Some(Instant::now() + CANCEL_PATIENCE));
                requests.asking.stop.cancel();
            }
            if conclusion.is_none() {
                step.requests.into_iter().for_each(|request| requests.start(request));
            }
            if requests.tasks.is_empty() {
                let completed = open.is_complete().then(|| (BatchEnding::Completed, Vec::new()));
                // Requests that were stopped and read no more are for the next run.
                return Ok((open, conclusion.or(completed)));
            }
            tokio::select! {
                Some(end) = requests.next() => {
                    let mut end = Some(end);
                    while let Some(one) = end {
                        match one {
                            AskEnd::Answered(request) => answered.push(request),
                            AskEnd::Stopped => {}
                            AskEnd::Refused(reason) => {
                                conclusion.get_or_insert_with(|| (BatchEnding::Failed, vec![refused_key(&reason)]));
                                requests.asking.stop.cancel();
                            }
                        }
                        end = requests.try_next();
                    }
                }
                _ = ticks.tick() => {}
                () = sleep_until(expires), if conclusion.is_none() => {
                    conclusion = Some((BatchEnding::Expired, Vec::new()));
                    requests.asking.stop.cancel();
                    requests.tasks.abort_all();
                }
                () = sleep_until(patience.unwrap_or(expires)), if patience.is_some() => {
                    patience = None;
                    requests.tasks.abort_all();
                }
                () = self.serving.wait_drain(), if !requests.asking.stop.is_cancelled() => requests.asking.stop.cancel(),
            }
        }
    }
}

/// The requests of a batch that have no final answer yet.
struct RequestsInFlight {
    asking: Arc<Asking>,
    tasks: JoinSet<(AskEnd, usize)>,
    bytes: usize,
    most: usize,
}

impl RequestsInFlight {
    /// How many further requests may be read now.
    fn room(&self) -> usize {
        if self.bytes >= MAX_BYTES_IN_FLIGHT { 0 } else { self.most.saturating_sub(self.tasks.len()) }
    }

    fn start(&mut self, request: BatchRequest) {
        let (asking, bytes) = (self.asking.clone(), request.body.len());
        self.bytes += bytes;
        self.tasks.spawn(async move { (asking.ask(request).await, bytes) });
    }

    /// The next request that has ended; `None` if there is none.
    async fn next(&mut self) -> Option<AskEnd> {
        let ended = self.tasks.join_next().await?;
        Some(self.record(ended))
    }

    fn try_next(&mut self) -> Option<AskEnd> {
        let ended = self.tasks.try_join_next()?;
        Some(self.record(ended))
    }

    fn record(&mut self, ended: Result<(AskEnd, usize), tokio::task::JoinError>) -> AskEnd {
        // A task that was aborted has taken its count along, and no request is read any more.
        let (end, bytes) = ended.unwrap_or((AskEnd::Stopped, 0));
        self.bytes -= bytes;
        end
    }
}

fn refused_key(reason: &str) -> BatchFault {
    BatchFault::whole("invalid_api_key", format!("the key that made this batch may send no more requests: {reason}"))
}

/// Runs what blocks on a thread for that, and returns the batch with the result.
async fn block<T: Send + 'static>(
    mut open: OpenBatch,
    work: impl FnOnce(&mut OpenBatch) -> Result<T, BatchesError> + Send + 'static,
) -> Result<(OpenBatch, T), BatchesError> {
    let working = tokio::task::spawn_blocking(move || work(&mut open).map(|done| (open, done)));
    working.await.unwrap_or_else(|error| Err(lost_thread(&error)))
}

fn lost_thread(error: &tokio::task::JoinError) -> BatchesError {
    BatchesError::Disk(format!("a thread was lost: {error}"))
}
