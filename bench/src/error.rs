//! Why a measurement could not be made. A request that fails is no error here: it is part of what is measured.

use thiserror::Error;

use crate::workload::TraceError;

/// Why a measurement came to nothing.
#[derive(Debug, Error)]
pub enum Error {
    /// Nothing answers there.
    #[error("cannot reach {target}: {reason}; start it first, or name another with --target")]
    Unreachable {
        /// As on the command line.
        target: String,
        /// What the system said.
        reason: String,
    },
    /// It does not tell its models.
    #[error("{target} does not say which models it has ({reason}); name one with --model")]
    NoModel {
        /// As on the command line.
        target: String,
        /// What came instead.
        reason: String,
    },
    /// A metrics page that was named on the command line.
    #[error("cannot read metrics from {page}: {reason}; leave out --metrics to measure without them")]
    NoMetrics {
        /// As on the command line.
        page: String,
        /// What came instead.
        reason: String,
    },
    /// The key cannot be sent.
    #[error("the key in ${variable} cannot be a header; it may only have visible ASCII characters")]
    Key {
        /// The environment's variable.
        variable: String,
    },
    /// Flags that do not go together.
    #[error("{0}")]
    Flags(String),
    /// The recorded trace.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The thread that begins sessions on time.
    #[error("cannot start a thread: {0}; the system's limit of threads may be reached")]
    Thread(#[from] std::io::Error),
}
