//! What one session sends in parts, between its reports: which blocks its replicas' engines have cached, and the prompt files that its
//! router asked for. Decides what the next part is; the session sends it when there is room.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::sync::Arc;

use hostler_proto::agent::v1 as wire;
use hostler_proto::agent::v1::attach_request::Message;

use crate::cache::{CacheLog, Cursor, Delta};
use crate::files::Bundle;

/// Blocks in one message: 256 KiB of keys.
const MOST_BLOCKS: usize = 32 * 1024;

/// Bytes of a bundle in one message.
const MOST_BYTES: usize = 256 * 1024;

/// What waits to be sent to one router.
#[derive(Debug)]
pub(super) struct Bulk {
    caches: Caches,
    files: Files,
    /// Whose turn it is when both have something.
    files_next: bool,
}

impl Bulk {
    /// Bulk for a router that knows nothing: all caches are due, whole.
    pub(super) fn new(logs: impl Iterator<Item = Arc<CacheLog>>) -> Self {
        Self { caches: Caches::new(logs), files: Files::default(), files_next: false }
    }

    /// Whether there may be something to send.
    pub(super) fn is_due(&self) -> bool {
        !self.files.sending.is_empty() || self.caches.are_due()
    }

    /// A report goes out: what it announces may be followed by blocks, and every change of a cache comes with one.
    pub(super) fn after_report(&mut self) {
        self.caches.replicas.iter_mut().for_each(|cache| cache.due = true);
    }

    /// Sends the caches of these replicas whole; without any index, those of all.
    pub(super) fn resync(&mut self, indices: &[u32]) {
        for (index, cache) in (0..).zip(&mut self.caches.replicas) {
            if indices.is_empty() || indices.contains(&index) {
                cache.cursor.reset();
                (cache.held, cache.due) = (None, true);
            }
        }
    }

    /// Sends a bundle, from its beginning even if it is being sent.
    pub(super) fn fetch(&mut self, bundle: Bundle) {
        self.files.fetch(bundle);
    }

    /// The next part, if there is one. `told` is the life of each replica that the router was last told of.
    pub(super) fn next(&mut self, told: impl Fn(usize) -> u64) -> Option<Message> {
        let Self { caches, files, files_next } = self;
        *files_next = !*files_next;
        let mut file = || files.next().map(Message::File);
        let mut cache = || caches.next(&told).map(Message::Cache);
        if *files_next { file().or_else(cache) } else { cache().or_else(file) }
    }
}

/// The caches of all replicas, in turn.
#[derive(Debug)]
struct Caches {
    replicas: Vec<Cache>,
    turn: usize,
}

/// How far the router has come with one replica's cache.
#[derive(Debug)]
struct Cache {
    log: Arc<CacheLog>,
    cursor: Cursor,
    /// There may be something to read.
    due: bool,
    /// Belongs to a life that the router has not heard of.
    held: Option<Delta>,
}

impl Caches {
    fn new(logs: impl Iterator<Item = Arc<CacheLog>>) -> Self {
        let replicas = logs.map(|log| Cache { log, cursor: Cursor::default(), due: true, held: None }).collect();
        Self { replicas, turn: 0 }
    }

    fn are_due(&self) -> bool {
        self.replicas.iter().any(|cache| cache.due)
    }

    /// What is to be said next. `told` is the life of each replica that the router was last told of.
    fn next(&mut self, told: impl Fn(usize) -> u64) -> Option<wire::CacheReport> {
        for _ in 0..self.replicas.len() {
            let at = self.turn;
            let cache = &mut self.replicas[at];
            let delta = cache.next(told(at));
            // The parts of one report leave together.
            if !cache.due {
                self.turn = (at + 1) % self.replicas.len();
            }
            if let Some(delta) = delta {
                return Some(report(at, delta));
            }
        }
        None
    }
}

impl Cache {
    fn next(&mut self, told: u64) -> Option<Delta> {
        while self.due {
            let Some(delta) = self.held.take().or_else(|| self.log.read(&mut self.cursor, MOST_BLOCKS)) else {
                self.due = false;
                break;
            };
            match delta.epoch.cmp(&told) {
                // The router has forgotten that life.
                Ordering::Less => {}
                Ordering::Equal => {
                    self.due = delta.partial;
                    return Some(delta);
                }
                // The next report announces it.
                Ordering::Greater => (self.held, self.due) = (Some(delta), false),
            }
        }
        None
    }
}

fn report(index: usize, delta: Delta) -> wire::CacheReport {
    let Delta { epoch, snapshot, partial, stored, removed, count, xor } = delta;
    let index = u32::try_from(index).unwrap_or(u32::MAX);
    wire::CacheReport { index, epoch, snapshot, partial, stored, removed, count, digest: xor }
}

/// The bundles that are being sent, each once: as many as this node has at most.
#[derive(Debug, Default)]
struct Files {
    sending: VecDeque<Sending>,
}

#[derive(Debug)]
struct Sending {
    bundle: Bundle,
    offset: usize,
}

impl Files {
    fn fetch(&mut self, bundle: Bundle) {
        self.sending.retain(|sending| sending.bundle.hash != bundle.hash);
        self.sending.push_back(Sending { bundle, offset: 0 });
    }

    fn next(&mut self) -> Option<wire::FilePart> {
        let Sending { bundle, offset } = self.sending.front_mut()?;
        let begin = *offset;
        *offset = bundle.bytes.len().min(begin + MOST_BYTES);
        let data = bundle.bytes.slice(begin..*offset);
        let part = wire::FilePart { hash: bundle.hash.clone(), offset: begin as u64, data, error: String::new() };
        if *offset == bundle.bytes.len() {
            self.sending.pop_front();
        }
        Some(part)
    }
}

#[cfg(test)]
mod tests;
