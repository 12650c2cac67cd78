//! Incidents of a GPU and the response of the engines on it.
//!
//! The decision is pure; the sentences are for operators, who read them in `hostler ps`.

use super::xid::{self, XidClass};

/// A report of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IncidentKind {
    /// The GPU reported a fault, once.
    Xid(u64),
    /// The GPU cannot be reached. Reported again with each reading.
    Lost,
    /// The GPU does not work until it is reset. Reported again with each reading.
    NeedsReset,
    /// A row of the GPU's memory could not be replaced. Reported again with each reading.
    RemapFailed,
    /// Rows of the GPU's memory now wait for a reset to be replaced; they did not before.
    RemapPending,
    Silent,
    Answers,
}

/// An incident of a whole GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GpuIncident {
    pub(super) whole_uuid: String,
    pub(super) index: u32,
    pub(super) kind: IncidentKind,
}

/// Response for one engine on the GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum IncidentResponse {
    /// Only write a line to the log.
    Log(String),
    /// Restart the engine.
    Fail(String),
    /// Take the engine out of service.
    Quarantine {
        reason: String,
        /// Do so without waiting for running requests.
        at_once: bool,
    },
}

/// Response for an engine that uses this GPU or a slice of it.
///
/// A quarantine's reason ends with the step that must come first. Every quarantine also says that
/// `hostler release` ends it.
pub(super) fn respond(incident: &GpuIncident, on_slice: bool) -> IncidentResponse {
    let gpu = incident.index;
    let at_once = |reason: String| IncidentResponse::Quarantine { reason, at_once: true };
    let later = |reason: String| IncidentResponse::Quarantine { reason, at_once: false };
    match incident.kind {
        IncidentKind::Xid(79) => at_once(format!("XID 79: GPU {gpu} has fallen off the bus, reboot the node")),
        IncidentKind::Xid(number) => {
            let (class, meaning) = xid::classify(number);
            let message = format!("XID {number} on GPU {gpu}: {meaning}");
            match class {
                XidClass::Logged => IncidentResponse::Log(message),
                // The fault is in one slice, but the driver's library does not say which. The
                // affected engine gets an error and ends.
                XidClass::RestartEngine if on_slice => IncidentResponse::Log(message),
                XidClass::RestartEngine => {
                    IncidentResponse::Fail(format!("{message}: the engine is restarted; reset the GPU when convenient"))
                }
                XidClass::ResetSoon => later(format!("{message}, reset the GPU or reboot the node")),
                XidClass::ResetNow => at_once(format!("{message}, reset the GPU or reboot the node")),
            }
        }
        IncidentKind::Lost => at_once(format!("GPU {gpu} is lost: the driver does not reach it any more, reboot the node")),
        IncidentKind::NeedsReset => at_once(format!("GPU {gpu} does not work before it is reset: reset it or reboot the node")),
        IncidentKind::RemapFailed => later(format!("GPU {gpu} could not replace a failed row of its memory, have the GPU replaced")),
        IncidentKind::RemapPending => {
            IncidentResponse::Log(format!("GPU {gpu} replaces failed rows of its memory at its next reset: reset it when convenient"))
        }
        IncidentKind::Silent => {
            let message =
                format!("the driver does not answer questions about GPU {gpu}: its figures are unknown, and `nvidia-smi` may hang as well");
            IncidentResponse::Log(message)
        }
        IncidentKind::Answers => IncidentResponse::Log(format!("the driver answers questions about GPU {gpu} again")),
    }
}

#[cfg(test)]
mod tests;
