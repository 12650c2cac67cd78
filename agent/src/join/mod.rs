//! Membership of the node in a fleet: its key and certificate.
//!
//! The first router that answers issues them for a join token. They are kept in a folder, renewed
//! over each router's connection, and requested again if they are lost or too old.

mod identity;
mod peers;
mod renewal;

use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hostler_proto::PROTOCOL;
use hostler_proto::join::v1 as wire;
use hostler_proto::join::v1::join_client::JoinClient;
use hostler_tls::{ClientConfig, EnrollmentVerifier, JoinToken, NodeKey, TlsError, check_name, read_private};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::AgentConfig;
use crate::dial::{DialError, dial};
use crate::job;
use crate::run_dir;
pub(crate) use identity::Identity;
pub(crate) use peers::PeerAccess;

const SIGN_TIMEOUT: Duration = Duration::from_secs(15);

#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("there is no home directory to keep the node's key in: name a folder with --identity-dir")]
    NoFolder,
    /// Standard input is empty.
    #[error("the join token cannot be read from standard input: {0}")]
    Input(#[source] std::io::Error),
    /// The router has no place or cannot be reached.
    #[error("{0}")]
    Unreachable(String),
    /// The router refuses, or is not part of the fleet.
    #[error("{0}")]
    Refused(String),
}

/// How the agent communicates with routers.
#[derive(Debug, Clone)]
pub enum RouterAccess {
    Plain {
        /// Whether plain text is allowed with routers on other hosts, too.
        beyond_host: bool,
    },
    /// Access over TLS, as a node of a fleet.
    Fleet(Arc<Membership>),
}

#[derive(Debug)]
pub struct Membership {
    node: String,
    /// Scheduler's job that the agent runs in; empty outside of any.
    job: String,
    folder: PathBuf,
    token: Arc<TokenSource>,
    key: NodeKey,
    identity: Mutex<Option<Arc<Identity>>>,
    /// Held while one task requests a certificate; the others wait for it.
    enroll_lock: Semaphore,
}

#[derive(Debug)]
enum TokenSource {
    File(PathBuf),
    /// The token came from standard input.
    Stdin(JoinToken),
}

impl TokenSource {
    fn open(path: &Path) -> Result<Self, JoinError> {
        if path != Path::new("-") {
            return Ok(Self::File(path.to_owned()));
        }
        let mut text = String::new();
        std::io::stdin().lock().take(4096).read_to_string(&mut text).map_err(JoinError::Input)?;
        Ok(Self::Stdin(JoinToken::parse(&text)?))
    }

    /// The token. A file is read again each time, so that a new token counts at once.
    fn token(&self) -> Result<JoinToken, TlsError> {
        match self {
            Self::Stdin(token) => Ok(token.clone()),
            Self::File(path) => {
                let text = String::from_utf8(read_private(path)?).unwrap_or_default();
                JoinToken::parse(&text).map_err(|error| TlsError::Content { path: path.clone(), what: error.to_string() })
            }
        }
    }
}

impl RouterAccess {
    /// Opens the access that the settings describe.
    ///
    /// # Errors
    /// When a node of a fleet has neither a valid certificate nor a token to get one, or has no
    /// place for its key.
    pub async fn open(config: &AgentConfig, node: &str) -> Result<Self, JoinError> {
        if config.join_token_file.as_os_str().is_empty() {
            return Ok(Self::Plain { beyond_host: config.allow_plain_text });
        }
        check_name(node)?;
        let folder = identity_folder(&config.identity_dir)?.join(node);
        let (token, node) = (config.join_token_file.clone(), node.to_owned());
        let opened = tokio::task::spawn_blocking(move || Membership::open(folder, &token, node)).await;
        Ok(Self::Fleet(Arc::new(opened.expect("opening a folder does not panic")?)))
    }

    /// Identity for a connection to the router at `address`: none in plain text, otherwise a
    /// certificate, which that router may have to sign first.
    pub(crate) async fn identity(&self, address: SocketAddr) -> Result<Option<Arc<Identity>>, JoinError> {
        match self {
            Self::Fleet(membership) => membership.identity(address).await.map(Some),
            Self::Plain { beyond_host } if *beyond_host || address.ip().is_loopback() => Ok(None),
            Self::Plain { .. } => Err(JoinError::Refused(format!(
                "{address} is on another host, and this agent has no join token, so prompts would travel in plain text: give it one \
                 (agent.join_token_file; `hostler init` and `hostler token create` make them), or permit it with --allow-plain-text"
            ))),
        }
    }

    /// Discards a certificate that a router refuses: the next connection gets another one.
    pub(crate) fn discard(&self, identity: &Identity) {
        if let Self::Fleet(membership) = self {
            let mut known = membership.identity.lock();
            if known.as_ref().is_some_and(|known| known.certified == identity.certified) {
                *known = None;
            }
        }
    }
}

impl Membership {
    fn open(folder: PathBuf, token: &Path, node: String) -> Result<Self, JoinError> {
        let token = TokenSource::open(token)?;
        let key = NodeKey::load_or_create(&folder.join("node.key"))?;
        let found = token.token();
        let identity = Identity::load(&folder, &node, &key).map(Arc::new);
        // A token of another fleet means that the node should move there.
        let identity =
            identity.filter(|identity| identity.is_valid() && found.as_ref().map_or(true, |token| token.fleet == identity.fleet));
        if identity.is_none() {
            found?;
        }
        let job = job::name_for_token(|name| std::env::var(name).ok());
        Ok(Self { node, job, folder, token: Arc::new(token), key, identity: Mutex::new(identity), enroll_lock: Semaphore::new(1) })
    }

    async fn identity(&self, address: SocketAddr) -> Result<Arc<Identity>, JoinError> {
        let _turn = self.enroll_lock.acquire().await.expect("the semaphore is never closed");
        let known = self.identity.lock().clone();
        match known {
            Some(known) if known.is_valid() => Ok(known),
            _ => self.enroll(address).await,
        }
    }

    async fn enroll(&self, address: SocketAddr) -> Result<Arc<Identity>, JoinError> {
        let source = self.token.clone();
        let token = tokio::task::spawn_blocking(move || source.token()).await.expect("reading a token does not panic")?;
        let channel = dial(address, Some(EnrollmentVerifier::config_for(token.fleet)?)).await.map_err(|error| match error {
            DialError::Unreachable(reason) => JoinError::Unreachable(reason),
            DialError::Tls { reason, .. } => JoinError::Refused(reason),
        })?;
        let request = wire::EnrollRequest {
            protocol: PROTOCOL,
            token_id: token.id.clone(),
            token_secret: token.secret().to_vec().into(),
            node: self.node.clone(),
            job: self.job.clone(),
            signing_request: self.key.request()?.into(),
        };
        let wire::EnrollResponse { certificate, authority } = await_signature(JoinClient::new(channel).enroll(request)).await?;
        let identity = Identity::new(&authority, &certificate, &self.key, &self.folder)?;
        if identity.certified.node != self.node || identity.fleet != token.fleet {
            return Err(JoinError::Refused(
                "the router has signed for another node or fleet: are router and agent of the same version?".into(),
            ));
        }
        tracing::info!(event = "node_joined", router = %address, node = self.node, token = token.id, "joined the fleet");
        Ok(self.store(identity).await)
    }

    /// Uses a new certificate, and saves it for the agent's next life.
    ///
    /// A certificate that cannot be saved still serves this life.
    async fn store(&self, identity: Identity) -> Arc<Identity> {
        let identity = Arc::new(identity);
        let (folder, saved) = (self.folder.clone(), identity.clone());
        match tokio::task::spawn_blocking(move || saved.save(&folder)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "the node's certificate is not kept: its next life has to join again"),
            Err(error) => tracing::error!(%error, "the node's certificate is not kept"),
        }
        *self.identity.lock() = Some(identity.clone());
        identity
    }
}

/// Waits for a router to sign. A busy router may sign later; a router that refuses does not.
async fn await_signature<T>(call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>) -> Result<T, JoinError> {
    let late = |_| JoinError::Unreachable(format!("the router did not sign within {} s", SIGN_TIMEOUT.as_secs()));
    let answer = timeout(SIGN_TIMEOUT, call).await.map_err(late)?;
    Ok(answer.map_err(|status| sign_error(&status))?.into_inner())
}

fn sign_error(status: &tonic::Status) -> JoinError {
    use tonic::Code;
    match status.code() {
        Code::PermissionDenied | Code::InvalidArgument | Code::FailedPrecondition | Code::Unauthenticated => {
            JoinError::Refused(status.message().to_owned())
        }
        Code::Unimplemented => JoinError::Refused("this router admits no nodes: give it its fleet's folder (router.tls_dir)".into()),
        _ => JoinError::Unreachable(status.message().to_owned()),
    }
}

fn identity_folder(configured: &Path) -> Result<PathBuf, JoinError> {
    if !configured.as_os_str().is_empty() {
        return Ok(configured.to_owned());
    }
    Ok(run_dir::state_home().ok_or(JoinError::NoFolder)?.join("hostler/identity"))
}

/// Connection settings with this certificate, or without one.
pub(crate) fn tls_config(identity: Option<&Arc<Identity>>) -> Option<Arc<ClientConfig>> {
    identity.map(|identity| identity.config.clone())
}

#[cfg(test)]
mod tests;
