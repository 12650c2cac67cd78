//! TLS for Hostler: the authority that signs for a fleet, the tokens by which nodes join it, the
//! content of certificates, and the settings of both ends of a connection.
//!
//! Router, agent and command line use it; nothing here knows of requests or replicas.

mod authority;
mod certificate_info;
mod client;
mod error;
mod files;
mod node_names;
mod peer;
mod server;
mod stream;
mod token;
mod token_store;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use tokio_rustls::rustls::crypto::{CryptoProvider, aws_lc_rs};

pub use authority::{Authority, EdgeCertificate, IssuedCertificate, NodeKey};
pub use certificate_info::{CertificateInfo, Fingerprint, check_name, has_certificates};
pub use client::{EnrollmentVerifier, connect, connect_to_host, member_config};
pub use error::{TlsError, describe_for_agent, describe_for_router, is_alert_about_certificate};
pub use files::{read_private, write_new, write_private};
pub use peer::PeerTls;
pub use server::{AgentsTls, EdgeFiles, EdgeTls};
pub use stream::{Handshake, Stream, accept};
pub use token::JoinToken;
pub use token_store::{JoinRequest, TokenError, TokenInfo, TokenScope, TokenStore, UseLimit};

/// TLS settings of one kind of client, ready to be used.
pub use tokio_rustls::rustls::ClientConfig;

/// Name in routers' certificates.
///
/// Agents ask for it whatever address they dialled: the fleet's authority identifies a router, not
/// the place where it runs.
const ROUTER_NAME: &str = "router.hostler.internal";

/// How long before its issue a certificate is already valid, in seconds, because clocks may differ
/// by as much.
pub const BACKDATE_SECONDS: u64 = 300;

fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: std::sync::OnceLock<Arc<CryptoProvider>> = std::sync::OnceLock::new();
    PROVIDER.get_or_init(|| Arc::new(aws_lc_rs::default_provider())).clone()
}

/// Seconds since 1970 by this host's clock.
#[must_use]
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Formats bytes in lower case, two digits per byte.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Parses a lower-case hexadecimal text; `None` unless it has exactly `N` bytes.
#[must_use]
pub fn parse_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits: Option<Vec<u8>> =
        text.bytes().map(|letter| char::from(letter).to_digit(16).and_then(|digit| u8::try_from(digit).ok())).collect();
    let digits = digits.filter(|digits| digits.len() == 2 * N && !text.bytes().any(|letter| letter.is_ascii_uppercase()))?;
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    Some(bytes)
}

/// Formats a Unix time in seconds for people.
fn format_time(seconds: u64) -> String {
    humantime::format_rfc3339_seconds(UNIX_EPOCH + std::time::Duration::from_secs(seconds)).to_string()
}

#[cfg(test)]
mod tests;
