//! Why the controller has not taken a step to its end, and which of the reasons end it.

use hostler_scheduler::CommandError;
use hostler_tls::TlsError;

use crate::FolderError;

/// Why a step, or the part of it that is about one entry, was not taken to its end.
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
    /// Whether this controller is to end, because the fleet is another one's.
    pub(crate) fn is_final(&self) -> bool {
        matches!(self, Self::Replaced { .. } | Self::Forgotten | Self::Folder(FolderError::OtherScheduler { .. }))
    }
}

/// Whether nothing was submitted for certain. A command that was late, or whose answer cannot be read, may have submitted a job.
pub(crate) fn is_refusal(error: &CommandError) -> bool {
    match error {
        CommandError::Missing { .. } | CommandError::Run { .. } | CommandError::Failed { .. } => true,
        CommandError::Late { .. } | CommandError::Unreadable { .. } => false,
    }
}
