//! Tuning of the connection that carries everything, and the names of requests on it.

use std::time::Duration;

use crate::agent::v1::Fingerprint;

/// HTTP/2 windows in bytes: large enough that only the lanes' own credit ever slows a stream.
pub const HTTP2_WINDOW_BYTES: u32 = 16 * 1024 * 1024;

/// HTTP/2 frames in bytes: a whole batch fits in one.
pub const MAX_HTTP2_FRAME_BYTES: u32 = 256 * 1024;

/// Largest accepted message, in bytes. A batch has at most 128 KiB and one more frame.
pub const MAX_MESSAGE_BYTES: usize = 4 * 1024 * 1024;

/// Interval of pings, and the time in which a peer must answer one.
pub const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Time after which a connection with unacknowledged bytes counts as dead, even if pings still wait
/// to be sent.
pub const TCP_USER_TIMEOUT: Duration = Duration::from_secs(10);

impl From<u128> for Fingerprint {
    #[expect(clippy::cast_possible_truncation, reason = "the halves are what is wanted")]
    fn from(name: u128) -> Self {
        Self { high: (name >> 64) as u64, low: name as u64 }
    }
}

impl From<Fingerprint> for u128 {
    fn from(name: Fingerprint) -> Self {
        (Self::from(name.high) << 64) | Self::from(name.low)
    }
}
