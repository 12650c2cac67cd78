//! Goes on with a stream whose engine was lost: has the rest of its answer computed by another replica, through the loop that every request goes
//! through.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hostler_proto::lane::{Header, RequestHead};
use tokio::time::Instant;

use super::retry_policy::{AttemptEnd, RetryPolicy};
use super::{Dispatch, OutboundRequest, StartedAnswer};
use crate::crash_suspects::CrashWatch;
use crate::fleet::Replica;
use crate::placement::{OutputBounds, PlacementRequest};
use crate::response_affinity::ResponseReference;
use crate::resume_tier::ResumeTier;
use crate::resumption::{ContinuationRequest, Sampling, StreamApi, TokenRecord, check_engine};
use crate::sse::Dialect;

/// Planned moves may meet a stream of hours several times. One that loses engines is stopped by the crash suspects long before.
const MAX_RESUMPTIONS: usize = 8;

/// The route that takes tokens as a prompt.
const COMPLETIONS: &str = "/v1/completions";

/// What the continuation of a stream is made of.
#[derive(Debug)]
pub(super) struct Resumption {
    dispatch: Arc<Dispatch>,
    /// The request, without its body once that is sent.
    outgoing: Box<OutboundRequest>,
    sampling: Box<Sampling>,
    pub(super) tier: ResumeTier,
    /// The replicas that have lost it.
    lost_at: Vec<Arc<str>>,
}

/// The way to another engine.
pub(super) struct ResumingAnswer(Pin<Box<dyn Future<Output = ResumedAnswer> + Send>>);

/// What the relay gets back at its end.
pub(super) struct ResumedAnswer {
    pub(super) resumption: Box<Resumption>,
    pub(super) crash_watch: CrashWatch,
    /// The answer, or why there is none.
    pub(super) outcome: Result<Box<StartedAnswer>, String>,
}

impl fmt::Debug for ResumingAnswer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ResumingAnswer").finish_non_exhaustive()
    }
}

impl ResumingAnswer {
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<ResumedAnswer> {
        self.0.as_mut().poll(context)
    }
}

impl Dispatch {
    /// What goes on with this answer when its engine is lost, and what remembers its tokens until then, if it may be resumed.
    pub(super) fn resumption(
        self: &Arc<Self>,
        mut outgoing: Box<OutboundRequest>,
        tier: ResumeTier,
    ) -> Option<(TokenRecord, Box<Resumption>)> {
        let sampling = outgoing.sampling.clone().ok().filter(|_| tier.is_some())?;
        let record = TokenRecord::new(sampling.api, &self.record_memory);
        outgoing.body = Bytes::new();
        Some((record, Box::new(Resumption { dispatch: self.clone(), outgoing, sampling, tier, lost_at: Vec::new() })))
    }

    /// Those that nobody knows to take tokens as a prompt.
    fn replicas_unfit_to_continue(&self) -> Vec<Arc<str>> {
        let is_unfit = |replica: &&Arc<Replica>| check_engine(replica.state.launch.as_ref(), StreamApi::Completions).is_err();
        self.fleet.view().replicas.iter().filter(is_unfit).map(|replica| replica.id.clone()).collect()
    }
}

impl Resumption {
    pub(super) fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    /// Whether it was resumed before.
    pub(super) fn is_under_way(&self) -> bool {
        !self.lost_at.is_empty()
    }

    /// Stands in for a watch that is elsewhere.
    pub(super) fn idle_watch(&self) -> CrashWatch {
        self.dispatch.crash_suspects.watch(None)
    }

    /// Whether it may be tried once more.
    pub(super) fn is_allowed(&self) -> bool {
        self.lost_at.len() < MAX_RESUMPTIONS
    }

    /// Sends the request for the rest elsewhere than to `lost_at`.
    pub(super) fn start(
        mut self: Box<Self>,
        request: ContinuationRequest,
        lost_at: Arc<str>,
        mut crash_watch: CrashWatch,
    ) -> ResumingAnswer {
        self.lost_at.push(lost_at);
        let outgoing = &mut self.outgoing;
        outgoing.received_at = Instant::now();
        outgoing.head = RequestHead {
            method: "POST".into(),
            path: COMPLETIONS.into(),
            headers: std::mem::take(&mut outgoing.head.headers).into_iter().filter(is_of_continuation).collect(),
            body_bytes: request.body.len() as u64,
            // It is the same request to who looks for one that crashes engines.
            fingerprint: outgoing.head.fingerprint,
            ..RequestHead::default()
        };
        outgoing.dialect = Dialect::OpenAi;
        outgoing.referenced_response = ResponseReference::None;
        outgoing.placement_request = PlacementRequest {
            model: self.sampling.model.clone(),
            cache_salt: self.sampling.cache_salt.clone(),
            path: COMPLETIONS.into(),
            prompt_parts: vec![request.body.slice(request.prompt)],
            output_bounds: OutputBounds { least: request.min_tokens, most: request.max_tokens },
            is_stream: true,
            body: request.body.clone(),
            required_engine: None,
        };
        outgoing.body = request.body;
        ResumingAnswer(Box::pin(async move {
            let outcome = self.find_continuation(&mut crash_watch).await;
            self.outgoing.body = Bytes::new();
            ResumedAnswer { resumption: self, crash_watch, outcome }
        }))
    }

    async fn find_continuation(&mut self, crash_watch: &mut CrashWatch) -> Result<Box<StartedAnswer>, String> {
        // One that is banned meanwhile is refused before its tokens are read.
        crash_watch.clearance().map_err(|ban| ban.to_string())?;
        // What was lost had been worth its attempt. The next one is paid for as any that follows a loss.
        let mut policy = RetryPolicy::default();
        for _ in &self.lost_at {
            policy.begin_attempt();
            policy.end_attempt(AttemptEnd::Lost { excused: true });
        }
        let dispatch = self.dispatch.clone();
        let unfit = dispatch.replicas_unfit_to_continue();
        let tried = self.lost_at.iter().cloned().chain(unfit).collect();
        let found = dispatch.find_answer(&mut self.outgoing, crash_watch, tried, policy).await;
        let begun = found.map_err(|refusal| refusal.to_string())?;
        if begun.head.status != 200 || !begun.is_stream() {
            return Err(format!("another engine answered {}", begun.head.status));
        }
        Ok(begun)
    }
}

/// Whether a header of the request goes with its continuation. Two requests of one name have crashed engines (vllm#15041).
fn is_of_continuation(header: &Header) -> bool {
    !header.name.eq_ignore_ascii_case(b"x-request-id")
}

#[cfg(test)]
mod tests;
