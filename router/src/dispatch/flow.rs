//! What every piece of an answer meets on its way to the client, wherever it comes through: the relay, or, while that waits for the next
//! one, the lane's task, which then writes it to the client itself.

use std::sync::Arc;

use bytes::Bytes;
use hostler_proto::lane::{Taken, Taker};
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use super::poison::Passage;
use super::scanner::{Passed, Scanner};
use super::told::{Finish, Told};
use crate::edge::Outlet;
use crate::sticky::Watch;

/// An answer on its way, shared by the two that may pass it on.
#[derive(Debug)]
pub(super) struct Flow(Mutex<Passing>);

/// How far an answer has come.
#[derive(Debug)]
pub(super) struct Passing {
    /// Follows an event stream.
    pub(super) scanner: Option<Scanner>,
    /// Reads a plain answer that is too long to be read whole before it is passed on.
    pub(super) told: Option<Box<Told>>,
    /// Reads which response it is, where that is remembered.
    pub(super) watch: Option<Watch>,
    /// Ends its trial, where it is on trial.
    pub(super) passage: Option<Passage>,
    /// Bytes of the body that were passed on.
    pub(super) sent: u64,
    /// When something last came.
    pub(super) progress: Instant,
    /// Where pieces may be written on the spot.
    pub(super) outlet: Option<Arc<Outlet>>,
    /// What the lane's task has found wrong with a piece, for the relay.
    pub(super) failed: Option<Passed>,
}

impl Flow {
    /// An answer of which nothing has been passed on, with a `scanner` for an event stream.
    pub(super) fn new(scanner: Option<Scanner>, watch: Option<Watch>, passage: Option<Passage>) -> Arc<Self> {
        let progress = Instant::now();
        Arc::new(Self(Mutex::new(Passing { scanner, told: None, watch, passage, sent: 0, progress, outlet: None, failed: None })))
    }

    /// For a moment.
    pub(super) fn lock(&self) -> MutexGuard<'_, Passing> {
        self.0.lock()
    }
}

impl Passing {
    /// Takes a piece in; what is to be sent of it, if anything.
    pub(super) fn pass(&mut self, bytes: Bytes) -> Passed {
        if self.watch.as_mut().is_some_and(|watch| watch.look(&bytes)) {
            self.watch = None;
        }
        if self.passage.as_mut().is_some_and(|passage| passage.look(&bytes)) {
            self.passage = None;
        }
        if let Some(scanner) = &mut self.scanner {
            return scanner.pass(bytes);
        }
        if let Some(told) = &mut self.told {
            told.read(&bytes);
            if told.finish() == Finish::Abort {
                return Passed::Aborted(Bytes::new());
            }
        }
        Passed::On(bytes)
    }
}

/// The lane's task takes pieces of an event stream.
impl Taker for Flow {
    fn take(&self, piece: Bytes) -> Taken {
        let mut flow = self.lock();
        // Nothing follows what has failed.
        if flow.failed.is_some() {
            return Taken::Not(piece);
        }
        let Some(outlet) = flow.outlet.clone() else { return Taken::Not(piece) };
        let Some(free) = outlet.free() else { return Taken::Not(piece) };
        flow.progress = Instant::now();
        match flow.pass(piece) {
            Passed::On(bytes) if bytes.is_empty() => Taken::Whole,
            Passed::On(bytes) => {
                flow.sent += bytes.len() as u64;
                if free.chunk(&bytes) { Taken::Whole } else { Taken::Wake }
            }
            failed => {
                flow.failed = Some(failed);
                Taken::Wake
            }
        }
    }
}

#[cfg(test)]
mod tests;
