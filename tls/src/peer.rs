//! TLS between two nodes of a fleet: each shows its node's certificate, and each wants one that the
//! fleet's authority has signed.
//!
//! Agents of one replica over several nodes speak so. A node's certificate is a client's, so this
//! file's verifier checks a server as routers check their clients.

use std::io;
use std::path::Path;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::client::{ClientConfig, Resumption};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use tokio_rustls::rustls::{DigitallySignedStruct, Error, ServerConfig, SignatureScheme, version};

use crate::client::{trust_in, unusable};
use crate::{Handshake, NodeKey, Stream, TlsError, provider};

/// Name that a node asks another for; certificates of nodes have none that TLS compares.
const NODE_NAME: &str = "node.hostler.internal";

/// TLS settings of a node for both ends of a connection to another one.
#[derive(Debug, Clone)]
pub struct PeerTls {
    server: Handshake,
    client: Arc<ClientConfig>,
}

impl PeerTls {
    /// Settings of the node with this certificate. `from` names the source in errors.
    ///
    /// # Errors
    /// When the authority or the certificate cannot be used, or the key does not belong to the
    /// certificate.
    pub fn new(authority: &[u8], certificate: &[u8], key: &NodeKey, from: &Path) -> Result<Self, TlsError> {
        let roots = trust_in(authority, from)?;
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider()).build();
        let verifier = verifier.map_err(|error| TlsError::Crypto(error.to_string()))?;
        let shown = vec![CertificateDer::from(certificate.to_vec())];
        let mut server = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&version::TLS13])?
            .with_client_cert_verifier(verifier.clone())
            .with_single_cert(shown.clone(), key.secret())
            .map_err(|error| unusable(from, &error))?;
        // A resumed session would continue with a certificate that has expired meanwhile.
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        let mut client = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(NodeVerifier(verifier)))
            .with_client_auth_cert(shown, key.secret())
            .map_err(|error| unusable(from, &error))?;
        client.resumption = Resumption::disabled();
        Ok(Self { server: Arc::new(server), client: Arc::new(client) })
    }

    /// Settings for the server's part of a handshake.
    #[must_use]
    pub fn handshake(&self) -> Handshake {
        self.server.clone()
    }

    /// Does the client's part of a handshake. [`Stream::certificate`] then says which node answers.
    ///
    /// # Errors
    /// When the handshake fails, or the other node is none of the fleet.
    pub async fn connect(&self, stream: TcpStream) -> io::Result<Stream> {
        let name = ServerName::try_from(NODE_NAME).map_err(io::Error::other)?;
        let stream = TlsConnector::from(self.client.clone()).connect(name, stream).await?;
        Ok(Stream::Tls(Box::new(stream.into())))
    }
}

/// Accepts a server that shows the certificate of a node.
#[derive(Debug)]
struct NodeVerifier(Arc<dyn ClientCertVerifier>);

impl ServerCertVerifier for NodeVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.0.verify_client_cert(end_entity, intermediates, now)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}
