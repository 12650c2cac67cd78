//! A router in this process and agents as separate programs, for tests of an agent's processes.

use std::fs;
use std::path::PathBuf;

use hostler_router::RouterConfig;
use rustix::process::Signal;

use super::admin::{Admin, Seen};
use super::fleet::RunningRouter;
use super::program::{Program, Workplace};
use super::wait::until;

/// A router, and one workplace for the agents that a test starts as programs.
pub(crate) struct Scene {
    pub(crate) place: Workplace,
    pub(crate) router: RunningRouter,
}

impl Scene {
    pub(crate) async fn new() -> Self {
        let local = || "127.0.0.1:0".to_owned();
        let config = RouterConfig { listen: local(), agents_listen: local(), admin_listen: local(), ..RouterConfig::default() };
        let place = Workplace::new();
        let (cache_dir, operators_socket) = (place.path().join("caches"), place.path().join("o.sock"));
        let config = RouterConfig { cache_dir, operators_socket, ..config };
        Self { place, router: RunningRouter::start(config).await }
    }

    /// An agent of node `n0`, whose engines make a token each 10 ms.
    pub(crate) fn agent(&self, name: &str, replicas: &str, flags: &[&str]) -> Program {
        self.start(name, replicas, flags, Workplace::start)
    }

    /// An agent of node `n0` as leader of a session, as a batch system starts jobs.
    pub(crate) fn job(&self, name: &str, replicas: &str, flags: &[&str]) -> Program {
        self.start(name, replicas, flags, Workplace::start_session)
    }

    fn start(&self, name: &str, replicas: &str, flags: &[&str], start: fn(&Workplace, &str, &[&str]) -> Program) -> Program {
        let router = self.router.agents.to_string();
        let mut arguments = vec!["agent", "--router", &router, "--node", "n0", "--engine", "simulated", "--replicas", replicas];
        arguments.extend(flags);
        arguments.extend(["--", "--sim-start-ms", "50", "--sim-step-ms", "10", "--enable-sleep-mode", "--enable-lora"]);
        start(&self.place, name, &arguments)
    }

    pub(crate) fn admin(&self) -> Admin {
        self.router.admin()
    }

    pub(crate) async fn ready(&self, count: usize) -> Vec<Seen> {
        self.until_replicas("all replicas ready", |replicas| replicas.len() == count && replicas.iter().all(Seen::is_ready)).await
    }

    pub(crate) async fn until_replicas(&self, what: &str, are: impl Fn(&[Seen]) -> bool) -> Vec<Seen> {
        until(what, async || {
            let replicas = self.admin().replicas().await.map_err(|status| status.to_string())?;
            if are(&replicas) { Ok(replicas) } else { Err(format!("{replicas:#?}")) }
        })
        .await
    }

    /// Directory of the only engine of the only agent.
    pub(crate) fn engine(&self) -> PathBuf {
        let records: Vec<_> = self.place.left().into_iter().filter(|path| path.ends_with("engine.pid")).collect();
        assert_eq!(records.len(), 1, "{records:?}");
        records[0].parent().unwrap().to_owned()
    }

    /// Processes that keep an engine.
    pub(crate) fn keepers(&self) -> Vec<u32> {
        let name = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        self.place.processes().into_iter().filter(|pid| name(pid).trim() == "engine-keeper").collect()
    }

    /// Ends the agent, which must exit as it should and leave nothing behind, not even a file.
    pub(crate) async fn ends(&self, agent: &mut Program, signal: Signal) {
        agent.signal(signal);
        assert!(agent.ended().await.success(), "{}", agent.stderr());
        self.until_no_process_is_left().await;
        assert_eq!(self.place.left(), Vec::<PathBuf>::new());
    }

    pub(crate) async fn until_no_process_is_left(&self) {
        until("nothing left of agent, keepers and engines", async || {
            let left = self.place.processes();
            if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
        })
        .await;
    }
}
