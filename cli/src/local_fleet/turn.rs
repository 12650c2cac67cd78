//! The turn of one `hostler up` among those that start at the same moment: the next one looks round
//! only when the record of this one is there. So no two take the same node or the same GPUs.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::bail;
use tokio::time::sleep;

use crate::host_names::this_host;
use crate::output::describe;
use crate::up_record::make_folder;

/// How long a turn is waited for. One lasts up to a minute, until the router's own agent has said
/// which GPUs it has, and several may wait.
const PATIENCE: Duration = Duration::from_secs(180);

const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Held until it is dropped. The kernel ends it with the process.
#[derive(Debug)]
pub(crate) struct UpTurn {
    /// `None` where no file can be locked; nothing else keeps two apart there.
    _lock: Option<File>,
}

impl UpTurn {
    /// Waits for this process's turn.
    ///
    /// # Errors
    /// When another process has it for minutes.
    pub(crate) async fn take() -> anyhow::Result<Self> {
        match make_folder() {
            Ok(folder) => Self::take_in(&folder, PATIENCE).await,
            Err(error) => {
                tracing::warn!(error = %describe(&error), "another `hostler up` of this moment may take the same node or GPUs");
                Ok(Self { _lock: None })
            }
        }
    }

    async fn take_in(folder: &Path, patience: Duration) -> anyhow::Result<Self> {
        // Hosts may share the folder.
        let path = folder.join(format!("{}.lock", this_host()));
        let opened = OpenOptions::new().create(true).truncate(false).read(true).write(true).mode(0o600).open(&path);
        let without = |error: std::io::Error| {
            tracing::warn!(file = %path.display(), %error, "cannot be locked: another `hostler up` of this moment may take the same node or GPUs");
            Ok(Self { _lock: None })
        };
        let mut file = match opened {
            Ok(file) => file,
            Err(error) => return without(error),
        };
        let began = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => {
                    // For the message to those that wait.
                    let _ = file.set_len(0).and_then(|()| file.write_all(std::process::id().to_string().as_bytes()));
                    return Ok(Self { _lock: Some(file) });
                }
                Err(TryLockError::Error(error)) => return without(error),
                Err(TryLockError::WouldBlock) => {}
            }
            if began.elapsed() >= patience {
                let holder = fs::read_to_string(&path).unwrap_or_default();
                bail!(
                    "another `hostler up` of yours (process {holder}) has not found its place within {}: see what it says, or end it with `kill {holder}`, and try again",
                    humantime::format_duration(patience)
                );
            }
            sleep(POLL_INTERVAL).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_turn_lasts_until_it_is_dropped_and_its_holder_is_named() {
        let place = tempfile::tempdir().unwrap();
        let first = UpTurn::take_in(place.path(), Duration::ZERO).await.unwrap();
        let refused = UpTurn::take_in(place.path(), Duration::ZERO).await.unwrap_err().to_string();
        assert!(refused.contains(&format!("(process {})", std::process::id())), "{refused}");
        drop(first);
        UpTurn::take_in(place.path(), Duration::ZERO).await.unwrap();
    }
}
