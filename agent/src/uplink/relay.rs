//! Relay of one request from a lane to its engine, and of the answer back, byte for byte.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hostler_api::{Route, Work};
use hostler_boot::root_cause;
use hostler_proto::lane::{Fault, RequestHead, StreamFault, is_keep_alive_comment};
use http::StatusCode;
use prometheus_client::metrics::counter::Counter;

use crate::crashes::RequestFingerprint;
use crate::engine::Phase;
use crate::engine::diagnosis::{Diagnosis, FailureKind};
use crate::engine_client::{EngineClient, EngineResponse, OutgoingRequest, RequestError};
use crate::lane::{IncomingRequest, RequestStream};
use crate::metrics::AgentMetrics;
use crate::node::NodeState;
use crate::traffic::{EngineWait, InFlight, PromptEstimate, RouterKey};

/// Serves one request to its end, or until the router cancels it.
///
/// A cancel drops the connection to the engine, and the engine aborts.
pub(super) async fn serve(incoming: IncomingRequest, node: Arc<NodeState>, router: RouterKey, metrics: Arc<AgentMetrics>) {
    let IncomingRequest { head, stream } = incoming;
    let is_counted = !head.aside;
    let counted = |counter: &Counter| {
        if is_counted {
            counter.inc();
        }
    };
    let outcome = tokio::select! {
        biased;
        () = stream.wait_cancelled() => match node.cut_off_reason() {
            Some(reason) => Err(StreamFault { fault: Fault::EngineStopped, message: reason.to_owned() }),
            None => {
                counted(&metrics.cancelled);
                return;
            }
        },
        outcome = relay(head, &stream, &node, router) => outcome,
    };
    match &outcome {
        Ok(()) => counted(&metrics.complete),
        Err(broken) => {
            tracing::debug!(%broken, "an answer broke");
            counted(&metrics.broken);
        }
    }
    stream.end(&outcome);
}

async fn relay(mut head: RequestHead, serving: &RequestStream, node: &NodeState, router: RouterKey) -> Result<(), StreamFault> {
    let replica = node.replica(head.replica).ok_or_else(|| not_ready(format!("this node has no replica {}", head.replica)))?;
    // Count the request before the phase is read, so that either a drain sees this request or this
    // request sees the drain.
    let prompt = PromptEstimate { tokens: head.prompt_tokens, uncached: head.uncached_tokens };
    let in_flight = (!head.aside).then(|| replica.engine.traffic().enter_with(router, prompt));
    let (phase, epoch) = {
        let status = replica.engine.status();
        let status = status.borrow();
        (status.phase, status.epoch)
    };
    if phase != Phase::Ready {
        return Err(not_ready(format!("replica {} is not ready", head.replica)));
    }
    let fingerprint = head.fingerprint.take().map(|fingerprint| (epoch, RequestFingerprint(fingerprint)));
    let _guided = head.guided.then(|| replica.engine.traffic().enter_guided());
    let prefill_estimate = Duration::from_millis(u64::from(head.prefill_estimate_ms));
    let wait = in_flight.as_ref().filter(|_| needs_engine_core(&head)).map(InFlight::track_wait);
    let request = OutgoingRequest::new(head, serving.body());
    let request = request.ok_or_else(|| StreamFault::protocol("the router sent a request head that HTTP does not allow"))?;
    let mut exchange = Exchange { client: &replica.client, serving, in_flight: in_flight.as_ref(), wait, fingerprint, is_sent: false };
    let outcome = tokio::select! {
        biased;
        outcome = exchange.run(request) => outcome,
        never = assume_prefilled_after(in_flight.as_ref(), prefill_estimate) => match never {},
    };
    outcome.map_err(|error| match error {
        RequestError::Request(broken) => broken,
        error => {
            in_flight.as_ref().inspect(|in_flight| in_flight.mark_failed());
            let status = replica.engine.status();
            let status = status.borrow();
            classify_break(replica.index, status.phase, status.failure.as_ref(), exchange.is_sent, &root_cause(&error))
        }
    })
}

/// One request on its way through the engine.
struct Exchange<'a> {
    client: &'a EngineClient,
    serving: &'a RequestStream,
    in_flight: Option<&'a InFlight>,
    /// Wait of a request whose answer needs the engine's core.
    wait: Option<EngineWait<'a>>,
    /// The engine's life and the request's fingerprint, until the request is sent.
    fingerprint: Option<(u64, RequestFingerprint)>,
    /// The engine has received the whole request.
    is_sent: bool,
}

impl<'a> Exchange<'a> {
    /// Sends the request to the engine and its answer back, or returns why there is no answer.
    async fn run(&mut self, request: OutgoingRequest) -> Result<(), RequestError> {
        let (status, mut answer) = self.send_request(request).await?;
        // A body of known length ends with its last byte. The end then leaves in the same batch,
        // before the router can cancel.
        while !answer.is_complete()
            && let Some(piece) = answer.next_chunk().await
        {
            let piece = piece?;
            self.observe(&piece, status);
            self.forward(piece, &mut answer).await;
        }
        answer.recycle();
        Ok(())
    }

    async fn send_request(&mut self, request: OutgoingRequest) -> Result<(StatusCode, EngineResponse<'a>), RequestError> {
        let Self { client, in_flight, wait, fingerprint, is_sent, .. } = self;
        let sent = || {
            *is_sent = true;
            wait.iter_mut().for_each(EngineWait::begin);
            if let (Some(in_flight), Some((epoch, fingerprint))) = (&in_flight, fingerprint.take()) {
                in_flight.mark_sent(epoch, fingerprint);
            }
        };
        let (head, answer) = client.request(request, sent).await?;
        let status = StatusCode::from_u16(head.status).unwrap_or_default();
        self.serving.send_head(head);
        if status == StatusCode::INTERNAL_SERVER_ERROR {
            self.in_flight.inspect(|in_flight| in_flight.mark_failed());
        }
        Ok((status, answer))
    }

    fn observe(&mut self, piece: &[u8], status: StatusCode) {
        if is_keep_alive_comment(piece) {
            return;
        }
        self.in_flight.inspect(|in_flight| in_flight.mark_prefilled());
        // vLLM's front-end refuses requests and begins answers by itself, whether or not its core
        // still works. Neither counts as progress.
        if status.is_success() {
            self.wait.as_mut().map(EngineWait::record_progress);
        }
        // vLLM's front-end ends its streams like this when its core has died, each event in a
        // separate piece. The process exits seconds later.
        if piece.starts_with(b"data: {\"error\"") {
            self.in_flight.inspect(|in_flight| in_flight.mark_failed());
        }
    }

    /// Passes a piece on.
    ///
    /// While the router has no room for it, the rest of the request continues to the engine.
    async fn forward(&mut self, piece: Bytes, answer: &mut EngineResponse<'_>) {
        let sending = async {
            tokio::select! {
                biased;
                () = self.serving.send_body(piece) => {}
                never = answer.keep_sending() => match never {},
            }
        };
        match &mut self.wait {
            Some(wait) => wait.pause_during(sending).await,
            None => sending.await,
        }
    }
}

/// Counts the prompt as computed after `prefill_estimate`, unless that is zero.
///
/// An answer that does not stream shows its first byte with its last.
async fn assume_prefilled_after(in_flight: Option<&InFlight>, prefill_estimate: Duration) -> Infallible {
    if !prefill_estimate.is_zero() {
        tokio::time::sleep(prefill_estimate).await;
        in_flight.inspect(|in_flight| in_flight.mark_prefilled());
    }
    std::future::pending().await
}

/// Whether the answer needs the engine's core. vLLM's front-end gives other answers by itself, even
/// while the core hangs.
fn needs_engine_core(head: &RequestHead) -> bool {
    let path = head.path.split('?').next().unwrap_or_default();
    head.method == "POST" && Route::of(path).work() != Work::Nothing
}

fn not_ready(message: String) -> StreamFault {
    StreamFault { fault: Fault::NotReady, message }
}

/// Fault for an engine that could not be reached or broke off, by itself or because it was ordered
/// to stop.
///
/// An ordered stop ends the life as it should, and nothing is wrong with the request. The request
/// is also fine if the engine never got all of it. About an engine that hung, `failure` knows more
/// than the connection.
fn classify_break(index: u32, phase: Phase, failure: Option<&Diagnosis>, is_sent: bool, cause: &str) -> StreamFault {
    match phase {
        Phase::Draining | Phase::Stopped | Phase::Quarantined | Phase::Sleeping => {
            let message = format!("the engine of replica {index} was stopped before the answer was complete");
            StreamFault { fault: Fault::EngineStopped, message }
        }
        Phase::Starting | Phase::Loading | Phase::Ready | Phase::Failed if is_sent => {
            let message = match failure {
                Some(Diagnosis { kind: FailureKind::Hang, cause, .. }) => format!("the engine of replica {index} hung: {cause}"),
                _ => format!("the engine of replica {index} broke off ({cause})"),
            };
            StreamFault { fault: Fault::EngineLost, message }
        }
        Phase::Starting | Phase::Loading | Phase::Ready | Phase::Failed => {
            not_ready(format!("the request could not be sent to the engine of replica {index} ({cause})"))
        }
    }
}

#[cfg(test)]
mod tests;
