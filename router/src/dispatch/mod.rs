//! Has a request placed, waits its turn where its replica has no room, sends it there, and to another replica while nothing of an answer has
//! reached the client; then hands over the answer.

mod bind;
mod budget;
mod flow;
mod place;
mod poison;
mod refusal;
mod relay;
mod scanner;
mod silence;
mod told;
mod work;

use std::future::poll_fn;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use hostler_proto::agent::v1 as wire;
use hostler_proto::lane::{Broken, WINDOW_BYTES, only_keeps_alive};
use memchr::memmem::Finder;
use tokio::time::{Instant, sleep, timeout_at};

pub use budget::{Retries, RetryBudget};
pub(crate) use place::Reserved;
pub use poison::{Ban, Fingerprint, Poison, Watched};
pub use refusal::Refusal;
pub use relay::{Held, Relay};
use scanner::tells_of_death;
pub use scanner::{Dialect, Scanner};
use silence::Tries;
pub use told::Usage;
use told::{Finish, Told};
pub use work::Work;

use crate::admission::{Generated, Permit, Used};
use crate::carry::Exchange;
use crate::edge::access::Entry;
use crate::fleet::{Fleet, InFlight, Replica};
use crate::metrics::RouterMetrics;
use crate::placement::{Asked, Guest, Hold, Placed, Placer, Prompt, Record, Spot};
use crate::sticky::{Keep, Named};
use bind::Bound;

/// A plain answer's prompt counts as computed after this at the latest, whatever was predicted.
const MOST_SETTLE_SECONDS: f64 = 600.0;

/// How often a young router looks for a candidate.
const SETTLE_PAUSE: Duration = Duration::from_millis(10);

/// Without this word no plain answer says that its engine was stopped under it.
static ABORT: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"abort\""));

/// In words, why an answer was given up that says so.
const ABORTED: &str = "the engine was stopped before the answer was complete";

/// What every dispatch needs.
#[derive(Debug)]
pub struct Dispatch {
    /// Where the replicas are.
    pub fleet: Fleet,
    /// Which of them a request goes to.
    pub placer: Arc<Placer>,
    /// Where requests wait while their replica has no room.
    pub hold: Hold,
    /// Keep retries from multiplying the load of a failing fleet.
    pub retries: Retries,
    /// Knows the requests that kill engines.
    pub poison: Arc<Poison>,
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
    /// What placement needs to know of it.
    pub asked: Asked,
    /// The router's own number of it.
    pub id: u64,
    /// Its turn among those that wait: a lower one goes first.
    pub priority: i32,
    /// Whose it is: the hash of its tenant's name, or of its key's where that has none; zero where there are no keys.
    pub tenant: u64,
    /// Who it shares the fleet's attention with, and what it takes of the place to wait.
    pub guest: Guest,
    /// Its place to wait, from the moment at which it was seen that it may have to.
    pub spot: Option<Spot>,
    /// What the client calls it.
    pub client_id: Option<Arc<str>>,
    /// Its head; the replica's index and the estimates are filled in.
    pub head: wire::RequestHead,
    /// Its body, complete; its memory counts as taken until nobody holds any of it.
    pub body: Bytes,
    /// The dialect of its event stream, should the answer be one.
    pub dialect: Dialect,
    /// What it has an engine compute.
    pub work: Work,
    /// Its line in the access log.
    pub entry: Entry,
    /// Which response it names.
    pub names: Named,
    /// Whose response its answer is, where the engine keeps it.
    pub keep: Option<Keep>,
    /// When it was taken.
    pub begun: Instant,
}

/// An answer that has begun.
#[derive(Debug)]
pub struct Answer {
    /// Status and headers as the engine sent them.
    pub head: wire::ResponseHead,
    /// The body.
    pub body: Box<Relay>,
    /// Why it comes from where it comes.
    pub reason: Arc<Record>,
}

/// An attempt that has got as far as its first bytes.
struct Begun {
    head: wire::ResponseHead,
    first: Option<Bytes>,
    exchange: Exchange,
    /// Gone when another replica is tried.
    in_flight: Option<InFlight>,
    replica: Arc<Replica>,
    placed: Placed,
    reason: Arc<Record>,
    /// Of an answer that was read whole.
    usage: Option<Usage>,
    /// Of a plain answer more comes than was read, which may say what was used.
    goes_on: bool,
    /// Only comments have come so far.
    waits: bool,
}

impl Begun {
    /// Whether another replica may do better: the engine is full, dying or dead. An event stream says so with status 200.
    fn is_refusal(&self) -> bool {
        let fails_at_once = || self.first.as_ref().is_some_and(|first| first.starts_with(b"data: {\"error\":")) && self.streams();
        matches!(self.head.status, 500 | 503) || fails_at_once()
    }

    /// Engines write JSON at once, when it is complete, so the rest of it is waited for as far as one window: should it break off, or
    /// be a generation cut short by an engine that was stopped under it, nothing has reached the client yet. Where nothing was to be computed,
    /// what looks like that, or like usage, is the client's own.
    async fn complete(&mut self, work: Work) -> Result<(), Broken> {
        if !self.has_type(b"application/json") {
            return Ok(());
        }
        let mut body = self.first.take().unwrap_or_default();
        let mut is_whole = false;
        while !is_whole && body.len() < WINDOW_BYTES {
            match poll_fn(|context| self.exchange.poll_body(context)).await? {
                Some(more) => body = [body, more].concat().into(),
                None => is_whole = true,
            }
        }
        if work.generates() && ABORT.find(&body).is_some() && Told::of(&body, "").finish() == Finish::Abort {
            return Err(Broken { fault: wire::Fault::EngineStopped, message: ABORTED.into() });
        }
        if work.is_some() && is_whole {
            self.usage = Told::usage_of(&body);
        }
        self.goes_on = work.is_some() && !is_whole;
        self.first = (!body.is_empty()).then_some(body);
        Ok(())
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
    /// Sends the request where it will be answered soonest. An attempt that is lost before a byte has reached the client is made
    /// again elsewhere, at most twice, and one answered with 500 once, within the retry budgets; one answered with 503 wherever there may
    /// be room. One that kills engines is refused.
    ///
    /// # Errors
    /// When no engine's answer can be given; an engine's own refusal is an answer.
    pub async fn send(&self, mut outgoing: Box<Outgoing>, permit: Permit) -> Result<Answer, Refusal> {
        self.retries.deposit();
        let fingerprint = poison::fingerprint(outgoing.tenant, &outgoing.head.path, &outgoing.body);
        outgoing.head.fingerprint = fingerprint.map(Into::into);
        let mut watched = self.poison.watch(fingerprint);
        // Before its prompt is read: that may be the dearer part.
        watched.clearance()?;
        outgoing.spot = self.hold.reserve(outgoing.asked.model.as_deref(), outgoing.guest)?;
        let deadline = outgoing.begun + self.answer_timeout;
        self.settled(outgoing.asked.model.as_deref()).await;
        let others_wait = self.hold.is_held(outgoing.asked.model.as_deref());
        let prompt = Arc::new(self.placer.read(std::mem::take(&mut outgoing.asked), others_wait).await);
        let mut tried: Vec<Arc<str>> = Vec::new();
        let mut refused: Option<Box<Begun>> = None;
        let mut lost = None;
        let mut retries = &self.retries.lost;
        let mut was_full = false;
        // Attempts that were lost to others' doing, and those at engines that were full.
        let (mut excused, mut full) = (0, 0);
        loop {
            let bound = if bind::may_try(tried.len() - excused, was_full) {
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
                    (Some(begun), _) => Ok(self.answer(*begun, &outgoing, watched, permit)),
                    (None, Some(Broken { message, .. })) => Err(Refusal::Lost { attempts: tried.len(), last: message }),
                    (None, None) => Err(Refusal::of(&self.fleet.view(), prompt.model())),
                };
            };
            if !tried.is_empty() {
                self.metrics.retries.inc();
            }
            let tries = Tries { prompt: &prompt, outgoing: &outgoing, tried: &mut tried, spared: excused + full, watched: &mut watched };
            let (replica, attempt) = self.attempt_where_heard(bound, tries).await?;
            let mut begun = match attempt {
                Attempt::Begun(begun) => begun,
                Attempt::Lost(broken) => {
                    tracing::info!(replica = %replica.id, reason = broken.message, "an attempt was lost before its first byte");
                    self.fleet.view().avoid(&replica, Instant::now());
                    // An engine that was stopped on purpose, or a node that is gone, is nobody's doing.
                    if broken.fault == wire::Fault::EngineLost && watched.lost(&replica) {
                        excused += 1;
                    }
                    watched.end_trial();
                    (lost, retries, was_full) = (Some(broken), &self.retries.lost, false);
                    continue;
                }
            };
            // An engine that is full or dying says 503; to a request that it cannot digest it says 500, as others will.
            let refuses = begun.is_refusal();
            was_full = begun.head.status == 503;
            if !refuses || refused.is_some() && !was_full {
                return Ok(self.answer(*begun, &outgoing, watched, permit));
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
    async fn settled(&self, model: Option<&str>) {
        let settling = || {
            let view = self.fleet.view();
            view.is_settling(Instant::now()) && view.eligible(model, &[]).next().is_none()
        };
        while settling() {
            sleep(SETTLE_PAUSE).await;
        }
    }

    /// Counts the request where it goes, remembers why, and sends it.
    fn sent(&self, prompt: &Prompt, outgoing: &Outgoing, bound: Bound, attempt: usize) -> Sent {
        let Bound { chosen, held, turn } = bound;
        let in_flight = self.placer.enter(prompt, &chosen, Instant::now());
        // Whoever is next sees this one counted.
        drop(turn);
        let settle = Duration::from_secs_f64(chosen.first_token().clamp(0.001, MOST_SETTLE_SECONDS));
        let replica = chosen.replica.clone();
        let head = wire::RequestHead {
            replica: replica.index,
            prompt_tokens: prompt.tokens(),
            uncached_tokens: chosen.uncached(),
            settle_ms: if prompt.streams() { 0 } else { u32::try_from(settle.as_millis()).unwrap_or(u32::MAX).max(1) },
            ..outgoing.head.clone()
        };
        self.metrics.placed(chosen.level);
        let guessed = chosen.guessed();
        let reason = Record {
            client_id: outgoing.client_id.clone(),
            attempt: u32::try_from(attempt).unwrap_or(u32::MAX),
            held: held.as_secs_f32(),
            ..Record::new(outgoing.id, prompt, chosen)
        };
        let reason = Arc::new(reason);
        self.placer.ring.record(reason.clone());
        outgoing.entry.sent(&replica.id, attempt, held);
        let placed = Placed::new(&self.placer, prompt, reason.clone(), &in_flight, guessed);
        let exchange = replica.lanes.open(head, outgoing.body.clone());
        Sent { replica, exchange, in_flight, placed, settle, reason }
    }

    async fn attempt(&self, sent: Sent, prompt: &Prompt, work: Work) -> Attempt {
        let Sent { replica, exchange, mut in_flight, placed, settle, reason } = sent;
        let exchange = match exchange {
            Ok(exchange) => exchange,
            Err(broken) => return Attempt::Lost(broken),
        };
        // A plain answer does not tell when its prompt has been computed.
        let settle = (!prompt.streams()).then_some(settle);
        let (head, first) = match self.first_bytes(&exchange, &mut in_flight, settle).await {
            Ok(began) => began,
            Err(broken) => return Attempt::Lost(broken),
        };
        let waits = first.as_ref().is_some_and(|first| only_keeps_alive(first));
        let mut begun =
            Box::new(Begun { head, first, exchange, in_flight: None, replica, placed, reason, usage: None, goes_on: false, waits });
        if !waits {
            in_flight.answered();
            self.hold.news();
            // An error comes fast, and says nothing of how fast the engine computes.
            if begun.head.status == 200 && !begun.is_refusal() {
                begun.placed.began();
            }
        }
        begun.in_flight = Some(in_flight);
        match begun.complete(work).await {
            Ok(()) if begun.is_refusal() && begun.first.as_deref().is_some_and(tells_of_death) => {
                Attempt::Lost(Broken { fault: wire::Fault::EngineLost, message: "the engine's core died".into() })
            }
            Ok(()) => Attempt::Begun(begun),
            Err(broken) => Attempt::Lost(broken),
        }
    }

    /// Waits for the head and the first bytes of an answer. Engines send their head before they have done anything; until the first byte of
    /// the body there is nothing to lose. After `settle` the prompt counts as computed.
    async fn first_bytes(
        &self,
        exchange: &Exchange,
        in_flight: &mut InFlight,
        mut settle: Option<Duration>,
    ) -> Result<(wire::ResponseHead, Option<Bytes>), Broken> {
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
                    self.hold.news();
                }
            }
        }
    }

    fn answer(&self, begun: Begun, outgoing: &Outgoing, mut watched: Watched, mut permit: Permit) -> Answer {
        let streams = begun.streams();
        // Front-ends begin a response's stream before they have asked their core.
        let is_front_ends = streams && outgoing.dialect == Dialect::Responses;
        if !begun.waits && !is_front_ends {
            watched.answered();
        }
        let Begun { head, first, exchange, in_flight, replica, placed, reason, usage, goes_on, waits } = begun;
        self.metrics.first_byte(outgoing.begun);
        if head.status >= 400 {
            permit.settle(Used { input: Some(0), output: Generated::Told(0) });
        }
        if !waits {
            outgoing.entry.began();
        }
        let watch = outgoing.keep.clone().filter(|_| head.status == 200).map(|keep| keep.watch(&replica));
        let most = outgoing.work.most(replica.longest_context());
        let held = Held {
            in_flight,
            permit,
            replica,
            watched,
            // What an engine refuses it has not computed.
            survives: head.status < 400,
            placed,
            usage,
            goes_on,
            most,
            waits,
            entry: outgoing.entry.clone(),
            begun: outgoing.begun,
            idle: self.idle_timeout,
            metrics: self.metrics.clone(),
        };
        let relay = Relay::new(exchange, first, streams.then_some(outgoing.dialect), watch, held);
        Answer { head, body: Box::new(relay), reason }
    }
}

/// A request that is counted where it went.
struct Sent {
    replica: Arc<Replica>,
    exchange: Result<Exchange, Broken>,
    in_flight: InFlight,
    placed: Placed,
    /// When the prompt of a plain answer is taken to have been computed.
    settle: Duration,
    reason: Arc<Record>,
}

#[cfg(test)]
mod tests;
