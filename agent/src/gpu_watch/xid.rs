//! Meaning of each XID for the engine on that GPU. An XID is the number under which NVIDIA's driver
//! reports a fault.
//!
//! Source: NVIDIA's XID catalog for Ampere and newer (docs.nvidia.com/deploy/xid-errors, column
//! "Immediate Action"), and the notes below it. This table departs from the catalog where its
//! "restart the application" is for the application's own faults (13, 31, 43 and similar). The
//! number does not say which process on the GPU it was. A process with a broken context gets an
//! error from CUDA, ends, and is therefore restarted.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum XidClass {
    /// The fault of a process, a consequence of another fault, or a note.
    Logged,
    /// The GPU keeps working, but its running processes are damaged.
    RestartEngine,
    /// The GPU must be reset, but running requests may finish.
    ResetSoon,
    /// The GPU does not work, or its results cannot be trusted.
    ResetNow,
}

/// Class and meaning of an XID. An XID that is not in the table is logged.
pub(super) fn classify(xid: u64) -> (XidClass, &'static str) {
    use XidClass::{Logged, ResetNow, ResetSoon, RestartEngine};
    match xid {
        13 => (Logged, "an exception in a process's kernel"),
        31 => (Logged, "a process used memory that is not its own"),
        43 => (Logged, "a process's kernel was stopped"),
        45 => (Logged, "a process's work was removed, after another fault or because the process ended"),
        63 => (Logged, "a memory row will be replaced at the next reset"),
        69 => (Logged, "a process used the GPU wrongly"),
        92 => (Logged, "many memory errors are being corrected"),
        // The driver reports 154 beside faults that have their own number.
        154 => (Logged, "the recovery that the driver recommends has changed"),
        32 => (RestartEngine, "corrupted commands to the GPU"),
        94 => (RestartEngine, "a contained memory error"),
        // A row that cannot be replaced does no damage before its memory fails again.
        64 => (ResetSoon, "a memory row could not be replaced"),
        // Engines on one GPU do not notice. Engines on several GPUs hang, and their watchdog ends
        // them.
        74 => (ResetSoon, "an NVLink error"),
        136 => (ResetSoon, "NVLink could not be trained"),
        156 => (ResetSoon, "a part of the GPU was taken out of use"),
        46 => (ResetNow, "the GPU has stopped processing"),
        48 => (ResetNow, "a memory error that cannot be corrected"),
        62 => (ResetNow, "the GPU's controller has halted"),
        79 => (ResetNow, "the GPU has fallen off the bus"),
        95 => (ResetNow, "a memory error that is not contained"),
        109 => (ResetNow, "the GPU does not switch between its tasks"),
        110 => (ResetNow, "a security fault of the GPU"),
        119 => (ResetNow, "the GPU's system processor does not answer"),
        120 => (ResetNow, "an error of the GPU's system processor"),
        140 => (ResetNow, "a memory error that cannot be corrected, found late"),
        143 => (ResetNow, "the GPU could not be initialised"),
        155 => (ResetNow, "an NVLink error that needs a reset"),
        158 => (ResetNow, "a fatal timeout of the GPU"),
        _ => (Logged, "see NVIDIA's XID catalog"),
    }
}
