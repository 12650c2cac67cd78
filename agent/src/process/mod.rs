//! Processes as the kernel shows them: which exist, what they do, which belong to an engine, and
//! what they leave behind.
//!
//! The keeper and the supervision of engines build on this.

pub(crate) mod activity;
pub(crate) mod core_exit;
pub(crate) mod leftovers;
pub(crate) mod oom_watch;
pub(crate) mod orphans;
pub(crate) mod record;
pub(crate) mod table;

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Environment variable of every keeper, with its engine's directory.
///
/// A later agent finds the keeper by it.
pub(crate) const KEEPER_OF: &str = "HOSTLER_KEEPER_OF";

/// Environment variable of every engine, with its directory, where vLLM puts its sockets.
///
/// A later agent finds the engine's processes by it.
pub(crate) const ENGINE_OF: &str = "VLLM_RPC_BASE_PATH";

/// How long to wait for killed processes before they are called stuck.
///
/// A process inside a GPU driver call can take seconds to die.
pub(crate) const STUCK_AFTER: Duration = Duration::from_secs(10);

/// The engine's first process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LeaderProcess {
    /// Process id, which is also the group's id.
    pub(crate) pid: i32,
    /// Start time in clock ticks since boot.
    pub(crate) started: u64,
}
