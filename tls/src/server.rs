//! The router's TLS listeners: the edge and the agents' port.
//!
//! The edge's certificate is in an operator's files, which are read again when they change, or the
//! fleet's authority issues it in memory. The router makes the certificate of the agents' port
//! itself. A change never touches open connections.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use sha2::{Digest, Sha256};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use tokio_rustls::rustls::{RootCertStore, ServerConfig, version};
use tokio_util::sync::CancellationToken;

use crate::certificate_info::expires_at;
use crate::files::read;
use crate::{Authority, Handshake, TlsError, provider};

/// How often the edge's three small files are checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// ALPN protocols, with HTTP/2 preferred to HTTP/1.1.
const ALPN_PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

#[derive(Debug, Clone)]
pub struct EdgeFiles {
    /// Certificate and intermediate ones, in PEM.
    pub certificate: PathBuf,
    /// Key of the certificate, in PEM.
    pub key: PathBuf,
    /// Authorities of clients' certificates, in PEM. If given, every client needs a certificate.
    pub client_authority: Option<PathBuf>,
}

struct EdgeFileBytes {
    certificate: Vec<u8>,
    key: Vec<u8>,
    client_authority: Option<Vec<u8>>,
}

#[derive(Debug)]
pub struct EdgeTls {
    current: ArcSwap<LoadedCertificate>,
    /// Files to read again; `None` if the fleet's authority has issued the certificate.
    files: Option<EdgeFiles>,
}

#[derive(Debug)]
struct LoadedCertificate {
    settings: Handshake,
    /// Digest of the files when they were last read.
    digest: [u8; 32],
    expires_at: Option<u64>,
}

impl LoadedCertificate {
    fn new(mut settings: ServerConfig, digest: [u8; 32], expires_at: Option<u64>) -> Self {
        settings.alpn_protocols = ALPN_PROTOCOLS.map(<[u8]>::to_vec).to_vec();
        Self { settings: Arc::new(settings), digest, expires_at }
    }
}

impl EdgeTls {
    /// Reads the files.
    ///
    /// # Errors
    /// When a file cannot be read or is invalid, or key and certificate do not belong together.
    pub fn load(files: EdgeFiles) -> Result<Self, TlsError> {
        let current = ArcSwap::from_pointee(files.load(&files.read()?)?);
        Ok(Self { current, files: Some(files) })
    }

    /// Issues a certificate of the fleet's authority for these names and addresses.
    ///
    /// The certificate and its key are only in memory.
    ///
    /// # Errors
    /// When a name cannot stand in a certificate, or the cryptographic library fails.
    pub fn issue(authority: &Authority, names: &[String]) -> Result<Self, TlsError> {
        let (certificates, key) = authority.issue_edge_in_memory(names)?;
        let expires_at = first_expiry(&certificates);
        let builder = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions()?;
        let settings = builder.with_no_client_auth().with_single_cert(certificates, key)?;
        Ok(Self { current: ArcSwap::from_pointee(LoadedCertificate::new(settings, [0; 32], expires_at)), files: None })
    }

    /// Settings for the next handshake.
    #[must_use]
    pub fn handshake(&self) -> Handshake {
        self.current.load().settings.clone()
    }

    /// When the first of the certificates in use expires: Unix time in seconds.
    #[must_use]
    pub fn expires_at(&self) -> Option<u64> {
        self.current.load().expires_at
    }

    /// Reads the files again whenever they change, until `end`.
    ///
    /// Invalid files are logged once, and the last good certificate stays in use.
    pub async fn reload_on_change(self: Arc<Self>, end: CancellationToken) {
        let Some(files) = &self.files else { return };
        let mut mentioned = String::new();
        loop {
            tokio::select! {
                () = tokio::time::sleep(CHECK_INTERVAL) => {}
                () = end.cancelled() => return,
            }
            let tls = self.clone();
            let looked = tokio::task::spawn_blocking(move || tls.reload_if_changed()).await;
            match looked {
                Ok(Ok(true)) => {
                    mentioned.clear();
                    tracing::info!(
                        event = "certificate_loaded",
                        certificate = %files.certificate.display(),
                        "the edge's certificate was read again"
                    );
                }
                Ok(Ok(false)) => mentioned.clear(),
                // A pair that is being replaced does not match for a moment; the next check finds
                // it complete.
                Ok(Err(error)) if mentioned != error.to_string() => {
                    tracing::warn!(event = "certificate_refused", %error, "the edge's new certificate cannot be used; the last one stays");
                    mentioned = error.to_string();
                }
                Ok(Err(_)) => {}
                Err(error) => tracing::error!(%error, "the edge's certificate could not be looked at"),
            }
        }
    }

    /// Checks the files; `true` if they had changed.
    fn reload_if_changed(&self) -> Result<bool, TlsError> {
        let Some(files) = &self.files else { return Ok(false) };
        let found = files.read()?;
        if self.current.load().digest == found.digest() {
            return Ok(false);
        }
        self.current.store(Arc::new(files.load(&found)?));
        Ok(true)
    }
}

impl EdgeFiles {
    fn read(&self) -> Result<EdgeFileBytes, TlsError> {
        Ok(EdgeFileBytes {
            certificate: read(&self.certificate)?,
            // The operator decides who else may read the key, because secrets are mounted with
            // modes of all kinds.
            key: read(&self.key)?,
            client_authority: self.client_authority.as_deref().map(read).transpose()?,
        })
    }

    fn load(&self, found: &EdgeFileBytes) -> Result<LoadedCertificate, TlsError> {
        let certificates = certificates(&self.certificate, &found.certificate)?;
        let expires_at = first_expiry(&certificates);
        let key = PrivateKeyDer::from_pem_slice(&found.key)
            .map_err(|_| TlsError::Content { path: self.key.clone(), what: "no private key in PEM is in it".into() })?;
        let builder = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions()?;
        let builder = match (&self.client_authority, &found.client_authority) {
            (Some(path), Some(pem)) => {
                let mut roots = RootCertStore::empty();
                for authority in self::certificates(path, pem)? {
                    roots.add(authority)?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider()).build();
                builder.with_client_cert_verifier(verifier.map_err(|error| TlsError::Crypto(error.to_string()))?)
            }
            _ => builder.with_no_client_auth(),
        };
        let settings = builder.with_single_cert(certificates, key).map_err(|error| TlsError::Content {
            path: self.key.clone(),
            what: format!("it is not the key of the certificate in {} ({error})", self.certificate.display()),
        })?;
        Ok(LoadedCertificate::new(settings, found.digest(), expires_at))
    }
}

impl EdgeFileBytes {
    fn digest(&self) -> [u8; 32] {
        let mut digest = Sha256::new();
        for part in [Some(&self.certificate), Some(&self.key), self.client_authority.as_ref()] {
            let part = part.map_or(&[][..], Vec::as_slice);
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part);
        }
        digest.finalize().into()
    }
}

/// When the first of these expires: Unix time in seconds.
fn first_expiry(certificates: &[CertificateDer<'_>]) -> Option<u64> {
    certificates.iter().filter_map(|certificate| expires_at(certificate)).min()
}

/// Certificates in a file, at least one.
pub(crate) fn certificates(path: &std::path::Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        _ => Err(TlsError::Content { path: path.to_owned(), what: "no certificate in PEM is in it".into() }),
    }
}

#[derive(Debug)]
pub struct AgentsTls {
    authority: Arc<Authority>,
    lifetime: Duration,
    current: ArcSwap<ServerConfig>,
}

impl AgentsTls {
    /// Creates the router's first certificate, valid for `lifetime`.
    ///
    /// # Errors
    /// When the cryptographic library fails.
    pub fn new(authority: Arc<Authority>, lifetime: Duration) -> Result<Self, TlsError> {
        let current = ArcSwap::new(agents_server_config(&authority, lifetime)?);
        Ok(Self { authority, lifetime, current })
    }

    /// Settings for the next handshake.
    #[must_use]
    pub fn handshake(&self) -> Handshake {
        self.current.load_full()
    }

    /// Renews the router's certificate at half of its lifetime, until `end`.
    pub async fn renew_certificate(self: Arc<Self>, end: CancellationToken) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(self.lifetime / 2) => {}
                () = end.cancelled() => return,
            }
            match agents_server_config(&self.authority, self.lifetime) {
                Ok(settings) => self.current.store(settings),
                Err(error) => tracing::error!(%error, "the router cannot make itself a new certificate for agents"),
            }
        }
    }
}

fn agents_server_config(authority: &Authority, lifetime: Duration) -> Result<Arc<ServerConfig>, TlsError> {
    let (certificates, key) = authority.issue_router(lifetime)?;
    let mut roots = RootCertStore::empty();
    roots.add(authority.certificate().clone())?;
    // A node without a certificate may connect to request one.
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider()).allow_unauthenticated().build();
    let mut settings = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&version::TLS13])?
        .with_client_cert_verifier(verifier.map_err(|error| TlsError::Crypto(error.to_string()))?)
        .with_single_cert(certificates, key)?;
    settings.alpn_protocols = vec![ALPN_PROTOCOLS[0].to_vec()];
    // A resumed session would continue with a certificate that has expired meanwhile.
    settings.session_storage = Arc::new(NoServerSessionStorage {});
    settings.send_tls13_tickets = 0;
    Ok(Arc::new(settings))
}
