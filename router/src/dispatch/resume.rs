//! Resumes a stream whose engine was lost. Another replica computes the rest of the answer, or all
//! of it again, through the loop that every request takes.

mod origin;
mod waiting;

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hostler_api::Route;
use hostler_proto::lane::{Header, RequestHead};
use tokio::time::{Instant, timeout};

use self::origin::StreamOrigin;
use self::waiting::Patience;
use super::attempts::{Attempts, ReplicaLoss};
use super::retry_policy::AttemptEnd;
use super::{Dispatch, OutboundRequest, Refusal, StartedAnswer};
use crate::crash_suspects::{Clearance, CrashWatch};
use crate::fleet::{Fleet, FleetView, Replica};
use crate::placement::{OutputBounds, PlacementDecision, PlacementRequest};
use crate::response_affinity::ResponseReference;
use crate::resume_tier::ResumeTier;
use crate::resumption::{ContinuationRequest, KeptBody, ReplayRecord, ResumePlan, Sampling, TokenRecord};
use crate::sse::Dialect;

/// Planned moves may meet a stream of hours several times. Crash suspicion stops a stream that
/// loses engines long before.
const MAX_RESUMPTIONS: usize = 8;

/// Limit until another engine has begun a moved stream; after it, the old engine keeps the stream.
/// A drain lasts 30 s by default.
const MOVE_TIMEOUT: Duration = Duration::from_secs(10);

/// The route that takes tokens as a prompt.
const COMPLETIONS: &str = Route::Completions.path();

/// Everything needed to continue a stream.
#[derive(Debug)]
pub(super) struct Resumption {
    dispatch: Arc<Dispatch>,
    /// The request. Its body is dropped once sent.
    outgoing: Box<OutboundRequest>,
    source: ResumptionSource,
    origin: StreamOrigin,
    pub(super) tier: ResumeTier,
    /// The engines that have lost the stream.
    losses: Vec<StreamLoss>,
    /// How often the stream has moved. It may return to an engine that it moved away from.
    moves: usize,
    /// How many tokens the stream goes on from.
    known_tokens: u64,
}

/// A replica that has lost a stream.
#[derive(Debug)]
struct StreamLoss {
    replica: ReplicaLoss,
    is_explained: bool,
}

/// Why a stream goes on elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Departure {
    /// The engine was lost.
    ///
    /// The loss `is_explained` if the engine was stopped or its crash is put down to somebody: a
    /// host that dies may have died of the request. The loss `is_agents` if only the connection to
    /// the agent is known to be lost.
    Loss { is_explained: bool, is_agents: bool },
    /// The engine continues the stream until another one does.
    Move,
}

/// The source of the request for the rest.
#[derive(Debug)]
enum ResumptionSource {
    /// The tokens so far, with these parameters.
    Tokens(Box<Sampling>),
    /// The request itself, sent again.
    Request(KeptBody),
}

/// The record of a stream until it has to go on elsewhere.
#[derive(Debug)]
pub(super) enum StreamRecord {
    Tokens(Box<TokenRecord>),
    Replay(Box<ReplayRecord>),
}

/// A search for another engine.
pub(super) struct ResumingAnswer {
    search: Pin<Box<dyn Future<Output = ResumedAnswer> + Send>>,
    /// Longest wait for a replica, during which no engine is to blame for the silence.
    pub(super) max_wait: Duration,
}

/// Why a search for another engine failed.
#[derive(Debug)]
enum SearchEnd {
    /// No replica can go on now.
    NoReplica(Refusal),
    /// No replica will ever go on.
    Failed(String),
}

impl SearchEnd {
    fn into_words(self) -> String {
        match self {
            Self::NoReplica(refusal) => refusal.to_string(),
            Self::Failed(reason) => reason,
        }
    }
}

/// The result of a search, for the relay.
pub(super) struct ResumedAnswer {
    pub(super) resumption: Box<Resumption>,
    pub(super) crash_watch: CrashWatch,
    /// The answer, or why there is none.
    pub(super) outcome: Result<Box<StartedAnswer>, String>,
}

/// Where a stream could go on.
#[derive(Debug)]
pub(super) struct Destinations {
    origin: StreamOrigin,
    lost_at: Vec<ReplicaLoss>,
}

impl Destinations {
    /// Whether a replica other than `from` could go on.
    pub(super) fn exist(&self, view: &FleetView, from: &Replica, now: Instant) -> bool {
        let can_continue = |replica: &Replica| {
            let has_lost_it = self.lost_at.iter().any(|loss| loss.holds(replica));
            !has_lost_it && replica.id != from.id && !view.is_last_resort(replica, now) && self.origin.may_continue_at(replica)
        };
        view.replicas.iter().any(|replica| replica.accepts(self.origin.model()) && can_continue(replica))
    }
}

impl fmt::Debug for ResumingAnswer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ResumingAnswer").finish_non_exhaustive()
    }
}

impl ResumingAnswer {
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<ResumedAnswer> {
        self.search.as_mut().poll(context)
    }
}

impl Dispatch {
    /// The record of this replica's stream, and the way to resume it, if it may be resumed.
    pub(super) fn resumption(
        self: &Arc<Self>,
        mut outgoing: Box<OutboundRequest>,
        decision: &PlacementDecision,
        replica: &Replica,
    ) -> Option<(StreamRecord, Box<Resumption>)> {
        let tier = decision.resume;
        if matches!(tier, ResumeTier::None(_)) {
            return None;
        }
        let origin = StreamOrigin::new(decision.model.as_deref(), replica)?;
        let body = std::mem::take(&mut outgoing.body);
        let memory = &self.record_memory.of_tenant(outgoing.queue_share);
        let (record, source) = match &outgoing.resume_plan {
            ResumePlan::None(_) => return None,
            ResumePlan::Replay(plan) => {
                let record = ReplayRecord::new(plan.api, memory);
                let kept = KeptBody::copy(&body, memory)?;
                (StreamRecord::Replay(Box::new(record)), ResumptionSource::Request(kept))
            }
            ResumePlan::Continue(sampling) => {
                let sampling = sampling.clone();
                (StreamRecord::Tokens(Box::new(TokenRecord::new(sampling.api, memory))), ResumptionSource::Tokens(sampling))
            }
        };
        let dispatch = self.clone();
        Some((record, Box::new(Resumption { dispatch, outgoing, source, origin, tier, losses: Vec::new(), moves: 0, known_tokens: 0 })))
    }
}

impl Resumption {
    /// The parameters of a stream that is continued from its tokens.
    pub(super) fn sampling(&self) -> Option<&Sampling> {
        match &self.source {
            ResumptionSource::Tokens(sampling) => Some(sampling),
            ResumptionSource::Request(_) => None,
        }
    }

    /// The dialect of the stream.
    pub(super) fn dialect(&self) -> Dialect {
        self.outgoing.dialect
    }

    /// Whether the stream has been resumed before.
    pub(super) fn is_under_way(&self) -> bool {
        self.losses.len() + self.moves > 0
    }

    /// A stand-in for a watch that is elsewhere.
    pub(super) fn idle_watch(&self) -> CrashWatch {
        self.dispatch.crash_suspects.watch(None)
    }

    /// Watches the request at a second engine.
    pub(super) fn second_watch(&self) -> CrashWatch {
        self.dispatch.crash_suspects.watch(self.outgoing.head.fingerprint)
    }

    pub(super) fn fleet(&self) -> &Fleet {
        &self.dispatch.fleet
    }

    /// Whether the stream may be resumed once more.
    pub(super) fn is_allowed(&self) -> bool {
        #[cfg(test)]
        if crate::simulation::sabotage::is(crate::simulation::sabotage::Sabotage::StreamGivenUp) {
            return false;
        }
        self.losses.len() + self.moves < MAX_RESUMPTIONS
    }

    /// Where the stream could go on.
    pub(super) fn destinations(&self) -> Destinations {
        Destinations { origin: self.origin.clone(), lost_at: self.losses.iter().map(|loss| loss.replica.clone()).collect() }
    }

    /// Sends the request for the rest, or the same request again, to another engine than the one it
    /// leaves.
    pub(super) fn start(
        mut self: Box<Self>,
        departure: Departure,
        rest: Option<ContinuationRequest>,
        leaves: &Replica,
        mut crash_watch: CrashWatch,
    ) -> ResumingAnswer {
        let now = Instant::now();
        if let Departure::Loss { is_explained, is_agents } = departure {
            self.losses.push(StreamLoss { replica: ReplicaLoss::new(leaves, is_agents, now), is_explained });
        }
        let left = ReplicaLoss::new(leaves, false, now);
        let max_wait = self.dispatch.queue.max_wait();
        self.outgoing.received_at = now;
        self.outgoing.head.headers.retain(is_of_continuation);
        match rest {
            Some(rest) => self.ask_for_rest(rest),
            None => self.ask_again(),
        }
        let search = Box::pin(async move {
            let outcome = match departure {
                Departure::Loss { .. } => self.await_continuation(Patience::from(now, max_wait), &mut crash_watch).await,
                Departure::Move => self.find_destination(&left, &mut crash_watch).await,
            };
            (self.outgoing.body, self.outgoing.placement_request) = (Bytes::new(), PlacementRequest::default());
            ResumedAnswer { resumption: self, crash_watch, outcome }
        });
        ResumingAnswer { search, max_wait }
    }

    fn ask_for_rest(&mut self, request: ContinuationRequest) {
        let ResumptionSource::Tokens(sampling) = &self.source else { return };
        self.known_tokens = request.known_tokens;
        let outgoing = &mut self.outgoing;
        outgoing.head = RequestHead {
            method: "POST".into(),
            path: COMPLETIONS.into(),
            headers: std::mem::take(&mut outgoing.head.headers),
            body_bytes: request.body.len() as u64,
            // Crash suspicion treats the continuation as the same request.
            fingerprint: outgoing.head.fingerprint,
            ..RequestHead::default()
        };
        outgoing.dialect = Dialect::OpenAi;
        outgoing.referenced_response = ResponseReference::None;
        outgoing.placement_request = PlacementRequest {
            tenant: outgoing.queue_share.tenant,
            model: self.origin.model().map(str::to_owned),
            cache_salt: sampling.cache_salt.clone(),
            path: COMPLETIONS.into(),
            prompt_parts: vec![request.body.slice(request.prompt)],
            output_bounds: OutputBounds { least: request.min_tokens, most: request.max_tokens },
            sequences: 1,
            is_stream: true,
            // Its engine was just lost.
            is_suspect: true,
            body: request.body.clone(),
            required_engine: None,
        };
        outgoing.body = request.body;
    }

    fn ask_again(&mut self) {
        let ResumptionSource::Request(KeptBody { body, .. }) = &self.source else { return };
        let outgoing = &mut self.outgoing;
        if let ResumePlan::Replay(plan) = &outgoing.resume_plan {
            outgoing.placement_request = plan.placement_request(outgoing.queue_share.tenant, body);
        }
        outgoing.body = body.clone();
    }

    /// Moves the stream elsewhere while the engine that it `left` continues. A destination is
    /// worthwhile only if its tokens come within a short time.
    async fn find_destination(&mut self, left: &ReplicaLoss, crash_watch: &mut CrashWatch) -> Result<Box<StartedAnswer>, String> {
        if !matches!(crash_watch.clearance(), Ok(Clearance::Free)) {
            return Err("it is suspected of having crashed an engine".into());
        }
        let mut attempts = self.attempts();
        let found = timeout(MOVE_TIMEOUT, self.find_continuation(&mut attempts, Some(left), crash_watch)).await;
        let found =
            found.unwrap_or_else(|_| Err(SearchEnd::Failed(format!("no other engine has begun within {} s", MOVE_TIMEOUT.as_secs()))));
        let begun = found.map_err(SearchEnd::into_words)?;
        if begun.awaits_first_event {
            return Err("the other engine has no room for it yet".into());
        }
        self.moves += 1;
        Ok(begun)
    }

    /// Attempts that count the losses so far. Each loss had been worth its attempt; the next
    /// attempt is paid for as after any loss.
    fn attempts(&self) -> Attempts {
        let mut attempts = Attempts::default();
        for loss in &self.losses {
            attempts.policy.begin_attempt();
            attempts.policy.end_attempt(AttemptEnd::Lost { excused: loss.is_explained });
        }
        attempts
    }

    async fn find_continuation(
        &mut self,
        attempts: &mut Attempts,
        left: Option<&ReplicaLoss>,
        crash_watch: &mut CrashWatch,
    ) -> Result<Box<StartedAnswer>, SearchEnd> {
        // Refuse a request banned meanwhile before its tokens are read.
        crash_watch.clearance().map_err(|ban| SearchEnd::Failed(ban.to_string()))?;
        attempts.tried = self.replicas_unfit_to_go_on(attempts, left);
        // Another search may follow.
        let request = self.outgoing.placement_request.clone();
        let dispatch = self.dispatch.clone();
        let found = dispatch.find_answer(&mut self.outgoing, crash_watch, attempts).await;
        self.outgoing.placement_request = request;
        let begun = found.map_err(|refusal| match refusal {
            Refusal::NotReady { .. } | Refusal::Lost { .. } => SearchEnd::NoReplica(refusal),
            refusal => SearchEnd::Failed(refusal.to_string()),
        })?;
        if begun.head.status != 200 || !begun.is_stream() || begun.is_retryable() {
            return Err(SearchEnd::Failed(format!("another engine answered {}", begun.head.status)));
        }
        Ok(begun)
    }

    /// Replicas whose engine cannot go on with the stream, and those that it has `left` or was lost
    /// at.
    fn replicas_unfit_to_go_on(&self, attempts: &Attempts, left: Option<&ReplicaLoss>) -> Vec<Arc<str>> {
        let is_left = |replica: &Replica| self.losses(attempts).chain(left).any(|loss| loss.holds(replica));
        let is_unfit = |replica: &&Arc<Replica>| !self.may_go_on_at(replica) || is_left(replica);
        self.dispatch.fleet.view().replicas.iter().filter(is_unfit).map(|replica| replica.id.clone()).collect()
    }

    /// The losses of the stream so far, and those of these attempts to continue it.
    fn losses<'a>(&'a self, attempts: &'a Attempts) -> impl Iterator<Item = &'a ReplicaLoss> {
        self.losses.iter().map(|loss| &loss.replica).chain(&attempts.losses)
    }

    /// Whether the replica's engine is known to take tokens as a prompt, or to give the same stream
    /// again.
    fn may_go_on_at(&self, replica: &Replica) -> bool {
        match &self.source {
            ResumptionSource::Tokens(_) => self.origin.may_continue_at(replica) && replica.max_context_tokens() > self.known_tokens,
            ResumptionSource::Request(_) => self.origin.may_replay_at(replica),
        }
    }

    /// The shortest context of the engines that can go on from so many tokens, so that any of them
    /// has room for the request.
    pub(super) fn context_to_go_on(&self, tokens: u64, own: u64) -> u64 {
        let view = self.dispatch.fleet.view();
        let others = view.replicas.iter().filter(|replica| replica.is_ready() && self.origin.may_continue_at(replica));
        others.map(|replica| replica.max_context_tokens()).filter(|context| *context > tokens).fold(own, u64::min)
    }
}

/// Whether a header of the request goes with its continuation. Two requests with the same id have
/// crashed engines (vllm#15041).
fn is_of_continuation(header: &Header) -> bool {
    !header.name.eq_ignore_ascii_case(b"x-request-id")
}

#[cfg(test)]
mod tests;
