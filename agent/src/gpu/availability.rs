//! Whether an engine's GPUs are free enough for it.
//!
//! Checked before each start: an engine beside a leftover process fails minutes later for lack of
//! memory, in words that do not name the process.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::driver_thread::DriverTimeout;
use super::nvml::{self, GpuHealth, GpuProcess, GpuUsage};
use super::{Gpu, GpuDriver};
use crate::sizes::{format_gib, scaled};

/// Time for an ending process to free its memory.
///
/// The driver frees tens of GiB within a second or two.
const RELEASE_GRACE: Duration = Duration::from_secs(3);

/// Interval between two checks.
const RECHECK_INTERVAL: Duration = Duration::from_millis(200);

/// Most processes that a message names; there may be many.
const MAX_NAMED_PROCESSES: usize = 4;

/// Kernel inode of the first PID namespace, where processes have the ids that the driver reports.
const FIRST_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

#[derive(Debug, Clone)]
pub struct GpuAvailability {
    driver: GpuDriver,
    gpus: Vec<Gpu>,
    utilization: f64,
}

impl GpuAvailability {
    /// Check for an engine that has these GPUs to itself and uses this share of their memory. vLLM
    /// does not start if less than that is free.
    #[must_use]
    pub fn new(driver: GpuDriver, gpus: Vec<Gpu>, utilization: f64) -> Self {
        Self { driver, gpus, utilization }
    }

    /// Checks whether an engine may start now.
    ///
    /// Waits `RELEASE_GRACE` for processes that are about to end.
    ///
    /// # Errors
    /// The obstacle to a start.
    pub async fn check(&self) -> Result<(), StartObstacle> {
        let until = Instant::now() + RELEASE_GRACE;
        loop {
            match self.check_once().await {
                Err(obstacle) if obstacle.in_use && Instant::now() < until => sleep(RECHECK_INTERVAL).await,
                done => return done,
            }
        }
    }

    async fn check_once(&self) -> Result<(), StartObstacle> {
        for gpu in &self.gpus {
            let index = gpu.index;
            let Some(whole) = self.driver.whole_gpu(gpu.whole_uuid()) else { continue };
            let target = gpu.clone();
            let trouble = |cause: String, remedy: &str| Err(StartObstacle { in_use: false, cause, remedy: remedy.to_owned() });
            let found = match whole.ask(move |driver| nvml::read_usage(driver, &target)).await {
                Ok((GpuHealth::Reachable, found)) => found,
                Ok((GpuHealth::Lost, _)) => {
                    return trouble(format!("GPU {index} is lost: the driver does not reach it"), "reboot the node");
                }
                Ok((GpuHealth::NeedsReset, _)) => {
                    return trouble(format!("GPU {index} does not work before it is reset"), "reset the GPU or reboot the node");
                }
                Err(DriverTimeout) => {
                    let cause = format!("the driver does not answer questions about GPU {index}");
                    return trouble(cause, "reboot the node if `nvidia-smi` hangs as well");
                }
            };
            if let Some((free, needed)) = memory_shortfall(&found, self.utilization) {
                let occupants: Vec<GpuOccupant> = found.processes.into_iter().map(GpuOccupant::new).collect();
                return Err(in_use_obstacle(gpu, &occupants, free, needed));
            }
            // The occupants are a display, a monitor or the MPS server, or a process that will
            // compute at the same time.
            if !found.processes.is_empty() {
                let who = list_occupants(&found.processes.into_iter().map(GpuOccupant::new).collect::<Vec<_>>());
                tracing::warn!(gpu = index, who, "not alone on the GPU, and started all the same: enough of its memory is free");
            }
        }
        Ok(())
    }
}

/// Free and needed memory if too little is free, by vLLM's own condition.
///
/// If the driver does not know the memory, as on a GPU that shares its host's, the engine finds out
/// itself.
fn memory_shortfall(found: &GpuUsage, utilization: f64) -> Option<(u64, u64)> {
    let (total, used) = found.memory?;
    let (free, needed) = (total.saturating_sub(used), scaled(total, utilization));
    (free < needed).then_some((free, needed))
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartObstacle {
    /// Whether another process is in the way; otherwise the GPU itself does not work.
    pub in_use: bool,
    pub cause: String,
    pub remedy: String,
}

/// A process on a GPU, in an operator's terms.
#[derive(Debug, Clone, PartialEq, Eq)]
struct GpuOccupant {
    pid: u32,
    bytes: Option<u64>,
    /// Name and owner; `None` if they cannot be seen from here.
    who: Option<(String, String)>,
}

impl GpuOccupant {
    fn new(process: GpuProcess) -> Self {
        let directory = PathBuf::from(format!("/proc/{}", process.pid));
        let who = || {
            let name = fs::read_to_string(directory.join("comm")).ok()?;
            Some((name.trim().to_owned(), user_name(fs::metadata(&directory).ok()?.uid())))
        };
        Self { pid: process.pid, bytes: process.bytes, who: if is_in_first_pid_namespace() { who() } else { None } }
    }

    fn describe(&self) -> String {
        let mut facts = Vec::new();
        match &self.who {
            Some((name, owner)) => facts.extend([name.clone(), format!("user {owner}")]),
            None => facts.push("not visible from here: of another container or user".to_owned()),
        }
        facts.extend(self.bytes.map(format_gib));
        format!("process {} ({})", self.pid, facts.join(", "))
    }
}

/// Whether this process is in the first PID namespace.
///
/// In a container the driver's process ids differ from the container's, and the same id may be
/// another process.
fn is_in_first_pid_namespace() -> bool {
    fs::metadata("/proc/self/ns/pid").is_ok_and(|namespace| namespace.ino() == FIRST_PID_NAMESPACE)
}

fn user_name(uid: u32) -> String {
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let named = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == uid.to_string()).then(|| name.to_owned())
    });
    named.unwrap_or_else(|| uid.to_string())
}

fn list_occupants(occupants: &[GpuOccupant]) -> String {
    let mut who = occupants.iter().take(MAX_NAMED_PROCESSES).map(GpuOccupant::describe).collect::<Vec<_>>().join(", ");
    if occupants.len() > MAX_NAMED_PROCESSES {
        who.push_str(&format!(" and {} more", occupants.len() - MAX_NAMED_PROCESSES));
    }
    who
}

fn in_use_obstacle(gpu: &Gpu, occupants: &[GpuOccupant], free: u64, needed: u64) -> StartObstacle {
    let what = if gpu.slice.is_some() { format!("the slice {} of GPU {}", gpu.uuid, gpu.index) } else { format!("GPU {}", gpu.index) };
    // In a container the driver may show no other processes.
    let who = if occupants.is_empty() { "processes that are not visible from here".to_owned() } else { list_occupants(occupants) };
    let them = if occupants.len() == 1 { "it" } else { "them" };
    StartObstacle {
        in_use: true,
        cause: format!("{what} is in use by {who}: {} are free and the engine takes {}", format_gib(free), format_gib(needed)),
        remedy: format!(
            "end {them}, give the agent other GPUs with CUDA_VISIBLE_DEVICES, or have the engine take less with --gpu-memory-utilization after `--`"
        ),
    }
}

#[cfg(test)]
mod tests;
