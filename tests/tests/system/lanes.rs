//! Both ends of a lane against each other, in any interleaving: the router's `lanes::Lane` and the
//! agent's `lane::Lane`, with the test as the network between them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use hostler_agent::lane::{IncomingRequest, Lane as AgentLane, RequestBody, RequestStream};
use hostler_proto::agent::v1::FrameBatch;
use hostler_proto::agent::v1::frame::Kind;
use hostler_proto::lane::{MAX_BODY_BYTES, StreamFault, WINDOW_BYTES};
use hostler_proto::lane::{RequestHead, ResponseHead};
use hostler_router::lanes::{Exchange, Lane as RouterLane};
use proptest::prelude::*;

/// Next steps. The number chooses a request, or an amount.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// A client sends a request with a body of up to four windows.
    Open,
    /// A batch crosses from the router to the agent.
    Down,
    /// A batch crosses from the agent to the router.
    Up,
    EngineReads(u8),
    EngineWrites(u8, u16),
    EngineEnds(u8),
    /// The engine breaks off.
    EngineBreaks(u8),
    ClientReads(u8),
    ClientLeaves(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => Just(Step::Open),
        6 => Just(Step::Down),
        6 => Just(Step::Up),
        4 => any::<u8>().prop_map(Step::EngineReads),
        8 => (any::<u8>(), any::<u16>()).prop_map(|(which, bytes)| Step::EngineWrites(which, bytes)),
        2 => any::<u8>().prop_map(Step::EngineEnds),
        1 => any::<u8>().prop_map(Step::EngineBreaks),
        8 => any::<u8>().prop_map(Step::ClientReads),
        1 => any::<u8>().prop_map(Step::ClientLeaves),
    ]
}

struct Client {
    id: u64,
    exchange: Exchange,
    begun: bool,
    received: Vec<u8>,
    ends: Vec<Result<(), StreamFault>>,
}

/// A request at the engine, and its bytes there.
struct AtEngine {
    serving: Option<RequestStream>,
    body: RequestBody,
    id: u64,
    taken: usize,
    body_ends: usize,
    written: Vec<u8>,
    /// Bytes that the engine has given but that had no credit yet.
    unsent: VecDeque<u8>,
    closing: Option<Result<(), StreamFault>>,
}

struct World {
    router: Arc<RouterLane>,
    agent: Arc<AgentLane>,
    down: VecDeque<FrameBatch>,
    up: VecDeque<FrameBatch>,
    clients: Vec<Client>,
    engine: Vec<AtEngine>,
    opened: u64,
}

fn context() -> Context<'static> {
    Context::from_waker(Waker::noop())
}

/// Length of a request's body, whose bytes all are its id, so that a stray byte is noticed.
fn body_of(id: u64) -> usize {
    usize::try_from(id * 37_411).unwrap() % (4 * WINDOW_BYTES)
}

fn byte_of(id: u64) -> u8 {
    u8::try_from(id % 251).unwrap()
}

fn pick<T>(list: &mut [T], which: u8) -> Option<&mut T> {
    let count = list.len();
    list.get_mut(usize::from(which) % count.max(1))
}

impl World {
    fn new() -> Self {
        let router = RouterLane::new(prometheus_client::metrics::counter::Counter::default());
        let agent = AgentLane::new(prometheus_client::metrics::counter::Counter::default());
        Self { router, agent, down: VecDeque::new(), up: VecDeque::new(), clients: Vec::new(), engine: Vec::new(), opened: 0 }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Open => {
                self.opened += 1;
                let id = self.opened;
                let head = RequestHead { path: id.to_string(), ..RequestHead::default() };
                let body = Bytes::from(vec![byte_of(id); body_of(id)]);
                if let Ok(exchange) = self.router.open(id, head, body) {
                    self.clients.push(Client { id, exchange, begun: false, received: Vec::new(), ends: Vec::new() });
                }
            }
            Step::Down => {
                self.down.extend(self.router.outbox().take_batch());
                if let Some(batch) = self.down.pop_front() {
                    check_sizes(&batch);
                    for IncomingRequest { head, stream: serving } in self.agent.receive(batch) {
                        let id = head.path.parse().unwrap();
                        serving.send_head(ResponseHead { status: 200, headers: Vec::new() });
                        let body = serving.body();
                        let (written, unsent) = (Vec::new(), VecDeque::new());
                        self.engine.push(AtEngine {
                            serving: Some(serving),
                            body,
                            id,
                            taken: 0,
                            body_ends: 0,
                            written,
                            unsent,
                            closing: None,
                        });
                    }
                }
            }
            Step::Up => {
                self.up.extend(self.agent.outbox().take_batch());
                if let Some(batch) = self.up.pop_front() {
                    check_sizes(&batch);
                    self.router.receive(batch);
                }
            }
            Step::EngineReads(which) => {
                if let Some(request) = pick(&mut self.engine, which) {
                    request.read();
                }
            }
            Step::EngineWrites(which, bytes) => {
                if let Some(request) = pick(&mut self.engine, which)
                    && request.closing.is_none()
                {
                    // Every byte is numbered, so that a lost, doubled or stray one is noticed.
                    let from = request.written.len();
                    let new = (from..from + usize::from(bytes) * 4).map(|place| byte_of(request.id.wrapping_add(place as u64)));
                    request.written.extend(new.clone());
                    request.unsent.extend(new);
                    request.send();
                }
            }
            Step::EngineEnds(which) => self.close(which, Ok(())),
            Step::EngineBreaks(which) => self.close(which, Err(StreamFault::protocol("broke off"))),
            Step::ClientReads(which) => {
                if let Some(client) = pick(&mut self.clients, which) {
                    client.read();
                }
            }
            Step::ClientLeaves(which) => {
                if !self.clients.is_empty() {
                    let which = usize::from(which) % self.clients.len();
                    drop(self.clients.swap_remove(which));
                }
            }
        }
    }

    fn close(&mut self, which: u8, outcome: Result<(), StreamFault>) {
        if let Some(request) = pick(&mut self.engine, which) {
            request.closing.get_or_insert(outcome);
            request.send();
        }
    }

    /// Moves everything that can still move, until nothing does.
    fn move_all(&mut self, but: Option<u64>) {
        for _ in 0..200 {
            self.take(Step::Down);
            self.take(Step::Up);
            self.engine.iter_mut().for_each(|request| {
                request.read();
                request.send();
            });
            self.clients.iter_mut().filter(|client| Some(client.id) != but).for_each(Client::read);
        }
    }
}

impl AtEngine {
    fn read(&mut self) {
        while let Poll::Ready(Ok(piece)) = self.body.poll_bytes(&context()) {
            let Some(bytes) = piece else {
                self.body_ends = 1;
                return;
            };
            assert!(bytes.iter().all(|byte| *byte == byte_of(self.id)), "a byte of another request");
            self.taken += bytes.len();
        }
    }

    /// Sends like the relay: pieces as credit allows, then the end.
    fn send(&mut self) {
        let Some(serving) = &self.serving else { return };
        while !self.unsent.is_empty() {
            let Poll::Ready(allowed) = serving.poll_credit(&context(), self.unsent.len()) else { return };
            serving.send_frame(Kind::Body(self.unsent.drain(..allowed).collect()));
        }
        if let Some(outcome) = &self.closing {
            self.serving.take().unwrap().end(outcome);
        }
    }
}

impl Client {
    fn read(&mut self) {
        if !self.begun {
            match self.exchange.poll_head(&context()) {
                Poll::Pending => return,
                Poll::Ready(Ok(_)) => self.begun = true,
                Poll::Ready(Err(broken)) => {
                    self.ends.push(Err(broken));
                    self.begun = true;
                    return;
                }
            }
        }
        if !self.ends.is_empty() {
            return;
        }
        match self.exchange.poll_body(&context()) {
            Poll::Pending => {}
            Poll::Ready(Ok(Some(bytes))) => self.received.extend_from_slice(&bytes),
            Poll::Ready(Ok(None)) => self.ends.push(Ok(())),
            Poll::Ready(Err(broken)) => self.ends.push(Err(broken)),
        }
    }
}

fn check_sizes(batch: &FrameBatch) {
    for frame in &batch.frames {
        if let Some(Kind::Body(body)) = &frame.kind {
            assert!(body.len() <= MAX_BODY_BYTES);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn each_body_arrives_exactly_or_ends_with_one_error(
        steps in prop::collection::vec(step(), 1..150), lose: bool,
    ) {
        let mut world = World::new();
        steps.into_iter().for_each(|step| world.take(step));
        if lose {
            world.router.mark_lost(&StreamFault::lane_lost());
            world.agent.close();
        } else {
            // Engines that are still writing complete.
            world.engine.iter_mut().for_each(|request| { request.closing.get_or_insert(Ok(())); });
        }
        world.move_all(None);
        // Complete requests that reached the agent only now, too.
        world.engine.iter_mut().for_each(|request| { request.closing.get_or_insert(Ok(())); });
        world.move_all(None);
        for client in &world.clients {
            let at_engine = world.engine.iter().find(|request| request.id == client.id);
            prop_assert_eq!(client.ends.len(), 1, "request {} ended {} times", client.id, client.ends.len());
            match (&client.ends[0], at_engine) {
                (Ok(()), Some(request)) => {
                    prop_assert_eq!(&client.received, &request.written);
                    prop_assert!(matches!(request.closing, Some(Ok(()))), "a broken answer ended as if it were whole");
                }
                (Ok(()), None) => prop_assert!(false, "an answer from nowhere"),
                (Err(_), Some(request)) => prop_assert!(request.written.starts_with(&client.received)),
                (Err(_), None) => prop_assert!(client.received.is_empty()),
            }
            if let (Some(request), false) = (at_engine, lose) {
                prop_assert!(request.taken <= body_of(client.id));
            }
        }
        prop_assert_eq!((world.router.open_request_count(), world.agent.active_requests()), (0, 0));
    }

}

proptest! {
    // Each case moves megabytes.
    #![proptest_config(ProptestConfig { cases: 8, ..ProptestConfig::default() })]

    #[test]
    fn a_request_body_reaches_the_engine_whole(ids in 1..6u64) {
        let mut world = World::new();
        (0..ids).for_each(|_| world.take(Step::Open));
        world.move_all(None);
        for request in &world.engine {
            prop_assert_eq!((request.taken, request.body_ends), (body_of(request.id), 1));
        }
        prop_assert_eq!(world.engine.len() as u64, ids);
    }

    #[test]
    fn a_stalled_client_holds_one_window_and_blocks_nobody(stalled in 1..8u64, windows in 2..5usize) {
        let mut world = World::new();
        (0..8).for_each(|_| world.take(Step::Open));
        (0..20).for_each(|_| world.take(Step::Down));
        for request in &mut world.engine {
            let bytes: Vec<u8> = (0..windows * WINDOW_BYTES).map(|place| byte_of(request.id.wrapping_add(place as u64))).collect();
            request.written.clone_from(&bytes);
            request.unsent.extend(bytes);
            request.closing = Some(Ok(()));
        }
        world.move_all(Some(stalled));
        for client in &world.clients {
            let request = world.engine.iter().find(|request| request.id == client.id).unwrap();
            if client.id == stalled {
                prop_assert_eq!(request.written.len() - request.unsent.len(), WINDOW_BYTES, "more than a window has left the engine");
            } else {
                prop_assert_eq!((&client.received, client.ends.len()), (&request.written, 1));
            }
        }
        // The client also gets everything once it reads.
        world.move_all(None);
        prop_assert!(world.clients.iter().all(|client| client.ends == [Ok(())]));
    }
}
