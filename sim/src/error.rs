//! Errors that can end the simulated engine early.
//!
//! The caller of `serve` reports them; errors of single requests are answers instead and live in
//! `api::errors`.

use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another process has the port, or a socket file is left from an earlier run.
    ///
    /// Like vLLM, the engine never removes it.
    #[error("OSError: [Errno 98] Address already in use: {address}; remove the socket file or choose another address")]
    AddressInUse { address: String },
    /// The address cannot be bound for another reason.
    #[error("cannot bind {address}")]
    Bind { address: String, source: std::io::Error },
    /// A socket path does not fit the kernel's 107 bytes.
    #[error("socket path {} is longer than 107 bytes; choose a shorter directory", path.display())]
    PathTooLong { path: PathBuf },
    /// An argument is wrong in a way that clap cannot see.
    #[error("bad value for {argument}: {reason}")]
    Argument { argument: &'static str, reason: String },
    #[error("cannot open the KV event endpoint {endpoint}: {reason}")]
    KvEvents { endpoint: String, reason: String },
    /// `--sim-read-model` has the model's folder read, and that failed.
    #[error("cannot read {}: {source}", path.display())]
    Model { path: PathBuf, source: std::io::Error },
    /// `--sim-fail-start` requested the failure.
    #[error("RuntimeError: Engine core initialization failed. See root cause above")]
    FailedStart,
    /// The `die` fault, or `--sim-die-after-ms`: the caller exits at once.
    #[error("the engine died as it was told to")]
    Died,
}
