//! Blocks that an engine has cached, learned from its own events.
//!
//! `kv_event` decodes the events, `mirror` keeps count of the blocks, `subscriber` listens to one
//! life of an engine, and sessions with routers read `CacheLog`. `FileLog` has the blocks in files,
//! which belong to all engines of the node.

mod block_set;
mod change_log;
mod cursor;
mod extra;
mod file_log;
pub(crate) mod kv_event;
mod log;
pub(crate) mod mirror;
mod subscriber;

use std::path::PathBuf;

pub(crate) use self::cursor::{CacheDelta, Cursor};
pub(crate) use self::file_log::{FILE_TIER, FileLog};
pub(crate) use self::log::{CacheLog, CacheLogWriter};
pub(crate) use self::subscriber::{FollowFrom, follow};

/// Memory in which an engine caches blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum CacheTier {
    #[default]
    Gpu,
    /// The host's memory, from which blocks are loaded into the GPU's.
    Host,
}

impl CacheTier {
    pub(crate) const ALL: [Self; 2] = [Self::Gpu, Self::Host];

    /// The tier's number in cache reports.
    pub(crate) fn number(self) -> u32 {
        match self {
            Self::Gpu => 0,
            Self::Host => 1,
        }
    }
}

/// How well the blocks of an engine are known, and whether that has changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheStatus {
    /// Epoch of the engine's life; 0 before the first.
    pub epoch: u64,
    /// Whether the blocks reported by `CacheLog::read` are exactly the cached ones.
    pub exact: bool,
    /// Why the blocks are not exact, in a sentence; empty if they are.
    pub reason: String,
    /// Tokens that a block holds; 0 before it is known.
    pub block_size: u32,
    /// A cached block may follow one that is not cached.
    pub has_holes: bool,
    /// Grows with each change of the blocks.
    pub version: u64,
}

/// Counters for an engine's events, over all its lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounters {
    /// Events of known kinds.
    pub events: u64,
    pub gaps: u64,
    /// Gaps that the engine could fill by sending messages again.
    pub replays: u64,
    /// Times that all blocks were forgotten, because the known ones could have been wrong.
    pub resets: u64,
    /// Blocks stored after a block that is not known.
    pub orphans: u64,
    pub malformed: u64,
    /// Events about unknown media, or about other cache groups than the mirrored one.
    pub ignored: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEventSource {
    /// Sockets that the engine binds.
    Sockets {
        /// Socket that sends events as they happen.
        live: PathBuf,
        /// Socket that sends events again on request.
        replay: PathBuf,
    },
    Nothing {
        because: String,
    },
}

#[cfg(test)]
mod tests;
