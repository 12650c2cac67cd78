//! What an engine's processes do while nothing comes out of it: whether one was stopped, and whether its core computes. Read from `/proc`, twice, for the watchdog, which must tell an engine that hangs from one that is at a long step.

use std::fs;
use std::io::Read;
use std::time::Duration;

use super::table;

/// The processes in which vLLM schedules and computes begin with these names, as the kernel cuts
/// them, at 15 bytes. With tensor parallelism the core may sleep while its workers compute.
const CORE_PROCESS_NAMES: [&str; 2] = ["VLLM::EngineCor", "VLLM::Worker"];

/// Linux counts CPU time for user space in hundredths of a second, on every architecture that vLLM
/// runs on (USER_HZ, proc(5)).
const TICKS_PER_SECOND: f64 = 100.0;

/// A core that uses less of a CPU than this does nothing. An idle vLLM core was seen at 0 to 1 %.
const CORE_BUSY_SHARE: f64 = 0.05;

/// A front-end that uses more of a CPU than this may be at a request that has not reached the core
/// yet, as with a long video. Answering probes alone costs it up to a tenth: 20 metrics pages a
/// second of 5 ms each.
const FRONT_END_BUSY_SHARE: f64 = 0.5;

/// What the processes of an engine do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ProcessActivity {
    /// This one was stopped, by SIGSTOP as a rule, and does nothing before it is continued.
    Stopped(String),
    /// Its core, or what comes before it, computes.
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
    /// It waits for a disk or a driver, as while it reads an adapter from a filesystem far away.
    blocked: bool,
    ticks: u64,
}

#[derive(Debug, Clone)]
pub(crate) struct ProcessSnapshot {
    /// The first process of the group.
    leader: i32,
    processes: Vec<ProcessSample>,
}

impl ProcessSnapshot {
    /// Examines the process group of an engine and all that descends from its leader, because
    /// compilers, for example, may have groups of their own. Runs on a thread of its own: on a
    /// large host `/proc` has tens of thousands of entries.
    pub(crate) async fn take(group: Option<u32>) -> Self {
        let leader = group.and_then(|group| i32::try_from(group).ok()).unwrap_or(0);
        let read = move || {
            let members = if leader == 0 { Vec::new() } else { table::tree(leader) };
            members.into_iter().filter_map(|process| ProcessSample::read(process.pid, process.started)).collect()
        };
        let processes = tokio::task::spawn_blocking(read).await.expect("reading /proc does not panic");
        Self { leader, processes }
    }

    /// The processes in which vLLM schedules or computes: their ids, and when they started.
    pub(crate) fn cores(&self) -> Vec<(i32, u64)> {
        self.processes.iter().filter(|process| process.is_core()).map(|process| (process.pid, process.started)).collect()
    }

    /// A process in which vLLM schedules or computes that was in an earlier snapshot and has ended
    /// since. An engine does not live on without it.
    pub(crate) fn process_lost_since(&self, earlier: &Self) -> Option<String> {
        let is_here =
            |lost: &ProcessSample| self.processes.iter().any(|process| (process.pid, process.started) == (lost.pid, lost.started));
        let lost = earlier.processes.iter().find(|process| process.is_core() && !is_here(process))?;
        Some(format!("{} (pid {})", lost.name, lost.pid))
    }

    /// What the processes did since an earlier snapshot, within `elapsed` of work. If they also
    /// rested in between, they seem to have done more than they did, never less.
    pub(crate) fn activity_since(&self, earlier: &Self, elapsed: Duration) -> ProcessActivity {
        if let Some(stopped) = self.processes.iter().find(|process| process.stopped) {
            return ProcessActivity::Stopped(format!("{} (pid {})", stopped.name, stopped.pid));
        }
        let others = |process: &&ProcessSample| process.pid != self.leader;
        let (has_core, has_others) =
            (self.processes.iter().any(ProcessSample::is_core), self.processes.iter().any(|process| others(&process)));
        // Without the names, the processes that the first one has started. If there are none, the
        // first one.
        let is_core = |process: &&ProcessSample| if has_core { process.is_core() } else { !has_others || others(process) };
        let share = |process: &ProcessSample| process.cpu_share_since(&earlier.processes, elapsed);
        let computes = |process: &ProcessSample| match share(process) {
            _ if process.blocked && is_core(&process) => true,
            // An engine that hangs starts nothing; one that compiles a kernel starts one compiler
            // after another.
            None => true,
            Some(share) => share >= if is_core(&process) { CORE_BUSY_SHARE } else { FRONT_END_BUSY_SHARE },
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
        // A process that sets its title need not set the kernel's name as well.
        let titled = fs::File::open(format!("/proc/{pid}/cmdline")).and_then(|file| file.take(64).read_to_end(&mut title)).is_ok();
        let title = String::from_utf8_lossy(&title);
        let title = title.split(['\0', ' ']).next().unwrap_or_default();
        let name = if titled && is_core_name(title) { title.to_owned() } else { sample.name };
        Some(Self { name, ..sample })
    }

    /// Reads a line of `/proc/PID/stat`; the name in parentheses may contain anything.
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

    /// The share of a CPU that it has used; none of one that was not there earlier.
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
