//! One request of a batch until it has an answer that is final.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hostler_batch_file::{Answer, Attempts, Judgement, Outcome, PRIORITY};
use http::HeaderMap;
use http::uri::PathAndQuery;
use tokio::sync::Semaphore;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::batches::{AnsweredRequest, BatchCaller, BatchRequest};
use crate::edge::NoAnswer;
use crate::inbound::Edge;
use crate::inbound::headers::PRIORITY_HEADER;
use crate::keys::Caller;

/// What all requests of a batch share.
#[derive(Debug)]
pub(super) struct Asking {
    pub(super) edge: Arc<Edge>,
    pub(super) caller: BatchCaller,
    pub(super) path: PathAndQuery,
    /// Whether a model has served since the batch began, by its number.
    pub(super) served: Vec<AtomicBool>,
    /// Places for requests of all batches.
    pub(super) in_flight: Arc<Semaphore>,
    /// Cancelled when no further attempt is made.
    pub(super) stop: CancellationToken,
}

/// How a request's attempts end.
#[derive(Debug)]
pub(super) enum AskEnd {
    Answered(AnsweredRequest),
    /// No further attempt may be made, and there is no answer.
    Stopped,
    /// The batch's caller may send nothing more, for this reason.
    Refused(String),
}

impl Asking {
    /// The caller as its key allows now.
    ///
    /// # Errors
    /// If the key is valid no more, or belongs to another tenant now.
    pub(super) fn find_caller(&self) -> Result<Caller, String> {
        let caller = self.edge.keys.find_by_id(&self.caller.key).map_err(|error| error.to_string())?;
        let is_same = !self.edge.keys.are_required() || *caller.tenant == *self.caller.tenant;
        if is_same { Ok(caller) } else { Err(format!("the key {} belongs to another tenant now", caller.key)) }
    }

    pub(super) async fn ask(&self, request: BatchRequest) -> AskEnd {
        let mut attempts = Attempts::default();
        loop {
            let place = tokio::select! {
                biased;
                () = self.stop.cancelled() => return AskEnd::Stopped,
                place = self.in_flight.acquire() => place.expect("nobody closes it"),
            };
            let caller = match self.find_caller() {
                Ok(caller) => caller,
                Err(reason) => return AskEnd::Refused(reason),
            };
            let answer = Box::pin(self.attempt(&request, &caller)).await;
            drop(place);
            let outcome = match answer {
                Ok(answer) if answer.status == http::StatusCode::UNAUTHORIZED => Outcome::Answered(answer),
                Err(error @ NoAnswer::TooLong) => Outcome::Failed { code: "answer_too_long", message: error.to_string() },
                answer => {
                    let has_served = self.served[request.model_number].load(Ordering::Relaxed);
                    match attempts.judge(answer.map_err(|error| error.to_string()), has_served, fastrand::f64()) {
                        Judgement::Ended(outcome) => outcome,
                        Judgement::KeyRefused(reason) => return AskEnd::Refused(reason),
                        Judgement::Again { pause, .. } => {
                            tokio::select! {
                                () = self.stop.cancelled() => return AskEnd::Stopped,
                                () = sleep(pause) => continue,
                            }
                        }
                    }
                }
            };
            let is_success = matches!(&outcome, Outcome::Answered(answer) if answer.status.is_success());
            if is_success {
                self.served[request.model_number].store(true, Ordering::Relaxed);
            }
            self.edge.dispatch.metrics.count_batch_request(is_success);
            return AskEnd::Answered(AnsweredRequest { number: request.number, custom_id: request.custom_id, outcome });
        }
    }

    async fn attempt(&self, request: &BatchRequest, caller: &Caller) -> Result<Answer, NoAnswer> {
        // A model that the fleet has had is only away when it is unknown later.
        let served = &self.served[request.model_number];
        if !served.load(Ordering::Relaxed) && self.edge.dispatch.fleet.view().models().iter().any(|model| model.id == request.model) {
            served.store(true, Ordering::Relaxed);
        }
        let mut headers = HeaderMap::new();
        if !request.has_priority {
            headers.insert(PRIORITY_HEADER, PRIORITY.into());
        }
        let (head, body) = self.edge.ask(&self.path, headers, request.body.clone(), caller).await?.into_parts();
        Ok(Answer { status: head.status, headers: head.headers, body })
    }
}
