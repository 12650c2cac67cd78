//! Common start of every role of Hostler: read settings, log, serve admin pages, and shut down in
//! two stages.
//!
//! Nothing here knows about requests, replicas or engines.

pub mod admin;
pub mod collector;
pub mod config;
pub mod connection_clock;
pub mod duration;
pub mod home;
pub mod listen;
pub mod metrics;
pub mod passing;
pub mod peer_user;
pub mod program;
pub mod shutdown;
pub mod socket;
pub mod telemetry;

pub use collector::{CollectorSettings, CollectorSettingsError, SamplingRule, TraceSettings};
pub use config::{ConfigError, Mistakes, Section, SettingSources, Settings};
pub use listen::{ListenError, accept, bind, configure_stream, reachable_here, resolve};
pub use shutdown::Shutdown;
pub use socket::{PrivateSocket, SocketError};

/// Raises the limit of open files to the most that this process is allowed. Each connection is a
/// file, and the usual 1,024 are soon used up.
pub fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }) {
        tracing::warn!(%error, "the number of open files stays at {:?}", limit.current);
    }
}

/// The kernel's name for this host.
#[must_use]
pub fn this_host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Innermost cause of an error, which tells people most.
#[must_use]
pub fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}
