//! Errors of files, certificates and handshakes, in sentences that name the remedy.

use std::error::Error;
use std::io::ErrorKind;
use std::path::PathBuf;

use tokio_rustls::rustls::{self, AlertDescription, CertificateError};

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("cannot write {path}: {source}")]
    Write { path: PathBuf, source: std::io::Error },
    #[error("{path}: {what}")]
    Content { path: PathBuf, what: String },
    #[error(
        "{path} can be read by others on this host (mode {mode:03o}): `chmod 600 {path}`, and take another key or token if somebody may have"
    )]
    Exposed { path: PathBuf, mode: u32 },
    #[error(
        "{0} has the authority of a fleet already: use it, or choose another folder with --dir; whoever joined by it would have to join again"
    )]
    Exists(PathBuf),
    #[error("{0} has no fleet's authority (ca.crt and ca.key): make one with `hostler init --dir {0}`")]
    NoAuthority(PathBuf),
    #[error("{0:?} cannot be a name in a certificate: ASCII letters, digits, `-`, `_` and, not as the first, `.` make one, 200 at most")]
    Name(String),
    #[error("this is no join token: one line of the form ID.SECRET#FINGERPRINT was expected, as `hostler token create` prints it")]
    NotAToken,
    #[error("the signing request is not one that this program makes: {0}")]
    Request(String),
    #[error("{0}")]
    Crypto(String),
}

impl TlsError {
    /// Whether a file was not written because there is one already.
    #[must_use]
    pub fn is_already_there(&self) -> bool {
        matches!(self, Self::Write { source, .. } if source.kind() == ErrorKind::AlreadyExists)
    }
}

impl From<rcgen::Error> for TlsError {
    fn from(error: rcgen::Error) -> Self {
        Self::Crypto(error.to_string())
    }
}

impl From<rustls::Error> for TlsError {
    fn from(error: rustls::Error) -> Self {
        Self::Crypto(error.to_string())
    }
}

/// Finds the TLS library's error among the causes of another.
fn tls_cause<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a rustls::Error> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(found) = error.downcast_ref::<rustls::Error>() {
            return Some(found);
        }
        // `source` of an I/O error skips the very error that it was made of.
        let inner = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        if let Some(found) = inner.and_then(|inner| tls_cause(inner)) {
            return Some(found);
        }
        cause = error.source();
    }
    None
}

/// Whether the peer rejected this side's certificate with a TLS alert.
#[must_use]
pub fn is_alert_about_certificate(error: &(dyn Error + 'static)) -> bool {
    use AlertDescription as Alert;
    matches!(
        tls_cause(error),
        Some(rustls::Error::AlertReceived(
            Alert::CertificateExpired
                | Alert::UnknownCA
                | Alert::BadCertificate
                | Alert::DecryptError
                | Alert::CertificateUnknown
                | Alert::CertificateRevoked
        ))
    )
}

/// Explains to an agent why its connection to a router failed in TLS; `None` if it failed
/// otherwise.
#[must_use]
pub fn describe_for_agent(error: &(dyn Error + 'static)) -> Option<String> {
    use AlertDescription as Alert;
    use CertificateError as Certificate;
    use rustls::Error as Tls;
    let sentence = match tls_cause(error)? {
        Tls::InvalidCertificate(Certificate::UnknownIssuer | Certificate::BadSignature) => {
            "the router's certificate is not of this agent's fleet: is this the right router? If the fleet was made anew, this agent needs \
             a new token (`hostler token create` beside the router)"
                .to_owned()
        }
        Tls::InvalidCertificate(Certificate::NotValidYet | Certificate::NotValidYetContext { .. }) => {
            "the router's certificate is not valid yet by this host's clock: set the clocks of both hosts (`timedatectl`)".to_owned()
        }
        Tls::InvalidCertificate(Certificate::Expired | Certificate::ExpiredContext { .. }) => {
            "the router's certificate has expired by this host's clock: set the clocks of both hosts (`timedatectl`); a router makes itself \
             a new certificate in time"
                .to_owned()
        }
        Tls::InvalidCertificate(Certificate::NotValidForName | Certificate::NotValidForNameContext { .. }) => {
            "what answers has a certificate of the fleet that is no router's: is this a router's agent port (router.agents_listen)?".to_owned()
        }
        Tls::AlertReceived(Alert::CertificateExpired) => {
            "this agent's certificate has expired by the router's clock: it joins again by its token; if that does not help, set the clocks \
             of both hosts"
                .to_owned()
        }
        Tls::AlertReceived(Alert::UnknownCA | Alert::BadCertificate | Alert::DecryptError | Alert::CertificateUnknown) => {
            "the router does not take this agent's certificate, which is of another fleet: it joins again by its token; give it one of this \
             router's fleet"
                .to_owned()
        }
        Tls::InvalidMessage(_) => {
            "what answers does not speak TLS: give the router its fleet's folder (router.tls_dir, made by `hostler init`)".to_owned()
        }
        other => format!("TLS failed: {other}"),
    };
    Some(sentence)
}

/// Explains to a router why an agent's connection failed in TLS; `None` if it failed otherwise.
#[must_use]
pub fn describe_for_router(error: &(dyn Error + 'static)) -> Option<String> {
    use AlertDescription as Alert;
    use CertificateError as Certificate;
    use rustls::Error as Tls;
    let sentence = match tls_cause(error)? {
        Tls::InvalidCertificate(Certificate::Expired | Certificate::ExpiredContext { .. }) => {
            "the agent's certificate has expired: it joins again by its token; if it does not, give it a new one (`hostler token create`)"
                .to_owned()
        }
        Tls::InvalidCertificate(Certificate::NotValidYet | Certificate::NotValidYetContext { .. }) => {
            "the agent's certificate is not valid yet by this host's clock: set the clocks of all routers' hosts (`timedatectl`)".to_owned()
        }
        Tls::InvalidCertificate(_) => {
            "the agent's certificate is not of this fleet: give it a token of this fleet (`hostler token create`)".to_owned()
        }
        Tls::AlertReceived(Alert::UnknownCA | Alert::BadCertificate | Alert::DecryptError | Alert::CertificateUnknown) => {
            "the agent does not take this router's certificate: its token or certificate is of another fleet".to_owned()
        }
        Tls::AlertReceived(Alert::CertificateExpired) => {
            "this router's certificate has expired, or is not valid yet, by the agent's clock: set the clocks of both hosts".to_owned()
        }
        Tls::InvalidMessage(_) => {
            "something spoke plain text to this port, which takes TLS: an agent needs agent.join_token_file".to_owned()
        }
        other => format!("TLS failed: {other}"),
    };
    Some(sentence)
}
