//! A node at the other end of a connection, as its certificate identifies it: the name by which it
//! may attach, and until when.
//!
//! A copied certificate is of little use. The node's name is taken while the node is attached, only
//! an attached node gets the next certificate, and a newer certificate makes older ones refused.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use hostler_tls::{BACKDATE_SECONDS, CertificateInfo};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tonic::Status;

/// How often an attachment's end is checked: the clock may be set, and the host may sleep.
const MAX_CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// Above this number of names, those with expired certificates are removed.
const PRUNE_ABOVE_NODES: usize = 4096;

#[derive(Debug)]
pub(crate) struct Member {
    certificate: CertificateInfo,
    /// When the newest certificate, perhaps renewed over this connection, expires: Unix time in
    /// seconds.
    expires_at: AtomicU64,
    attachments: AtomicU32,
    fence: Arc<NewestCertificates>,
}

impl Member {
    pub(crate) fn new(certified: CertificateInfo, fence: Arc<NewestCertificates>) -> Self {
        Self { expires_at: AtomicU64::new(certified.expires_at), certificate: certified, attachments: AtomicU32::new(0), fence }
    }

    pub(crate) fn certificate(&self) -> &CertificateInfo {
        &self.certificate
    }

    pub(crate) fn is_attached(&self) -> bool {
        self.attachments.load(Ordering::Relaxed) > 0
    }

    /// Records a certificate that is valid until this Unix time, in seconds.
    pub(crate) fn record_renewal(&self, until: u64) {
        self.expires_at.fetch_max(until, Ordering::Relaxed);
    }

    /// Lets the member attach by a name.
    ///
    /// # Errors
    /// If the name is another node's, or the certificate has expired or is not the newest.
    pub(crate) fn attach(self: &Arc<Self>, node: &str) -> Result<MemberAttachment, Status> {
        let own = &self.certificate.node;
        if own != node {
            return Err(Status::permission_denied(format!(
                "this agent calls itself node `{node}`, and its certificate is node `{own}`'s: let it join under its own name, with a token \
                 (agent.join_token_file) and an agent.identity_dir of its own"
            )));
        }
        if self.has_expired(hostler_tls::now()) {
            return Err(Status::unauthenticated(EXPIRED_MESSAGE));
        }
        self.fence.admit(&self.certificate)?;
        self.attachments.fetch_add(1, Ordering::Relaxed);
        Ok(MemberAttachment(self.clone()))
    }

    fn has_expired(&self, now: u64) -> bool {
        self.expires_at.load(Ordering::Relaxed) <= now
    }
}

const EXPIRED_MESSAGE: &str = "the node's certificate has expired and it has no newer one: it joins again by its token";

#[derive(Debug)]
pub(crate) struct MemberAttachment(Arc<Member>);

impl MemberAttachment {
    pub(crate) async fn wait_expired(&self) -> Status {
        loop {
            let left = self.0.expires_at.load(Ordering::Relaxed).saturating_sub(hostler_tls::now());
            if left == 0 {
                return Status::unauthenticated(EXPIRED_MESSAGE);
            }
            tokio::time::sleep(Duration::from_secs(left).min(MAX_CHECK_INTERVAL)).await;
        }
    }
}

impl Drop for MemberAttachment {
    fn drop(&mut self) {
        self.0.attachments.fetch_sub(1, Ordering::Relaxed);
    }
}

/// For each node, when the newest of its certificates known here was issued and when it expires.
#[derive(Debug, Default)]
pub(crate) struct NewestCertificates(Mutex<FxHashMap<String, (u64, u64)>>);

impl NewestCertificates {
    pub(crate) fn record_issued(&self, certified: &CertificateInfo) {
        let mut newest = self.0.lock();
        if newest.len() > PRUNE_ABOVE_NODES {
            let now = hostler_tls::now();
            newest.retain(|_, (_, until)| *until > now);
        }
        let known = newest.entry(certified.node.clone()).or_default();
        *known = (known.0.max(certified.issued_at), known.1.max(certified.expires_at));
    }

    /// When the newest certificate of this node expires: Unix time in seconds.
    #[must_use]
    pub(crate) fn expires_at(&self, node: &str) -> Option<u64> {
        self.0.lock().get(node).map(|(_, until)| *until)
    }

    /// Refuses a certificate whose node has a newer one. Routers' clocks may differ by as much as
    /// certificates are backdated.
    fn admit(&self, certified: &CertificateInfo) -> Result<(), Status> {
        let newest = self.0.lock().get(&certified.node).map_or(0, |(issued, _)| *issued);
        if certified.issued_at + BACKDATE_SECONDS < newest {
            return Err(Status::unauthenticated(format!(
                "node `{}` has a newer certificate than this one, so this one was copied or brought back: the node joins again by its token",
                certified.node
            )));
        }
        self.record_issued(certified);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
