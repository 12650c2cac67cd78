//! One request from a lane to its engine, and the engine's answer back, byte for byte.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use hostler_proto::agent::v1::{Fault, Header, RequestHead, ResponseHead};
use hostler_proto::lane::{Broken, only_keeps_alive};
use http::{Method, Request, Uri};
use http_body::Body;
use http_body_util::BodyExt;
use prometheus_client::metrics::counter::Counter;

use super::client::SizedBody;
use super::lane::{Incoming, Serving};
use super::report::{Board, Replica};
use crate::engine::Phase;
use crate::metrics::AgentMetrics;
use crate::traffic::{InFlight, Prompt, RouterKey};

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

async fn relay(head: RequestHead, serving: &Serving, board: &Board, router: RouterKey) -> Result<(), Broken> {
    let replica = board.replica(head.replica).ok_or_else(|| not_ready(format!("this node has no replica {}", head.replica)))?;
    // Counted before the phase is looked at, so that a drain either sees this request or is seen by it.
    let prompt = Prompt { tokens: head.prompt_tokens, uncached: head.uncached_tokens };
    let in_flight = (!head.aside).then(|| replica.engine.traffic().enter_with(router, prompt));
    if replica.engine.status().borrow().phase != Phase::Ready {
        return Err(not_ready(format!("replica {} is not ready", head.replica)));
    }
    let settle = Duration::from_millis(u64::from(head.settle_ms));
    let request = request(head, serving)?;
    tokio::select! {
        outcome = exchange(replica, request, serving, in_flight.as_ref()) => outcome,
        never = settled(in_flight.as_ref(), settle) => match never {},
    }
}

/// The request to the engine, and its answer back.
async fn exchange(replica: &Replica, request: Request<SizedBody>, serving: &Serving, in_flight: Option<&InFlight>) -> Result<(), Broken> {
    let response = replica.client.request(request).await.map_err(|error| lost(replica, &error))?;
    let (head, mut body) = response.into_parts();
    serving.head(ResponseHead {
        status: head.status.as_u16().into(),
        headers: head.headers.iter().map(|(name, value)| Header::new(name, value)).collect(),
    });
    // A body of known length ends with its last byte: the end then leaves in the same batch, before the router can think of cancelling.
    while !body.is_end_stream()
        && let Some(frame) = body.frame().await
    {
        let frame = frame.map_err(|error| lost(replica, &error))?;
        if let Ok(bytes) = frame.into_data() {
            if !only_keeps_alive(&bytes) {
                in_flight.inspect(|in_flight| in_flight.computed());
            }
            serving.send(bytes).await;
        }
    }
    Ok(())
}

/// Counts the prompt as computed after `settle`, unless that is zero: an answer that does not stream shows its first byte with its last.
async fn settled(in_flight: Option<&InFlight>, settle: Duration) -> Infallible {
    if !settle.is_zero() {
        tokio::time::sleep(settle).await;
        in_flight.inspect(|in_flight| in_flight.computed());
    }
    std::future::pending().await
}

fn request(head: RequestHead, serving: &Serving) -> Result<Request<SizedBody>, Broken> {
    let refused = || Broken::protocol("the router sent a request head that HTTP does not allow");
    let uri = Uri::builder().scheme("http").authority("engine").path_and_query(head.path).build().map_err(|_| refused())?;
    let mut request = Request::new(SizedBody { body: serving.body(), left: head.body_bytes });
    *request.method_mut() = Method::from_bytes(head.method.as_bytes()).map_err(|_| refused())?;
    *request.uri_mut() = uri;
    for header in head.headers {
        let (name, value) = header.parse().ok_or_else(refused)?;
        request.headers_mut().append(name, value);
    }
    Ok(request)
}

fn not_ready(message: String) -> Broken {
    Broken { fault: Fault::NotReady, message }
}

/// The engine could not be reached or broke off.
fn lost(replica: &Replica, error: &dyn std::error::Error) -> Broken {
    let cause = hostler_boot::root_cause(error);
    Broken { fault: Fault::EngineLost, message: format!("the engine of replica {} broke off ({cause})", replica.index) }
}

#[cfg(test)]
mod tests;
