//! Routers, agents and simulated engines in this process, over real sockets.
//!
//! If the test's clock is paused, so is theirs: waiting takes no time, and a busy machine makes
//! nobody late. Dropping a `Fleet` stops it, even in a failing test.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hostler_agent::keeper::InProcessEngines;
use hostler_agent::{Agent, AgentConfig, AgentError, EngineKind};
use hostler_boot::Shutdown;
use hostler_proto::agent::v1::agent_link_client::AgentLinkClient;
use hostler_proto::agent::v1::attach_request::Message;
use hostler_proto::agent::v1::{AttachRequest, AttachResponse};
use hostler_router::{Router, RouterConfig};
use serde_json::json;
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::{Channel, Endpoint as TonicEndpoint};
use tonic::{Status, Streaming};

use super::PROGRAM;
use super::admin::{Admin, Seen};
use super::client::Endpoint;
use super::engines::{in_process, pace_paused_clock};
use super::program::kill_group;
use super::wait::{soon, until};

/// Defaults for engines' flags.
const ENGINE_DEFAULTS: [(&str, &str); 2] = [("--sim-step-ms", "5"), ("--sim-start-ms", "50")];

#[derive(Debug, Clone)]
pub(crate) struct Setup {
    agents: usize,
    routers: usize,
    router: RouterConfig,
    agent: AgentConfig,
    engine: Vec<String>,
    engine_of: Vec<(usize, Vec<String>)>,
    engines_are_processes: bool,
}

impl Setup {
    /// One router and this many agents, `n0`, `n1` and so on, with one engine each.
    pub(crate) fn agents(agents: usize) -> Self {
        let local = || "127.0.0.1:0".to_owned();
        let router = RouterConfig {
            listen: local(),
            agents_listen: local(),
            admin_listen: local(),
            drain_timeout: Duration::from_secs(20),
            ..RouterConfig::default()
        };
        let agent = AgentConfig {
            engine: EngineKind::Simulated,
            replicas: 1,
            drain_timeout: Duration::from_secs(20),
            stop_grace: Duration::from_secs(2),
            probe_interval: Duration::from_millis(20),
            ..AgentConfig::default()
        };
        Self { agents, routers: 1, router, agent, engine: Vec::new(), engine_of: Vec::new(), engines_are_processes: false }
    }

    /// One router and two agents with one engine each.
    pub(crate) fn two_agents() -> Self {
        Self::agents(2)
    }

    pub(crate) fn routers(mut self, routers: usize) -> Self {
        self.routers = routers;
        self
    }

    pub(crate) fn engine(mut self, flags: &str) -> Self {
        self.engine.extend(flags.split_whitespace().map(str::to_owned));
        self
    }

    pub(crate) fn engine_of(mut self, agent: usize, flags: &str) -> Self {
        self.engine_of.push((agent, flags.split_whitespace().map(str::to_owned).collect()));
        self
    }

    /// Runs engines as processes, to test their output and their processes.
    ///
    /// Their clock is never paused.
    pub(crate) fn engines_as_processes(mut self) -> Self {
        self.engines_are_processes = true;
        self
    }

    pub(crate) fn router(mut self, change: impl FnOnce(&mut RouterConfig)) -> Self {
        change(&mut self.router);
        self
    }

    pub(crate) fn agent(mut self, change: impl FnOnce(&mut AgentConfig)) -> Self {
        change(&mut self.agent);
        self
    }

    /// Agents with engines that run already.
    pub(crate) fn attach(self, targets: &[String]) -> Self {
        self.agent(|agent| (agent.attach, agent.replicas) = (targets.to_vec(), 0))
    }

    fn engine_args(&self, agent: usize) -> Vec<String> {
        if !self.agent.attach.is_empty() {
            return Vec::new();
        }
        let own = self.engine_of.iter().filter(|(of, _)| *of == agent).flat_map(|(_, flags)| flags);
        let mut flags: Vec<String> = self.engine.iter().chain(own).cloned().collect();
        for (flag, value) in ENGINE_DEFAULTS {
            if !flags.iter().any(|given| given == flag) {
                flags.extend([flag.to_owned(), value.to_owned()]);
            }
        }
        flags
    }
}

#[derive(Debug)]
pub(crate) struct RunningRouter {
    pub(crate) edge: SocketAddr,
    pub(crate) agents: SocketAddr,
    pub(crate) admin: SocketAddr,
    socket: Admin,
    pub(crate) shutdown: Shutdown,
    pub(crate) task: JoinHandle<()>,
}

#[derive(Debug)]
pub(crate) struct RunningAgent {
    pub(crate) shutdown: Shutdown,
    pub(crate) task: JoinHandle<Result<(), AgentError>>,
    /// Run directory, below which the agent makes its own directory.
    pub(crate) run_dir: PathBuf,
}

#[derive(Debug)]
pub(crate) struct Fleet {
    pub(crate) routers: Vec<RunningRouter>,
    pub(crate) agents: Vec<RunningAgent>,
    setup: Setup,
    directory: TempDir,
    engines: Arc<InProcessEngines>,
    _pace: AbortOnDropHandle<()>,
}

impl RunningRouter {
    pub(crate) async fn start(config: RouterConfig) -> Self {
        let router = Router::bind(config).await.unwrap();
        let (edge, agents, admin) = (router.edge_address(), router.agents_address(), router.admin_address());
        let socket = Admin::at(router.operators_socket().unwrap());
        let shutdown = Shutdown::new();
        let running = router.run(shutdown.clone());
        let task = tokio::spawn(async { running.await.unwrap() });
        Self { edge, agents, admin, socket, shutdown, task }
    }

    pub(crate) fn edge(&self) -> Endpoint {
        Endpoint::Tcp(self.edge)
    }

    pub(crate) fn admin(&self) -> Admin {
        self.socket
    }

    pub(crate) async fn metric(&self, name: &str) -> f64 {
        Endpoint::Tcp(self.admin).metric(name).await
    }
}

impl Fleet {
    /// Starts everything and waits until every router sees every replica ready.
    pub(crate) async fn start(setup: Setup) -> Self {
        let fleet = Self::launch(setup).await;
        fleet.until_ready().await;
        fleet
    }

    pub(crate) async fn launch(setup: Setup) -> Self {
        // This log is shown when a test fails.
        let log = hostler_boot::telemetry::LogConfig { level: "info,h2=off".into(), ..Default::default() };
        hostler_boot::telemetry::init(&log).unwrap();
        let directory = tempfile::Builder::new().prefix("h-").tempdir_in("/tmp").unwrap();
        let pace = AbortOnDropHandle::new(tokio::spawn(pace_paused_clock()));
        let mut fleet =
            Self { routers: Vec::new(), agents: Vec::new(), setup: setup.clone(), directory, engines: in_process(), _pace: pace };
        for index in 0..setup.routers {
            // Each router has its socket, and keeps models' tokenizers, in a separate place.
            let cache_dir = fleet.directory.path().join(format!("c{index}"));
            let operators_socket = fleet.directory.path().join(format!("o{index}.sock"));
            fleet.routers.push(RunningRouter::start(RouterConfig { cache_dir, operators_socket, ..setup.router.clone() }).await);
        }
        let addresses: Vec<String> = fleet.routers.iter().map(|router| router.agents.to_string()).collect();
        for _ in 0..setup.agents {
            fleet.add_agent(addresses.clone()).await;
        }
        fleet
    }

    /// Starts one more agent, for the routers at these addresses.
    pub(crate) async fn add_agent(&mut self, routers: Vec<String>) {
        let index = self.agents.len();
        let run_dir = self.directory.path().join(format!("r{index}"));
        let config = AgentConfig {
            router: routers,
            node: format!("n{index}"),
            engine_args: self.setup.engine_args(index),
            run_dir: run_dir.clone(),
            log_dir: self.directory.path().join("logs"),
            ..self.setup.agent.clone()
        };
        let agent = soon("an agent's preparation", Agent::prepare_with(config, PROGRAM.as_ref())).await.unwrap();
        let agent = if self.setup.engines_are_processes { agent } else { agent.with_engines_in_process(self.engines.clone()) };
        let shutdown = Shutdown::new();
        let task = tokio::spawn(agent.run(shutdown.clone()));
        self.agents.push(RunningAgent { shutdown, task, run_dir });
    }

    pub(crate) fn edge(&self) -> Endpoint {
        self.routers[0].edge()
    }

    pub(crate) fn admin(&self) -> Admin {
        self.routers[0].admin()
    }

    pub(crate) fn router_config(&self) -> RouterConfig {
        let (cache_dir, operators_socket) = (self.directory.path().join("c"), self.directory.path().join("o.sock"));
        RouterConfig { cache_dir, operators_socket, ..self.setup.router.clone() }
    }

    /// Waits until every router knows the cache of every replica exactly, and can tokenize for it.
    pub(crate) async fn until_exact(&self) {
        for router in &self.routers {
            until("all caches known", async || {
                let replicas = router.admin().replicas().await.map_err(|status| status.to_string())?;
                if replicas.iter().all(|replica| replica.is_ready() && replica.cache.exact) {
                    Ok(())
                } else {
                    Err(format!("{replicas:#?}"))
                }
            })
            .await;
        }
    }

    /// Waits until every router has these blocks of a replica's cache, as its agent reports them.
    pub(crate) async fn until_cached(&self, id: &str, what: &str, is: impl Fn(u64) -> bool) {
        for router in &self.routers {
            until(&format!("{id} has cached {what}"), async || {
                let Seen { cache, .. } = router.admin().replica(id).await;
                if cache.exact && cache.matches && is(cache.blocks) { Ok(()) } else { Err(format!("{cache:?}")) }
            })
            .await;
        }
    }

    pub(crate) async fn until_ready(&self) {
        let standbys = usize::from(self.setup.agent.standby);
        let count = self.setup.agents * (self.setup.agent.replicas as usize + standbys);
        for router in &self.routers {
            until("all replicas ready", async || {
                let replicas = router.admin().replicas().await.map_err(|status| status.to_string())?;
                let ready = replicas.iter().filter(|replica| replica.is_ready()).count();
                if ready == count { Ok(()) } else { Err(format!("{replicas:#?}")) }
            })
            .await;
        }
    }

    /// A replica as the first router sees it.
    pub(crate) async fn replica(&self, id: &str) -> Seen {
        self.admin().replica(id).await
    }

    /// Waits until a replica meets this condition for the first router.
    pub(crate) async fn until_replica(&self, id: &str, what: &str, is: impl Fn(&Seen) -> bool) -> Seen {
        until(&format!("{id}: {what}"), async || {
            let replica = self.replica(id).await;
            if is(&replica) { Ok(replica) } else { Err(format!("{replica:#?}")) }
        })
        .await
    }

    /// Endpoint of a replica's engine, without any Hostler process in between.
    pub(crate) async fn engine(&self, id: &str) -> Endpoint {
        Endpoint::Unix(self.replica(id).await.socket.into())
    }

    pub(crate) async fn fault(&self, id: &str, kind: &str) {
        let answer = self.engine(id).await.post("/sim/fault", &json!({"kind": kind})).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }

    /// Makes an engine crash by itself, as if a request had caused it.
    pub(crate) async fn crash(&self, id: &str) {
        self.fault(id, "die").await;
    }

    /// Kills an engine from outside, which no request has caused.
    pub(crate) async fn kill(&self, id: &str) {
        let engine = self.replica(id).await.pid;
        if self.setup.engines_are_processes { kill_group(engine) } else { self.engines.kill(engine) }
    }

    /// Ends an engine like SIGTERM from a third party.
    pub(crate) async fn terminate(&self, id: &str) {
        self.engines.terminate(self.replica(id).await.pid);
    }

    /// Whether the engine with this id lives.
    pub(crate) fn is_running(&self, engine: u32) -> bool {
        self.engines.is_running(engine)
    }

    /// Waits until this many requests are in flight on a replica, over all routers.
    pub(crate) async fn until_in_flight(&self, id: &str, count: u32) {
        self.until_replica(id, &format!("{count} in flight"), |replica| replica.in_flight == count).await;
    }

    /// Waits until no request is counted any more: by the routers, the agents or the engines.
    pub(crate) async fn until_idle(&self) {
        until("nothing in flight", async || {
            for router in &self.routers {
                let in_flight = router.metric("hostler_in_flight").await;
                let replicas = router.admin().replicas().await.map_err(|status| status.to_string())?;
                if in_flight != 0.0 || replicas.iter().any(|replica| replica.local_in_flight + replica.in_flight > 0) {
                    return Err(format!("{in_flight} in flight in the router; {replicas:#?}"));
                }
                for replica in replicas.iter().filter(|replica| replica.is_ready()) {
                    let engine = Endpoint::Unix(replica.socket.clone().into());
                    let left = engine.metric("vllm:num_requests_running").await + engine.metric("vllm:num_requests_waiting").await;
                    if left != 0.0 {
                        return Err(format!("the engine of {} has {left} requests", replica.id));
                    }
                }
            }
            Ok(())
        })
        .await;
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        // The remaining tasks end with the runtime. An engine is killed when its supervisor's task
        // is dropped.
        self.agents.iter().for_each(|agent| agent.shutdown.stop());
        self.routers.iter().for_each(|router| router.shutdown.stop());
    }
}

/// The agents' side of a router's contract, for tests that use it themselves.
pub(crate) async fn link(router: SocketAddr) -> AgentLinkClient<Channel> {
    AgentLinkClient::new(TonicEndpoint::from_shared(format!("http://{router}")).unwrap().connect().await.unwrap())
}

/// Begins an `Attach` call as a real agent would, with these first messages; the sender is for
/// more.
pub(crate) async fn attach(
    router: SocketAddr,
    first: impl IntoIterator<Item = Message>,
) -> Result<(mpsc::Sender<AttachRequest>, Streaming<AttachResponse>), Status> {
    let (sender, messages) = mpsc::channel(16);
    for message in first {
        sender.try_send(AttachRequest { message: Some(message) }).unwrap();
    }
    let mut client = link(router).await;
    let answers = soon("an answer to Attach", client.attach(ReceiverStream::new(messages))).await?.into_inner();
    Ok((sender, answers))
}
