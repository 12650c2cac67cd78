//! Checks after a run: no request is counted anywhere, no process has grown, and nothing is left
//! once all have ended.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::fleet::Fleet;
use crate::process::{descriptors, memory};
use crate::tally::Tally;

/// Time limit for an undisturbed fleet to serve again.
///
/// Engines that were killed often wait before they start.
const READY: Duration = Duration::from_secs(60);

/// Time limit for the last counts to disappear.
///
/// By then a client that left has been noticed, and a report of an idle engine has come.
const IDLE: Duration = Duration::from_secs(15);

/// How often processes are examined.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Most additional memory of a router or an agent compared with before the load, at any time.
///
/// Some megabytes are usual.
const MOST_GROWTH: u64 = 64 << 20;

/// Most additional descriptors of an idle router compared with before the load.
const MOST_DESCRIPTORS: usize = 40;

/// Figures of the router itself that are zero if nothing is in flight.
const FIGURES: [&str; 3] = ["hostler_in_flight", "hostler_queued_requests", "hostler_replica_local_in_flight"];

#[derive(Debug)]
pub(crate) struct Baseline {
    memory: [(&'static str, u64); 2],
    descriptors: Vec<usize>,
}

impl Baseline {
    pub(crate) async fn of(fleet: &Fleet) -> Self {
        let (mut memory, mut open) = ([("routers", 0), ("agents", 0)], Vec::new());
        for (kind, pid) in processes(fleet).await {
            let of = &mut memory[usize::from(kind == "agents")].1;
            *of = (*of).max(crate::process::memory(pid));
            if kind == "routers" {
                open.push(descriptors(pid));
            }
        }
        Self { memory, descriptors: open }
    }
}

/// Records memory and retries until it is dropped.
pub(crate) async fn watch(fleet: Arc<Fleet>, tally: Arc<Tally>) {
    let mut tick = interval(LOOK_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        look(&fleet, &tally).await;
    }
}

async fn look(fleet: &Fleet, tally: &Tally) {
    for (kind, pid) in processes(fleet).await {
        tally.memory(kind, memory(pid));
    }
    for (number, router) in fleet.routers.iter().enumerate() {
        if let Some(retries) = router.figure("hostler_retries_total").await {
            tally.retries(number, retries);
        }
    }
}

/// Routers and agents that run and have no fault now.
async fn processes(fleet: &Fleet) -> Vec<(&'static str, u32)> {
    let routers = fleet.routers.iter().map(|router| ("routers", &router.process));
    let agents = fleet.agents.iter().map(|agent| ("agents", &agent.process));
    let held = |(kind, place): (&'static str, &tokio::sync::Mutex<Option<crate::process::Process>>)| {
        Some((kind, place.try_lock().ok()?.as_ref()?.pid()))
    };
    routers.chain(agents).filter_map(held).collect()
}

/// Brings the fleet back and checks that no request is counted any more.
pub(crate) async fn check_recovery(fleet: &Fleet, tally: &Tally, before: &Baseline) {
    let begun = Instant::now();
    loop {
        if let Err(error) = fleet.heal().await {
            tally.note(&format!("healing: {error:#}"));
        }
        match fleet.until_ready(Duration::from_secs(5)).await {
            Ok(()) => break,
            Err(error) if begun.elapsed() > READY => return tally.violation(&format!("the fleet does not come back: {error:#}")),
            Err(_) => {}
        }
    }
    if let Err(error) = idle(fleet).await {
        tally.violation(&error);
    }
    look(fleet, tally).await;
    for (kind, had) in before.memory {
        let most = tally.most_memory(kind);
        if most > had + MOST_GROWTH {
            tally.violation(&format!("memory of {kind} has grown from {} to {} MiB", had >> 20, most >> 20));
        }
    }
    let routers = processes(fleet).await.into_iter().filter(|(kind, _)| *kind == "routers");
    for ((_, pid), had) in routers.zip(&before.descriptors) {
        let open = descriptors(pid);
        if open > had + MOST_DESCRIPTORS {
            tally.violation(&format!("an idle router has {open} files and sockets open, and had {had} before the load"));
        }
    }
}

/// Waits until no router, agent or engine counts a request.
async fn idle(fleet: &Fleet) -> Result<(), String> {
    let begun = Instant::now();
    loop {
        let counted = counted(fleet).await;
        if counted.is_empty() {
            return Ok(());
        }
        if begun.elapsed() > IDLE {
            return Err(format!("{IDLE:?} after the last answer there are still counted: {}", counted.join("; ")));
        }
        sleep(Duration::from_millis(200)).await;
    }
}

async fn counted(fleet: &Fleet) -> Vec<String> {
    let mut counted = Vec::new();
    for (number, router) in fleet.routers.iter().enumerate() {
        for name in FIGURES {
            match router.figure(name).await {
                Some(0.0) => {}
                figure => counted.push(format!("router {number}: {name} {figure:?}")),
            }
        }
        match fleet.replicas(number).await {
            Ok(replicas) => {
                let busy = replicas.into_iter().filter(|replica| replica.requests > 0);
                counted.extend(busy.map(|replica| format!("router {number}: {replica:?}")));
            }
            Err(error) => counted.push(format!("router {number}: {error:#}")),
        }
    }
    counted
}

/// Ends the whole fleet and checks that nothing is left.
pub(crate) async fn end(fleet: &Fleet, tally: &Tally) {
    if let Err(error) = fleet.end().await {
        tally.violation(&format!("at the end: {error:#}"));
    }
    let begun = Instant::now();
    // Keepers outlive their engines.
    while !fleet.place.processes().is_empty() && begun.elapsed() < IDLE {
        sleep(Duration::from_millis(100)).await;
    }
    let left = fleet.place.processes();
    if !left.is_empty() {
        let names: Vec<String> =
            left.iter().map(|pid| std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default()).collect();
        tally.violation(&format!("processes are left: {left:?} {names:?}"));
    }
    let files = fleet.place.leftover_files();
    if !files.is_empty() {
        tally.violation(&format!("files are left: {files:?}"));
    }
    if fleet.listens() {
        tally.violation("a port is still listened on");
    }
    fleet.place.panics().iter().for_each(|line| tally.violation(line));
}
