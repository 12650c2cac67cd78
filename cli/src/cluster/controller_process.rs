//! The fleet's controller as a process: whether one runs, and how it is started in the background.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, bail};
use hostler_boot::socket::is_live;
use hostler_controller::{Endpoint, FleetFolder, FolderError};

use super::Fleet;
use crate::env::this_host;

/// How long a controller may take until it says where it is reached. It waits for a submission of the one before it, and binds its ports.
const START_TIMEOUT: Duration = Duration::from_secs(150);

const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A status older than this is that of a controller that is gone.
pub(super) const STATUS_LIFETIME: Duration = Duration::from_secs(60);

/// How much of the end of a log is read for its last lines.
const LOG_TAIL: u64 = 8192;

const SHOWN_LINES: usize = 8;

/// Where the running controller is reached; `None` where none runs. One on another host is known by what it has just written.
pub(super) async fn find_controller(folder: &FleetFolder) -> anyhow::Result<Option<Endpoint>> {
    let Some(endpoint) = folder.endpoint()? else { return Ok(None) };
    let is_alive = if endpoint.host == this_host() {
        is_live(&endpoint.operators_socket).await
    } else {
        let age = folder.status()?.and_then(|status| SystemTime::now().duration_since(status.at).ok());
        age.is_none_or(|age| age < STATUS_LIFETIME)
    };
    Ok(Some(endpoint).filter(|_| is_alive))
}

/// Starts the controller unless one runs, and waits until it says where it is reached. `None` where it has found nothing to do and has ended.
pub(super) async fn ensure_controller(fleet: &Fleet) -> anyhow::Result<Option<Endpoint>> {
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

/// A process in a session of its own, which goes on when the terminal is gone.
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

/// Whether another controller holds the place: one that was started at the same time.
fn is_another_starting(folder: &FleetFolder) -> anyhow::Result<bool> {
    match folder.lock_controller(Duration::ZERO) {
        Ok(_) => Ok(false),
        Err(FolderError::Busy { .. }) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// The last lines of a file.
pub(super) fn last_lines(path: &Path) -> io::Result<Vec<String>> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL)))?;
    let mut end = Vec::new();
    file.take(LOG_TAIL).read_to_end(&mut end)?;
    let text = String::from_utf8_lossy(&end);
    let lines: Vec<&str> = text.lines().collect();
    Ok(lines[lines.len().saturating_sub(SHOWN_LINES)..].iter().map(|line| (*line).to_owned()).collect())
}
