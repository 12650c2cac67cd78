//! Starts the fleet's controller for a command: as a process of this host or as a batch job,
//! according to `cluster.controller`.

use std::fmt;

use anyhow::Context;
use hostler_controller::{ControllerPlace, Endpoint, ProgramFile};

use super::Fleet;
use super::controller_job::ensure_job;
use super::controller_process::{end_process, ensure_process, find_controller};
use crate::host_names::this_host;
use crate::output::say;

/// The controller that keeps the fleet, or will.
#[derive(Debug)]
pub(super) enum FoundController {
    Running(Box<Endpoint>),
    /// Id of the batch job that will start the controller.
    Submitted(String),
}

impl fmt::Display for FoundController {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Running(endpoint) => match &endpoint.job {
                None => write!(formatter, "on {}", endpoint.host),
                Some(job) => write!(formatter, "in job {job} on {}", endpoint.host),
            },
            Self::Submitted(job) => write!(formatter, "in job {job}"),
        }
    }
}

/// Makes the controller run, now or as soon as its job starts.
///
/// # Errors
/// When it cannot be started or submitted, or has found nothing to keep.
pub(super) async fn ensure_controller(fleet: &Fleet) -> anyhow::Result<FoundController> {
    if let Some(endpoint) = find_controller(&fleet.folder).await? {
        return Ok(FoundController::Running(endpoint.into()));
    }
    match fleet.config.controller {
        ControllerPlace::Job => Ok(FoundController::Submitted(ensure_job(fleet).await?)),
        ControllerPlace::Login => {
            let started = ensure_process(fleet).await?;
            started
                .map(|endpoint| FoundController::Running(endpoint.into()))
                .context("the controller has ended: another command has ended what was to serve")
        }
    }
}

/// Like `ensure_controller`, but replaces a controller that a command of another program has
/// started on this host.
///
/// # Errors
/// As for `ensure_controller`, and when the old controller does not leave its place.
pub(super) async fn ensure_current_controller(fleet: &Fleet) -> anyhow::Result<FoundController> {
    let own = ProgramFile::of_this_process(env!("CARGO_PKG_VERSION")).context("this program does not know its own file")?;
    if let Some(endpoint) = find_controller(&fleet.folder).await?
        && let Some(other) = find_other_program(&endpoint, &own, &this_host())
    {
        say(&format!(
            "replaced  the controller ran hostler {} ({}), which is not this program: another one takes its place",
            other.version,
            other.path.display()
        ));
        end_process(&fleet.folder, &endpoint).await?;
    }
    ensure_controller(fleet).await
}

/// The other program of a controller that this program must replace. A controller in a job gets its
/// program with the next job.
fn find_other_program<'a>(endpoint: &'a Endpoint, own: &ProgramFile, this_host: &str) -> Option<&'a ProgramFile> {
    let program = endpoint.program.as_ref().filter(|_| endpoint.job.is_none() && endpoint.host == this_host);
    program.filter(|program| *program != own)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::tests::endpoint;

    #[test]
    fn only_a_background_controller_of_another_program_is_replaced() {
        let own = ProgramFile::of_this_process("2.0.0").unwrap();
        let running = |version: &str| Endpoint { program: ProgramFile::of_this_process(version).ok(), ..endpoint("login1", 7) };
        let found = |endpoint: &Endpoint| find_other_program(endpoint, &own, "login1").map(|program| program.version.clone());
        assert_eq!(found(&running("1.0.0")).as_deref(), Some("1.0.0"));
        assert_eq!(found(&running("2.0.0")), None);
        assert_eq!(found(&Endpoint { program: None, ..running("1.0.0") }), None, "a person or a service has started it");
        assert_eq!(found(&Endpoint { host: "login2".into(), ..running("1.0.0") }), None);
        assert_eq!(found(&Endpoint { job: Some("11.head".into()), ..running("1.0.0") }), None);
    }
}
