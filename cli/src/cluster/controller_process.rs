//! The fleet's controller as a process: finds a running one, or starts it in the background of this
//! host.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, bail};
use hostler_controller::{Endpoint, FleetFolder, FolderError, HEARTBEAT_LIFETIME};
use rustix::process::{Pid, Signal, kill_process};

use super::Fleet;
use crate::file_end::read_end;
use crate::fleet_state::{find_router, is_process_here};

/// Time in which a controller publishes its endpoint. It waits for a submission of the one before
/// it, and binds its ports.
const START_TIMEOUT: Duration = Duration::from_secs(150);

/// Time in which a controller leaves its place: a command of the scheduler may run for a minute.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(75);

const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Bytes at the end of a log that are read for its last lines.
const LOG_TAIL: u64 = 8192;

const SHOWN_LINES: usize = 8;

/// Watches whether the time of the controller's endpoint changes, which shows that the controller
/// lives. No two clocks are compared, and nothing is written.
#[derive(Debug)]
pub(super) struct HeartbeatWatch {
    last: Option<SystemTime>,
    changed: Instant,
}

impl HeartbeatWatch {
    pub(super) fn new() -> Self {
        Self { last: None, changed: Instant::now() }
    }

    /// Whether there was no sign of life for too long.
    pub(super) fn is_silent(&mut self, folder: &FleetFolder) -> Result<bool, FolderError> {
        Ok(self.note(folder.last_heartbeat()?, Instant::now()))
    }

    fn note(&mut self, seen: Option<SystemTime>, now: Instant) -> bool {
        if seen != self.last {
            (self.last, self.changed) = (seen, now);
        }
        now.duration_since(self.changed) > HEARTBEAT_LIFETIME
    }
}

/// Endpoint of the running controller; `None` if none runs. A controller on another host, or in a
/// job, is known by its heartbeat.
pub(super) async fn find_controller(folder: &FleetFolder) -> anyhow::Result<Option<Endpoint>> {
    let Some(endpoint) = find_router(folder).await? else { return Ok(None) };
    // The router of an ending controller may finish its streams for a long time.
    let has_left = is_process_here(&endpoint) && folder.has_controller_left()?;
    Ok(Some(endpoint).filter(|_| !has_left))
}

/// Starts the controller on this host unless one runs, and waits for its endpoint. Returns `None`
/// if it has found nothing to do and has ended.
pub(super) async fn ensure_process(fleet: &Fleet) -> anyhow::Result<Option<Endpoint>> {
    if let Some(endpoint) = find_controller(&fleet.folder).await? {
        return Ok(Some(endpoint));
    }
    let mut child = spawn_controller(fleet)?;
    let began = Instant::now();
    while began.elapsed() < START_TIMEOUT {
        if let Some(endpoint) = find_controller(&fleet.folder).await? {
            return Ok(Some(endpoint));
        }
        match child.try_wait()? {
            Some(ended) if ended.success() => return Ok(None),
            Some(_) if !is_another_starting(&fleet.folder)? => break,
            _ => tokio::time::sleep(POLL_INTERVAL).await,
        }
    }
    let log = fleet.folder.controller_log();
    let lines = last_lines(&log).unwrap_or_default();
    bail!("the controller did not start; the end of its log {}:\n{}", log.display(), lines.join("\n"))
}

/// Makes this host's controller leave its place, and waits until it has. Its router finishes its
/// answers.
pub(super) async fn end_process(folder: &FleetFolder, controller: &Endpoint) -> anyhow::Result<()> {
    let pid = i32::try_from(controller.pid).ok().and_then(Pid::from_raw).context("the controller's process has no number")?;
    kill_process(pid, Signal::TERM).with_context(|| format!("cannot end the controller, process {}", controller.pid))?;
    let began = Instant::now();
    while find_controller(folder).await?.is_some_and(|found| found.is_same_start(controller)) {
        if began.elapsed() >= LEAVE_TIMEOUT {
            bail!("the controller, process {}, does not leave its place: see {}", controller.pid, folder.controller_log().display());
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(())
}

/// Starts the controller in a session of its own, so it outlives the terminal.
fn spawn_controller(fleet: &Fleet) -> anyhow::Result<Child> {
    let path = fleet.folder.controller_log();
    let log = File::options().create(true).append(true).mode(0o600).open(&path);
    let log = log.with_context(|| format!("cannot write {}", path.display()))?;
    let program = std::env::current_exe().context("this program does not know its own path")?;
    let mut command = Command::new(&program);
    command.args(["controller", "--background"]).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    if let Some(file) = &fleet.file {
        command.arg("--config").arg(file);
    }
    command.spawn().with_context(|| format!("cannot start {}", program.display()))
}

/// Whether another controller, started at the same time, holds the place.
fn is_another_starting(folder: &FleetFolder) -> anyhow::Result<bool> {
    match folder.lock_controller(Duration::ZERO) {
        Ok(_) => Ok(false),
        Err(FolderError::Busy { .. }) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// The last lines of a file.
pub(super) fn last_lines(path: &Path) -> io::Result<Vec<String>> {
    let text = read_end(path, LOG_TAIL)?;
    let lines: Vec<&str> = text.lines().collect();
    Ok(lines[lines.len().saturating_sub(SHOWN_LINES)..].iter().map(|line| (*line).to_owned()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::tests::endpoint;

    #[tokio::test]
    async fn a_remote_controller_that_died_before_its_status_is_gone() {
        let place = tempfile::tempdir().unwrap();
        let folder = FleetFolder::at(&place.path().join("fleet")).unwrap();
        assert_eq!(find_controller(&folder).await.unwrap(), None);
        let endpoint = endpoint("another-login-node", 1);
        folder.write_endpoint(&endpoint).unwrap();
        assert_eq!(find_controller(&folder).await.unwrap(), Some(endpoint), "it has just begun");
        let file = File::open(folder.path().join("endpoint.json")).unwrap();
        file.set_modified(SystemTime::now() - HEARTBEAT_LIFETIME - Duration::from_secs(5)).unwrap();
        assert_eq!(find_controller(&folder).await.unwrap(), None);
    }

    #[test]
    fn a_controller_is_silent_after_a_minute_without_heartbeat_change() {
        let mut watch = HeartbeatWatch::new();
        let (began, long_ago) = (watch.changed, SystemTime::UNIX_EPOCH);
        let after = |seconds| began + Duration::from_secs(seconds);
        assert!(!watch.note(Some(long_ago), after(5)));
        assert!(!watch.note(Some(long_ago), after(65)));
        assert!(watch.note(Some(long_ago), after(66)));
        assert!(!watch.note(Some(long_ago + Duration::from_secs(10)), after(67)));
        assert!(!watch.note(None, after(127)) && watch.note(None, after(188)), "nor is there one without an endpoint");
    }
}
