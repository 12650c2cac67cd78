//! Sessions with the router at one address.
//!
//! They are dialled again when one ends, and there are two while another router takes the first
//! one's place.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::Notify;
use tokio::time::sleep;

use super::backoff::{Backoff, MAX_DELAY};
use super::session::{SessionEnd, attach};
use super::{SessionEnds, Uplink};

/// Pause after a refusal that will probably last.
const REFUSED_DELAY: Duration = Duration::from_secs(10);

/// Keeps a session with the router at `address` until it ends.
///
/// An absent router is dialled repeatedly, but logged once. While another router takes its place
/// there are two sessions; the session with the first ends when that router leaves.
pub(super) async fn maintain_session(uplink: Arc<Uplink>, address: SocketAddr, name: String, ends: SessionEnds) {
    let mut redial = Backoff::default();
    let mut mentioned = String::new();
    let successor = Arc::new(Notify::new());
    let mut replaced = FuturesUnordered::new();
    'dial: loop {
        let attached = Arc::<AtomicBool>::default();
        let mut session = Box::pin(run_session(uplink.clone(), address, attached.clone(), successor.clone(), ends.clone()));
        let ended = loop {
            tokio::select! {
                ended = &mut session => break ended,
                () = successor.notified() => {
                    if attached.load(Ordering::Relaxed) {
                        tracing::info!(router = name, %address, "another router takes this one's place: dialling again");
                        replaced.push(session);
                    }
                    redial = Backoff::default();
                    continue 'dial;
                }
                Some(ended) = replaced.next() => log_replaced(&name, address, ended.as_ref()),
            }
        };
        if attached.load(Ordering::Relaxed) {
            (redial, mentioned) = (Backoff::default(), String::new());
        }
        let Some(ended) = ended.filter(|_| !ends.with_router.is_cancelled()) else {
            while replaced.next().await.is_some() {}
            return;
        };
        let reason = ended.to_string();
        match &ended {
            SessionEnd::Refused(_) => uplink.attachments.record_refusal(address, &reason),
            _ => uplink.attachments.record_failure(address, &reason),
        }
        // Log one line per outage, whatever further symptoms follow. A refusal is logged again,
        // because somebody must act.
        if mentioned.is_empty() || (matches!(ended, SessionEnd::Refused(_)) && reason != mentioned) {
            match &ended {
                SessionEnd::Duplicate => tracing::debug!(router = name, %address, reason),
                SessionEnd::Left => tracing::info!(router = name, %address, reason, "not attached; retrying"),
                SessionEnd::Refused(_) => {
                    tracing::error!(event = "router_refused", router = name, %address, reason, "not attached");
                }
                SessionEnd::Unreachable(_) | SessionEnd::Lost(_) => {
                    tracing::warn!(event = "router_lost", router = name, %address, reason, "not attached; retrying");
                }
            }
            mentioned = reason;
        }
        let longest = if matches!(ended, SessionEnd::Refused(_) | SessionEnd::Duplicate) { REFUSED_DELAY } else { MAX_DELAY };
        tokio::select! {
            () = sleep(redial.next_delay_up_to(longest)) => {}
            () = successor.notified() => redial = Backoff::default(),
            // If no successor came, this was the only session.
            Some(ended) = replaced.next() => {
                log_replaced(&name, address, ended.as_ref());
                redial = Backoff::default();
            }
            () = ends.cancelled() => {
                while replaced.next().await.is_some() {}
                return;
            }
        }
    }
}

fn log_replaced(name: &str, address: SocketAddr, ended: Option<&SessionEnd>) {
    if let Some(reason) = ended {
        tracing::info!(router = name, %address, %reason, "the session with the router that was replaced has ended");
    }
}

/// Runs one session, starting with the dialling. `None` if `end` has come.
async fn run_session(
    uplink: Arc<Uplink>,
    address: SocketAddr,
    attached: Arc<AtomicBool>,
    successor: Arc<Notify>,
    ends: SessionEnds,
) -> Option<SessionEnd> {
    let session = tokio::select! {
        session = attach(&uplink, address, successor) => session,
        () = ends.cancelled() => return None,
    };
    match session {
        Ok(session) => {
            attached.store(true, Ordering::Relaxed);
            tracing::info!(event = "router_attached", router = %address, "attached");
            let _attached = uplink.attachments.record_attached();
            session.run(&ends.now).await
        }
        Err(ended) => Some(ended),
    }
}
