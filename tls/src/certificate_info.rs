//! Content of a node's certificate: its node and fleet, the token by which it joined, and its
//! validity.

use sha2::{Digest, Sha256};
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use crate::{BACKDATE_SECONDS, TlsError, hex};

/// SHA-256 of a public key, which identifies an authority or a node's key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint(pub(crate) [u8; 32]);

impl Fingerprint {
    /// Fingerprint of a certificate's public key; `None` if it cannot be parsed.
    #[must_use]
    pub fn of_certificate(certificate: &[u8]) -> Option<Self> {
        let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
        Some(Self::of_key(certificate.public_key().raw))
    }

    /// Hashes a public key with its algorithm (SubjectPublicKeyInfo).
    pub(crate) fn of_key(key: &[u8]) -> Self {
        Self(Sha256::digest(key).into())
    }
}

/// When a certificate expires: Unix time in seconds; `None` if it cannot be parsed.
pub(crate) fn expires_at(certificate: &[u8]) -> Option<u64> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    u64::try_from(certificate.validity().not_after.timestamp()).ok()
}

impl std::fmt::Display for Fingerprint {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&hex(&self.0))
    }
}

/// Content of a node's certificate, which the handshake has verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateInfo {
    pub node: String,
    pub token: String,
    pub key: Fingerprint,
    /// Time of issue: Unix time in seconds by the issuing router's clock.
    pub issued_at: u64,
    /// Time of expiry: Unix time in seconds.
    pub expires_at: u64,
}

impl CertificateInfo {
    /// Parses a certificate; `None` if it is not a node's.
    #[must_use]
    pub fn parse(certificate: &[u8]) -> Option<Self> {
        let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
        let names = certificate.subject_alternative_name().ok().flatten()?;
        let value_of = |what: &str| {
            names.value.general_names.iter().find_map(|name| match name {
                GeneralName::URI(uri) => uri.strip_prefix(SCHEME)?.split_once('/')?.1.strip_prefix(what).map(str::to_owned),
                _ => None,
            })
        };
        let seconds = |time: i64| u64::try_from(time).unwrap_or(0);
        let validity = certificate.validity();
        Some(Self {
            node: value_of("node/")?,
            token: value_of("token/")?,
            key: Fingerprint::of_key(certificate.public_key().raw),
            issued_at: seconds(validity.not_before.timestamp()) + BACKDATE_SECONDS,
            expires_at: seconds(validity.not_after.timestamp()),
        })
    }
}

const SCHEME: &str = "hostler://";

/// Longest name of a node or fleet, in bytes; a file name has at most 255.
const MAX_NAME_BYTES: usize = 200;

/// URI in a certificate that names its node.
pub(crate) fn node_uri(fleet: &str, node: &str) -> String {
    format!("{SCHEME}{fleet}/node/{node}")
}

/// URI in a certificate that names the node's join token.
pub(crate) fn token_uri(fleet: &str, token: &str) -> String {
    format!("{SCHEME}{fleet}/token/{token}")
}

/// Checks that a name can stand in such a URI without escapes, and be a folder's name.
///
/// # Errors
/// When the name cannot.
pub fn check_name(name: &str) -> Result<(), TlsError> {
    let fits = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '-' | '_');
    if !name.is_empty() && !name.starts_with('.') && name.len() <= MAX_NAME_BYTES && name.chars().all(fits) {
        Ok(())
    } else {
        Err(TlsError::Name(name.to_owned()))
    }
}
/// Whether a text in PEM has certificates, and each of them can be read.
#[must_use]
pub fn has_certificates(pem: &str) -> bool {
    let mut certificates = CertificateDer::pem_slice_iter(pem.as_bytes()).peekable();
    certificates.peek().is_some()
        && certificates.all(|certificate| certificate.is_ok_and(|certificate| X509Certificate::from_der(&certificate).is_ok()))
}
