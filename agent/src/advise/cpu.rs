//! CPU use of the processes that serve HTTP for an engine. vLLM's Python front-end can use only one
//! core of the host, so its share of a core says how near it is to its limit.

use std::fs;

use rustc_hash::FxHashMap;
use tokio::time::Instant;

/// Name of the further front-end processes that vLLM starts with `--api-server-count`.
///
/// The kernel cuts a name at 15 bytes.
const API_SERVER_PROCESS: &str = "VLLM::APIServer";

/// Remembers the CPU time of each process, to compute what it has used since.
#[derive(Debug, Default)]
pub(super) struct FrontEndCpu {
    last_ticks: FxHashMap<u32, (u64, Instant)>,
}

impl FrontEndCpu {
    /// Share of a core that this engine's busiest front-end process has used since the last
    /// reading.
    ///
    /// `leader` is the engine's first process. Reads a few small files in `/proc`, too little to
    /// justify another thread.
    pub(super) fn read(&mut self, leader: u32, now: Instant) -> Option<f32> {
        let further =
            child_pids(leader).into_iter().filter(|child| read_name(*child).is_some_and(|name| name.starts_with(API_SERVER_PROCESS)));
        let used: FxHashMap<u32, u64> =
            std::iter::once(leader).chain(further).filter_map(|pid| Some((pid, parse_cpu_ticks(&read_stat(pid)?)?))).collect();
        let shares = used.iter().filter_map(|(pid, ticks)| {
            let (before, at) = self.last_ticks.get(pid)?;
            core_share(ticks.checked_sub(*before)?, (now - *at).as_secs_f32())
        });
        let busiest = shares.max_by(f32::total_cmp);
        self.last_ticks = used.into_iter().map(|(pid, ticks)| (pid, (ticks, now))).collect();
        busiest
    }
}

/// Converts ticks within this many seconds into a share of a core.
#[expect(clippy::cast_precision_loss, reason = "the ticks of a second are few")]
fn core_share(ticks: u64, seconds: f32) -> Option<f32> {
    (seconds > 0.0).then(|| ticks as f32 / rustix::param::clock_ticks_per_second() as f32 / seconds)
}

fn read_stat(pid: u32) -> Option<String> {
    fs::read_to_string(format!("/proc/{pid}/stat")).ok()
}

fn read_name(pid: u32) -> Option<String> {
    fs::read_to_string(format!("/proc/{pid}/comm")).ok()
}

/// Children of the first thread of this process.
///
/// Kernels without this file list no children, so only the leader is watched.
fn child_pids(pid: u32) -> Vec<u32> {
    let listed = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    listed.split_whitespace().filter_map(|child| child.parse().ok()).collect()
}

/// User and system time in a line of `/proc/PID/stat`.
///
/// The name in parentheses may contain anything, so fields are counted from the last parenthesis.
fn parse_cpu_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

#[cfg(test)]
mod tests;
