//! Dispatches a request: places it, waits for its turn, sends it, and hands over the answer.
//!
//! The request waits if its replica has no room, and goes to another replica while no byte of an
//! answer has reached the client.

mod attempts;
mod binding;
mod confinement;
mod external;
mod failover;
mod job_end;
mod outbound_request;
mod refusal;
mod relay;
mod resume;
mod retry_budget;
mod retry_policy;
mod started_answer;
mod usage_bounds;

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hostler_proto::lane::{Fault, RequestHead, ResponseHead, StreamFault, is_keep_alive_comment};
use tokio::time::{Instant, sleep, timeout_at};

use attempts::{Attempts, ReplicaLoss};
pub(crate) use external::ExternalPlacement;
use failover::RetryContext;
use job_end::explain_loss;
pub(crate) use outbound_request::OutboundRequest;
pub(crate) use refusal::Refusal;
pub(crate) use relay::BREAK_DELAY;
pub(crate) use relay::{Relay, RelayContext};
pub(crate) use retry_budget::RetryBudgets;
use retry_policy::{AttemptEnd, NextStep};
use started_answer::StartedAnswer;
pub(crate) use usage_bounds::Work;

use crate::access_log::AttemptEntry;
use crate::admission::{ActualUsage, OutputTokens, Permit};
use crate::crash_suspects::{self, Clearance, CrashSuspects, CrashWatch};
use crate::fan_out::AnswerExchange;
use crate::fleet::{Fleet, InFlight, Replica};
use crate::metrics::RouterMetrics;
use crate::outcome::{AnswerOutcome, LossCause};
use crate::placement::{PlacementDecision, PlacementFeedback, Placer, Prompt, RequestQueue};
use crate::resume_tier::{NotResumed, ResumeTier};
use crate::resumption::{RecordMemory, ResumePlan, check_engine, check_replaying_engine, unasked_part, without_asking};
use crate::sse::Dialect;
use binding::Binding;

/// Upper bound of a plain answer's predicted prefill, in seconds.
const MAX_PREFILL_SECONDS: f64 = 600.0;

/// How often a router in its startup grace looks for a replica.
const STARTUP_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Time in which an agent's report comes. Agents send one 10 ms after a change; a busy machine
/// takes longer.
const REPORT_WAIT: Duration = Duration::from_millis(100);

const ABORT_MESSAGE: &str = "the engine was stopped before the answer was complete";

const END_MESSAGE: &str = "the engine ended the answer before it was complete";

#[derive(Debug)]
pub(crate) struct Dispatch {
    pub fleet: Fleet,
    pub placer: Arc<Placer>,
    pub queue: RequestQueue,
    pub retries: RetryBudgets,
    /// Requests that were in flight when engines crashed.
    pub crash_suspects: Arc<CrashSuspects>,
    pub metrics: Arc<RouterMetrics>,
    /// Limit until the first byte of an answer.
    pub answer_timeout: Duration,
    /// Limit between two pieces of an answer.
    pub idle_timeout: Duration,
    /// Memory shared by the token records of all streams.
    pub record_memory: RecordMemory,
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub head: ResponseHead,
    pub body: Box<Relay>,
    pub decision: Arc<PlacementDecision>,
}

enum AttemptOutcome {
    Started(Box<StartedAnswer>),
    /// The attempt brought no answer; the replica is avoided for a second.
    Lost(StreamFault),
}

impl Dispatch {
    /// Sends the request where it will be answered soonest, and retries within the retry budgets.
    ///
    /// An attempt lost before a byte has reached the client is repeated elsewhere at most twice,
    /// and one answered with 500 once. One answered with 503 waits for its turn again, at most
    /// seven times. A request that crashes engines is refused.
    ///
    /// # Errors
    /// If no engine can give an answer. An engine's own refusal counts as an answer.
    pub(crate) async fn send(self: &Arc<Self>, mut outgoing: Box<OutboundRequest>, permit: Permit) -> Result<Answer, Refusal> {
        self.retries.deposit();
        let fingerprint = crash_suspects::fingerprint(outgoing.tenant, &outgoing.head.path, unasked_part(&outgoing.body));
        outgoing.head.fingerprint = fingerprint;
        let mut crash_watch = self.crash_suspects.watch(fingerprint);
        // Check before reading the prompt, which may cost more.
        let clearance = crash_watch.clearance()?;
        outgoing.placement_request.is_suspect = clearance != Clearance::Free || crash_watch.is_confined();
        outgoing.queue_slot = self.queue.take_slot_if_contended(outgoing.placement_request.model.as_deref(), outgoing.queue_share)?;
        let begun = self.find_answer(&mut outgoing, &mut crash_watch, &mut Attempts::default()).await?;
        Ok(self.relay_answer(*begun, outgoing, crash_watch, permit))
    }

    /// The beginning of an answer from a replica that was not tried yet.
    async fn find_answer(
        &self,
        outgoing: &mut OutboundRequest,
        crash_watch: &mut CrashWatch,
        attempts: &mut Attempts,
    ) -> Result<Box<StartedAnswer>, Refusal> {
        let deadline = outgoing.received_at + self.answer_timeout;
        self.await_startup_grace(outgoing.placement_request.model.as_deref()).await;
        let others_wait = self.queue.has_waiting(outgoing.placement_request.model.as_deref());
        let prompt = Arc::new(self.placer.read_prompt(std::mem::take(&mut outgoing.placement_request), others_wait).await);
        let mut refused: Option<Box<StartedAnswer>> = None;
        let mut lost = None;
        loop {
            let bound = if attempts.policy.allows_attempt() {
                let bound = timeout_at(deadline, self.bind(&prompt, outgoing, attempts, crash_watch)).await;
                bound.map_err(|_| Refusal::TooSlow(self.answer_timeout))??
            } else {
                None
            };
            let Some(bound) = bound.filter(|bound| self.retries.pay(attempts.policy.payment(bound.has_room()), &self.metrics)) else {
                // The trial planned there will not take place.
                crash_watch.end_trial();
                return match (refused, lost) {
                    (Some(begun), _) => Ok(begun),
                    (None, Some(StreamFault { message, .. })) => {
                        let retry_after = refusal::retry_after(self.fleet.view().arrival(prompt.model(), Instant::now()));
                        Err(Refusal::Lost { attempts: attempts.policy.attempts(), last: message, retry_after })
                    }
                    (None, None) => Err(Refusal::for_request(&self.fleet.view(), prompt.model(), prompt.path())),
                };
            };
            if attempts.policy.attempts() > 0 {
                self.metrics.retries.inc();
            }
            let context = RetryContext { prompt: &prompt, outgoing, attempts, crash_watch };
            let (replica, attempt) = self.attempt_with_failover(bound, context).await?;
            let end = attempt_end(&attempt, &replica, crash_watch);
            let step = attempts.policy.end_attempt(end);
            if end == AttemptEnd::Full && self.may_take_later(&replica, &prompt, &attempts.tried).await {
                attempts.reopen(&replica);
            } else if step == NextStep::TryAgain && end != AttemptEnd::Failed {
                self.fleet.view().avoid(&replica, Instant::now());
            }
            match attempt {
                AttemptOutcome::Started(begun) if step == NextStep::RelayAnswer => {
                    return Ok(begun);
                }
                AttemptOutcome::Started(mut begun) => {
                    begun.in_flight = None;
                    begun.entry.record_refusal();
                    begun.feedback.record_outcome(AnswerOutcome::of_status(begun.head.status).as_str());
                    refused = Some(begun);
                }
                AttemptOutcome::Lost(mut broken) => {
                    attempts.losses.push(ReplicaLoss::new(&replica, broken.fault == Fault::LaneLost, Instant::now()));
                    broken.message = explain_loss(&self.fleet.view(), &replica, Instant::now(), broken.message);
                    tracing::info!(replica = %replica.id, reason = broken.message, "an attempt was lost before its first byte");
                    lost = Some(broken);
                }
            }
            crash_watch.end_trial();
        }
    }

    /// Whether an engine that has refused a request may take it later, because others fill it.
    ///
    /// Another router may have sent those a moment ago, as while it gives its place to this one.
    async fn may_take_later(&self, replica: &Replica, prompt: &Prompt, tried: &[Arc<str>]) -> bool {
        let present = self.fleet.view().present(replica).cloned();
        if self.learn_sequence_limit(present.as_deref().unwrap_or(replica), prompt.sequences()) {
            return true;
        }
        let has_others = self.fleet.view().eligible(prompt.model(), tried).next().is_some();
        if has_others {
            return false;
        }
        // What filled it may have ended before a report told of it. Attempts are bounded.
        sleep(REPORT_WAIT).await;
        true
    }

    /// Learns how many sequences an engine takes at once, which has refused a request of this many.
    /// `false` if it has no others: then it will not take this request later either.
    fn learn_sequence_limit(&self, replica: &Replica, sequences: u32) -> bool {
        let (local, engine) = (&replica.local_load, &replica.load.engine);
        // The refused request is still counted here. The engine's own count is older.
        let sent = local.sequences().saturating_sub(sequences).saturating_add(replica.load.in_flight_elsewhere);
        let others = if sent > 0 { sent } else { engine.running.saturating_add(engine.waiting) };
        if others > 0 && replica.state.sequence_limit == 0 {
            local.learn_sequence_limit(others.saturating_add(sequences - 1), self.fleet.view().seconds(Instant::now()));
        }
        others > 0
    }

    /// Waits for a candidate during the router's startup grace, so a restart delays clients briefly
    /// and causes no errors.
    pub(crate) async fn await_startup_grace(&self, model: Option<&str>) {
        let is_waiting = || {
            let view = self.fleet.view();
            view.is_in_startup_grace(Instant::now()) && view.eligible(model, &[]).next().is_none()
        };
        while is_waiting() {
            sleep(STARTUP_POLL_INTERVAL).await;
        }
    }

    /// Counts the request at its replica, records the decision, and sends it.
    fn send_to(&self, prompt: &Prompt, outgoing: &OutboundRequest, bound: Binding, attempt: usize) -> SentAttempt {
        let Binding { chosen, queued_for, turn } = bound;
        let in_flight = self.placer.count_in_flight(prompt, &chosen, Instant::now());
        // The next request must see this one counted.
        drop(turn);
        let prefill_estimate = Duration::from_secs_f64(chosen.first_token_seconds().clamp(0.001, MAX_PREFILL_SECONDS));
        let replica = chosen.replica.clone();
        let resume = resume_tier(outgoing, &replica);
        let body = match (&outgoing.resume_plan, resume) {
            (ResumePlan::Continue(_), ResumeTier::None(_)) => without_asking(&outgoing.body),
            _ => outgoing.body.clone(),
        };
        let mut head = RequestHead {
            replica: replica.index,
            body_bytes: body.len() as u64,
            prompt_tokens: prompt.token_count(),
            uncached_tokens: chosen.uncached_tokens(),
            prefill_estimate_ms: if prompt.is_stream() {
                0
            } else {
                u32::try_from(prefill_estimate.as_millis()).unwrap_or(u32::MAX).max(1)
            },
            ..outgoing.head.clone()
        };
        self.metrics.count_placement(chosen.level);
        let approx_prefix_slot = chosen.approx_prefix_slot();
        let decision = PlacementDecision {
            client_id: outgoing.client_id.clone(),
            attempt: u32::try_from(attempt).unwrap_or(u32::MAX),
            queued_seconds: queued_for.as_secs_f32(),
            resume,
            ..PlacementDecision::new(outgoing.id, prompt, chosen)
        };
        let decision = Arc::new(decision);
        self.placer.decisions.push(decision.clone());
        let entry = outgoing.log_entry.record_attempt(&replica.id, attempt, queued_for, &decision);
        entry.add_trace_parent(&mut head.headers);
        let feedback = PlacementFeedback::new(&self.placer, prompt, decision.clone(), &in_flight, approx_prefix_slot);
        let fan_out = outgoing.fan_out.as_ref().filter(|_| replica.has_rust_front_end());
        let exchange = AnswerExchange::open(&replica.lanes, head, body, fan_out);
        SentAttempt { replica, exchange, in_flight, feedback, prefill_estimate, decision, entry }
    }

    async fn await_answer_start(&self, sent: SentAttempt, prompt: &Prompt, outgoing: &OutboundRequest) -> AttemptOutcome {
        let SentAttempt { replica, exchange, mut in_flight, feedback, prefill_estimate, decision, entry } = sent;
        let exchange = match exchange {
            Ok(exchange) => exchange,
            Err(broken) => return lose(&entry, &decision, broken),
        };
        // A plain answer does not show when its prompt has been computed.
        let prefill_estimate = (!prompt.is_stream()).then_some(prefill_estimate);
        let (head, first_chunk) = match self.read_first_bytes(&exchange, &mut in_flight, prefill_estimate).await {
            Ok(began) => began,
            Err(broken) => return lose(&entry, &decision, broken),
        };
        entry.record_status(head.status);
        decision.outcome.lock().status = Some(head.status);
        let awaits_first_event = first_chunk.as_ref().is_some_and(|first_chunk| is_keep_alive_comment(first_chunk));
        let mut begun = Box::new(StartedAnswer {
            head,
            first_chunk,
            exchange,
            in_flight: None,
            replica,
            feedback,
            decision,
            entry,
            usage: None,
            has_unread_body: false,
            awaits_first_event,
        });
        if let Err(broken) = begun.check_stream_start(outgoing) {
            return lose(&begun.entry, &begun.decision, broken);
        }
        if !awaits_first_event {
            begun.entry.record_first_token();
            in_flight.start_answer();
            self.queue.notify_change();
            // An error comes fast and says nothing about the engine's speed.
            if begun.head.status == 200 && !begun.is_retryable() {
                begun.feedback.record_start();
            }
        }
        begun.in_flight = Some(in_flight);
        if let Err(broken) = begun.buffer_json_body(outgoing.work).await {
            return lose(&begun.entry, &begun.decision, broken);
        }
        match begun.engine_fault() {
            Some(broken) => lose(&begun.entry, &begun.decision, broken),
            None => AttemptOutcome::Started(begun),
        }
    }

    /// Waits for the head and the first bytes of an answer.
    ///
    /// Engines send their head before they compute anything, so a retry elsewhere loses nothing
    /// until the first byte of the body. After `prefill_estimate` the prompt counts as computed.
    async fn read_first_bytes(
        &self,
        exchange: &AnswerExchange,
        in_flight: &mut InFlight,
        mut prefill_estimate: Option<Duration>,
    ) -> Result<(ResponseHead, Option<Bytes>), StreamFault> {
        let begins = async {
            let head = poll_fn(|context| exchange.poll_head(context)).await?;
            Ok((head, poll_fn(|context| exchange.poll_body(context)).await?))
        };
        tokio::pin!(begins);
        loop {
            tokio::select! {
                biased;
                began = &mut begins => return began,
                () = sleep(prefill_estimate.unwrap_or_default()), if prefill_estimate.is_some() => {
                    prefill_estimate = None;
                    in_flight.finish_prefill();
                    self.queue.notify_change();
                }
            }
        }
    }

    fn relay_answer(
        self: &Arc<Self>,
        begun: StartedAnswer,
        outgoing: Box<OutboundRequest>,
        mut crash_watch: CrashWatch,
        mut permit: Permit,
    ) -> Answer {
        let streams = begun.is_stream();
        // Front-ends begin a response's stream before they have asked their engine core.
        let is_front_ends = streams && outgoing.dialect == Dialect::Responses;
        if !begun.awaits_first_event && !is_front_ends {
            crash_watch.mark_answered();
        }
        let StartedAnswer {
            head,
            first_chunk,
            exchange,
            in_flight,
            replica,
            feedback,
            decision,
            entry,
            usage,
            has_unread_body,
            awaits_first_event,
        } = begun;
        self.metrics.observe_first_byte(outgoing.received_at);
        if head.status >= 400 {
            permit.reconcile_usage(ActualUsage { prompt_tokens: Some(0), output_tokens: OutputTokens::Exact(0) });
        }
        if !awaits_first_event {
            outgoing.log_entry.record_first_byte();
        }
        let watch = outgoing.stored_response.clone().filter(|_| head.status == 200).map(|keep| keep.id_reader(&replica));
        let usage_bounds = outgoing.work.usage_bounds(replica.max_context_tokens());
        let origin = replica.clone();
        let context = RelayContext {
            in_flight,
            permit,
            replica,
            crash_watch,
            // An engine has not computed what it refuses.
            clears_suspicion: head.status < 400,
            outcome_if_whole: AnswerOutcome::of_status(head.status),
            feedback,
            usage,
            has_unread_body,
            usage_bounds,
            awaits_first_event,
            log_entry: outgoing.log_entry.clone(),
            attempt_entry: entry,
            received_at: outgoing.received_at,
            idle_timeout: self.idle_timeout,
            metrics: self.metrics.clone(),
        };
        let dialect = streams.then_some(outgoing.dialect);
        let mut relay = Relay::new(exchange, first_chunk, dialect, watch, context);
        if let Some((record, resumption)) = streams.then(|| self.resumption(outgoing, &decision, &origin)).flatten() {
            relay.record_stream(record, resumption);
        }
        relay.count_text_of_unknown_tokens();
        Answer { head, body: Box::new(relay), decision }
    }
}

/// Ends an attempt without an answer.
fn lose(entry: &AttemptEntry, decision: &PlacementDecision, broken: StreamFault) -> AttemptOutcome {
    let cause = LossCause::from(broken.fault);
    entry.record_failure(cause);
    decision.outcome.lock().end = Some(cause.as_str());
    AttemptOutcome::Lost(broken)
}

/// How a stream on this replica is resumed if the engine dies.
fn resume_tier(outgoing: &OutboundRequest, replica: &Replica) -> ResumeTier {
    let launch = replica.state.launch.as_ref();
    let tier = match &outgoing.resume_plan {
        ResumePlan::Continue(sampling) => check_engine(launch, sampling.api).map(|()| sampling.tier),
        ResumePlan::Replay(_) => check_replaying_engine(launch).map(|()| ResumeTier::Replay),
        ResumePlan::None(reason) => Err(*reason),
    };
    let tier = tier.unwrap_or_else(ResumeTier::None);
    if tier != ResumeTier::None(NotResumed::NoStream) {
        outgoing.log_entry.set_resume_tier(tier);
    }
    tier
}

/// Classifies the end of an attempt. No request is to blame if the engine was stopped on purpose or
/// the node is gone.
fn attempt_end(attempt: &AttemptOutcome, replica: &Replica, crash_watch: &mut CrashWatch) -> AttemptEnd {
    match attempt {
        AttemptOutcome::Lost(broken) => {
            AttemptEnd::Lost { excused: broken.fault == Fault::EngineLost && crash_watch.record_engine_loss(&replica.engine_life()) }
        }
        AttemptOutcome::Started(begun) if begun.head.status == 503 => AttemptEnd::Full,
        AttemptOutcome::Started(begun) if begun.is_retryable() => AttemptEnd::Failed,
        AttemptOutcome::Started(_) => AttemptEnd::Answered,
    }
}

/// A request that is counted at the replica it was sent to.
struct SentAttempt {
    replica: Arc<Replica>,
    exchange: Result<AnswerExchange, StreamFault>,
    in_flight: InFlight,
    feedback: PlacementFeedback,
    /// After this time a plain answer's prompt counts as computed.
    prefill_estimate: Duration,
    decision: Arc<PlacementDecision>,
    entry: AttemptEntry,
}

#[cfg(test)]
mod tests;
