//! The processes of one engine: created as a process group of their own, asked to stop through the first of them, and killed as a group. Also knows the record that lets a later agent find the group when this one dies.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process, kill_process_group, test_kill_process_group};
use tokio::net::unix::pipe;
use tokio::process::{Child, Command};

use super::command::{CommandLine, temporary_in};
use super::proc::{self, Process};

/// How long one wait for the end of a killed group lasts before it is called stuck. A process inside a GPU driver call can take seconds to die.
const STUCK_AFTER: Duration = Duration::from_secs(10);

/// The process group of an engine. Its id is the id of its first process and is not given to another process while any member is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Group {
    leader: Pid,
}

/// What a spawn gives.
#[derive(Debug)]
pub(crate) struct Spawned {
    /// The first process; dropping it does not end it.
    pub(crate) child: Child,
    /// The group it leads.
    pub(crate) group: Group,
    /// Everything the group prints, standard output and error in order.
    pub(crate) output: pipe::Receiver,
}

/// Creates the engine in a fresh 0700 directory, with a group of its own but in the agent's session: a batch system's clean-up must still reach it. Nothing else may use the directory.
pub(crate) fn spawn(line: &CommandLine, directory: &Path) -> io::Result<Spawned> {
    prepare(directory)?;
    let (reader, writer) = io::pipe()?;
    let mut command = Command::new(&line.program);
    command.args(&line.arguments).process_group(0).stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    for name in &line.unset {
        command.env_remove(name);
    }
    command.envs(line.set.iter().map(|(name, value)| (name, value)));
    let child = command.spawn()?;
    // Our copies of the writing end live in the command; with them gone, the pipe ends when the group does.
    drop(command);
    let leader =
        child.id().and_then(|id| Pid::from_raw(id.cast_signed())).ok_or_else(|| io::Error::other("the engine has no process id"))?;
    let group = Group { leader };
    let rest = Record::of(group).and_then(|record| record.write(directory)).and_then(|()| pipe::Receiver::from_owned_fd(reader.into()));
    match rest {
        Ok(output) => Ok(Spawned { child, group, output }),
        Err(error) => {
            group.kill();
            Err(error)
        }
    }
}

/// Empties the directory: sockets of an earlier life would make vLLM fail, and its temporary files are never removed by itself.
fn prepare(directory: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut builder = fs::DirBuilder::new();
    builder.mode(0o700).create(directory)?;
    builder.create(temporary_in(directory))
}

impl Group {
    /// The id of the first process and of the group.
    pub(crate) fn id(self) -> u32 {
        self.leader.as_raw_nonzero().get().cast_unsigned()
    }

    /// Sends SIGTERM to the first process only, which ends the others in its own order. To be used only while the first process is known not to have been reaped.
    pub(crate) fn terminate(self) {
        // If it is gone, its exit is about to be seen.
        let _ = kill_process(self.leader, Signal::TERM);
    }

    /// Sends SIGKILL to every member.
    pub(crate) fn kill(self) {
        // Nobody left is what was wanted.
        let _ = kill_process_group(self.leader, Signal::KILL);
    }

    /// Whether no member lives. One that has ended and was not reaped does not count.
    pub(crate) fn is_empty(self) -> bool {
        test_kill_process_group(self.leader) == Err(Errno::SRCH) || self.members().is_empty()
    }

    /// The ids of the living members.
    pub(crate) fn members(self) -> Vec<i32> {
        let members = proc::members(self.leader.as_raw_nonzero().get());
        members.into_iter().map(|process| process.pid).collect()
    }

    /// Kills until no member lives; gives up after ten seconds and then says which are left.
    pub(crate) async fn end(self) -> Result<(), Vec<i32>> {
        let ended = async {
            let mut pause = Duration::from_millis(2);
            while !self.is_empty() {
                self.kill();
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_millis(100));
            }
        };
        match tokio::time::timeout(STUCK_AFTER, ended).await {
            Ok(()) => Ok(()),
            Err(_) => Err(self.members()),
        }
    }
}

/// What the engine's directory says about its group, for an agent that did not start it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Record {
    leader: i32,
    started: u64,
    session: i32,
    birthplace: String,
}

impl Record {
    fn of(group: Group) -> io::Result<Self> {
        let leader = group.leader.as_raw_nonzero().get();
        // The process is our child and not yet reaped, so it is there even if it has ended.
        let process = Process::read(leader).ok_or_else(|| io::Error::other("cannot read /proc, which an agent needs"))?;
        Ok(Self { leader, started: process.started, session: process.session, birthplace: proc::birthplace() })
    }

    fn path(directory: &Path) -> PathBuf {
        directory.join("engine.pid")
    }

    fn write(&self, directory: &Path) -> io::Result<()> {
        let text = format!("{} {} {} {}\n", self.leader, self.started, self.session, self.birthplace);
        fs::write(Self::path(directory), text)
    }

    fn read(directory: &Path) -> Option<Self> {
        let text = fs::read_to_string(Self::path(directory)).ok()?;
        let mut words = text.split_whitespace();
        Some(Self {
            leader: words.next()?.parse().ok()?,
            started: words.next()?.parse().ok()?,
            session: words.next()?.parse().ok()?,
            birthplace: words.next()?.to_owned(),
        })
    }

    /// The living members of the recorded group, and nothing else that may have its id by now.
    fn members(&self) -> Vec<Process> {
        if self.birthplace != proc::birthplace() {
            return Vec::new();
        }
        // The id of a group is not reused while it has members: another process under the leader's id proves that the group ended.
        match Process::read(self.leader) {
            Some(leader) if leader.started != self.started => return Vec::new(),
            _ => {}
        }
        let mut members = proc::members(self.leader);
        members.retain(|member| member.session == self.session && member.started >= self.started);
        members
    }
}

/// The living processes of an engine whose agent is dead, found by the record in its directory and by the environment that every engine is given.
pub(crate) fn orphans(directory: &Path) -> Vec<i32> {
    let mut found = Record::read(directory).map_or_else(Vec::new, |record| record.members());
    let mark = format!("VLLM_RPC_BASE_PATH={}", directory.display());
    let mut marked = Process::all();
    marked.retain(|process| !process.ended && process.has_environment(&mark));
    found.append(&mut marked);
    let mut ids: Vec<i32> = found.into_iter().map(|process| process.pid).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// Kills the processes of an engine whose agent is dead. Blocks until none lives, ten seconds at most; returns how many it found, or those that are left.
#[expect(clippy::disallowed_methods, reason = "it runs where blocking is allowed, before the agent has any engine")]
pub(crate) fn end_orphans(directory: &Path) -> Result<usize, Vec<i32>> {
    let deadline = std::time::Instant::now() + STUCK_AFTER;
    let mut found = 0;
    loop {
        let orphans = orphans(directory);
        if orphans.is_empty() {
            return Ok(found);
        }
        if std::time::Instant::now() >= deadline {
            return Err(orphans);
        }
        found = found.max(orphans.len());
        for pid in orphans {
            if let Some(pid) = Pid::from_raw(pid) {
                // One that is already gone is what was wanted.
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[cfg(test)]
mod tests;
