//! Has a request placed, waits its turn where its replica has no room, sends it there, and to another replica while nothing of an answer has
//! reached the client; then hands over the answer.

mod binding;
mod retry_budget;
mod pipeline;
mod external;
mod crash_suspects;
mod refusal;
mod relay;
mod sse_scanner;
mod failover;
mod answer_parser;
mod usage_bounds;

use std::future::poll_fn;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use hostler_proto::lane::{Broken, Fault, Header, RequestHead, ResponseHead, WINDOW_BYTES, only_keeps_alive};
use memchr::memmem::Finder;
use tokio::time::{Instant, sleep, timeout_at};

pub use retry_budget::{RetryBudgets, RetryBudget};
pub(crate) use external::ExternalPlacement;
pub use crash_suspects::{Ban, Fingerprint, CrashSuspects, CrashWatch, MAX_REQUESTS_PER_DEATH, ReportedDeath};
pub use refusal::Refusal;
pub use relay::{RelayContext, Relay};
use sse_scanner::is_engine_death;
pub use sse_scanner::{Dialect, SseScanner};
use failover::RetryContext;
pub use answer_parser::TokenUsage;
use answer_parser::{FinishState, AnswerParser};
pub use usage_bounds::Work;

use crate::admission::{OutputTokens, Permit, ActualUsage};
use crate::lanes::Exchange;
use crate::edge::access::Entry;
use crate::fleet::{Fleet, InFlight, Replica};
use crate::metrics::RouterMetrics;
use crate::placement::{PlacementRequest, QueueShare, RequestQueue, PlacementFeedback, Placer, Prompt, PlacementDecision, QueueSlot};
use crate::sticky::{Keep, Named};
use binding::Binding;

/// A plain answer's prompt counts as computed after this at the latest, whatever was predicted.
const MAX_PREFILL_SECONDS: f64 = 600.0;

/// How often a young router looks for a candidate.
const STARTUP_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Without this word no plain answer says that its engine was stopped under it.
static ABORT_MARKER: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"abort\""));

/// In words, why an answer was given up that says so.
const ABORT_MESSAGE: &str = "the engine was stopped before the answer was complete";

/// What every dispatch needs.
#[derive(Debug)]
pub struct Dispatch {
    /// Where the replicas are.
    pub fleet: Fleet,
    /// Which of them a request goes to.
    pub placer: Arc<Placer>,
    /// Where requests wait while their replica has no room.
    pub queue: RequestQueue,
    /// Keep retries from multiplying the load of a failing fleet.
    pub retries: RetryBudgets,
    /// Knows the requests that kill engines.
    pub crash_suspects: Arc<CrashSuspects>,
    /// Where outcomes are counted.
    pub metrics: Arc<RouterMetrics>,
    /// How long the first byte of an answer may take.
    pub answer_timeout: Duration,
    /// How long an answer may pause.
    pub idle_timeout: Duration,
}

/// A request as it will be sent, to one replica or several in turn.
#[derive(Debug)]
pub struct OutboundRequest {
    /// What placement needs to know of it.
    pub placement_request: PlacementRequest,
    /// The router's own number of it.
    pub id: u64,
    /// Its turn among those that wait: a lower one goes first.
    pub priority: i32,
    /// Whose it is: the hash of its tenant's name, or of its key's where that has none; zero where there are no keys.
    pub tenant: u64,
    /// Who it shares the fleet's attention with, and what it takes of the place to wait.
    pub queue_share: QueueShare,
    /// Its place to wait, from the moment at which it was seen that it may have to.
    pub queue_slot: Option<QueueSlot>,
    /// What the client calls it.
    pub client_id: Option<Arc<str>>,
    /// Its head; the replica's index and the estimates are filled in.
    pub head: RequestHead,
    /// Its body, complete; its memory counts as taken until nobody holds any of it.
    pub body: Bytes,
    /// The dialect of its event stream, should the answer be one.
    pub dialect: Dialect,
    /// What it has an engine compute.
    pub work: Work,
    /// Its line in the access log.
    pub log_entry: Entry,
    /// Which response it names.
    pub referenced_response: Named,
    /// Whose response its answer is, where the engine keeps it.
    pub stored_response: Option<Keep>,
    /// When it was taken.
    pub received_at: Instant,
}

/// An answer that has begun.
#[derive(Debug)]
pub struct Answer {
    /// Status and headers as the engine sent them.
    pub head: ResponseHead,
    /// The body.
    pub body: Box<Relay>,
    /// Why it comes from where it comes.
    pub decision: Arc<PlacementDecision>,
}

/// An attempt that has got as far as its first bytes.
struct StartedAnswer {
    head: ResponseHead,
    first_chunk: Option<Bytes>,
    exchange: Exchange,
    /// Gone when another replica is tried.
    in_flight: Option<InFlight>,
    replica: Arc<Replica>,
    placed: PlacementFeedback,
    decision: Arc<PlacementDecision>,
    /// Of an answer that was read whole.
    usage: Option<TokenUsage>,
    /// Of a plain answer more comes than was read, which may say what was used.
    has_unread_body: bool,
    /// Only comments have come so far.
    awaits_first_event: bool,
}

impl StartedAnswer {
    /// Whether another replica may do better: the engine is full, dying or dead. An event stream says so with status 200.
    fn is_retryable(&self) -> bool {
        let fails_at_once = || self.is_stream() && self.first_chunk.as_ref().is_some_and(|first| first.starts_with(b"data: {\"error\":"));
        matches!(self.head.status, 500 | 503) || fails_at_once()
    }

    /// Engines write JSON at once, when it is complete, so the rest of it is waited for as far as one window: should it break off, or
    /// be a generation cut short by an engine that was stopped under it, nothing has reached the client yet. Where nothing was to be computed,
    /// what looks like that, or like usage, is the client's own.
    async fn buffer_json_body(&mut self, work: Work) -> Result<(), Broken> {
        if !self.has_content_type(b"application/json") {
            return Ok(());
        }
        let mut body = self.first_chunk.take().unwrap_or_default();
        let mut is_whole = false;
        while !is_whole && body.len() < WINDOW_BYTES {
            match poll_fn(|context| self.exchange.poll_body(context)).await? {
                Some(more) => body = [body, more].concat().into(),
                None => is_whole = true,
            }
        }
        if work.generates() && ABORT_MARKER.find(&body).is_some() && AnswerParser::parse(&body, "").finish_state() == FinishState::Abort {
            return Err(Broken { fault: Fault::EngineStopped, message: ABORT_MESSAGE.into() });
        }
        if work.is_some() && is_whole {
            self.usage = AnswerParser::parse_usage(&body);
        }
        self.has_unread_body = work.is_some() && !is_whole;
        self.first_chunk = (!body.is_empty()).then_some(body);
        Ok(())
    }

    fn is_stream(&self) -> bool {
        self.has_content_type(b"text/event-stream")
    }

    fn has_content_type(&self, wanted: &[u8]) -> bool {
        let has = |header: &Header| header.name.eq_ignore_ascii_case(b"content-type") && header.value.starts_with(wanted);
        self.head.headers.iter().any(has)
    }
}

/// One try's result.
enum AttemptOutcome {
    Started(Box<StartedAnswer>),
    /// Nothing came; the replica is avoided for a moment.
    Lost(Broken),
}

impl Dispatch {
    /// Sends the request where it will be answered soonest. An attempt that is lost before a byte has reached the client is made
    /// again elsewhere, at most twice, and one answered with 500 once, within the retry budgets; one answered with 503 wherever there may
    /// be room. One that kills engines is refused.
    ///
    /// # Errors
    /// When no engine's answer can be given; an engine's own refusal is an answer.
    pub async fn send(&self, mut outgoing: Box<OutboundRequest>, permit: Permit) -> Result<Answer, Refusal> {
        self.retries.deposit();
        let fingerprint = crash_suspects::fingerprint(outgoing.tenant, &outgoing.head.path, &outgoing.body);
        outgoing.head.fingerprint = fingerprint;
        let mut watched = self.crash_suspects.watch(fingerprint);
        // Before its prompt is read: that may be the dearer part.
        watched.clearance()?;
        outgoing.queue_slot = self.queue.take_slot_if_contended(outgoing.placement_request.model.as_deref(), outgoing.queue_share)?;
        let deadline = outgoing.received_at + self.answer_timeout;
        self.await_startup_grace(outgoing.placement_request.model.as_deref()).await;
        let others_wait = self.queue.has_waiting(outgoing.placement_request.model.as_deref());
        let prompt = Arc::new(self.placer.read_prompt(std::mem::take(&mut outgoing.placement_request), others_wait).await);
        let mut tried: Vec<Arc<str>> = Vec::new();
        let mut refused: Option<Box<StartedAnswer>> = None;
        let mut lost = None;
        let mut retries = &self.retries.lost;
        let mut was_full = false;
        // Attempts that were lost to others' doing, and those at engines that were full.
        let (mut excused, mut full) = (0, 0);
        loop {
            let bound = if binding::has_attempts_left(tried.len() - excused, was_full) {
                let bound = timeout_at(deadline, self.bind(&prompt, &mut outgoing, &tried, &mut watched)).await;
                bound.map_err(|_| Refusal::TooSlow(self.answer_timeout))??
            } else {
                None
            };
            // Only a retry costs something.
            let Some(bound) = bound.filter(|bound| tried.is_empty() || was_full && bound.has_room() || retries.withdraw()) else {
                // The one that it will not stand.
                watched.end_trial();
                return match (refused, lost) {
                    (Some(begun), _) => Ok(self.relay_answer(*begun, &outgoing, watched, permit)),
                    (None, Some(Broken { message, .. })) => Err(Refusal::Lost { attempts: tried.len(), last: message }),
                    (None, None) => Err(Refusal::for_model(&self.fleet.view(), prompt.model())),
                };
            };
            if !tried.is_empty() {
                self.metrics.retries.inc();
            }
            let tries = RetryContext { prompt: &prompt, outgoing: &outgoing, tried: &mut tried, uncounted: excused + full, crash_watch: &mut watched };
            let (replica, attempt) = self.attempt_with_failover(bound, tries).await?;
            let mut begun = match attempt {
                AttemptOutcome::Started(begun) => begun,
                AttemptOutcome::Lost(broken) => {
                    tracing::info!(replica = %replica.id, reason = broken.message, "an attempt was lost before its first byte");
                    self.fleet.view().avoid(&replica, Instant::now());
                    // An engine that was stopped on purpose, or a node that is gone, is nobody's doing.
                    if broken.fault == Fault::EngineLost && watched.record_engine_loss(&replica) {
                        excused += 1;
                    }
                    watched.end_trial();
                    (lost, retries, was_full) = (Some(broken), &self.retries.lost, false);
                    continue;
                }
            };
            // An engine that is full or dying says 503; to a request that it cannot digest it says 500, as others will.
            let refuses = begun.is_retryable();
            was_full = begun.head.status == 503;
            if !refuses || refused.is_some() && !was_full {
                return Ok(self.relay_answer(*begun, &outgoing, watched, permit));
            }
            begun.in_flight = None;
            watched.end_trial();
            if was_full {
                full += 1;
                self.fleet.view().avoid(&replica, Instant::now());
            }
            (refused, retries) = (Some(begun), &self.retries.refused);
        }
    }

    /// Waits until there is a candidate, as long as the router is young: its restart then costs clients a moment and no error.
    async fn await_startup_grace(&self, model: Option<&str>) {
        let settling = || {
            let view = self.fleet.view();
            view.is_settling(Instant::now()) && view.eligible(model, &[]).next().is_none()
        };
        while settling() {
            sleep(STARTUP_POLL_INTERVAL).await;
        }
    }

    /// Counts the request where it goes, remembers why, and sends it.
    fn send_to(&self, prompt: &Prompt, outgoing: &OutboundRequest, bound: Binding, attempt: usize) -> SentAttempt {
        let Binding { chosen, queued_for: held, turn } = bound;
        let in_flight = self.placer.count_in_flight(prompt, &chosen, Instant::now());
        // Whoever is next sees this one counted.
        drop(turn);
        let settle = Duration::from_secs_f64(chosen.first_token_seconds().clamp(0.001, MAX_PREFILL_SECONDS));
        let replica = chosen.replica.clone();
        let head = RequestHead {
            replica: replica.index,
            prompt_tokens: prompt.token_count(),
            uncached_tokens: chosen.uncached_tokens(),
            settle_ms: if prompt.is_stream() { 0 } else { u32::try_from(settle.as_millis()).unwrap_or(u32::MAX).max(1) },
            ..outgoing.head.clone()
        };
        self.metrics.count_placement(chosen.level);
        let guessed = chosen.approx_prefix_slot();
        let reason = PlacementDecision {
            client_id: outgoing.client_id.clone(),
            attempt: u32::try_from(attempt).unwrap_or(u32::MAX),
            queued_seconds: held.as_secs_f32(),
            ..PlacementDecision::new(outgoing.id, prompt, chosen)
        };
        let reason = Arc::new(reason);
        self.placer.decisions.push(reason.clone());
        outgoing.log_entry.sent(&replica.id, attempt, held);
        let placed = PlacementFeedback::new(&self.placer, prompt, reason.clone(), &in_flight, guessed);
        let exchange = replica.lanes.open(head, outgoing.body.clone());
        SentAttempt { replica, exchange, in_flight, placed, prefill_estimate: settle, decision: reason }
    }

    async fn await_answer_start(&self, sent: SentAttempt, prompt: &Prompt, work: Work) -> AttemptOutcome {
        let SentAttempt { replica, exchange, mut in_flight, placed, prefill_estimate: settle, decision: reason } = sent;
        let exchange = match exchange {
            Ok(exchange) => exchange,
            Err(broken) => return AttemptOutcome::Lost(broken),
        };
        // A plain answer does not tell when its prompt has been computed.
        let settle = (!prompt.is_stream()).then_some(settle);
        let (head, first) = match self.read_first_bytes(&exchange, &mut in_flight, settle).await {
            Ok(began) => began,
            Err(broken) => return AttemptOutcome::Lost(broken),
        };
        let waits = first.as_ref().is_some_and(|first| only_keeps_alive(first));
        let mut begun =
            Box::new(StartedAnswer { head, first_chunk: first, exchange, in_flight: None, replica, placed, decision: reason, usage: None, has_unread_body: false, awaits_first_event: waits });
        if !waits {
            in_flight.answered();
            self.queue.notify_change();
            // An error comes fast, and says nothing of how fast the engine computes.
            if begun.head.status == 200 && !begun.is_retryable() {
                begun.placed.record_start();
            }
        }
        begun.in_flight = Some(in_flight);
        match begun.buffer_json_body(work).await {
            Ok(()) if begun.is_retryable() && begun.first_chunk.as_deref().is_some_and(is_engine_death) => {
                AttemptOutcome::Lost(Broken { fault: Fault::EngineLost, message: "the engine's core died".into() })
            }
            Ok(()) => AttemptOutcome::Started(begun),
            Err(broken) => AttemptOutcome::Lost(broken),
        }
    }

    /// Waits for the head and the first bytes of an answer. Engines send their head before they have done anything; until the first byte of
    /// the body there is nothing to lose. After `settle` the prompt counts as computed.
    async fn read_first_bytes(
        &self,
        exchange: &Exchange,
        in_flight: &mut InFlight,
        mut settle: Option<Duration>,
    ) -> Result<(ResponseHead, Option<Bytes>), Broken> {
        let begins = async {
            let head = poll_fn(|context| exchange.poll_head(context)).await?;
            Ok((head, poll_fn(|context| exchange.poll_body(context)).await?))
        };
        tokio::pin!(begins);
        loop {
            tokio::select! {
                biased;
                began = &mut begins => return began,
                () = sleep(settle.unwrap_or_default()), if settle.is_some() => {
                    settle = None;
                    in_flight.computed();
                    self.queue.notify_change();
                }
            }
        }
    }

    fn relay_answer(&self, begun: StartedAnswer, outgoing: &OutboundRequest, mut watched: CrashWatch, mut permit: Permit) -> Answer {
        let streams = begun.is_stream();
        // Front-ends begin a response's stream before they have asked their core.
        let is_front_ends = streams && outgoing.dialect == Dialect::Responses;
        if !begun.awaits_first_event && !is_front_ends {
            watched.mark_answered();
        }
        let StartedAnswer { head, first_chunk: first, exchange, in_flight, replica, placed, decision: reason, usage, has_unread_body: goes_on, awaits_first_event: waits } = begun;
        self.metrics.observe_first_byte(outgoing.received_at);
        if head.status >= 400 {
            permit.reconcile_usage(ActualUsage { prompt_tokens: Some(0), output_tokens: OutputTokens::Exact(0) });
        }
        if !waits {
            outgoing.log_entry.began();
        }
        let watch = outgoing.stored_response.clone().filter(|_| head.status == 200).map(|keep| keep.watch(&replica));
        let most = outgoing.work.usage_bounds(replica.longest_context());
        let held = RelayContext {
            in_flight,
            permit,
            replica,
            crash_watch: watched,
            // What an engine refuses it has not computed.
            clears_suspicion: head.status < 400,
            feedback: placed,
            usage,
            has_unread_body: goes_on,
            usage_bounds: most,
            awaits_first_event: waits,
            log_entry: outgoing.log_entry.clone(),
            received_at: outgoing.received_at,
            idle_timeout: self.idle_timeout,
            metrics: self.metrics.clone(),
        };
        let relay = Relay::new(exchange, first, streams.then_some(outgoing.dialect), watch, held);
        Answer { head, body: Box::new(relay), decision: reason }
    }
}

/// A request that is counted where it went.
struct SentAttempt {
    replica: Arc<Replica>,
    exchange: Result<Exchange, Broken>,
    in_flight: InFlight,
    placed: PlacementFeedback,
    /// When the prompt of a plain answer is taken to have been computed.
    prefill_estimate: Duration,
    decision: Arc<PlacementDecision>,
}

#[cfg(test)]
mod tests;
