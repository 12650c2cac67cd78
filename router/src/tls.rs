//! Sets up the router's TLS: the edge with the operator's certificate, the agents' port with the
//! fleet's authority. Plain text stays on this host unless the settings permit otherwise.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hostler_tls::{AgentsTls, Authority, EdgeFiles, EdgeTls, TlsError, TokenStore};
use tokio_util::sync::CancellationToken;

use crate::config::RouterConfig;
use crate::member::NewestCertificates;

#[derive(Debug, thiserror::Error)]
pub enum TlsSetupError {
    #[error("{0} (settings router.tls_cert, router.tls_key, router.tls_client_ca)")]
    Edge(#[source] TlsError),
    #[error("{0} (setting router.tls_dir)")]
    Agents(#[source] TlsError),
    #[error("router.tls_cert and router.tls_key belong together: give both, or neither")]
    IncompletePair,
    #[error("this router shows a certificate of the fleet's authority: name its folder (setting router.tls_dir)")]
    NoAuthority,
    #[error("router.tls_client_ca asks clients for certificates, which takes TLS: give router.tls_cert and router.tls_key too")]
    ClientCaWithoutTls,
    #[error(
        "{setting} is {address}, which other hosts reach, and would be in plain text: {remedy}; on a network where everybody may read and \
             send everything, --allow-plain-text (setting router.allow_plain_text) permits it"
    )]
    PlainText { setting: &'static str, address: SocketAddr, remedy: &'static str },
}

#[derive(Debug, Clone)]
pub(crate) struct RouterTls {
    pub(crate) edge: Option<Arc<EdgeTls>>,
    /// TLS of the admin listener, if operators of other hosts reach it.
    pub(crate) admin: Option<Arc<EdgeTls>>,
    pub(crate) agents: Option<FleetAuthority>,
}

#[derive(Debug, Clone)]
pub(crate) struct FleetAuthority {
    pub(crate) tls: Arc<AgentsTls>,
    pub(crate) authority: Arc<Authority>,
    pub(crate) tokens: TokenStore,
    pub(crate) newest: Arc<NewestCertificates>,
    pub(crate) certificate_lifetime: Duration,
}

impl RouterTls {
    pub(crate) fn load(config: &RouterConfig) -> Result<Self, TlsSetupError> {
        let client_authority = non_empty_path(&config.tls_client_ca);
        let edge = match (non_empty_path(&config.tls_cert), non_empty_path(&config.tls_key)) {
            (Some(certificate), Some(key)) => {
                let files = EdgeFiles { certificate, key, client_authority };
                Some(Arc::new(EdgeTls::load(files).map_err(TlsSetupError::Edge)?))
            }
            (None, None) if client_authority.is_some() => return Err(TlsSetupError::ClientCaWithoutTls),
            (None, None) => None,
            _ => return Err(TlsSetupError::IncompletePair),
        };
        let agents = non_empty_path(&config.tls_dir).map(|folder| FleetAuthority::load(&folder, config.certificate_lifetime)).transpose();
        Ok(Self { edge, admin: None, agents: agents.map_err(TlsSetupError::Agents)? })
    }

    /// Makes the fleet's authority certify this host by these names for the edge, if the settings
    /// name no certificate.
    pub(crate) fn certify_edge(&mut self, names: &[String]) -> Result<(), TlsSetupError> {
        let issued = self.issue(names)?;
        self.edge.get_or_insert(issued);
        Ok(())
    }

    /// Certifies this host for the edge and the admin listener.
    pub(crate) fn certify_host(&mut self, names: &[String]) -> Result<(), TlsSetupError> {
        let issued = self.issue(names)?;
        self.edge.get_or_insert_with(|| issued.clone());
        self.admin = Some(issued);
        Ok(())
    }

    fn issue(&self, names: &[String]) -> Result<Arc<EdgeTls>, TlsSetupError> {
        let authority = &self.agents.as_ref().ok_or(TlsSetupError::NoAuthority)?.authority;
        Ok(Arc::new(EdgeTls::issue(authority, names).map_err(TlsSetupError::Agents)?))
    }

    /// Refuses addresses that others reach in plain text, unless the settings permit it.
    pub(crate) fn check_plain_text(&self, config: &RouterConfig, edge: SocketAddr, agents: SocketAddr) -> Result<(), TlsSetupError> {
        let doors = [
            ("router.listen", edge, self.edge.is_some(), "give it a certificate (router.tls_cert and router.tls_key)"),
            (
                "router.agents_listen",
                agents,
                self.agents.is_some(),
                "make the fleet's authority with `hostler init` and name its folder (router.tls_dir)",
            ),
        ];
        for (setting, address, secured, remedy) in doors {
            if !secured && !config.allow_plain_text && !address.ip().is_loopback() {
                return Err(TlsSetupError::PlainText { setting, address, remedy });
            }
        }
        Ok(())
    }

    /// Reloads the edge's certificate when its files change, and renews the agents' port's before
    /// it expires, until `end`.
    pub(crate) async fn renew_certificates(self, end: CancellationToken) {
        let edge = async {
            if let Some(edge) = self.edge {
                edge.reload_on_change(end.clone()).await;
            }
        };
        let agents = async {
            if let Some(agents) = self.agents {
                agents.tls.renew_certificate(end.clone()).await;
            }
        };
        tokio::join!(edge, agents);
    }
}

impl FleetAuthority {
    fn load(folder: &Path, certificate_lifetime: Duration) -> Result<Self, TlsError> {
        let authority = Arc::new(Authority::load(folder)?);
        let tls = Arc::new(AgentsTls::new(authority.clone(), certificate_lifetime)?);
        Ok(Self { tls, authority, tokens: TokenStore::in_folder(folder), newest: Arc::default(), certificate_lifetime })
    }
}

fn non_empty_path(path: &Path) -> Option<PathBuf> {
    (!path.as_os_str().is_empty()).then(|| path.to_owned())
}

#[cfg(test)]
mod tests;
