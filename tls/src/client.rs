//! The client's side of TLS: its trust, and the handshake with a router.
//!
//! Agents know routers by the fleet's authority, or by the fingerprint in their token before they
//! have that. Operators know a router by the same authority and the name of its host.

use std::io;
use std::path::Path;
use std::sync::Arc;

use tokio::io::AsyncBufReadExt;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::client::{Resumption, WebPkiServerVerifier};
use tokio_rustls::rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme, version};

use crate::files::read;
use crate::server::certificates;
use crate::{Fingerprint, NodeKey, ROUTER_NAME, Stream, TlsError, provider};

/// Verifier for an agent without a certificate.
///
/// It trusts the authority with this fingerprint, which the router sends beside its own
/// certificate.
#[derive(Debug)]
pub struct EnrollmentVerifier {
    authority: Fingerprint,
    provider: Arc<CryptoProvider>,
}

impl EnrollmentVerifier {
    /// TLS settings of a connection that asks for a certificate.
    ///
    /// # Errors
    /// When the cryptographic library fails.
    pub fn config_for(authority: Fingerprint) -> Result<Arc<ClientConfig>, TlsError> {
        let trust = Self { authority, provider: provider() };
        let builder = ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&version::TLS13])?;
        Ok(finish(builder.dangerous().with_custom_certificate_verifier(Arc::new(trust)).with_no_client_auth()))
    }
}

impl ServerCertVerifier for EnrollmentVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let ours = intermediates.iter().find(|shown| Fingerprint::of_certificate(shown) == Some(self.authority));
        let ours = ours.ok_or(Error::InvalidCertificate(CertificateError::UnknownIssuer))?;
        let mut roots = RootCertStore::empty();
        roots.add(ours.clone().into_owned())?;
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), self.provider.clone()).build();
        let verifier = verifier.map_err(|error| Error::General(error.to_string()))?;
        verifier.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// TLS settings of a node with a certificate. `from` names the source in errors.
///
/// # Errors
/// When the authority or the certificate cannot be used, or the key does not belong to the
/// certificate.
pub fn member_config(authority: &[u8], certificate: &[u8], key: &NodeKey, from: &Path) -> Result<Arc<ClientConfig>, TlsError> {
    let roots = trust_in(authority, from)?;
    let builder = ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&version::TLS13])?;
    let certificate = vec![CertificateDer::from(certificate.to_vec())];
    let config = builder.with_root_certificates(roots).with_client_auth_cert(certificate, key.secret());
    Ok(finish(config.map_err(|error| unusable(from, &error))?))
}

/// Trust in the authority with this certificate and in nobody else.
pub(crate) fn trust_in(authority: &[u8], from: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    let added = roots.add(CertificateDer::from(authority.to_vec()));
    let wrong = |error| TlsError::Content { path: from.to_owned(), what: format!("the authority's certificate cannot be used ({error})") };
    added.map_err(wrong)?;
    Ok(roots)
}

/// Error about the certificate and the key of a node.
pub(crate) fn unusable(from: &Path, error: &Error) -> TlsError {
    TlsError::Content { path: from.to_owned(), what: format!("its certificate and key cannot be used ({error})") }
}

/// Does the client's part of a handshake with a router's listener that has the fleet's certificate
/// for this host.
///
/// The host is a name or an address.
///
/// # Errors
/// When the authority's file cannot be read, or the handshake fails.
pub async fn connect_to_host(stream: TcpStream, authority: &Path, host: &str, protocol: &[u8]) -> io::Result<Stream> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(authority, &read(authority).map_err(io::Error::other)?).map_err(io::Error::other)? {
        roots.add(certificate).map_err(io::Error::other)?;
    }
    let builder = ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&version::TLS13]).map_err(io::Error::other)?;
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![protocol.to_vec()];
    let name = ServerName::try_from(host.trim_matches(['[', ']']).to_owned()).map_err(io::Error::other)?;
    let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
    Ok(Stream::Tls(Box::new(stream.into())))
}

fn finish(mut config: ClientConfig) -> Arc<ClientConfig> {
    config.alpn_protocols = vec![b"h2".to_vec()];
    config.resumption = Resumption::disabled();
    Arc::new(config)
}

/// Does the client's part of a handshake with a router, and waits for the router's first bytes.
///
/// Only they show that it accepted the client's certificate.
///
/// # Errors
/// When the handshake fails; `describe_for_agent` explains why.
pub async fn connect(stream: TcpStream, config: Arc<ClientConfig>) -> io::Result<Stream> {
    let name = ServerName::try_from(ROUTER_NAME).map_err(io::Error::other)?;
    let mut stream = TlsConnector::from(config).connect(name, stream).await?;
    stream.fill_buf().await?;
    Ok(Stream::Tls(Box::new(stream.into())))
}
