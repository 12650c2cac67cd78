//! Record in an engine's directory by which an agent finds the engine's processes when neither
//! their keeper nor the agent that started them lives any more.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::LeaderProcess;
use super::table::{self, ProcessStat};

/// Record of an engine's process group, for an agent that did not start it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProcessRecord {
    pub(super) leader: i32,
    pub(super) started: u64,
    pub(super) session: i32,
    pub(super) boot_and_namespace: String,
    /// Directory in the environment of the engine's processes, if it is not this engine's: they
    /// began as a spare.
    pub(super) begun_in: Option<PathBuf>,
}

impl ProcessRecord {
    /// Creates the record of an existing first process, even if it has ended.
    pub(crate) fn of(leader: i32) -> io::Result<Self> {
        let process = ProcessStat::read(leader).ok_or_else(|| io::Error::other("cannot read /proc, which an agent needs"))?;
        Ok(Self {
            leader,
            started: process.started,
            session: process.session,
            boot_and_namespace: table::boot_and_namespace(),
            begun_in: None,
        })
    }

    fn path(directory: &Path) -> PathBuf {
        directory.join("engine.pid")
    }

    pub(crate) fn write(&self, directory: &Path) -> io::Result<()> {
        let mut text = format!("{} {} {} {}", self.leader, self.started, self.session, self.boot_and_namespace).into_bytes();
        if let Some(path) = &self.begun_in {
            text.push(b' ');
            text.extend(path.as_os_str().as_bytes());
        }
        text.push(b'\n');
        fs::write(Self::path(directory), text)
    }

    pub(crate) fn read(directory: &Path) -> Option<Self> {
        let text = fs::read(Self::path(directory)).ok()?;
        let mut words = text.strip_suffix(b"\n").unwrap_or(&text).splitn(5, |byte| *byte == b' ');
        let mut word = || str::from_utf8(words.next()?).ok();
        Some(Self {
            leader: word()?.parse().ok()?,
            started: word()?.parse().ok()?,
            session: word()?.parse().ok()?,
            boot_and_namespace: word()?.to_owned(),
            begun_in: words.next().map(|path| OsStr::from_bytes(path).into()),
        })
    }

    /// This record, for processes that began in another directory.
    pub(crate) fn begun_in(self, directory: PathBuf) -> Self {
        Self { begun_in: Some(directory), ..self }
    }

    pub(crate) fn leader(&self) -> LeaderProcess {
        LeaderProcess { pid: self.leader, started: self.started }
    }

    /// Whether this is the record of a first process that lives here and now.
    pub(crate) fn is_of(&self, leader: LeaderProcess) -> bool {
        let lives = ProcessStat::read(leader.pid).is_some_and(|process| process.started == leader.started && !process.is_zombie);
        lives && self.leader() == leader && !self.is_foreign()
    }

    /// Whether the ids mean nothing here, because they are from an earlier boot or another
    /// container.
    pub(crate) fn is_foreign(&self) -> bool {
        self.boot_and_namespace != table::boot_and_namespace()
    }

    /// Living members of the recorded group and session, without unrelated processes that may have
    /// such an id by now.
    ///
    /// A keeper makes a session. All in it is the engine's, as is what mounts a container's image
    /// in a group of its own.
    pub(super) fn members(&self) -> Vec<ProcessStat> {
        if self.is_foreign() {
            return Vec::new();
        }
        // A group's id is not reused while it has members. So another process under the leader's id
        // proves that the group ended. The same holds for the session, whose leader is the older
        // one.
        let of = |id: i32| ProcessStat::read(id);
        if of(self.leader).is_some_and(|leader| leader.started != self.started)
            || of(self.session).is_some_and(|keeper| keeper.started > self.started)
        {
            return Vec::new();
        }
        let has_own_session = table::own_session().is_some_and(|own| own != self.session);
        let mut members = table::session(self.session);
        // A keeper may have begun in the same tick as its engine.
        let is_kept = |member: &ProcessStat| member.group == self.leader || (has_own_session && member.pid != self.session);
        members.retain(|member| member.started >= self.started && is_kept(member));
        members
    }
}
