//! The open lanes of one attachment, and the tickets by which a new lane finds its attachment.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use hostler_proto::lane::{RequestHead, StreamFault};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::time::Instant;

use super::{Exchange, Lane};
use crate::random::random;

/// The lanes of one attachment; requests use them in turn.
#[derive(Debug, Default)]
pub struct Lanes {
    lanes: ArcSwap<Vec<Arc<Lane>>>,
    /// Whether there are any lanes. Every placement reads this of every replica.
    is_available: AtomicBool,
    /// Held while the lanes change, so that `is_available` matches the last change.
    change_lock: Mutex<()>,
    /// Ids are never reused, so a late frame of a cancelled request reaches no other request.
    next_id: AtomicU64,
    /// When the agent's last report came, and for how long it counts.
    heard: Mutex<Option<(Instant, Duration)>>,
}

impl Lanes {
    /// Adds a lane and removes lost ones.
    pub fn add(&self, lane: &Arc<Lane>) {
        self.update(|lanes| live_lanes(lanes).chain([lane.clone()]).collect());
    }

    pub fn remove_lost(&self) {
        self.update(|lanes| live_lanes(lanes).collect());
    }

    /// Marks every lane lost, because the attachment has ended.
    pub fn mark_lost(&self) {
        let loss = self.loss();
        self.update(|_| Vec::new()).iter().for_each(|lane| lane.mark_lost(&loss));
    }

    /// Records an agent's report, which counts for a lease.
    pub fn mark_heard(&self, at: Instant, lease: Duration) {
        *self.heard.lock() = Some((at, lease));
    }

    /// Why work on these lanes is lost now. If the lease has lapsed, the agent's silence is the
    /// reason that a connection ends.
    #[must_use]
    pub fn loss(&self) -> StreamFault {
        let heard = *self.heard.lock();
        let silence = heard.and_then(|(at, lease)| Some(at.elapsed()).filter(|silence| *silence > lease));
        silence.map_or_else(StreamFault::lane_lost, agent_silent)
    }

    fn update(&self, change: impl FnOnce(&[Arc<Lane>]) -> Vec<Arc<Lane>>) -> Arc<Vec<Arc<Lane>>> {
        let _alone = self.change_lock.lock();
        let lanes = change(&self.lanes.load());
        let any = !lanes.is_empty();
        let before = self.lanes.swap(Arc::new(lanes));
        self.is_available.store(any, Ordering::Release);
        before
    }

    #[must_use]
    pub fn is_available(&self) -> bool {
        self.is_available.load(Ordering::Acquire)
    }

    /// Sends a request on the next lane.
    ///
    /// # Errors
    /// If there is no lane, or it was lost just now.
    pub fn open(&self, head: RequestHead, body: Bytes) -> Result<Exchange, StreamFault> {
        let lanes = self.lanes.load();
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let turn = usize::try_from(id % lanes.len().max(1) as u64).unwrap_or(0);
        lanes.get(turn).ok_or_else(StreamFault::lane_lost)?.open(id, head, body)
    }
}

fn agent_silent(silence: Duration) -> StreamFault {
    let seconds = silence.as_secs();
    let message =
        format!("the node's agent was silent for {seconds} s, so its connection was given up: its host is gone, or its job was suspended");
    StreamFault { message, ..StreamFault::lane_lost() }
}

fn live_lanes(lanes: &[Arc<Lane>]) -> impl Iterator<Item = Arc<Lane>> {
    lanes.iter().filter(|lane| !lane.is_lost()).cloned()
}

/// The attachments that lanes may join, by their secret ticket.
#[derive(Debug, Default)]
pub struct Tickets(Mutex<FxHashMap<Bytes, Arc<Lanes>>>);

impl Tickets {
    /// Makes a ticket for `lanes`. The ticket is valid until the returned guard is dropped, which
    /// also marks the lanes lost.
    ///
    /// # Errors
    /// If the operating system gives no random numbers.
    pub fn issue(self: &Arc<Self>, lanes: &Arc<Lanes>) -> std::io::Result<Ticket> {
        let secret = Bytes::copy_from_slice(&random::<16>()?);
        self.0.lock().insert(secret.clone(), lanes.clone());
        Ok(Ticket { secret, tickets: self.clone() })
    }

    #[must_use]
    pub fn redeem(&self, secret: &[u8]) -> Option<Arc<Lanes>> {
        self.0.lock().get(secret).cloned()
    }
}

/// Proof of an attachment; see [`Tickets::issue`].
#[derive(Debug)]
pub struct Ticket {
    secret: Bytes,
    tickets: Arc<Tickets>,
}

impl Ticket {
    #[must_use]
    pub fn secret(&self) -> &Bytes {
        &self.secret
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let lanes = self.tickets.0.lock().remove(&self.secret);
        lanes.into_iter().for_each(|lanes| lanes.mark_lost());
    }
}
