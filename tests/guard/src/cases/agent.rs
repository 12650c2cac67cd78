//! The agent's part: requests from a real router to an engine that answers on command, and its
//! answers back.
//!
//! The agent is the production one with its keeper; the router and the clients run uncounted on
//! this thread.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use hostler_agent::{Agent, AgentConfig, EngineKind};
use hostler_boot::Shutdown;
use hostler_router::Router;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::sleep;

use super::clients::{ANSWER, Client, EVENT, chat, chunk};
use super::scene::{admin_page, settings};
use crate::counted::{CountedThread, drive, flush};
use crate::fake_engine::{ANSWER_ALL, AWAIT};

/// Streams that the engine steps together.
pub(crate) const STREAMS: u32 = 256;

/// Number of counted steps.
pub(crate) const STEPS: u32 = 20;

pub(crate) const AT_ONCE: u32 = 16;

/// Number of counted rounds.
pub(crate) const ROUNDS: u32 = 40;

const WARM: u32 = 5;

/// Time limit for the agent and its engine to be ready, under valgrind on a busy machine.
const START: Duration = Duration::from_secs(60);

/// A fleet of one agent, which is counted.
pub(super) struct AgentFixture {
    pub(super) agent: CountedThread,
    edge: SocketAddr,
    /// The router's pages for operators.
    pub(super) admin: SocketAddr,
    /// Connection on which the engine takes orders.
    engine: UnixStream,
    shutdown: Shutdown,
    _folder: TempDir,
}

impl AgentFixture {
    pub(super) async fn start(kv_events: bool) -> anyhow::Result<Self> {
        // Keep the path short: the paths of Unix sockets begin with it.
        let folder = tempfile::Builder::new().prefix("g-").tempdir_in("/tmp")?;
        let router = Router::bind(settings(&folder)).await?;
        let (edge, admin, agents) = (router.edge_address(), router.admin_address(), router.agents_address());
        tokio::spawn(router.run(Shutdown::new()));
        let steps = folder.path().join("steps");
        let config = AgentConfig {
            router: vec![agents.to_string()],
            node: "guard".into(),
            engine: EngineKind::Simulated,
            replicas: 1,
            engine_args: vec!["--steps".into(), steps.display().to_string()],
            run_dir: folder.path().join("r"),
            log_dir: folder.path().join("l"),
            kv_events,
            // No timer should fire.
            probe_interval: Duration::from_secs(3600),
            stall_timeout: Duration::from_secs(3600),
            canary_interval: Duration::ZERO,
            stop_grace: Duration::from_secs(1),
            ..AgentConfig::default()
        };
        let program = std::env::current_exe()?;
        let shutdown = Shutdown::new();
        let ending = shutdown.clone();
        let agent = CountedThread::start(move || async move {
            let agent = Agent::prepare_with(config, &program).await.expect("nothing that it needs is missing");
            agent.run(ending).await.expect("it has no address to bind");
        })?;
        let engine = tokio::time::timeout(START, ready(admin, &steps)).await.context("the engine was not ready in time")?;
        Ok(Self { agent, edge, admin, engine, shutdown, _folder: folder })
    }

    /// Waits until this many requests wait in the engine.
    async fn until_waiting(&mut self, count: u32) -> anyhow::Result<()> {
        self.order(AWAIT, count).await
    }

    /// Makes the engine answer every waiting request, so that the agent sees everything at once.
    async fn answer_all(&mut self) -> anyhow::Result<()> {
        let hold = self.agent.pause().await;
        let done = self.order(ANSWER_ALL, 0).await;
        drop(hold);
        done
    }

    pub(super) async fn order(&mut self, order: u32, count: u32) -> anyhow::Result<()> {
        self.engine.write_u64((u64::from(order) << 32) | u64::from(count)).await?;
        ensure!(self.engine.read_u8().await.context("the engine has ended")? == 0, "the engine did not obey");
        Ok(())
    }

    /// Sends a request of each client, so that the agent sees all of them at once.
    async fn send(&self, clients: &mut [Client], request: &[u8]) -> anyhow::Result<()> {
        let _hold = self.agent.pause().await;
        for client in clients {
            client.send(request).await?;
        }
        // The router is on this thread; its sockets are polled between turns.
        for _ in 0..4 {
            sleep(Duration::from_millis(5)).await;
            flush().await;
        }
        Ok(())
    }

    /// Ends the engine with its agent.
    pub(super) async fn end(self) {
        self.agent.end().await;
        self.shutdown.stop();
        // The keeper sees the end even if this process exits first.
        sleep(Duration::from_millis(100)).await;
    }
}

/// Waits until the router has a replica, and connects to the socket for its engine's orders.
async fn ready(admin: SocketAddr, steps: &Path) -> UnixStream {
    let steps: PathBuf = steps.into();
    loop {
        if is_ready(admin).await.unwrap_or(false)
            && let Ok(engine) = UnixStream::connect(&steps).await
        {
            return engine;
        }
        sleep(Duration::from_millis(50)).await;
    }
}

async fn is_ready(admin: SocketAddr) -> std::io::Result<bool> {
    Ok(admin_page(admin, "/readyz").await?.starts_with("HTTP/1.1 200 "))
}

pub(crate) fn events() -> anyhow::Result<()> {
    drive(async {
        let mut scene = AgentFixture::start(false).await?;
        let mut clients = Client::connect(scene.edge, STREAMS).await?;
        scene.send(&mut clients, &stream()).await?;
        scene.until_waiting(STREAMS).await?;
        let chunk = chunk(EVENT);
        for step in 0..WARM + STEPS {
            if step == WARM {
                scene.agent.begin().await;
            }
            scene.answer_all().await?;
            for client in &mut clients {
                if step == 0 {
                    client.head().await?;
                }
                client.expect(&chunk).await?;
            }
        }
        scene.end().await;
        Ok(())
    })
}

pub(crate) fn requests() -> anyhow::Result<()> {
    drive(async {
        let mut scene = AgentFixture::start(false).await?;
        let mut clients = Client::connect(scene.edge, AT_ONCE).await?;
        let request = chat("Hello", r#""stream":false"#);
        for round in 0..WARM + ROUNDS {
            if round == WARM {
                scene.agent.begin().await;
            }
            scene.send(&mut clients, &request).await?;
            scene.until_waiting(AT_ONCE).await?;
            scene.answer_all().await?;
            for client in &mut clients {
                client.answer(ANSWER).await?;
            }
        }
        scene.end().await;
        Ok(())
    })
}

fn stream() -> Vec<u8> {
    chat("Tell me about engines.", r#""stream":true"#)
}
