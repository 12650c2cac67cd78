//! One request from a lane to its engine, and the engine's answer back, byte for byte.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hostler_boot::root_cause;
use hostler_proto::agent::v1::{Fault, Header, RequestHead, ResponseHead};
use hostler_proto::lane::{Broken, only_keeps_alive};
use http::{Method, Request, StatusCode, Uri};
use http_body::Body;
use http_body_util::BodyExt;
use prometheus_client::metrics::counter::Counter;
use tokio::sync::oneshot;

use super::client::{EngineClient, SizedBody};
use super::lane::{Incoming, Serving};
use super::report::Board;
use crate::deaths::Fingerprint;
use crate::engine::Phase;
use crate::metrics::AgentMetrics;
use crate::traffic::{InFlight, Prompt, RouterKey, Wait};

/// A piece of an answer up to this size, as events are, is copied out of the buffer that it was read into, which has 8 KiB at least: to take
/// new ones from the operating system cost a fifth of all that the agent did for an event.
const COPIED_BYTES: usize = 2048;

/// Serves one request to its end, or until the router cancels it: the connection to the engine is then dropped, and the engine aborts.
pub(super) async fn serve(incoming: Incoming, board: Arc<Board>, router: RouterKey, metrics: Arc<AgentMetrics>) {
    let Incoming { head, serving } = incoming;
    let is_counted = !head.aside;
    let counted = |counter: &Counter| {
        if is_counted {
            counter.inc();
        }
    };
    let outcome = tokio::select! {
        biased;
        () = serving.cancelled() => {
            counted(&metrics.cancelled);
            return;
        }
        outcome = relay(head, &serving, &board, router) => outcome,
    };
    match &outcome {
        Ok(()) => counted(&metrics.complete),
        Err(broken) => {
            tracing::debug!(%broken, "an answer broke");
            counted(&metrics.broken);
        }
    }
    serving.end(&outcome);
}

async fn relay(mut head: RequestHead, serving: &Serving, board: &Board, router: RouterKey) -> Result<(), Broken> {
    let replica = board.replica(head.replica).ok_or_else(|| not_ready(format!("this node has no replica {}", head.replica)))?;
    // Counted before the phase is looked at, so that a drain either sees this request or is seen by it.
    let prompt = Prompt { tokens: head.prompt_tokens, uncached: head.uncached_tokens };
    let mut in_flight = (!head.aside).then(|| replica.engine.traffic().enter_with(router, prompt));
    let (phase, epoch) = {
        let status = replica.engine.status();
        let status = status.borrow();
        (status.phase, status.epoch)
    };
    if phase != Phase::Ready {
        return Err(not_ready(format!("replica {} is not ready", head.replica)));
    }
    if let (Some(in_flight), Some(name)) = (&mut in_flight, head.fingerprint.take()) {
        in_flight.sent(epoch, Fingerprint(name.into()));
    }
    let _guided = head.guided.then(|| replica.engine.traffic().enter_guided());
    let settle = Duration::from_millis(u64::from(head.settle_ms));
    let wait = in_flight.as_ref().filter(|_| computes(&head)).map(InFlight::wait);
    let (request, sent) = request(head, serving)?;
    let exchange = Exchange { client: &replica.client, serving, in_flight: in_flight.as_ref(), wait };
    let outcome = tokio::select! {
        outcome = exchange.run(request, sent) => outcome,
        never = settled(in_flight.as_ref(), settle) => match never {},
    };
    outcome.map_err(|cause| {
        in_flight.as_ref().inspect(|in_flight| in_flight.broke());
        broke_off(replica.index, replica.engine.status().borrow().phase, &cause)
    })
}

/// One request on its way through the engine.
struct Exchange<'a> {
    client: &'a EngineClient,
    serving: &'a Serving,
    in_flight: Option<&'a InFlight>,
    /// For a request whose answer the engine has to compute.
    wait: Option<Wait<'a>>,
}

impl Exchange<'_> {
    /// The request to the engine, and its answer back, or why there is none. `sent` resolves when the engine has all of the request.
    async fn run(mut self, request: Request<SizedBody>, sent: oneshot::Receiver<()>) -> Result<(), String> {
        let mut response = pin!(self.client.request(request));
        let early = tokio::select! {
            biased;
            // However the body ended, there is no more of it.
            _ = sent => None,
            response = response.as_mut() => Some(response),
        };
        self.wait.as_mut().map(Wait::begin);
        let response = match early {
            Some(response) => response,
            None => response.await,
        };
        let (head, mut body) = response.map_err(|error| root_cause(&error))?.into_parts();
        self.serving.head(ResponseHead {
            status: head.status.as_u16().into(),
            headers: head.headers.iter().map(|(name, value)| Header::new(name, value)).collect(),
        });
        if head.status == StatusCode::INTERNAL_SERVER_ERROR {
            self.in_flight.inspect(|in_flight| in_flight.broke());
        }
        // A body of known length ends with its last byte: the end then leaves in the same batch, before the router can think of cancelling.
        while !body.is_end_stream()
            && let Some(frame) = body.frame().await
        {
            let frame = frame.map_err(|error| root_cause(&error))?;
            if let Ok(bytes) = frame.into_data() {
                self.pass(bytes, head.status).await;
            }
        }
        Ok(())
    }

    /// Takes note of a piece of the answer, and passes it on.
    async fn pass(&mut self, bytes: Bytes, status: StatusCode) {
        if !only_keeps_alive(&bytes) {
            self.in_flight.inspect(|in_flight| in_flight.computed());
            // vLLM's front-end alone refuses requests, and begins answers, whether or not its core still moves: neither is a sign of life.
            if status.is_success() {
                self.wait.as_mut().map(Wait::moved);
            }
            // So it ends its streams when its core has died, each event in a piece of its own. The process exits seconds later.
            if bytes.starts_with(b"data: {\"error\"") {
                self.in_flight.inspect(|in_flight| in_flight.broke());
            }
        }
        // Until it has left, a piece would hold the connection's whole read buffer, and the next read would need another one.
        let bytes = if bytes.len() <= COPIED_BYTES { Bytes::copy_from_slice(&bytes) } else { bytes };
        let sending = self.serving.send(bytes);
        match &mut self.wait {
            Some(wait) => wait.pass(sending).await,
            None => sending.await,
        }
    }
}

/// Counts the prompt as computed after `settle`, unless that is zero: an answer that does not stream shows its first byte with its last.
async fn settled(in_flight: Option<&InFlight>, settle: Duration) -> Infallible {
    if !settle.is_zero() {
        tokio::time::sleep(settle).await;
        in_flight.inspect(|in_flight| in_flight.computed());
    }
    std::future::pending().await
}

/// Whether the engine's core has to do something for the answer. vLLM's front-end gives the others by itself, even while the core hangs.
fn computes(head: &RequestHead) -> bool {
    let path = head.path.split('?').next().unwrap_or_default();
    head.method == "POST"
        && !matches!(path, "/tokenize" | "/detokenize" | "/v1/messages/count_tokens")
        && !path.ends_with("/cancel")
        && !path.ends_with("/render")
}

/// The request for the engine, and what resolves when all of its body has left.
fn request(head: RequestHead, serving: &Serving) -> Result<(Request<SizedBody>, oneshot::Receiver<()>), Broken> {
    let refused = || Broken::protocol("the router sent a request head that HTTP does not allow");
    let uri = Uri::builder().scheme("http").authority("engine").path_and_query(head.path).build().map_err(|_| refused())?;
    let (complete, sent) = oneshot::channel();
    let mut request =
        Request::new(SizedBody { body: serving.body(), left: head.body_bytes, complete: (head.body_bytes > 0).then_some(complete) });
    *request.method_mut() = Method::from_bytes(head.method.as_bytes()).map_err(|_| refused())?;
    *request.uri_mut() = uri;
    for header in head.headers {
        let (name, value) = header.parse().ok_or_else(refused)?;
        request.headers_mut().append(name, value);
    }
    Ok((request, sent))
}

fn not_ready(message: String) -> Broken {
    Broken { fault: Fault::NotReady, message }
}

/// The engine could not be reached or broke off: of itself, or because it was told to stop. In the latter case its life ended as it should, and
/// nothing is wrong with the request.
fn broke_off(index: u32, phase: Phase, cause: &str) -> Broken {
    match phase {
        Phase::Draining | Phase::Stopped | Phase::Quarantined | Phase::Sleeping => {
            let message = format!("the engine of replica {index} was stopped before the answer was complete");
            Broken { fault: Fault::EngineStopped, message }
        }
        Phase::Starting | Phase::Loading | Phase::Ready | Phase::Failed => {
            Broken { fault: Fault::EngineLost, message: format!("the engine of replica {index} broke off ({cause})") }
        }
    }
}

#[cfg(test)]
mod tests;
