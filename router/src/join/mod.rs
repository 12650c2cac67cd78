//! Admits nodes to the fleet on the agents' TLS port. A join token earns a certificate, and an
//! attached node gets its next one.

mod peer;

use std::time::Duration;

use hostler_proto::PROTOCOL;
use hostler_proto::join::v1 as wire;
use hostler_proto::join::v1::join_server::{Join, JoinServer};
use hostler_tls::{Authority, IssuedCertificate, JoinRequest, TokenError};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tonic::{Request, Response, Status};

use crate::fleet::Fleet;
use crate::member::Member;
use crate::tls::FleetAuthority;
pub(crate) use peer::{Connection, Peer};

/// Limit for checking tokens and signing. The folder may be on a network file system.
const FOLDER_TIMEOUT: Duration = Duration::from_secs(10);

/// Most nodes that are checked at once. Each takes a thread for as long as the file system needs.
const MAX_CONCURRENT: usize = 8;

/// Largest request. A certificate signing request has a few hundred bytes.
const MAX_REQUEST_BYTES: usize = 64 * 1024;

/// Most characters of an unchecked name that are logged.
const MAX_LOGGED_CHARS: usize = 64;

#[derive(Debug)]
pub(crate) struct JoinEndpoint {
    fleet: Fleet,
    authority: FleetAuthority,
    permits: Semaphore,
}

impl JoinEndpoint {
    pub(crate) fn into_server(fleet: Fleet, authority: FleetAuthority) -> JoinServer<Self> {
        let joining = Self { fleet, authority, permits: Semaphore::new(MAX_CONCURRENT) };
        JoinServer::new(joining).max_decoding_message_size(MAX_REQUEST_BYTES)
    }

    /// Runs work that needs the folder or the key away from the runtime's threads.
    async fn run_blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(FleetAuthority) -> Result<T, Status> + Send + 'static,
    ) -> Result<T, Status> {
        let done = async {
            let _place = self.permits.acquire().await.map_err(|_| Status::unavailable("the router is leaving"))?;
            let admitting = self.authority.clone();
            tokio::task::spawn_blocking(move || work(admitting)).await.map_err(|error| Status::internal(error.to_string()))?
        };
        timeout(FOLDER_TIMEOUT, done)
            .await
            .map_err(|_| Status::unavailable("the router's folder of tokens does not answer (router.tls_dir)"))?
    }

    async fn enroll(&self, request: wire::EnrollRequest) -> Result<IssuedCertificate, Status> {
        if request.protocol != PROTOCOL {
            let version = env!("CARGO_PKG_VERSION");
            return Err(Status::failed_precondition(format!(
                "the agent speaks protocol {}, router {version} speaks protocol {PROTOCOL}: install the same version of hostler on both",
                request.protocol
            )));
        }
        // Check the name before the token is used.
        hostler_tls::check_name(&request.node).map_err(|error| Status::invalid_argument(error.to_string()))?;
        // No life is 0, so any agent that has the name counts.
        if let Some(holder) = self.fleet.view().other_holder(&request.node, 0, None) {
            return Err(Status::failed_precondition(format!("{}; nobody can join by that name meanwhile", holder.name_refusal())));
        }
        self.run_blocking(move |admitting| {
            let wire::EnrollRequest { token_id, token_secret, node, job, signing_request, .. } = request;
            let key = Authority::requested_key(&signing_request).map_err(|error| Status::invalid_argument(error.to_string()))?;
            let applicant = JoinRequest { node, job, key };
            admitting.tokens.redeem(&token_id, &token_secret, &applicant, hostler_tls::now()).map_err(|refused| token_refusal(&refused))?;
            let issued = admitting.authority.issue(&applicant.node, &token_id, &signing_request, admitting.certificate_lifetime);
            issued.map_err(|error| Status::invalid_argument(error.to_string()))
        })
        .await
    }

    async fn renew(&self, member: &Member, signing_request: bytes::Bytes) -> Result<IssuedCertificate, Status> {
        if !member.is_attached() {
            return Err(Status::permission_denied("only a node that is attached over this connection gets its next certificate"));
        }
        let (node, token) = (member.certificate().node.clone(), member.certificate().token.clone());
        let issued = member.certificate().issued_at;
        self.run_blocking(move |admitting| {
            if admitting.tokens.is_revoked(&token) {
                return Err(token_refusal(&TokenError::Revoked(token)));
            }
            let key = Authority::requested_key(&signing_request).map_err(|error| Status::invalid_argument(error.to_string()))?;
            match admitting.tokens.claim(&node, key, issued) {
                Ok(()) => {}
                // A folder that cannot be written is no reason to make a node leave.
                Err(TokenError::Folder(error)) => tracing::warn!(node, %error, "whose the node's name is cannot be written down"),
                Err(taken) => return Err(token_refusal(&taken)),
            }
            let issued = admitting.authority.issue(&node, &token, &signing_request, admitting.certificate_lifetime);
            issued.map_err(|error| Status::invalid_argument(error.to_string()))
        })
        .await
    }
}

fn truncate(text: &str) -> String {
    text.chars().take(MAX_LOGGED_CHARS).collect()
}

/// The status for a token that is not accepted. A folder's fault may pass, so a retry helps.
fn token_refusal(refused: &TokenError) -> Status {
    match refused {
        TokenError::Folder(_) => Status::unavailable(refused.to_string()),
        _ => Status::permission_denied(refused.to_string()),
    }
}

#[tonic::async_trait]
impl Join for JoinEndpoint {
    async fn enroll(&self, request: Request<wire::EnrollRequest>) -> Result<Response<wire::EnrollResponse>, Status> {
        let peer = Peer::of(&request);
        let request = request.into_inner();
        // Truncated for the log: unchecked, they may be anything.
        let (node, token) = (truncate(&request.node), truncate(&request.token_id));
        match JoinEndpoint::enroll(self, request).await {
            Ok(IssuedCertificate { certificate, info }) => {
                self.authority.newest.record_issued(&info);
                tracing::info!(event = "node_joined", node, token, peer = ?peer.address, "a node has joined");
                let authority = self.authority.authority.certificate().to_vec().into();
                Ok(Response::new(wire::EnrollResponse { certificate: certificate.into(), authority }))
            }
            Err(status) => {
                tracing::warn!(event = "node_refused", node, token, peer = ?peer.address, reason = status.message(), "a node may not join");
                Err(status)
            }
        }
    }

    async fn renew(&self, request: Request<wire::RenewRequest>) -> Result<Response<wire::RenewResponse>, Status> {
        let peer = Peer::of(&request);
        let member = peer.member.ok_or_else(|| Status::permission_denied("only a node with a certificate gets its next one"))?;
        match JoinEndpoint::renew(self, &member, request.into_inner().signing_request).await {
            Ok(IssuedCertificate { certificate, info }) => {
                self.authority.newest.record_issued(&info);
                member.record_renewal(info.expires_at);
                tracing::debug!(node = info.node, "a node has its next certificate");
                Ok(Response::new(wire::RenewResponse { certificate: certificate.into() }))
            }
            Err(status) => {
                tracing::warn!(
                    event = "node_refused",
                    node = member.certificate().node,
                    reason = status.message(),
                    "a node gets no new certificate"
                );
                Err(status)
            }
        }
    }
}
