//! The place of a fleet's only controller: taking it, and waiting for it in a batch job.

use std::fs::File;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use hostler_boot::Shutdown;
use hostler_controller::{Endpoint, FleetFolder, FolderError};
use tokio::time::sleep;

use crate::host_names::this_host;

/// How long the place may stay held by a controller that leaves, by a scheduler's command left
/// behind, or by a controller whose host has died. Each takes up to a minute.
pub(super) const PLACE_PATIENCE: Duration = Duration::from_secs(75);

pub(super) const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Waits for the place of the fleet's only controller.
pub(super) async fn take_place(folder: &FleetFolder) -> anyhow::Result<File> {
    let (waiting, began) = (folder.clone(), Instant::now());
    match tokio::task::spawn_blocking(move || waiting.lock_controller(PLACE_PATIENCE)).await? {
        Err(FolderError::Busy { .. }) => Err(taken_place(folder.endpoint()?.as_ref())),
        locked => {
            let lock = locked?;
            while let Some(other) = find_elsewhere(folder, &this_host())? {
                if began.elapsed() >= PLACE_PATIENCE {
                    return Err(taken_place(Some(&other)));
                }
                sleep(POLL_INTERVAL).await;
            }
            Ok(lock)
        }
    }
}

/// The controller that lives on another host. File locks may not reach that far.
fn find_elsewhere(folder: &FleetFolder, this_host: &str) -> anyhow::Result<Option<Endpoint>> {
    let Some(other) = folder.endpoint()?.filter(|endpoint| endpoint.host != this_host) else { return Ok(None) };
    Ok(if folder.is_controller_gone()? { None } else { Some(other) })
}

fn taken_place(other: Option<&Endpoint>) -> anyhow::Error {
    let other = other.map(|other| format!(" on {}, process {}", other.host, other.pid)).unwrap_or_default();
    anyhow!("this fleet has a controller already{other}: SIGTERM ends it, and its jobs run on")
}

/// Waits for the place as long as this batch job runs, and tells the controller that has it.
/// Returns `None` if the job must end first.
pub(super) async fn wait_for_place(folder: &FleetFolder, job: &str, shutdown: &Shutdown) -> anyhow::Result<Option<File>> {
    let mut is_announced = false;
    loop {
        let tried = folder.clone();
        if let Some(lock) = tokio::task::spawn_blocking(move || try_place(&tried)).await?? {
            folder.remove_standby()?;
            return Ok(Some(lock));
        }
        if !is_announced {
            tracing::info!(job, "this controller waits for the place of the one that runs");
            is_announced = true;
        }
        // Another waiting job, dead by now, may have overwritten the claim.
        folder.renew_standby(job)?;
        tokio::select! {
            () = sleep(POLL_INTERVAL) => {}
            () = shutdown.wait_drain() => return Ok(None),
        }
    }
}

fn try_place(folder: &FleetFolder) -> anyhow::Result<Option<File>> {
    match folder.lock_controller(Duration::ZERO) {
        Err(FolderError::Busy { .. }) => Ok(None),
        locked => {
            let lock = locked?;
            Ok(if find_elsewhere(folder, &this_host())?.is_some() { None } else { Some(lock) })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::tests::endpoint;

    #[test]
    fn a_live_controller_elsewhere_keeps_its_place() {
        let place = tempfile::tempdir().unwrap();
        let folder = FleetFolder::at(&place.path().join("fleet")).unwrap();
        let find = || find_elsewhere(&folder, "login1").unwrap();
        assert_eq!(find(), None);
        let other = endpoint("login2", 7);
        folder.write_endpoint(&other).unwrap();
        assert_eq!(find(), Some(other.clone()));
        assert!(taken_place(Some(&other)).to_string().contains("already on login2, process 7"));
        folder.retire_endpoint(&other).unwrap();
        assert_eq!(find(), None, "it has ended");
        folder.write_endpoint(&endpoint("login1", 7)).unwrap();
        assert_eq!(find(), None, "here the lock says so");
    }

    #[tokio::test(start_paused = true)]
    async fn a_controller_in_a_job_waits_for_its_place() {
        let place = tempfile::tempdir().unwrap();
        let folder = FleetFolder::at(&place.path().join("fleet")).unwrap();
        let other = endpoint("another-host", 7);
        folder.write_endpoint(&other).unwrap();
        let leaving = async {
            while folder.standby().unwrap().is_none() {
                sleep(POLL_INTERVAL).await;
            }
            assert_eq!(folder.standby().unwrap().as_deref(), Some("12.head"));
            folder.retire_endpoint(&other).unwrap();
        };
        let shutdown = Shutdown::new();
        let (lock, ()) = tokio::join!(wait_for_place(&folder, "12.head", &shutdown), leaving);
        assert!(lock.unwrap().is_some() && folder.standby().unwrap().is_none());
        folder.renew_endpoint(&other).unwrap();
        shutdown.drain();
        assert!(wait_for_place(&folder, "13.head", &shutdown).await.unwrap().is_none());
    }
}
