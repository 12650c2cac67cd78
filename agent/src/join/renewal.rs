//! Renewal of the node's certificate at two thirds of its life.
//!
//! It uses the connection on which the node is attached, so the attachment continues.

use std::sync::Arc;
use std::time::Duration;

use hostler_proto::join::v1 as wire;
use hostler_proto::join::v1::join_client::JoinClient;
use hostler_tls::CertificateInfo;
use tokio::time::sleep;
use tonic::transport::Channel;

use super::{Identity, JoinError, Membership, RouterAccess, await_signature};

/// How often the clock is read, because it may be set and the host may sleep.
const MAX_CHECK_INTERVAL: Duration = Duration::from_secs(30);

impl RouterAccess {
    /// Renews the certificate of this connection before it expires, while this future is polled.
    ///
    /// Other connections renew their own.
    pub(crate) async fn keep_renewed(self, channel: Channel, identity: Option<Arc<Identity>>) {
        match (self, identity) {
            (Self::Fleet(membership), Some(identity)) => membership.keep_renewed(channel, identity).await,
            // In plain text nothing expires.
            _ => std::future::pending().await,
        }
    }
}

impl Membership {
    async fn keep_renewed(&self, channel: Channel, mut identity: Arc<Identity>) {
        let mut mentioned = String::new();
        loop {
            loop {
                let left = renewal_time(&identity.certified).saturating_sub(hostler_tls::now());
                if left == 0 {
                    break;
                }
                sleep(Duration::from_secs(left).min(MAX_CHECK_INTERVAL)).await;
            }
            match self.renew(channel.clone(), &identity).await {
                Ok(renewed) => {
                    tracing::debug!(until = renewed.certified.expires_at, "the node's certificate was renewed");
                    mentioned.clear();
                    identity = renewed;
                }
                Err(error) => {
                    let reason = error.to_string();
                    if reason != mentioned {
                        tracing::error!(
                            event = "certificate_not_renewed",
                            reason,
                            "the node's certificate is not renewed; trying on until it expires"
                        );
                        mentioned = reason;
                    }
                    sleep(retry_delay(&identity.certified)).await;
                }
            }
        }
    }

    async fn renew(&self, channel: Channel, identity: &Identity) -> Result<Arc<Identity>, JoinError> {
        let request = wire::RenewRequest { signing_request: self.key.request()?.into() };
        let certificate = await_signature(JoinClient::new(channel).renew(request)).await?.certificate;
        Ok(self.store(identity.with_certificate(&certificate, &self.key, &self.folder)?).await)
    }
}

/// When a certificate should be renewed, in seconds since 1970.
fn renewal_time(certified: &CertificateInfo) -> u64 {
    certified.issued_at + certified.expires_at.saturating_sub(certified.issued_at) * 2 / 3
}

/// Delay after a failed renewal. A third of a certificate's life has about six of them.
fn retry_delay(certified: &CertificateInfo) -> Duration {
    Duration::from_secs(certified.expires_at.saturating_sub(certified.issued_at) / 20)
        .clamp(Duration::from_millis(300), Duration::from_secs(600))
}
