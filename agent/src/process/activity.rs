//! Activity of an engine's processes while it produces nothing: whether one was stopped, and
//! whether its core computes.
//!
//! The watchdog must tell an engine that hangs from one in a long step. So `/proc` is read twice.

use std::fs;
use std::io::Read;
use std::time::Duration;

use super::table;

/// Name prefixes of the processes in which vLLM schedules and computes, as the kernel cuts them at
/// 15 bytes.
///
/// With tensor parallelism the core may sleep while its workers compute.
const CORE_PROCESS_NAMES: [&str; 2] = ["VLLM::EngineCor", "VLLM::Worker"];

/// Compilers that engines start for new kernels: of Inductor's C++, and of CUDA.
///
/// On a host that is busy they get a small share of a core: 0.37 was seen of `cc1plus` with seven
/// processes on two cores, while the first request with log probabilities waited for 40 s.
const COMPILER_NAMES: [&str; 5] = ["cc1plus", "cc1", "cicc", "ptxas", "nvlink"];

/// Ticks per second of Linux's CPU time for user space: hundredths of a second on every
/// architecture that vLLM runs on (USER_HZ, proc(5)).
const TICKS_PER_SECOND: f64 = 100.0;

/// A core that uses less of a CPU than this is idle. An idle vLLM core was seen at 0 to 1 %.
const CORE_BUSY_SHARE: f64 = 0.05;

/// A front-end that uses more of a CPU than this may be working on a request that has not reached
/// the core yet, as with a long video.
///
/// Answering probes alone costs it up to a tenth: 20 metrics pages a second of 5 ms each.
const FRONT_END_BUSY_SHARE: f64 = 0.5;

/// Activity of an engine's processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ProcessActivity {
    /// This process was stopped, usually by SIGSTOP, and rests until it is continued.
    Stopped(String),
    /// The core, or a stage before it, computes.
    Computing,
    /// No process computes.
    Idle,
    Unknown,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct ProcessSample {
    pid: i32,
    started: u64,
    name: String,
    stopped: bool,
    /// The process waits for a disk or a driver, as while it reads an adapter from a remote
    /// filesystem.
    blocked: bool,
    ticks: u64,
}

#[derive(Debug, Clone)]
pub(crate) struct ProcessSnapshot {
    /// First process of the group.
    leader: i32,
    processes: Vec<ProcessSample>,
}

impl ProcessSnapshot {
    /// Examines the process group of an engine and all descendants of its leader, because
    /// compilers, for example, may have their own groups.
    ///
    /// Runs on its own thread: on a large host `/proc` has tens of thousands of entries.
    pub(crate) async fn take(group: Option<u32>) -> Self {
        let leader = group.and_then(|group| i32::try_from(group).ok()).unwrap_or(0);
        let read = move || {
            let members = if leader == 0 { Vec::new() } else { table::tree(leader) };
            members.into_iter().filter_map(|process| ProcessSample::read(process.pid, process.started)).collect()
        };
        let processes = tokio::task::spawn_blocking(read).await.expect("reading /proc does not panic");
        Self { leader, processes }
    }

    /// Processes in which vLLM schedules or computes: their ids and start times.
    pub(crate) fn cores(&self) -> Vec<(i32, u64)> {
        self.processes.iter().filter(|process| process.is_core()).map(|process| (process.pid, process.started)).collect()
    }

    /// A process in which vLLM schedules or computes that was in an earlier snapshot and has ended
    /// since.
    ///
    /// An engine does not survive its loss.
    pub(crate) fn process_lost_since(&self, earlier: &Self) -> Option<String> {
        let is_here =
            |lost: &ProcessSample| self.processes.iter().any(|process| (process.pid, process.started) == (lost.pid, lost.started));
        let lost = earlier.processes.iter().find(|process| process.is_core() && !is_here(process))?;
        Some(format!("{} (pid {})", lost.name, lost.pid))
    }

    /// Activity of the processes since an earlier snapshot, within `elapsed` of work.
    ///
    /// If they also rested in between, the result overstates their activity, but never understates
    /// it.
    pub(crate) fn activity_since(&self, earlier: &Self, elapsed: Duration) -> ProcessActivity {
        if let Some(stopped) = self.processes.iter().find(|process| process.stopped) {
            return ProcessActivity::Stopped(format!("{} (pid {})", stopped.name, stopped.pid));
        }
        let others = |process: &&ProcessSample| process.pid != self.leader;
        let (has_core, has_others) =
            (self.processes.iter().any(ProcessSample::is_core), self.processes.iter().any(|process| others(&process)));
        // Without the names, these are the processes that the first one has started. If there are
        // none, it is the first one.
        let is_core = |process: &&ProcessSample| if has_core { process.is_core() } else { !has_others || others(process) };
        let share = |process: &ProcessSample| process.cpu_share_since(&earlier.processes, elapsed);
        let computes = |process: &ProcessSample| match share(process) {
            _ if process.blocked && is_core(&process) => true,
            // A hung engine starts no process; one that compiles a kernel starts one compiler after
            // another.
            None => true,
            Some(share) if is_core(&process) || process.is_compiler() => share >= CORE_BUSY_SHARE,
            Some(share) => share >= FRONT_END_BUSY_SHARE,
        };
        match self.processes.as_slice() {
            [] => ProcessActivity::Unknown,
            processes if processes.iter().any(computes) => ProcessActivity::Computing,
            _ => ProcessActivity::Idle,
        }
    }
}

impl ProcessSample {
    fn read(pid: i32, started: u64) -> Option<Self> {
        let sample = Self::parse(pid, started, &fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?;
        let mut title = Vec::new();
        // A process that sets its title may leave the kernel's name unchanged.
        let titled = fs::File::open(format!("/proc/{pid}/cmdline")).and_then(|file| file.take(64).read_to_end(&mut title)).is_ok();
        let title = String::from_utf8_lossy(&title);
        let title = title.split(['\0', ' ']).next().unwrap_or_default();
        let name = if titled && is_core_name(title) { title.to_owned() } else { sample.name };
        Some(Self { name, ..sample })
    }

    /// Parses a line of `/proc/PID/stat`; the name in parentheses may contain anything.
    fn parse(pid: i32, started: u64, line: &str) -> Option<Self> {
        let (before, after) = (line.find('(')?, line.rfind(')')?);
        let fields: Vec<&str> = line[after + 1..].split_whitespace().collect();
        let ticks = |index: usize| fields.get(index)?.parse::<u64>().ok();
        Some(Self {
            pid,
            started,
            name: line[before + 1..after].to_owned(),
            stopped: *fields.first()? == "T",
            blocked: *fields.first()? == "D",
            ticks: ticks(11)? + ticks(12)?,
        })
    }

    fn is_core(&self) -> bool {
        is_core_name(&self.name)
    }

    fn is_compiler(&self) -> bool {
        COMPILER_NAMES.contains(&&*self.name)
    }

    /// Share of a CPU that the process has used; `None` for a process that did not exist earlier.
    fn cpu_share_since(&self, earlier: &[Self], elapsed: Duration) -> Option<f64> {
        let same = |other: &&Self| (other.pid, other.started) == (self.pid, self.started);
        let before = earlier.iter().find(same)?.ticks;
        let used = u32::try_from(self.ticks.saturating_sub(before)).unwrap_or(u32::MAX);
        Some(f64::from(used) / TICKS_PER_SECOND / elapsed.as_secs_f64().max(0.001))
    }
}

fn is_core_name(name: &str) -> bool {
    CORE_PROCESS_NAMES.iter().any(|core| name.starts_with(core))
}

#[cfg(test)]
mod tests;
