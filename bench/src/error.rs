//! Reasons why a measurement could not be made.
//!
//! A request that fails is no error here: it is part of the result.

use thiserror::Error;

use crate::workload::TraceError;

#[derive(Debug, Error)]
pub enum Error {
    #[error("cannot reach {target}: {reason}; start it first, or name another with --target")]
    Unreachable { target: String, reason: String },
    #[error("{target} does not say which models it has ({reason}); name one with --model")]
    NoModel { target: String, reason: String },
    #[error("cannot read metrics from {page}: {reason}; leave out --metrics to measure without them")]
    NoMetrics { page: String, reason: String },
    #[error("the key in ${variable} cannot be a header; it may only have visible ASCII characters")]
    Key { variable: String },
    #[error("{0}")]
    Flags(String),
    #[error("cannot use the schema {}: {reason}", path.display())]
    Schema { path: std::path::PathBuf, reason: String },
    #[error(transparent)]
    Trace(#[from] TraceError),
    #[error("cannot start a thread: {0}; the system's limit of threads may be reached")]
    Thread(#[from] std::io::Error),
}
