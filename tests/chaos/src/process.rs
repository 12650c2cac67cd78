//! The program as separate processes in a separate place.
//!
//! They are started, signalled and ended by their ids, and found by a mark in their environment
//! wherever they have moved.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio::time::{sleep, timeout};

const START: Duration = Duration::from_secs(20);

/// How often the remaining processes are killed, and the pause between.
const SWEEPS: u32 = 100;
const SWEEP_PAUSE: Duration = Duration::from_millis(20);

/// Place of everything in one run: homes, sockets, logs.
#[derive(Debug)]
pub(crate) struct Workplace {
    directory: TempDir,
    program: PathBuf,
}

/// A running process, killed on drop.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    pid: u32,
    out: PathBuf,
    err: PathBuf,
}

impl Workplace {
    pub(crate) fn new(program: &Path) -> anyhow::Result<Self> {
        let program = fs::canonicalize(program)
            .with_context(|| format!("there is no {}: build it, or name another by HOSTLER_BIN", program.display()))?;
        // Keep the path short: the paths of Unix sockets begin with it.
        Ok(Self { directory: tempfile::Builder::new().prefix("h-").tempdir_in("/tmp")?, program })
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Keeps the files for an investigation.
    pub(crate) fn keep(&mut self) {
        self.directory.disable_cleanup(true);
    }

    fn run_dir(&self) -> PathBuf {
        self.path().join("run")
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("HOSTLER_")) {
            command.env_remove(name);
        }
        command.args(arguments).env("HOME", self.path()).env_remove("XDG_CONFIG_HOME").env_remove("XDG_STATE_HOME");
        command.env_remove("XDG_CACHE_HOME").env_remove("XDG_RUNTIME_DIR").env("HOSTLER_AGENT_RUN_DIR", self.run_dir());
        // Use a separate process group: an interrupt of this program is for this program only.
        command.stdin(Stdio::null()).kill_on_drop(true).process_group(0);
        command
    }

    /// Starts a program; its output is appended to the files of this name.
    pub(crate) fn start(&self, name: &str, arguments: &[&str]) -> anyhow::Result<Process> {
        let (out, err) = (self.path().join(format!("{name}.out")), self.path().join(format!("{name}.err")));
        let log = File::options().create(true).append(true).open(&err)?;
        let child = self.command(arguments).stdout(File::create(&out)?).stderr(log).spawn();
        let child = child.with_context(|| format!("cannot start {}", self.program.display()))?;
        let pid = child.id().context("it has ended at once")?;
        Ok(Process { child, pid, out, err })
    }

    /// Living processes that were started here, engines and their keepers included.
    pub(crate) fn processes(&self) -> Vec<u32> {
        let pids = fs::read_dir("/proc").into_iter().flatten().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        pids.filter(|pid| self.is_ours(*pid)).collect()
    }

    /// Whether a process was started here, and lives.
    pub(crate) fn is_ours(&self, pid: u32) -> bool {
        let mark = format!("HOSTLER_AGENT_RUN_DIR={}", self.run_dir().display());
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes()) && is_alive(pid)
    }

    /// Files that agents have left below their run directory; its lock stays.
    pub(crate) fn leftover_files(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        below(self.run_dir(), &mut found);
        found.retain(|path| *path != self.run_dir().join("lock"));
        found
    }

    /// Lines of the programs' logs that show a bug.
    pub(crate) fn panics(&self) -> Vec<String> {
        let logs = fs::read_dir(self.path()).into_iter().flatten().flatten().map(|entry| entry.path());
        let logs = logs.filter(|path| path.extension().is_some_and(|end| end == "err"));
        let text = |path: PathBuf| Some((path.file_stem()?.to_string_lossy().into_owned(), fs::read_to_string(&path).ok()?));
        let panics = |(name, text): (String, String)| {
            let lines = text.lines().filter(|line| line.contains("panicked at") || line.contains("a task broke"));
            lines.map(|line| format!("{name}: {line}")).collect::<Vec<_>>()
        };
        logs.filter_map(text).flat_map(panics).collect()
    }
}

impl Drop for Workplace {
    /// Kills everything that was started here.
    ///
    /// The next sweep kills a process that is started meanwhile.
    #[allow(clippy::disallowed_methods, reason = "a destructor cannot await, and the run is over")]
    fn drop(&mut self) {
        for _ in 0..SWEEPS {
            let left = self.processes();
            if left.is_empty() {
                return;
            }
            left.into_iter().for_each(|pid| signal(pid, Signal::KILL));
            std::thread::sleep(SWEEP_PAUSE);
        }
    }
}

fn below(path: PathBuf, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        found.push(entry.path());
        below(entry.path(), found);
    }
}

impl Process {
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    pub(crate) fn signal(&self, signal: Signal) {
        self::signal(self.pid, signal);
    }

    /// Waits for the lines with these prefixes, and returns the rest of each.
    pub(crate) async fn wait_for_lines<const WORDS: usize>(&mut self, words: [&str; WORDS]) -> anyhow::Result<[String; WORDS]> {
        let begun = std::time::Instant::now();
        while begun.elapsed() < START {
            let text = fs::read_to_string(&self.out).unwrap_or_default();
            let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
            let found = words.map(|word| whole.lines().find_map(|line| line.strip_prefix(word)).map(|rest| rest.trim().to_owned()));
            if found.iter().all(Option::is_some) {
                return Ok(found.map(Option::unwrap_or_default));
            }
            if let Some(status) = self.child.try_wait()? {
                let log = fs::read_to_string(&self.err).unwrap_or_default();
                let lines: Vec<&str> = log.lines().collect();
                bail!("it has ended ({status}):\n{}", lines[lines.len().saturating_sub(5)..].join("\n"));
            }
            sleep(Duration::from_millis(5)).await;
        }
        bail!("it has not said {words:?} within {START:?}")
    }

    pub(crate) async fn wait_exit(&mut self, within: Duration) -> Option<ExitStatus> {
        timeout(within, self.child.wait()).await.ok()?.ok()
    }

    /// Kills the process, as the kernel would.
    pub(crate) async fn kill(&mut self) {
        // A process that has exited is fine.
        let _ = self.child.kill().await;
    }
}

pub(crate) fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid.cast_signed()) {
        // A process that has exited needs no signal.
        let _ = kill_process(pid, signal);
    }
}

/// Sends a signal to the group that a process leads.
pub(crate) fn signal_group(leader: u32, signal: Signal) {
    if let Some(leader) = Pid::from_raw(leader.cast_signed()) {
        let _ = kill_process_group(leader, signal);
    }
}

/// Whether a process runs. A process that has ended and was not reaped does not.
fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().next());
    state.is_some_and(|state| !matches!(state, "Z" | "X"))
}

/// Bytes of private memory of a process.
pub(crate) fn memory(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) * 1024
}

pub(crate) fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}
