//! Why the controller did not complete a step, and which of these reasons end the controller.

use hostler_scheduler::CommandError;
use hostler_tls::TlsError;

use crate::FolderError;

/// Reason why a step, or its part for one entry, was not completed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StepError {
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error("the router does not answer: {}", .0.message())]
    Router(#[from] tonic::Status),
    #[error("no join token for the jobs: {0}")]
    Token(#[from] TlsError),
    #[error("the fleet has another controller, on {host}, process {pid}")]
    Replaced { host: String, pid: u32 },
    #[error("the fleet's endpoint is gone: nobody would find this controller")]
    Forgotten,
}

impl StepError {
    /// Whether this controller must end because the fleet belongs to another one.
    pub(crate) fn is_final(&self) -> bool {
        matches!(self, Self::Replaced { .. } | Self::Forgotten | Self::Folder(FolderError::OtherScheduler { .. }))
    }
}

/// Whether certainly nothing was submitted. A command that was late, or whose answer cannot be
/// read, may have submitted a job.
pub(crate) fn is_refusal(error: &CommandError) -> bool {
    match error {
        CommandError::Missing { .. } | CommandError::Run { .. } | CommandError::Failed { .. } => true,
        CommandError::Late { .. } | CommandError::Unreadable { .. } => false,
    }
}
