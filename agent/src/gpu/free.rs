//! Whether the GPUs of an engine are free enough for it. Asked before each start: an engine beside a leftover process fails minutes later for
//! want of memory, with words that do not name the process.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::questions::{self, InUse, Process, Standing};
use super::thread::Silent;
use super::{Driver, Gpu};
use crate::plan::{gib, scaled};

/// How long a process that is ending may take until its memory is free; the driver clears up tens of GiB within a second or two.
const SETTLES: Duration = Duration::from_secs(3);

/// Between two looks.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// Processes that are named; there may be many.
const NAMED: usize = 4;

/// The kernel's number of the first PID namespace, in which processes have the numbers that the driver tells.
const FIRST_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// Tells whether an engine's GPUs are free.
#[derive(Debug, Clone)]
pub struct Free {
    driver: Driver,
    gpus: Vec<Gpu>,
    utilization: f64,
}

impl Free {
    /// For an engine on these GPUs, to itself, that uses this part of their memory: vLLM does not start where less than that is free.
    #[must_use]
    pub fn new(driver: Driver, gpus: Vec<Gpu>, utilization: f64) -> Self {
        Self { driver, gpus, utilization }
    }

    /// Whether an engine may start now. Waits three seconds for processes that are about to end, and ten for the driver.
    ///
    /// # Errors
    /// What is in the way.
    pub async fn check(&self) -> Result<(), Obstacle> {
        let until = Instant::now() + SETTLES;
        loop {
            match self.look().await {
                Err(obstacle) if obstacle.in_use && Instant::now() < until => sleep(LOOK_AGAIN).await,
                done => return done,
            }
        }
    }

    async fn look(&self) -> Result<(), Obstacle> {
        for gpu in &self.gpus {
            let index = gpu.index;
            let Some(whole) = self.driver.whole(gpu.whole()) else { continue };
            let asked = gpu.clone();
            let trouble = |cause: String, remedy: &str| Err(Obstacle { in_use: false, cause, remedy: remedy.to_owned() });
            let found = match whole.ask(move |driver| questions::in_use(driver, &asked)).await {
                Ok((Standing::Reachable, found)) => found,
                Ok((Standing::Lost, _)) => return trouble(format!("GPU {index} is lost: the driver does not reach it"), "reboot the node"),
                Ok((Standing::NeedsReset, _)) => {
                    return trouble(format!("GPU {index} does not work before it is reset"), "reset the GPU or reboot the node");
                }
                Err(Silent) => {
                    let cause = format!("the driver does not answer questions about GPU {index}");
                    return trouble(cause, "reboot the node if `nvidia-smi` hangs as well");
                }
            };
            if let Some((free, needed)) = lacks(&found, self.utilization) {
                let occupants: Vec<Occupant> = found.processes.into_iter().map(Occupant::new).collect();
                return Err(in_use(gpu, &occupants, free, needed));
            }
            // A display, a monitor or the server of MPS; or somebody who will compute at the same time.
            if !found.processes.is_empty() {
                let who = named(&found.processes.into_iter().map(Occupant::new).collect::<Vec<_>>());
                tracing::warn!(gpu = index, who, "not alone on the GPU, and started all the same: enough of its memory is free");
            }
        }
        Ok(())
    }
}

/// What is free and what is needed, where that is more; vLLM's own condition. A driver that does not tell of the memory, as where a GPU shares
/// its host's, leaves it to the engine to find out.
fn lacks(found: &InUse, utilization: f64) -> Option<(u64, u64)> {
    let (total, used) = found.memory?;
    let (free, needed) = (total.saturating_sub(used), scaled(total, utilization));
    (free < needed).then_some((free, needed))
}

/// What keeps an engine from starting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Obstacle {
    /// Somebody is there; else the GPU itself does not work.
    pub in_use: bool,
    /// Who or what it is.
    pub cause: String,
    /// What to do.
    pub remedy: String,
}

/// A process on a GPU, as people know it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Occupant {
    pid: u32,
    bytes: Option<u64>,
    /// Name and owner; `None` when it cannot be seen from here.
    who: Option<(String, String)>,
}

impl Occupant {
    fn new(process: Process) -> Self {
        let directory = PathBuf::from(format!("/proc/{}", process.pid));
        let who = || {
            let name = fs::read_to_string(directory.join("comm")).ok()?;
            Some((name.trim().to_owned(), user(fs::metadata(&directory).ok()?.uid())))
        };
        Self { pid: process.pid, bytes: process.bytes, who: if in_first_namespace() { who() } else { None } }
    }

    fn in_words(&self) -> String {
        let mut facts = Vec::new();
        match &self.who {
            Some((name, owner)) => facts.extend([name.clone(), format!("user {owner}")]),
            None => facts.push("not visible from here: of another container or user".to_owned()),
        }
        facts.extend(self.bytes.map(gib));
        format!("process {} ({})", self.pid, facts.join(", "))
    }
}

/// In a container the driver's numbers are not those that processes have in there, and the same number may be another process.
fn in_first_namespace() -> bool {
    fs::metadata("/proc/self/ns/pid").is_ok_and(|namespace| namespace.ino() == FIRST_PID_NAMESPACE)
}

fn user(uid: u32) -> String {
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let named = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == uid.to_string()).then(|| name.to_owned())
    });
    named.unwrap_or_else(|| uid.to_string())
}

fn named(occupants: &[Occupant]) -> String {
    let mut who = occupants.iter().take(NAMED).map(Occupant::in_words).collect::<Vec<_>>().join(", ");
    if occupants.len() > NAMED {
        who.push_str(&format!(" and {} more", occupants.len() - NAMED));
    }
    who
}

fn in_use(gpu: &Gpu, occupants: &[Occupant], free: u64, needed: u64) -> Obstacle {
    let what = if gpu.slice.is_some() { format!("the slice {} of GPU {}", gpu.uuid, gpu.index) } else { format!("GPU {}", gpu.index) };
    // In a container the driver may show none of the others.
    let who = if occupants.is_empty() { "processes that are not visible from here".to_owned() } else { named(occupants) };
    let them = if occupants.len() == 1 { "it" } else { "them" };
    Obstacle {
        in_use: true,
        cause: format!("{what} is in use by {who}: {} are free and the engine takes {}", gib(free), gib(needed)),
        remedy: format!(
            "end {them}, give the agent other GPUs with CUDA_VISIBLE_DEVICES, or have the engine take less with --gpu-memory-utilization after `--`"
        ),
    }
}

#[cfg(test)]
mod tests;
