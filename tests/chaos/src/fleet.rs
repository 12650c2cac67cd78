//! Fleet of a run: two routers, and three agents with two simulated engines each.
//!
//! All are processes of the real program, and a restarted one returns to its place.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::Value;
use tokio::sync::Mutex;
use tokio::time::{sleep, timeout};

use crate::client::Client;
use crate::plan::{AGENTS, ENGINES, ROUTERS};
use crate::process::{Process, Workplace};

const OPERATOR: Duration = Duration::from_secs(10);

const PAGE: Duration = Duration::from_secs(5);

/// How long routers and agents let requests finish when they are told to stop.
///
/// It is so short that some requests do not finish.
const DRAIN: &str = "3s";

#[derive(Debug)]
pub(crate) struct Router {
    number: usize,
    pub(crate) edge: SocketAddr,
    agents: SocketAddr,
    admin: SocketAddr,
    /// Process of the router; `None` while it is away. Held while a fault is injected.
    pub(crate) process: Mutex<Option<Process>>,
    /// Counter of the beginnings and ends of faults that break connections.
    disturbances: AtomicU64,
}

/// An agent; `None` while it is away.
#[derive(Debug, Default)]
pub(crate) struct Agent {
    pub(crate) process: Mutex<Option<Process>>,
}

#[derive(Debug)]
pub(crate) struct Fleet {
    pub(crate) place: Workplace,
    pub(crate) routers: [Router; ROUTERS],
    pub(crate) agents: [Agent; AGENTS],
    home: Ipv4Addr,
}

/// A replica as a router sees it.
#[derive(Debug, Clone)]
pub(crate) struct Replica {
    pub(crate) id: String,
    pub(crate) phase: String,
    pub(crate) pid: u32,
    /// Requests there, by the router's count, the agent's and the engine's.
    pub(crate) requests: u64,
}

impl Router {
    /// Records the beginning or the end of a fault that breaks the router's connections.
    pub(crate) fn disturb(&self) {
        self.disturbances.fetch_add(1, Ordering::SeqCst);
    }

    /// Moment for a later call of `was_disturbed`.
    pub(crate) fn moment(&self) -> u64 {
        self.disturbances.load(Ordering::SeqCst)
    }

    /// Whether the router's connections may have broken since.
    pub(crate) fn was_disturbed(&self, since: u64) -> bool {
        since % 2 == 1 || self.moment() != since
    }

    /// Value of one of the router's own figures; `None` while it does not answer.
    pub(crate) async fn figure(&self, name: &str) -> Option<f64> {
        let page = Client::new(self.admin, false).get("/metrics", PAGE).await?;
        let samples = page.lines().filter(|line| line.split(['{', ' ']).next() == Some(name));
        Some(samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
    }
}

impl Fleet {
    /// Starts the whole fleet and waits until each router has every engine ready.
    pub(crate) async fn start(program: &Path) -> anyhow::Result<Self> {
        // No other process binds a port of this address while a router is away.
        let [.., second, last] = std::process::id().to_be_bytes();
        let home = Ipv4Addr::new(127, 77, second, last.max(1));
        let place = Workplace::new(program)?;
        let (first, second) = (Self::first(&place, home, 0).await?, Self::first(&place, home, 1).await?);
        let fleet = Self { place, routers: [first, second], agents: Default::default(), home };
        for agent in 0..AGENTS {
            *fleet.agents[agent].process.lock().await = Some(fleet.agent(agent)?);
        }
        fleet.until_ready(Duration::from_secs(60)).await?;
        Ok(fleet)
    }

    async fn first(place: &Workplace, home: Ipv4Addr, number: usize) -> anyhow::Result<Router> {
        let free = SocketAddr::from((home, 0));
        let mut process = router(place, number, [free; 3])?;
        let [edge, agents, admin] = process.wait_for_lines(["edge ", "agents ", "admin "]).await.context("a router")?;
        let address = |line: String| line.trim_start_matches("http://").trim_end_matches("/v1").parse::<SocketAddr>();
        let (edge, agents, admin) = (address(edge)?, address(agents)?, address(admin)?);
        Ok(Router { number, edge, agents, admin, process: Mutex::new(Some(process)), disturbances: AtomicU64::new(0) })
    }

    /// Starts a router in its old place.
    pub(crate) async fn router(&self, number: usize) -> anyhow::Result<Process> {
        let Router { edge, agents, admin, .. } = self.routers[number];
        let mut process = router(&self.place, number, [edge, agents, admin])?;
        process.wait_for_lines(["edge ", "agents ", "admin "]).await.with_context(|| format!("router {number}, started again"))?;
        Ok(process)
    }

    /// Starts an agent, which takes over the engines of a killed one.
    pub(crate) fn agent(&self, number: usize) -> anyhow::Result<Process> {
        let node = format!("n{number}");
        let routers = self.routers.each_ref().map(|router| router.agents.to_string());
        let engines = ENGINES.to_string();
        let keeps = if number + 1 == AGENTS { "keep" } else { "kill" };
        let mut arguments = vec!["agent", "--node", &node, "--engine", "simulated", "--replicas", &engines, "--if-agent-dies", keeps];
        routers.iter().for_each(|router| arguments.extend(["--router", router]));
        arguments.extend(["--drain-timeout", DRAIN, "--stop-grace", "2s", "--"]);
        arguments.extend(["--sim-start-ms", "200", "--sim-step-ms", "15"]);
        self.place.start(&node, &arguments)
    }

    /// Runs an operator's subcommand at a router, and returns its output.
    ///
    /// Only this function knows how operators reach a router.
    pub(crate) async fn operate(&self, router: usize, arguments: &[&str], patience: Duration) -> anyhow::Result<String> {
        let socket = socket(&self.place, router);
        let mut all = arguments.to_vec();
        all.extend(["--admin", &socket]);
        let output = timeout(patience, self.place.command(&all).output()).await;
        let output = output.with_context(|| format!("hostler {arguments:?} does not end"))??;
        ensure!(output.status.success(), "hostler {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Replicas as a router sees them.
    pub(crate) async fn replicas(&self, router: usize) -> anyhow::Result<Vec<Replica>> {
        let printed = self.operate(router, &["ps", "--json"], OPERATOR).await?;
        let listed: Value = serde_json::from_str(&printed).context("what hostler ps says")?;
        let nodes = listed["nodes"].as_array().context("what hostler ps says has no nodes")?;
        let replica = |replica: &Value| Replica {
            id: replica["id"].as_str().unwrap_or_default().to_owned(),
            phase: replica["phase"].as_str().unwrap_or_default().to_owned(),
            pid: replica["engine_pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0),
            requests: ["in_flight", "local_in_flight", "running", "waiting"].iter().map(|of| replica[of].as_u64().unwrap_or(0)).sum(),
        };
        Ok(nodes.iter().filter_map(|node| node["replicas"].as_array()).flatten().map(replica).collect())
    }

    /// Waits until each router has every engine ready.
    pub(crate) async fn until_ready(&self, patience: Duration) -> anyhow::Result<()> {
        self.until(patience, |replicas| replicas.iter().all(|replica| replica.phase == "ready")).await
    }

    /// Waits until each router sees all engines, and the condition holds.
    pub(crate) async fn until(&self, patience: Duration, are: impl Fn(&[Replica]) -> bool) -> anyhow::Result<()> {
        let begun = Instant::now();
        for router in &self.routers {
            loop {
                let seen = self.replicas(router.number).await;
                if seen.as_ref().is_ok_and(|replicas| replicas.len() == AGENTS * ENGINES && are(replicas)) {
                    break;
                }
                if begun.elapsed() > patience {
                    bail!("after {patience:?} router {} sees {seen:#?}", router.number);
                }
                sleep(Duration::from_millis(200)).await;
            }
        }
        Ok(())
    }

    /// Whether a port of this address is still listened on.
    pub(crate) fn listens(&self) -> bool {
        let tables = std::fs::read_to_string("/proc/net/tcp").unwrap_or_default();
        let home = format!("{:08X}:", u32::from_le_bytes(self.home.octets()));
        // `0A` is LISTEN.
        let ours = |line: &str| {
            let mut fields = line.split_whitespace().skip(1);
            fields.next().is_some_and(|local| local.starts_with(&home)) && fields.nth(1) == Some("0A")
        };
        tables.lines().any(ours)
    }
}

/// Socket on which operators reach a router.
fn socket(place: &Workplace, number: usize) -> String {
    place.path().join(format!("router{number}.sock")).to_string_lossy().into_owned()
}

fn router(place: &Workplace, number: usize, [edge, agents, admin]: [SocketAddr; 3]) -> anyhow::Result<Process> {
    let (name, caches) = (format!("router{number}"), place.path().join(format!("cache{number}")));
    let (edge, agents, admin) = (edge.to_string(), agents.to_string(), admin.to_string());
    let socket = socket(place, number);
    let mut arguments = vec!["router", "--listen", &edge, "--agents-listen", &agents, "--admin-listen", &admin];
    arguments.extend(["--operators-socket", &socket]);
    let caches = caches.to_string_lossy();
    arguments.extend(["--drain-timeout", DRAIN, "--cache-dir", &caches]);
    place.start(&name, &arguments)
}
