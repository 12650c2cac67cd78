//! Executes the plan: each step in a separate task, at its time, and undoes everything at the end
//! of the step.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use rustix::process::Signal;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use crate::fleet::{Fleet, Replica};
use crate::plan::{Engine, Fault, ROUTERS, Step};
use crate::process::{Process, signal, signal_group};
use crate::tally::Tally;

/// Time limit for a role to exit: the time that it gives its requests and engines, plus reserve for
/// a busy machine.
const END: Duration = Duration::from_secs(30);

const OPERATOR: Duration = Duration::from_secs(15);

/// Time limit of a rolling restart per engine.
const ROLLING: &str = "20s";

/// Executes all planned faults, and returns when the last one is undone.
pub(crate) async fn carry_out(fleet: &Arc<Fleet>, steps: Vec<Step>, begun: Instant, tally: &Arc<Tally>) {
    let mut under_way = JoinSet::new();
    for step in steps {
        sleep_until(begun + step.at).await;
        tally.note(&format!("{step}"));
        let (fleet, tally) = (fleet.clone(), tally.clone());
        under_way.spawn(async move {
            if let Err(error) = fleet.inject(step.fault).await {
                tally.violation(&format!("{step}: {error:#}"));
            }
        });
    }
    under_way.join_all().await;
}

impl Fleet {
    /// Injects one fault. A fault that is impossible now is skipped.
    ///
    /// # Errors
    /// When a router or an agent does not exit or start as it must.
    async fn inject(&self, fault: Fault) -> anyhow::Result<()> {
        match fault {
            Fault::KillEngine(engine) => {
                self.with_engine(engine, |pid| signal_group(pid, Signal::KILL)).await;
                Ok(())
            }
            Fault::TermEngine(engine) => {
                self.with_engine(engine, |pid| signal(pid, Signal::TERM)).await;
                Ok(())
            }
            Fault::StopEngine(engine, stopped) => {
                if let Some(pid) = self.with_engine(engine, |pid| signal_group(pid, Signal::STOP)).await {
                    sleep(stopped).await;
                    if self.place.is_ours(pid) {
                        signal_group(pid, Signal::CONT);
                    }
                }
                Ok(())
            }
            Fault::KillAgent(agent, away) => {
                let mut place = self.agents[agent].process.lock().await;
                end(&mut place, Signal::KILL, away).await?;
                *place = Some(self.agent(agent)?);
                Ok(())
            }
            Fault::TermAgent(agent, away) => {
                let mut place = self.agents[agent].process.lock().await;
                end(&mut place, Signal::TERM, away).await.with_context(|| format!("agent n{agent}"))?;
                *place = Some(self.agent(agent)?);
                Ok(())
            }
            Fault::StopAgent(agent, stopped) => {
                pause(&*self.agents[agent].process.lock().await, stopped).await;
                Ok(())
            }
            Fault::StopRouter(router, stopped) => {
                pause(&*self.routers[router].process.lock().await, stopped).await;
                Ok(())
            }
            Fault::KillRouter(router, away) => self.exchange_router(router, Signal::KILL, away).await,
            Fault::TermRouter(router, away) => self.exchange_router(router, Signal::TERM, away).await,
            Fault::Drain(router, engine, drained) => {
                self.ask(router, &["drain", "--force", &engine.to_string()]).await;
                sleep(drained).await;
                self.ask(router, &["release", &engine.to_string()]).await;
                Ok(())
            }
            Fault::Restart(router, engine) => {
                self.ask(router, &["restart", "--force", &engine.to_string()]).await;
                Ok(())
            }
            Fault::RollingRestart(router) => {
                // The rolling restart stops if another fault hits the engines meanwhile.
                let _ = self.operate(router, &["restart", "--rolling", "--wait", ROLLING], Duration::from_secs(120)).await;
                Ok(())
            }
        }
    }

    /// Sends an operator's request to a router, or to the other one while that is away.
    ///
    /// A refusal counts as an answer.
    async fn ask(&self, router: usize, arguments: &[&str]) {
        for router in [router, (router + 1) % ROUTERS] {
            if self.operate(router, arguments, OPERATOR).await.is_ok() {
                return;
            }
        }
    }

    /// Applies an action to the process of an engine, if one runs, and returns its id.
    async fn with_engine(&self, engine: Engine, act: impl Fn(u32)) -> Option<u32> {
        let engine_id = engine.to_string();
        for router in 0..ROUTERS {
            let seen = self.replicas(router).await.unwrap_or_default();
            let pid = seen.into_iter().find(|Replica { id, .. }| *id == engine_id).map(|replica| replica.pid);
            // The router may not know yet that the engine has exited, and its id may belong to
            // another process.
            if let Some(pid) = pid.filter(|pid| self.place.is_ours(*pid)) {
                act(pid);
                return Some(pid);
            }
        }
        None
    }

    /// Ends a router, and starts it again.
    async fn exchange_router(&self, number: usize, how: Signal, away: Duration) -> anyhow::Result<()> {
        let router = &self.routers[number];
        let mut place = router.process.lock().await;
        router.disturb();
        let ended = end(&mut place, how, away).await.with_context(|| format!("router {number}"));
        *place = Some(self.router(number).await?);
        router.disturb();
        ended
    }

    /// Undoes all faults: stopped processes continue, missing ones start, drained or failed
    /// replicas are released.
    pub(crate) async fn heal(&self) -> anyhow::Result<()> {
        for pid in self.place.processes() {
            signal(pid, Signal::CONT);
        }
        for replica in self.replicas(0).await? {
            if replica.phase != "ready" {
                self.ask(0, &["release", &replica.id]).await;
            }
        }
        Ok(())
    }

    /// Ends everything as an operator would: agents, then routers.
    ///
    /// # Errors
    /// When a process does not end, or not with the right status.
    pub(crate) async fn end(&self) -> anyhow::Result<()> {
        let agents = self.agents.iter().map(|agent| &agent.process);
        for place in agents.chain(self.routers.iter().map(|router| &router.process)) {
            end(&mut *place.lock().await, Signal::TERM, Duration::ZERO).await?;
        }
        Ok(())
    }
}

/// Ends a process by a signal and waits.
async fn end(place: &mut Option<Process>, how: Signal, away: Duration) -> anyhow::Result<()> {
    let Some(mut process) = place.take() else { return Ok(()) };
    process.signal(how);
    let status = process.wait_exit(END).await;
    sleep(away).await;
    let Some(status) = status else {
        process.kill().await;
        anyhow::bail!("it has not ended within {END:?} of a signal");
    };
    // An agent that had to cut requests off reports it by its status; the answers of their clients
    // are checked separately.
    anyhow::ensure!(how == Signal::KILL || matches!(status.code(), Some(0 | 5)), "it was told to end, and ended so: {status}");
    Ok(())
}

/// Stops a process for a while.
async fn pause(process: &Option<Process>, stopped: Duration) {
    if let Some(process) = process {
        process.signal(Signal::STOP);
        sleep(stopped).await;
        process.signal(Signal::CONT);
    }
}
