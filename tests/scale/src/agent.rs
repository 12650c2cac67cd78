//! One agent for as long as the fleet lives: attaches, reports as often as a real one with GPUs,
//! answers requests, and dials again when its router is gone.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hostler_agent::lane::{IncomingRequest, RequestStream};
use hostler_agent::node::REPORT_INTERVAL;
use hostler_agent::uplink::{Backoff, LANES};
use hostler_proto::agent::v1::Hello;
use hostler_proto::agent::v1::frame::Kind;
use hostler_proto::lane::{Header, ResponseHead};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, interval, interval_at, sleep, sleep_until};
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;

use super::{AttachRequest, Attachment, Replica, Tally, attach};

/// How often an agent reads an idle engine's figures, each time followed by a report.
const IDLE_REPORT_INTERVAL: Duration = Duration::from_millis(500);

/// How often the driver reports on the GPUs.
const GPU_REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Duration of an answer, from its first event to its last.
const ANSWER: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub struct Agent {
    hello: Hello,
    replicas: Arc<Vec<ReplicaCounts>>,
    /// Notified when there are changes to report.
    moved: Arc<Notify>,
    tally: Arc<Tally>,
}

/// Counts of one replica.
#[derive(Debug, Default)]
struct ReplicaCounts {
    in_flight: AtomicU32,
    served: AtomicU64,
}

impl Agent {
    /// Creates an agent of this name with this many replicas; events are counted in `tally`.
    #[must_use]
    pub fn new(node: String, replicas: u32, tally: Arc<Tally>) -> Self {
        let hello = Hello { node, life: fastrand::u64(1..), ..Hello::default() };
        Self { hello, replicas: Arc::new((0..replicas).map(|_| ReplicaCounts::default()).collect()), moved: Arc::default(), tally }
    }

    /// Requests that each replica has answered.
    pub fn served(&self) -> impl Iterator<Item = u64> {
        self.replicas.iter().map(|counts| counts.served.load(Ordering::Relaxed))
    }

    /// Serves the router at `address` until it is dropped.
    pub async fn serve(&self, address: SocketAddr) {
        let mut redial = Backoff::default();
        loop {
            self.tally.attempts.fetch_add(1, Ordering::Relaxed);
            let (took, taken) = mpsc::unbounded_channel();
            let joining =
                AttachRequest { hello: self.hello.clone(), replicas: self.replicas().map(Replica::full_report).collect(), lanes: LANES };
            match attach(address, joining, &took, self.tally.traffic()).await {
                Ok(attached) => {
                    redial = Backoff::default();
                    let _counted = self.tally.attached();
                    let ended = self.follow(attached, taken).await;
                    self.tally.note(&self.hello.node, &ended);
                }
                Err(status) => self.tally.note(&self.hello.node, &status),
            }
            sleep(redial.next_delay()).await;
        }
    }

    /// Reports and answers until the connection ends.
    async fn follow(&self, mut attached: Attachment, mut taken: mpsc::UnboundedReceiver<IncomingRequest>) -> Status {
        let mut heartbeat = interval(Duration::from_millis(u64::from(attached.lease_ms())) / 3);
        // The reports of the replicas are spread over time; those of the GPUs come together.
        let between = IDLE_REPORT_INTERVAL / u32::try_from(self.replicas.len().max(1)).unwrap_or(1);
        let mut readings = interval_at(Instant::now() + between.mul_f64(fastrand::f64()), between);
        let mut gpus = interval_at(Instant::now() + GPU_REPORT_INTERVAL.mul_f64(fastrand::f64()), GPU_REPORT_INTERVAL);
        let mut next_report = Instant::now();
        loop {
            let moved = async {
                sleep_until(next_report).await;
                self.moved.notified().await;
            };
            let update = tokio::select! {
                directive = attached.directive() => match directive {
                    // There is nothing here to drain or to ask for.
                    Ok(_) => continue,
                    Err(status) => return status,
                },
                Some(incoming) = taken.recv() => {
                    self.serve_request(incoming);
                    continue;
                }
                () = moved => self.replicas().map(Replica::load_report).collect(),
                _ = gpus.tick() => self.replicas().map(|replica| replica.gpu_report(70.0 + 10.0 * fastrand::f32())).collect(),
                _ = readings.tick() => Vec::new(),
                _ = heartbeat.tick() => Vec::new(),
            };
            heartbeat.reset();
            next_report = Instant::now() + REPORT_INTERVAL;
            if let Err(status) = attached.report(update).await {
                return status;
            }
        }
    }

    /// Every replica in its present state.
    fn replicas(&self) -> impl Iterator<Item = Replica> {
        self.replicas.iter().zip(0..).map(|(counts, index)| Replica {
            index,
            in_flight: counts.in_flight.load(Ordering::Relaxed),
            served: counts.served.load(Ordering::Relaxed),
        })
    }

    /// Answers a request in a separate task.
    fn serve_request(&self, incoming: IncomingRequest) {
        let (replicas, moved) = (self.replicas.clone(), self.moved.clone());
        tokio::spawn(async move {
            let IncomingRequest { head, stream } = incoming;
            let Some(counts) = replicas.get(head.replica as usize) else { return };
            counts.in_flight.fetch_add(1, Ordering::Relaxed);
            moved.notify_one();
            answer(stream).await;
            counts.in_flight.fetch_sub(1, Ordering::Relaxed);
            counts.served.fetch_add(1, Ordering::Relaxed);
            moved.notify_one();
        });
    }
}

/// Running agents. Dropping them ends their connections.
#[derive(Debug)]
pub struct Agents {
    agents: Vec<Arc<Agent>>,
    pub tally: Arc<Tally>,
    _tasks: Vec<AbortOnDropHandle<()>>,
}

impl Agents {
    /// Starts this many agents, `n0`, `n1` and so on, with this many replicas each, for the router
    /// whose agents' port is `router`.
    #[must_use]
    pub fn start(agents: u32, replicas: u32, router: SocketAddr) -> Self {
        let tally = Arc::<Tally>::default();
        let agents: Vec<_> = (0..agents).map(|index| Arc::new(Agent::new(format!("n{index}"), replicas, tally.clone()))).collect();
        let keep = |agent: Arc<Agent>| AbortOnDropHandle::new(tokio::spawn(async move { agent.serve(router).await }));
        let tasks = agents.iter().cloned().map(keep).collect();
        Self { agents, tally, _tasks: tasks }
    }

    /// Whether every agent is attached, with all its lanes.
    #[must_use]
    pub fn are_attached(&self) -> bool {
        self.tally.attached_now() as usize == self.agents.len()
    }

    /// Requests that each replica of each agent has answered.
    #[must_use]
    pub fn served(&self) -> Vec<u64> {
        self.agents.iter().flat_map(|agent| agent.served()).collect()
    }
}

const EVENTS: [&str; 3] = [
    "data: {\"object\":\"chat.completion.chunk\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n",
    "data: {\"object\":\"chat.completion.chunk\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"Hello.\"},\"finish_reason\":\"stop\"}]}\n\n",
    "data: [DONE]\n\n",
];

async fn answer(serving: RequestStream) {
    let content_type = Header { name: Bytes::from_static(b"content-type"), value: Bytes::from_static(b"text/event-stream") };
    serving.send_head(ResponseHead { status: 200, headers: vec![content_type] });
    let [first, rest @ ..] = EVENTS.map(|event| Kind::Body(Bytes::from_static(event.as_bytes())));
    serving.send_frame(first);
    tokio::select! {
        () = sleep(ANSWER) => {}
        () = serving.wait_cancelled() => return,
    }
    for event in rest {
        serving.send_frame(event);
    }
    serving.end(&Ok(()));
}
