//! The answer's body on its way to the client: the engine's bytes as they come, with a scanner beside event streams.
//!
//! It is polled by the client's connection, so no task and no channel lies between the lane and the socket; and while it waits for the next
//! event, it has the lane's task write that to the socket (see [`Flow`] and the edge's `outlet`). It ends cleanly only when the answer is whole. A broken event stream gets an error event of its dialect, and every broken answer ends without its
//! last chunk, so that nothing between here and the user can take it for complete.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hostler_proto::agent::v1::Fault;
use hostler_proto::lane::{Broken, only_keeps_alive};
use http_body::{Body, Frame};
use tokio::time::{Instant, Sleep};

use super::flow::Flow;
use super::poison::Watched;
use super::scanner::{Passed, Scanner};
use super::told::{Told, Usage};
use super::work::Most;
use crate::admission::{Generated, Permit, Used};
use crate::carry::Exchange;
use crate::edge::Outlet;
use crate::edge::access::Entry;
use crate::fleet::{InFlight, Replica};
use crate::metrics::{Outcome, RouterMetrics};
use crate::placement::Placed;
use crate::sticky::Watch;

/// What lives as long as the answer does.
#[derive(Debug)]
pub struct Held {
    /// Counts the request on its replica, unless that has ended already.
    pub in_flight: Option<InFlight>,
    /// Counts the request in the router.
    pub permit: Permit,
    /// Where it runs; for the log.
    pub replica: Arc<Replica>,
    /// Learns whether its engine dies with it.
    pub watched: Watched,
    /// Whether its end shows that it harms no engine: not where the engine had failed.
    pub survives: bool,
    /// Learns from how it ends.
    pub placed: Placed,
    /// Only comments have come so far, which keep the connection alive while the request waits in its engine.
    pub waits: bool,
    /// Of an answer that was read whole before it was passed on.
    pub usage: Option<Usage>,
    /// It was not, but may say what was used.
    pub goes_on: bool,
    /// The most that it can have used.
    pub(crate) most: Most,
    /// Its line in the access log.
    pub entry: Entry,
    /// When the request was taken.
    pub begun: Instant,
    /// How long the answer may pause.
    pub idle: Duration,
    /// Where the outcome is counted.
    pub metrics: Arc<RouterMetrics>,
}

/// One answer's body.
#[derive(Debug)]
pub struct Relay {
    state: State,
    /// Read before it was known whether the answer would be sent.
    first: Option<Bytes>,
    flow: Arc<Flow>,
    exchange: Exchange,
    held: Held,
    /// The lane's task is still to be told that it may take events.
    lends: bool,
    pause: Option<Pin<Box<Sleep>>>,
}

#[derive(Debug)]
enum State {
    Streaming,
    /// The error event that is sent next.
    Explaining(Bytes, String),
    /// The connection gets a moment to send what it has, then breaks.
    Flushing(Pin<Box<Sleep>>, String),
    Ended,
}

/// The word in the access log for what broke an answer.
fn word(fault: Fault) -> &'static str {
    match fault {
        Fault::EngineStopped => "engine_stopped",
        Fault::LaneLost => "agent_lost",
        Fault::Protocol => "protocol",
        Fault::EngineLost | Fault::NotReady | Fault::None => "engine_lost",
    }
}

/// The moment that a connection gets to send what it has before it breaks. HTTP/2 throws away what is queued when a stream is reset.
const FLUSH: Duration = Duration::from_millis(200);

fn flushing(message: String) -> State {
    State::Flushing(Box::pin(tokio::time::sleep(FLUSH)), message)
}

impl Relay {
    /// The rest of `exchange` after its head and `first` piece. `watch` reads which response it is, where that is remembered.
    #[must_use]
    pub fn new(exchange: Exchange, first: Option<Bytes>, dialect: Option<super::Dialect>, watch: Option<Watch>, held: Held) -> Self {
        let passage = dialect.and_then(|dialect| held.watched.passage(dialect.token()));
        let flow = Flow::new(dialect.map(Scanner::new), watch, passage);
        // The first piece comes by again.
        flow.lock().told = held.goes_on.then(|| Box::new(Told::new("")));
        Self { state: State::Streaming, first, flow, exchange, held, lends: false, pause: None }
    }

    /// Events may be written to the client's connection as chunks of HTTP/1.1, once the library has sent what comes before them.
    pub(crate) fn through(&mut self, outlet: Arc<Outlet>) {
        let mut flow = self.flow.lock();
        if flow.scanner.is_some() {
            outlet.occupy();
            flow.outlet = Some(outlet);
            self.lends = true;
        }
    }

    fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Broken>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Ok(Some(first)));
        }
        self.lend();
        if let Poll::Ready(piece) = self.exchange.poll_body(context) {
            self.flow.lock().progress = Instant::now();
            if matches!(&piece, Err(broken) if broken.fault == Fault::EngineLost) {
                let _ = self.held.watched.lost(&self.held.replica);
            }
            return Poll::Ready(piece);
        }
        // One timer an answer, looked at again only when it fires: an event costs a reading of the clock.
        let idle = self.held.idle;
        let pause = self.pause.get_or_insert_with(|| Box::pin(tokio::time::sleep(idle)));
        while pause.as_mut().poll(context).is_ready() {
            let progress = self.flow.lock().progress;
            if progress.elapsed() >= idle {
                return Poll::Ready(Err(Broken { fault: Fault::EngineLost, message: "the engine sent nothing for too long".into() }));
            }
            pause.as_mut().reset(progress + idle);
        }
        Poll::Pending
    }

    /// From the first event on the lane's task may take the next ones.
    fn lend(&mut self) {
        if self.lends && !self.held.waits {
            self.lends = false;
            self.exchange.lend(self.flow.clone());
        }
    }

    /// Gives the library something to send.
    fn send(&self, bytes: Bytes) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let mut flow = self.flow.lock();
        flow.sent += bytes.len() as u64;
        flow.outlet.as_ref().inspect(|outlet| outlet.occupy());
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }

    /// The answer broke: an event stream is told so first.
    fn break_off(&mut self, cause: &'static str, message: String) {
        self.exchange.take_back();
        let replica = &self.held.replica.id;
        tracing::warn!(%replica, message, "an answer broke after it had begun");
        self.held.metrics.ended(Outcome::Broken, self.held.begun);
        let usage = self.usage();
        self.held.entry.ended(Outcome::Broken, Some(cause), usage);
        self.settle(usage, false);
        self.state = match &self.flow.lock().scanner {
            Some(scanner) => State::Explaining(scanner.error_event(&message), message),
            None => flushing(message),
        };
    }

    /// Takes a piece in; what is to be sent of it, if anything.
    fn piece(&mut self, bytes: Bytes) -> Bytes {
        // The first event, where comments came before it.
        if self.held.waits && !only_keeps_alive(&bytes) {
            self.held.waits = false;
            self.held.in_flight.as_mut().map(InFlight::answered);
            self.held.placed.began();
            self.held.entry.began();
            self.held.watched.answered();
        }
        let passed = self.flow.lock().pass(bytes);
        self.passed(passed)
    }

    /// What is to be sent of a piece that was looked at.
    fn passed(&mut self, passed: Passed) -> Bytes {
        match passed {
            Passed::On(bytes) => bytes,
            Passed::Failed { bytes, died } => {
                if died {
                    let _ = self.held.watched.lost(&self.held.replica);
                }
                self.break_off("engine_error", "the engine reported an error".into());
                self.state = flushing("the engine reported an error".into());
                bytes
            }
            Passed::Aborted(bytes) => {
                self.break_off("engine_stopped", super::ABORTED.into());
                bytes
            }
        }
    }

    fn end(&mut self) -> Bytes {
        let (rest, is_complete) = match &mut self.flow.lock().scanner {
            Some(scanner) => (scanner.rest(), scanner.is_complete()),
            None => (Bytes::new(), true),
        };
        if is_complete {
            self.complete();
            return rest;
        }
        // Half an event would spoil the error event.
        self.break_off("incomplete", "the engine ended the answer before it was complete".into());
        Bytes::new()
    }

    /// Tells the caller's limits what was used. Before its end no answer has said all of it, and some never do. Each event of a stream has a
    /// token at least, but the first, which has only a role, and the last: so nobody pays less who leaves in time.
    fn settle(&mut self, usage: Option<Usage>, is_whole: bool) {
        let work = self.held.most.work;
        if !work.is_some() {
            return;
        }
        let events = self.flow.lock().scanner.as_ref().map_or(0, Scanner::events).saturating_sub(2);
        let output = match usage {
            _ if !work.generates() => Generated::Told(0),
            Some(usage) if is_whole => Generated::Told(usage.completion),
            usage => Generated::AtLeast(usage.map_or(0, |usage| usage.completion).max(events)),
        };
        let input = usage.map(|usage| usage.prompt).filter(|prompt| *prompt > 0);
        self.held.permit.settle(Used { input, output });
    }

    /// What the engine says that was used, as far as that can be.
    fn usage(&self) -> Option<Usage> {
        let flow = self.flow.lock();
        let told = match (&flow.scanner, &flow.told) {
            (Some(scanner), _) => scanner.usage(),
            (None, Some(told)) => told.usage(),
            (None, None) => self.held.usage,
        };
        self.held.most.bound(told?)
    }

    /// Whether nothing is left of an answer that needs no looking at.
    fn is_read(&self) -> bool {
        self.flow.lock().scanner.is_none() && self.first.is_none() && self.exchange.is_finished()
    }

    fn complete(&mut self) {
        self.state = State::Ended;
        if self.held.survives {
            self.held.watched.survived();
        }
        let usage = self.usage();
        let events = self.flow.lock().scanner.as_ref().map(Scanner::events);
        if let Some(events) = events {
            self.held.metrics.streamed(events, usage);
        }
        if self.held.most.work.is_some() {
            let most = self.held.most;
            self.held.placed.ended(usage, events.unwrap_or(0), most.context, most.work.answers == 1);
        }
        self.held.metrics.ended(Outcome::Complete, self.held.begun);
        self.held.entry.ended(Outcome::Complete, None, usage);
        self.settle(usage, true);
    }
}

impl Body for Relay {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let relay = self.get_mut();
        loop {
            match std::mem::replace(&mut relay.state, State::Ended) {
                State::Streaming => {
                    relay.state = State::Streaming;
                    let polled = relay.poll_piece(context);
                    // Looked for after the inbox: until it was polled, the lane's task may have found it. What came behind it is of no use.
                    let failed = relay.flow.lock().failed.take();
                    let sent = match (failed, polled) {
                        (Some(failed), _) => relay.passed(failed),
                        (None, Poll::Pending) => return Poll::Pending,
                        (None, Poll::Ready(Ok(Some(bytes)))) => relay.piece(bytes),
                        (None, Poll::Ready(Ok(None))) => relay.end(),
                        (None, Poll::Ready(Err(broken))) => {
                            relay.break_off(word(broken.fault), broken.message);
                            Bytes::new()
                        }
                    };
                    if !sent.is_empty() {
                        return relay.send(sent);
                    }
                }
                State::Explaining(event, message) => {
                    relay.state = flushing(message);
                    return relay.send(event);
                }
                State::Flushing(mut moment, message) => {
                    if moment.as_mut().poll(context).is_pending() {
                        relay.state = State::Flushing(moment, message);
                        return Poll::Pending;
                    }
                    return Poll::Ready(Some(Err(Broken { fault: Fault::EngineLost, message })));
                }
                State::Ended => return Poll::Ready(None),
            }
        }
    }

    /// A plain answer may be known to be whole with its last piece: nothing more is asked for then.
    fn is_end_stream(&self) -> bool {
        match self.state {
            State::Streaming => self.is_read(),
            State::Ended => true,
            _ => false,
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // What is taken after this would not be counted.
        self.exchange.take_back();
        if matches!(self.state, State::Streaming) {
            self.left();
        }
        self.held.entry.bytes(self.flow.lock().sent);
    }
}

impl Relay {
    /// Nobody asks for more.
    fn left(&mut self) {
        // Whoever knows the length, or that there is no body, does not ask for the end.
        if self.is_read() {
            self.complete();
        } else {
            self.held.metrics.ended(Outcome::ClientLeft, self.held.begun);
            let usage = self.usage();
            self.held.entry.ended(Outcome::ClientLeft, None, usage);
            self.settle(usage, false);
        }
    }
}
