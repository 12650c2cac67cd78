//! Sends a request to a replica and another one while nothing of an answer has reached the client; then hands over the answer.

mod budget;
mod relay;
mod scanner;

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hostler_proto::agent::v1 as wire;
use hostler_proto::lane::{Broken, WINDOW_BYTES};
use tokio::time::{Instant, sleep, timeout_at};

pub use budget::RetryBudget;
pub use relay::{Held, Relay};
pub use scanner::{Dialect, Scanner, Usage};

use crate::admission::Permit;
use crate::carry::Exchange;
use crate::fleet::{Fleet, FleetView, InFlight, Phase, Replica};
use crate::metrics::RouterMetrics;
use crate::placement::place;

/// Attempts for one request, the first included.
const ATTEMPTS: usize = 3;

/// How often a young router looks for a candidate.
const SETTLE_PAUSE: Duration = Duration::from_millis(10);

/// What every dispatch needs.
#[derive(Debug)]
pub struct Dispatch {
    /// Where the replicas are.
    pub fleet: Fleet,
    /// Keeps retries from multiplying the load of a failing fleet.
    pub budget: RetryBudget,
    /// Where outcomes are counted.
    pub metrics: Arc<RouterMetrics>,
    /// How long the first byte of an answer may take.
    pub answer_timeout: Duration,
    /// How long an answer may pause.
    pub idle_timeout: Duration,
}

/// A request as it will be sent, to one replica or several in turn.
#[derive(Debug)]
pub struct Outgoing {
    /// The model it names.
    pub model: Option<String>,
    /// Its head; the replica's index is filled in.
    pub head: wire::RequestHead,
    /// Its body, complete.
    pub body: Bytes,
    /// The dialect of its event stream, should the answer be one.
    pub dialect: Dialect,
    /// When it was taken.
    pub begun: Instant,
}

/// An answer that has begun.
#[derive(Debug)]
pub struct Answer {
    /// Status and headers as the engine sent them.
    pub head: wire::ResponseHead,
    /// The body.
    pub body: Relay,
}

/// Why a request got no answer from any engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No replica serves the model, and it is known which models there are.
    #[error("The model `{model}` does not exist. Models here: {known}.")]
    UnknownModel {
        /// As the client named it.
        model: String,
        /// The models there are, separated by commas.
        known: String,
    },
    /// Nothing can take the request now.
    #[error("{0}")]
    NotReady(String),
    /// Every attempt was lost.
    #[error(
        "the answer was lost {attempts} times, the last time because {last}; nothing had reached you yet, so the request may be sent again"
    )]
    Lost {
        /// Attempts that were made.
        attempts: usize,
        /// What happened to the last one.
        last: String,
    },
    /// The first byte did not come in time.
    #[error("no engine began to answer within {}", humanize(*.0))]
    TooSlow(Duration),
}

fn humanize(duration: Duration) -> String {
    format!("{} s", duration.as_secs_f64())
}

/// An attempt that has got as far as its first bytes.
struct Begun {
    head: wire::ResponseHead,
    first: Option<Bytes>,
    exchange: Exchange,
    /// Gone when another replica is tried.
    in_flight: Option<InFlight>,
    replica: Replica,
}

impl Begun {
    /// Whether another replica may do better: the engine is full, dying or dead. An event stream says so with status 200.
    fn is_refusal(&self) -> bool {
        let fails_at_once = || self.streams() && self.first.as_ref().is_some_and(|first| first.starts_with(b"data: {\"error\":"));
        matches!(self.head.status, 500 | 503) || fails_at_once()
    }

    /// Engines write JSON at once, when it is complete, so the rest of it is waited for as far as one window: should it break off, or
    /// be a generation cut short by an engine that was stopped under it, nothing has reached the client yet.
    async fn completed(mut self) -> Result<Self, Broken> {
        if !self.has_type(b"application/json") {
            return Ok(self);
        }
        let mut body = self.first.take().unwrap_or_default();
        while body.len() < WINDOW_BYTES
            && let Some(more) = poll_fn(|context| self.exchange.poll_body(context)).await?
        {
            body = [body, more].concat().into();
        }
        // Quotes within JSON strings are escaped, so this is never a part of generated text.
        if memchr::memmem::find(&body, b"\"finish_reason\":\"abort\"").is_some() {
            let message = "the engine was stopped before the answer was complete".into();
            return Err(Broken { fault: wire::Fault::EngineLost, message });
        }
        self.first = (!body.is_empty()).then_some(body);
        Ok(self)
    }

    fn streams(&self) -> bool {
        self.has_type(b"text/event-stream")
    }

    fn has_type(&self, wanted: &[u8]) -> bool {
        let has = |header: &wire::Header| header.name.eq_ignore_ascii_case(b"content-type") && header.value.starts_with(wanted);
        self.head.headers.iter().any(has)
    }
}

/// One try's result.
enum Attempt {
    Begun(Box<Begun>),
    /// Nothing came; the replica is avoided for a moment.
    Lost(Broken),
}

impl Dispatch {
    /// Sends the request where it will be answered soonest. An attempt that is lost, or answered with 500 or 503, before a byte
    /// has reached the client is made again elsewhere, at most twice and within the retry budget.
    ///
    /// # Errors
    /// When no engine's answer can be given; an engine's own refusal is an answer.
    pub async fn send(&self, outgoing: Outgoing, permit: Permit) -> Result<Answer, Refusal> {
        self.budget.deposit();
        let deadline = outgoing.begun + self.answer_timeout;
        let mut tried: Vec<Arc<str>> = Vec::new();
        let mut refused: Option<Box<Begun>> = None;
        let mut lost = None;
        loop {
            if tried.is_empty() {
                self.settled(outgoing.model.as_deref()).await;
            }
            let placed = {
                let view = self.fleet.view();
                let candidates = view.candidates(outgoing.model.as_deref(), &tried, Instant::now());
                let may_try = tried.is_empty() || (tried.len() < ATTEMPTS && !candidates.is_empty() && self.budget.withdraw());
                let placement = if may_try { place(&candidates, &mut fastrand::Rng::new()) } else { None };
                placement.map(|placement| view.replicas[placement.replica].clone())
            };
            let Some(replica) = placed else {
                return match (refused, lost) {
                    (Some(begun), _) => Ok(self.answer(*begun, &outgoing, permit)),
                    (None, Some(Broken { message, .. })) => Err(Refusal::Lost { attempts: tried.len(), last: message }),
                    (None, None) => Err(refusal(&self.fleet.view(), outgoing.model.as_deref())),
                };
            };
            if !tried.is_empty() {
                self.metrics.retries.inc();
            }
            tried.push(replica.id.clone());
            let attempt = timeout_at(deadline, self.attempt(&replica, &outgoing)).await;
            match attempt.map_err(|_| Refusal::TooSlow(self.answer_timeout))? {
                // An engine that is full or dying says 503; one that died under the request may say 500, as it also does for a request it cannot digest.
                Attempt::Begun(mut begun) if begun.is_refusal() && refused.is_none() => {
                    begun.in_flight = None;
                    refused = Some(begun);
                }
                Attempt::Begun(begun) => return Ok(self.answer(*begun, &outgoing, permit)),
                Attempt::Lost(broken) => {
                    tracing::info!(replica = %replica.id, reason = broken.message, "an attempt was lost before its first byte");
                    self.fleet.view().avoid(&replica, Instant::now());
                    lost = Some(broken);
                }
            }
        }
    }

    /// Waits until there is a candidate, as long as the router is young: its restart then costs clients a moment and no error.
    async fn settled(&self, model: Option<&str>) {
        let settling = || {
            let (view, now) = (self.fleet.view(), Instant::now());
            view.is_settling(now) && view.candidates(model, &[], now).is_empty()
        };
        while settling() {
            sleep(SETTLE_PAUSE).await;
        }
    }

    async fn attempt(&self, replica: &Replica, outgoing: &Outgoing) -> Attempt {
        let in_flight = replica.own.enter();
        let head = wire::RequestHead { replica: replica.index, ..outgoing.head.clone() };
        let exchange = match replica.lanes.open(head, outgoing.body.clone()) {
            Ok(exchange) => exchange,
            Err(broken) => return Attempt::Lost(broken),
        };
        let head = match poll_fn(|context| exchange.poll_head(context)).await {
            Ok(head) => head,
            Err(broken) => return Attempt::Lost(broken),
        };
        // Engines send their head before they have done anything; until the first byte of the body there is nothing to lose.
        let begun = match poll_fn(|context| exchange.poll_body(context)).await {
            Ok(first) => Begun { head, first, exchange, in_flight: Some(in_flight), replica: replica.clone() },
            Err(broken) => return Attempt::Lost(broken),
        };
        match begun.completed().await {
            Ok(begun) => Attempt::Begun(Box::new(begun)),
            Err(broken) => Attempt::Lost(broken),
        }
    }

    fn answer(&self, begun: Begun, outgoing: &Outgoing, permit: Permit) -> Answer {
        let streams = begun.streams();
        let Begun { head, first, exchange, in_flight, replica } = begun;
        self.metrics.first_byte(outgoing.begun);
        let held = Held { in_flight, permit, replica, begun: outgoing.begun, idle: self.idle_timeout, metrics: self.metrics.clone() };
        Answer { head, body: Relay::new(exchange, first, streams.then_some(outgoing.dialect), held) }
    }
}

/// Why no replica can take a request for `model`, in a sentence for the client.
fn refusal(view: &FleetView, model: Option<&str>) -> Refusal {
    let any_ready = view.replicas.iter().any(Replica::is_ready);
    // An engine that loads for the first time may yet serve it.
    let all_known = view.replicas.iter().all(|replica| replica.is_ready() || !replica.state.models.is_empty());
    let exists = |model: &&str| view.replicas.iter().any(|replica| replica.serves(Some(model)));
    if let Some(model) = model.filter(|model| any_ready && all_known && !exists(model)) {
        let known: Vec<&str> = view.models().into_iter().map(|model| model.id.as_str()).collect();
        return Refusal::UnknownModel { model: model.to_owned(), known: known.join(", ") };
    }
    if view.replicas.is_empty() {
        return Refusal::NotReady("no agent has attached yet: start `hostler agent --router HOST:PORT` on a node".into());
    }
    let of_interest =
        view.replicas.iter().filter(|replica| !replica.is_ready() && (replica.state.models.is_empty() || replica.serves(model)));
    let states: Vec<String> = of_interest.take(5).map(describe).collect();
    Refusal::NotReady(format!("no replica is ready: {}", states.join("; ")))
}

fn describe(replica: &Replica) -> String {
    let (id, phase) = (&replica.id, replica.state.phase);
    // Only the first line: a failure's reason goes on with the engine's log, which is for operators.
    let reason = replica.state.wire.reason.lines().next().unwrap_or_default();
    match phase {
        Phase::Ready => format!("{id} has lost its agent"),
        _ if reason.is_empty() => format!("{id} is {}", phase.word()),
        _ => format!("{id} is {} ({reason})", phase.word()),
    }
}

#[cfg(test)]
mod tests;
