//! A session with a router that only listens, an engine whose HTTP side is scripted, and a cache
//! that the test writes.

use std::collections::BTreeSet;
use std::pin::Pin;

use futures_util::Stream;
use hostler_proto::agent::v1::agent_link_server::{AgentLink, AgentLinkServer};
use prost::Message;
use sha2::{Digest, Sha256};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::task::TaskTracker;
use tonic::Response;
use tonic::transport::Server;

use super::*;
use crate::cache::kv_event::{BlocksStored, KvEvent};
use crate::cache::{self, CacheLogWriter};
use crate::crashes::RequestFingerprint;
use crate::engine::start_order::StartOrder;
use crate::engine::{Engine, EngineSpec};
use crate::engine_client::api_client::tests::Scripted;
use crate::host::EngineProgram;
use crate::keeper;
use crate::node::{NodeState, Replica, ReplicaTraits};
use crate::prompt_files::PromptFileSource;
use crate::traffic::PromptEstimate;
use crate::uplink::SessionEnds;
use crate::uplink::redial::maintain_session;
use crate::vllm::CommandLine;
use crate::{AgentConfig, AgentMetrics};

/// Size of a tokenizer that is larger than one part.
const TOKENIZER_BYTES: usize = 600_000;

const ROUTER_LIFE: u64 = 7;

/// Messages that the router gets, and a channel for its orders.
type Attached = (Streaming<wire::AttachRequest>, mpsc::Sender<Result<wire::AttachResponse, Status>>);

struct Listening(mpsc::Sender<Attached>);

#[tonic::async_trait]
impl AgentLink for Listening {
    type AttachStream = ReceiverStream<Result<wire::AttachResponse, Status>>;
    type CarryStream = Pin<Box<dyn Stream<Item = Result<wire::FrameBatch, Status>> + Send>>;

    async fn attach(&self, request: Request<Streaming<wire::AttachRequest>>) -> Result<Response<Self::AttachStream>, Status> {
        let (orders, answers) = mpsc::channel(4);
        let welcome = wire::Welcome { protocol: PROTOCOL, router_life: ROUTER_LIFE, lease_ms: 60_000, ..wire::Welcome::default() };
        orders.send(Ok(wire::AttachResponse { message: Some(FromRouter::Welcome(welcome)) })).await.unwrap();
        self.0.send((request.into_inner(), orders)).await.unwrap();
        Ok(Response::new(ReceiverStream::new(answers)))
    }

    async fn carry(&self, _: Request<Streaming<wire::FrameBatch>>) -> Result<Response<Self::CarryStream>, Status> {
        Ok(Response::new(Box::pin(futures_util::stream::pending())))
    }
}

/// Knowledge of a router after all reports.
#[derive(Debug, Default)]
struct Known {
    epoch: u64,
    state: wire::ReplicaState,
    load: wire::Load,
    crashes: Vec<wire::EngineCrash>,
    blocks: BTreeSet<u64>,
    /// The router has all blocks that the last report about them counts.
    whole: bool,
    snapshots: u32,
    parts: Vec<wire::FilePart>,
}

impl Known {
    fn take(&mut self, message: ToRouter) {
        match message {
            ToRouter::Report(report) => {
                for replica in report.replicas {
                    self.epoch = replica.epoch;
                    if report.snapshot {
                        self.crashes.clear();
                    }
                    self.crashes.extend(replica.crashes);
                    self.state = replica.state.unwrap_or(std::mem::take(&mut self.state));
                    self.load = replica.load.unwrap_or(std::mem::take(&mut self.load));
                }
            }
            ToRouter::Cache(report) => {
                assert_eq!((report.index, report.epoch), (0, self.epoch), "a cache before its life was announced");
                if report.snapshot {
                    self.blocks.clear();
                    self.snapshots += 1;
                }
                report.removed.iter().for_each(|key| assert!(self.blocks.remove(key)));
                self.blocks.extend(report.stored);
                self.whole = !report.partial;
                if self.whole {
                    let digest = self.blocks.iter().fold(0, |xor, key| xor ^ key);
                    assert_eq!((self.blocks.len() as u64, digest), (report.count, report.digest));
                }
            }
            ToRouter::File(part) => self.parts.push(part),
            ToRouter::Hello(_) | ToRouter::Answer(_) | ToRouter::LoadWish(_) => {}
        }
    }
}

struct Fixture {
    known: Known,
    from_agent: Streaming<wire::AttachRequest>,
    orders: mpsc::Sender<Result<wire::AttachResponse, Status>>,
    engine: Engine,
    end: CancellationToken,
    tracker: TaskTracker,
    _http: Scripted,
    _directory: tempfile::TempDir,
}

impl Fixture {
    async fn start() -> Self {
        let (directory, tracker, end) = (tempfile::tempdir().unwrap(), TaskTracker::new(), CancellationToken::new());
        let engine = Engine::start(spec(&directory), &tracker);
        engine.status().wait_for(|status| status.pid.is_some()).await.unwrap();
        let http = Scripted::at(
            engine.socket(),
            Box::new(|path| match path {
                "/v1/models" => Some((200, r#"{"data":[{"id":"tiny"}]}"#.to_owned())),
                "/sim/model/tokenizer.json" => Some((200, "t".repeat(TOKENIZER_BYTES))),
                _ => Some((200, String::new())),
            }),
        );
        let simulated = EngineProgram::Simulated { program: "/opt/hostler".into() };
        let prompt_files = PromptFileSource::new(&simulated, &AgentConfig::default());
        let replica = Replica::new(
            0,
            engine.clone(),
            ReplicaTraits {
                gpu: String::new(),
                token_budget: 512,
                is_standby: false,
                prompt_files,
                setup: crate::advise::EngineSetup::default(),
            },
        );
        let uplink = Uplink {
            state: Arc::new(NodeState::new(vec![replica])),
            node: "node".to_owned(),
            life: 1,
            access: crate::join::RouterAccess::Plain { beyond_host: false },
            metrics: Arc::new(AgentMetrics::default()),
            requests: TaskTracker::new(),
            attached_routers: tokio::sync::watch::Sender::default(),
            attachments: Arc::default(),
            load_turns: Arc::default(),
        };
        let state = uplink.state.clone();
        tracker.spawn({
            let end = end.clone();
            async move { state.watch(end).await }
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (attached, mut attachments) = mpsc::channel(1);
        let served = Server::builder()
            .add_service(AgentLinkServer::new(Listening(attached)))
            .serve_with_incoming_shutdown(TcpListenerStream::new(listener), end.clone().cancelled_owned());
        tokio::spawn(served);
        let ends = SessionEnds { now: end.clone(), with_router: CancellationToken::new() };
        tracker.spawn(maintain_session(Arc::new(uplink), address, "router".to_owned(), ends));
        let (from_agent, orders) = attachments.recv().await.unwrap();
        Self { known: Known::default(), from_agent, orders, engine, end, tracker, _http: http, _directory: directory }
    }

    /// Listens until the router's knowledge meets this condition.
    async fn until(&mut self, condition: impl Fn(&Known) -> bool) {
        while !condition(&self.known) {
            let message = timeout(Duration::from_secs(60), self.from_agent.message()).await;
            let Ok(message) = message else { panic!("still {:?}, {} blocks", self.known.state, self.known.blocks.len()) };
            self.known.take(message.unwrap().unwrap().message.unwrap());
        }
    }

    async fn order(&self, order: Order) {
        let directive = FromRouter::Directive(wire::Directive { id: 0, order: Some(order) });
        self.orders.send(Ok(wire::AttachResponse { message: Some(directive) })).await.unwrap();
    }

    /// Writer of the cache in place of the engine's events.
    fn writer(&self) -> CacheLogWriter {
        let writer = self.engine.cache().begin_life(self.known.epoch);
        writer.mark_exact();
        writer
    }

    async fn stop(self) {
        self.end.cancel();
        self.engine.stop().await;
        self.tracker.close();
        self.tracker.wait().await;
    }
}

fn spec(directory: &tempfile::TempDir) -> EngineSpec {
    let life = directory.path().join("e0");
    EngineSpec {
        node: "n0".to_owned(),
        index: 0,
        command: CommandLine {
            container: Vec::new(),
            program: "/bin/sh".into(),
            arguments: vec!["-c".into(), "exec sleep 1000".into()],
            set: vec![("VLLM_RPC_BASE_PATH", life.clone().into())],
            unset: Vec::new(),
            withheld_routes: &[],
        },
        version: None,
        directory: life,
        run_dirs: None,
        log: directory.path().join("e0.log"),
        startup_timeout: Duration::from_secs(60),
        drain_timeout: Duration::from_secs(60),
        stop_grace: Duration::from_millis(300),
        max_backoff: Duration::from_secs(300),
        probe_interval: Duration::from_millis(50),
        cache: cache::KvEventSource::Nothing { because: "it has no cache".to_owned() },
        keepers: keeper::tests::program(directory.path()).into(),
        if_agent_dies: keeper::AgentDeathPolicy::Kill,
        cpu_binding: None,
        gpu_availability: None,
        fallback: None,
        start_order: Arc::new(StartOrder::unordered()),
        file_pool: None,
        file_log: None,
        stage: None,
        warm_starts: None,
        gang: None,
        may_fork: true,
        stall_timeout: Duration::from_secs(10),
        canary_interval: Duration::ZERO,
        attached_to: None,
    }
}

fn store(writer: &CacheLogWriter, first: u32, blocks: u32) {
    let hashes = (first..first + blocks).map(u64::from).collect();
    let tokens = (first..first + blocks).collect();
    writer.apply(&[KvEvent::Stored(Box::new(BlocksStored { hashes, tokens, block_size: 1, ..BlocksStored::default() }))]);
}

fn is_ready(known: &Known) -> bool {
    known.state.phase() == wire::Phase::Ready && known.state.prompt_files.is_some()
}

#[tokio::test]
async fn a_router_gets_cache_reports_and_then_their_changes() {
    let mut fixture = Fixture::start().await;
    fixture.until(is_ready).await;
    assert_eq!(fixture.known.state.cache.clone().unwrap().reason, "it has no cache");
    assert_eq!(fixture.known.state.token_budget, 512);

    let writer = fixture.writer();
    store(&writer, 0, 100_000);
    fixture.until(|known| known.whole && known.blocks.len() == 100_000).await;
    fixture.until(|known| known.state.cache.as_ref().is_some_and(|cache| cache.exact && cache.block_size == 1)).await;
    let snapshots = fixture.known.snapshots;
    store(&writer, 200_000, 3);
    fixture.until(|known| known.whole && known.blocks.len() == 100_003).await;
    assert_eq!(fixture.known.snapshots, snapshots);

    fixture.order(Order::ResyncCache(wire::Replicas { indices: vec![0] })).await;
    fixture.until(|known| known.snapshots == snapshots + 1 && known.whole).await;
    assert_eq!(fixture.known.blocks.len(), 100_003);
    fixture.stop().await;
}

#[tokio::test]
async fn a_router_is_told_all_prompt_tokens_and_its_own() {
    let mut fixture = Fixture::start().await;
    let traffic = fixture.engine.traffic().clone();
    let mine = traffic.enter_with(RouterKey(ROUTER_LIFE), PromptEstimate { tokens: 90, uncached: 50 });
    let _other = traffic.enter_with(RouterKey(ROUTER_LIFE + 1), PromptEstimate { tokens: 9, uncached: 5 });
    let tokens = |load: &wire::Load| [load.context_tokens, load.pending_tokens, load.context_tokens_yours, load.pending_tokens_yours];
    fixture.until(|known| tokens(&known.load) == [99, 55, 90, 50]).await;
    mine.mark_prefilled();
    fixture.until(|known| tokens(&known.load) == [99, 5, 90, 0]).await;
    drop(mine);
    fixture.until(|known| tokens(&known.load) == [9, 5, 0, 0]).await;
    fixture.stop().await;
}

#[tokio::test]
async fn each_crash_is_reported_once_and_again_in_a_snapshot() {
    let mut fixture = Fixture::start().await;
    fixture.until(is_ready).await;
    let epochs = |known: &Known| known.crashes.iter().map(|crash| crash.epoch).collect::<Vec<_>>();
    let name = RequestFingerprint((7 << 64) | 9);
    fixture.engine.crashes().record(1, vec![name, RequestFingerprint(3)]);
    fixture.until(|known| epochs(known) == [1]).await;
    assert_eq!(fixture.known.crashes[0].requests[0], wire::Fingerprint { high: 7, low: 9 });
    fixture.engine.crashes().record(2, vec![name]);
    fixture.until(|known| epochs(known) == [1, 2]).await;
    fixture.known.crashes.clear();
    fixture.order(Order::Resync(wire::Resync {})).await;
    fixture.until(|known| epochs(known) == [1, 2]).await;
    fixture.stop().await;
}

#[tokio::test]
async fn a_router_gets_the_prompt_files_that_it_asks_for() {
    let mut fixture = Fixture::start().await;
    fixture.until(is_ready).await;
    let files = fixture.known.state.prompt_files.clone().unwrap();
    assert_eq!(files.error, "");

    fixture.order(Order::FetchFiles(wire::FetchFiles { hash: files.hash.clone() })).await;
    fixture.until(|known| known.parts.last().is_some_and(|part| part.offset + part.data.len() as u64 == files.bytes)).await;
    let bundle: Vec<u8> = fixture.known.parts.drain(..).flat_map(|part| part.data).collect();
    assert_eq!(Sha256::digest(&bundle).as_slice(), &files.hash);
    let bundle = wire::PromptBundle::decode(bundle.as_slice()).unwrap();
    assert_eq!((bundle.files[0].name.as_str(), bundle.files[0].content.len()), ("tokenizer.json", TOKENIZER_BYTES));

    fixture.order(Order::FetchFiles(wire::FetchFiles { hash: b"unknown".as_slice().into() })).await;
    fixture.until(|known| !known.parts.is_empty()).await;
    assert_eq!(fixture.known.parts[0].hash, b"unknown".as_slice());
    assert_ne!(fixture.known.parts[0].error, "");
    fixture.stop().await;
}
