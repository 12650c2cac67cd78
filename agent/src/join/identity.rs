//! Identity of an agent as a node of a fleet: a certificate that names the node, and the authority
//! that signed it.
//!
//! The files are `node.der` and `ca.der` beside the node's key.

use std::path::Path;
use std::sync::Arc;

use hostler_tls::{CertificateInfo, ClientConfig, Fingerprint, NodeKey, PeerTls, TlsError, member_config, write_private};

const CERTIFICATE: &str = "node.der";

const AUTHORITY: &str = "ca.der";

#[derive(Debug)]
pub(crate) struct Identity {
    pub(super) certified: CertificateInfo,
    pub(super) fleet: Fingerprint,
    pub(super) config: Arc<ClientConfig>,
    authority: Vec<u8>,
    certificate: Vec<u8>,
}

impl Identity {
    pub(super) fn new(authority: &[u8], certificate: &[u8], key: &NodeKey, folder: &Path) -> Result<Self, TlsError> {
        let config = member_config(authority, certificate, key, folder)?;
        let wrong = |what: &str| TlsError::Content { path: folder.to_owned(), what: what.to_owned() };
        let certified = CertificateInfo::parse(certificate).ok_or_else(|| wrong("the certificate is no node's"))?;
        let fleet = Fingerprint::of_certificate(authority).ok_or_else(|| wrong("the authority's certificate cannot be read"))?;
        Ok(Self { certified, fleet, config, authority: authority.to_vec(), certificate: certificate.to_vec() })
    }

    /// Loads the identity that an earlier life has saved, if this node can use it with this key.
    pub(super) fn load(folder: &Path, node: &str, key: &NodeKey) -> Option<Self> {
        let (authority, certificate) = (std::fs::read(folder.join(AUTHORITY)).ok()?, std::fs::read(folder.join(CERTIFICATE)).ok()?);
        match Self::new(&authority, &certificate, key, folder) {
            Ok(identity) => Some(identity).filter(|identity| identity.certified.node == node),
            Err(error) => {
                tracing::warn!(%error, "the node's old certificate cannot be used; it joins again");
                None
            }
        }
    }

    /// Saves the identity for the agent's next life.
    pub(super) fn save(&self, folder: &Path) -> Result<(), TlsError> {
        write_private(&folder.join(AUTHORITY), &self.authority)?;
        write_private(&folder.join(CERTIFICATE), &self.certificate)
    }

    /// Settings for connections with other nodes of the fleet.
    pub(super) fn peer_tls(&self, key: &NodeKey, folder: &Path) -> Result<PeerTls, TlsError> {
        PeerTls::new(&self.authority, &self.certificate, key, folder)
    }

    pub(super) fn is_valid(&self) -> bool {
        self.certified.expires_at > hostler_tls::now()
    }

    /// Replaces the certificate by another one of the same authority.
    pub(super) fn with_certificate(&self, certificate: &[u8], key: &NodeKey, folder: &Path) -> Result<Self, TlsError> {
        Self::new(&self.authority, certificate, key, folder)
    }
}
