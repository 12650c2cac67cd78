//! A simulated engine as its agent sees it: it lives and dies, hangs, refuses, drains. It decides
//! what each request gets; `node` and the network decide how much of that reaches the router.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hostler_agent::lane::RequestStream;
use hostler_proto::agent::v1::Phase;
use hostler_proto::lane::{Fault, Header, RequestHead, ResponseHead, StreamFault};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

use super::model::ModelRequest;
use super::trace::Trace;

/// Time from an error event to the exit of the process.
const EXIT_DELAY: Duration = Duration::from_secs(1);

/// How long a stopping engine lets its requests finish.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(4);

/// How an engine ends, as its requests see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Death {
    /// The connection to the engine breaks.
    Lost,
    /// The front-end says that the core is dead, ends its answers and exits a second later.
    ErrorEvent,
    /// The engine is stopped: its answers end with the finish reason `abort`.
    Abort,
    /// The answers end, without a finish reason.
    Incomplete,
    /// The agent stops the engine, and says so of each request.
    Stopped,
    /// The agent gives the requests up.
    GivenUp,
}

impl Death {
    pub(super) const ALL: [Self; 6] = [Self::Lost, Self::ErrorEvent, Self::Abort, Self::Incomplete, Self::Stopped, Self::GivenUp];

    /// Whether the agent reports the requests in flight.
    fn is_crash(self) -> bool {
        matches!(self, Self::Lost | Self::ErrorEvent | Self::Incomplete)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EngineLife {
    pub(super) epoch: u64,
    pub(super) phase: Phase,
    death: Option<Death>,
    /// Whether the engine was drained and is not released yet.
    is_held: bool,
    /// How often the engine has fallen asleep, which ends its requests.
    naps: u64,
}

#[derive(Debug, Clone)]
pub(super) struct EngineCrash {
    pub(super) epoch: u64,
    pub(super) at: Instant,
    pub(super) requests: Vec<u128>,
}

#[derive(Debug)]
pub(super) struct SimulatedEngine {
    pub(super) name: String,
    /// Time from one token to the next.
    step: Duration,
    life: Mutex<EngineLife>,
    /// Wakes waiters in the order in which they began; tokio's `watch` would pick randomly.
    changed: Notify,
    change_count: AtomicU64,
    state: Mutex<EngineState>,
    trace: Trace,
}

#[derive(Debug, Default)]
struct EngineState {
    next_request: u64,
    /// Each request's sending router, and its fingerprint.
    running: BTreeMap<u64, (u64, Option<u128>)>,
    crashes: Vec<EngineCrash>,
    hangs_until: Option<Instant>,
    /// The status that new requests get.
    refusing: Option<u16>,
}

/// Counts a request of an engine until it is dropped.
struct RunningRequest<'a> {
    engine: &'a SimulatedEngine,
    id: u64,
    /// Whether the head of the answer was sent.
    has_head: AtomicBool,
    /// The rest of an event that is sent in two pieces.
    unsent: Mutex<Bytes>,
}

impl RunningRequest<'_> {
    fn send_head(&self, stream: &RequestStream, head: ResponseHead) {
        self.has_head.store(true, Ordering::Relaxed);
        stream.send_head(head);
    }

    async fn send_rest(&self, stream: &RequestStream) {
        let rest = std::mem::take(&mut *self.unsent.lock());
        stream.send_body(rest).await;
    }

    /// The engine's name for the request.
    fn name(&self) -> String {
        format!("cmpl-{}-{}", self.engine.name.replace('/', "-"), self.id)
    }
}

impl Drop for RunningRequest<'_> {
    fn drop(&mut self) {
        self.engine.state.lock().running.remove(&self.id);
        self.engine.tell();
    }
}

impl SimulatedEngine {
    pub(super) fn start(name: String, step: Duration, trace: Trace) -> Arc<Self> {
        let life = EngineLife { epoch: 1, phase: Phase::Ready, death: None, is_held: false, naps: 0 };
        let (life, changed, change_count) = (Mutex::new(life), Notify::new(), AtomicU64::new(0));
        Arc::new(Self { name, step, life, changed, change_count, state: Mutex::default(), trace })
    }

    pub(super) fn life(&self) -> EngineLife {
        *self.life.lock()
    }

    fn tell(&self) {
        self.change_count.fetch_add(1, Ordering::Relaxed);
        self.changed.notify_waiters();
    }

    /// Changes the engine's life, if that is possible now. Returns whether it was.
    fn change_life(&self, change: impl FnOnce(&mut EngineLife) -> bool) -> bool {
        let is_changed = change(&mut self.life.lock());
        if is_changed {
            self.tell();
        }
        is_changed
    }

    async fn wait_for<T>(&self, found: impl Fn() -> Option<T>) -> T {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if let Some(found) = found() {
                return found;
            }
            changed.await;
        }
    }

    /// Resolves when the change count differs from `seen`, with the new count.
    pub(super) async fn wait_for_change(&self, seen: u64) -> u64 {
        self.wait_for(|| Some(self.change_count.load(Ordering::Relaxed)).filter(|count| *count != seen)).await
    }

    /// The requests in all, and those of this router.
    pub(super) fn in_flight(&self, router: u64) -> (u32, u32) {
        let state = self.state.lock();
        let count = |of: usize| u32::try_from(of).unwrap_or(u32::MAX);
        (count(state.running.len()), count(state.running.values().filter(|(sender, _)| *sender == router).count()))
    }

    pub(super) fn crashes(&self) -> Vec<EngineCrash> {
        self.state.lock().crashes.clone()
    }

    pub(super) fn hang(&self, time: Duration) {
        self.state.lock().hangs_until = Some(Instant::now() + time);
    }

    pub(super) fn refuse(&self, status: Option<u16>) {
        self.state.lock().refusing = status;
    }

    /// Ends this life, if there is one, and begins the next one after a while.
    pub(super) fn die(self: &Arc<Self>, death: Death, restart_after: Duration) {
        if self.end_life(death) {
            let engine = self.clone();
            tokio::spawn(async move {
                if death == Death::ErrorEvent {
                    sleep(EXIT_DELAY).await;
                    engine.change_life(|life| {
                        life.phase = Phase::Failed;
                        true
                    });
                }
                sleep(restart_after).await;
                engine.begin_life();
            });
        }
    }

    fn end_life(&self, death: Death) -> bool {
        let is_alive = |life: &EngineLife| matches!(life.phase, Phase::Ready | Phase::Draining | Phase::Sleeping) && life.death.is_none();
        let has_died = self.change_life(|life| {
            let dies = is_alive(life);
            if dies {
                life.death = Some(death);
                // The front-end takes requests until it exits.
                if death != Death::ErrorEvent {
                    life.phase = if death.is_crash() { Phase::Failed } else { Phase::Stopped };
                }
            }
            dies
        });
        if has_died {
            self.trace.note(format_args!("{} ends: {death:?}", self.name));
        }
        if has_died && death.is_crash() {
            let mut state = self.state.lock();
            let requests = state.running.values().filter_map(|(_, fingerprint)| *fingerprint).collect();
            state.crashes.push(EngineCrash { epoch: self.life().epoch, at: Instant::now(), requests });
        }
        has_died
    }

    fn begin_life(&self) {
        self.state.lock().hangs_until = None;
        self.change_life(|life| {
            *life = EngineLife { epoch: life.epoch + 1, phase: Phase::Ready, death: None, is_held: false, ..*life };
            true
        });
        self.trace.note(format_args!("{} is ready again", self.name));
    }

    fn change_phase(&self, from: Phase, to: Phase) -> bool {
        self.change_life(|life| {
            let changes = life.phase == from && life.death.is_none();
            if changes {
                life.phase = to;
            }
            changes
        })
    }

    /// Takes no new requests until the running ones are done or their time is over. Returns `true`
    /// unless that was called off.
    async fn empty(&self, phase: Phase) -> bool {
        if !self.change_phase(Phase::Ready, phase) {
            return false;
        }
        let present = self.life();
        let is_over = self.wait_for(|| (self.state.lock().running.is_empty() || self.life() != present).then_some(()));
        let _ = timeout(DRAIN_TIMEOUT, is_over).await;
        self.life() == present
    }

    /// Finishes the running requests, and comes back.
    pub(super) async fn restart(self: &Arc<Self>, restart_after: Duration) {
        if self.empty(Phase::Draining).await {
            self.die(Death::Stopped, restart_after);
        }
    }

    /// Finishes the running requests, and stops until released.
    pub(super) async fn drain(&self) {
        if self.empty(Phase::Draining).await && self.end_life(Death::Stopped) {
            self.change_life(|life| {
                life.is_held = true;
                true
            });
        }
    }

    /// Finishes the running requests, and computes nothing until woken.
    pub(super) async fn fall_asleep(&self) {
        if self.empty(Phase::Sleeping).await {
            self.trace.note(format_args!("{} sleeps", self.name));
            self.change_life(|life| {
                life.naps += 1;
                true
            });
        }
    }

    /// Serves again if draining, drained or asleep.
    pub(super) fn bring_back(&self) {
        if !self.change_phase(Phase::Draining, Phase::Ready) && !self.change_phase(Phase::Sleeping, Phase::Ready) && self.life().is_held {
            self.begin_life();
        }
    }

    /// Answers a request on `stream`. `poison` is the number of events after which the engine dies
    /// of it.
    pub(super) async fn answer(
        self: &Arc<Self>,
        (router, head): (u64, &RequestHead),
        body: &[u8],
        stream: &RequestStream,
        poison: Option<usize>,
    ) -> Result<(), EngineFailure> {
        let life = self.life();
        if life.phase != Phase::Ready {
            return Err(StreamFault { fault: Fault::NotReady, message: format!("{} is not ready", self.name) }.into());
        }
        let request = ModelRequest::parse(&head.path, body).ok_or_else(|| StreamFault::protocol("a request that nobody has sent"))?;
        let running = {
            let mut state = self.state.lock();
            state.next_request += 1;
            let id = state.next_request;
            state.running.insert(id, (router, head.fingerprint));
            RunningRequest { engine: self, id, has_head: AtomicBool::new(false), unsent: Mutex::default() }
        };
        self.tell();
        let has_died = self.wait_for(|| {
            let now = self.life();
            let ends = if now.naps == life.naps { Death::Lost } else { Death::Abort };
            (now.epoch != life.epoch || now.death.is_some() || now.naps != life.naps).then(|| now.death.unwrap_or(ends))
        });
        let died = tokio::select! {
            biased;
            died = has_died => died,
            () = self.generate(&request, &running, stream, poison) => return Ok(()),
        };
        self.end_answer(died, &request, &running, stream).await
    }

    async fn generate(
        self: &Arc<Self>,
        request: &ModelRequest,
        running: &RunningRequest<'_>,
        stream: &RequestStream,
        poison: Option<usize>,
    ) {
        self.advance(1).await;
        let refusing = self.state.lock().refusing;
        if let Some(status) = refusing {
            let error = format!("{{\"error\": {{\"message\": \"the engine is full\", \"code\": {status}}}}}");
            running.send_head(stream, response(status, "application/json", Some(error.len())));
            stream.send_body(error.into()).await;
            return;
        }
        if !request.is_stream {
            let answer = request.plain();
            self.advance(request.answer().tokens.len()).await;
            if poison.is_some() {
                self.crash_forever().await;
            }
            running.send_head(stream, response(200, "application/json", Some(answer.len())));
            stream.send_body(answer.into()).await;
            return;
        }
        running.send_head(stream, response(200, "text/event-stream; charset=utf-8", None));
        // Compute the prompt.
        self.advance(4).await;
        for (at, event) in request.events(&running.name()).into_iter().enumerate() {
            if poison.is_some_and(|after| at >= after) {
                self.crash_forever().await;
            }
            self.advance(1).await;
            // Some events come in two pieces.
            let length = if (at + event.len()).is_multiple_of(11) { event.len() / 2 } else { event.len() };
            let mut piece = Bytes::from(event);
            *running.unsent.lock() = piece.split_off(length);
            stream.send_body(piece).await;
            if !running.unsent.lock().is_empty() {
                sleep(Duration::from_millis(2)).await;
                running.send_rest(stream).await;
            }
        }
    }

    /// Dies of the present request, and so never returns.
    async fn crash_forever(self: &Arc<Self>) {
        self.die(Death::Lost, Duration::from_secs(1));
        std::future::pending::<()>().await;
    }

    /// Waits for so many steps, and as long as the engine hangs.
    async fn advance(&self, steps: usize) {
        sleep(self.step * u32::try_from(steps).unwrap_or(u32::MAX)).await;
        loop {
            let until = self.state.lock().hangs_until.filter(|until| *until > Instant::now());
            match until {
                Some(until) => tokio::time::sleep_until(until).await,
                None => return,
            }
        }
    }

    /// Ends a request whose engine dies.
    async fn end_answer(
        &self,
        death: Death,
        request: &ModelRequest,
        running: &RunningRequest<'_>,
        stream: &RequestStream,
    ) -> Result<(), EngineFailure> {
        let says_nothing = !request.is_stream || !running.has_head.load(Ordering::Relaxed);
        match death {
            Death::Lost => Err(StreamFault { fault: Fault::EngineLost, message: format!("{} broke off", self.name) }.into()),
            Death::Stopped => Err(StreamFault { fault: Fault::EngineStopped, message: format!("{} was stopped", self.name) }.into()),
            Death::GivenUp => Err(EngineFailure::GivenUp),
            Death::ErrorEvent | Death::Abort | Death::Incomplete if says_nothing => {
                Err(StreamFault { fault: Fault::EngineLost, message: format!("{} broke off", self.name) }.into())
            }
            Death::Incomplete => {
                running.send_rest(stream).await;
                Ok(())
            }
            Death::ErrorEvent | Death::Abort => {
                running.send_rest(stream).await;
                let error = "data: {\"error\": {\"message\": \"EngineCore encountered an issue. See stack trace\", \"code\": 500}}\n\n";
                let event = if death == Death::Abort { request.aborted(&running.name()) } else { error.to_owned() };
                stream.send_body(event.into()).await;
                stream.send_body("data: [DONE]\n\n".into()).await;
                Ok(())
            }
        }
    }
}

/// Why an engine did not answer to the end.
#[derive(Debug)]
pub(super) enum EngineFailure {
    Fault(StreamFault),
    /// The agent says nothing.
    GivenUp,
}

impl From<StreamFault> for EngineFailure {
    fn from(fault: StreamFault) -> Self {
        Self::Fault(fault)
    }
}

fn response(status: u16, kind: &'static str, length: Option<usize>) -> ResponseHead {
    let header = |name: &'static str, value: String| Header { name: name.into(), value: value.into() };
    let length = length.map(|length| header("content-length", length.to_string()));
    ResponseHead { status, headers: [header("content-type", kind.to_owned())].into_iter().chain(length).collect() }
}
