//! Data that one session sends in parts between its reports: the cached blocks of its replicas'
//! engines, and the prompt files that its router requested.
//!
//! The queue decides the next part; the session sends it when there is room.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::sync::Arc;

use hostler_proto::agent::v1 as wire;
use hostler_proto::agent::v1::attach_request::Message;

use crate::cache::{CacheDelta, CacheLog, CacheTier, Cursor, FILE_TIER, FileLog};
use crate::prompt_files::Bundle;

/// Blocks in one message: 256 KiB of keys.
const MAX_BLOCKS_PER_MESSAGE: usize = 32 * 1024;

const MAX_FILE_BYTES_PER_MESSAGE: usize = 256 * 1024;

/// Transfers that wait for one router.
#[derive(Debug)]
pub(super) struct TransferQueue {
    caches: CacheTransfers,
    files: FileTransfers,
    /// Whether files go next if both have something to send.
    files_next: bool,
}

impl TransferQueue {
    /// Transfers for a router that knows nothing: all caches are due, whole. `tiers` is the highest
    /// tier that it knows; it would take another tier's blocks for the GPU's.
    pub(super) fn new(logs: impl Iterator<Item = Arc<CacheLog>>, files: Option<Arc<FileLog>>, tiers: u32) -> Self {
        Self { caches: CacheTransfers::new(logs, files, tiers), files: FileTransfers::default(), files_next: false }
    }

    pub(super) fn is_due(&self) -> bool {
        !self.files.sending.is_empty() || self.caches.are_due()
    }

    /// Marks the caches as due when a report goes out.
    ///
    /// Blocks may follow the report that announces them, and every change of a cache comes with a
    /// report.
    pub(super) fn mark_caches_due(&mut self) {
        self.caches.transfers.iter_mut().for_each(|cache| cache.is_due = true);
    }

    /// Sends the caches of these replicas whole; without any index, those of all.
    pub(super) fn resync(&mut self, indices: &[u32]) {
        for cache in &mut self.caches.transfers {
            if indices.is_empty() || indices.contains(&cache.index) {
                cache.cursor.reset();
                (cache.deferred, cache.is_due) = (None, true);
            }
        }
    }

    /// Sends a bundle, from its beginning even if it is being sent.
    pub(super) fn send_files(&mut self, bundle: Bundle) {
        self.files.push(bundle);
    }

    /// Next part, if there is one.
    ///
    /// `reported_epoch` is the life of each replica in the last report to the router.
    pub(super) fn next(&mut self, reported_epoch: impl Fn(usize) -> u64) -> Option<Message> {
        let Self { caches, files, files_next } = self;
        *files_next = !*files_next;
        let mut file = || files.next().map(Message::File);
        let mut cache = || caches.next(&reported_epoch).map(Message::Cache);
        if *files_next { file().or_else(cache) } else { cache().or_else(file) }
    }
}

/// Caches of all replicas, each tier of each in turn, and the files that they share.
#[derive(Debug)]
struct CacheTransfers {
    transfers: Vec<CacheTransfer>,
    next_transfer: usize,
}

/// Progress of the router with one tier of one replica's cache, or with the node's files.
#[derive(Debug)]
struct CacheTransfer {
    /// The replica's number on the node; 0 for the node's files.
    index: u32,
    source: CacheSource,
    cursor: Cursor,
    /// There may be new changes to read.
    is_due: bool,
    /// Delta of a life that has not been reported to the router yet.
    deferred: Option<CacheDelta>,
}

#[derive(Debug)]
enum CacheSource {
    Engine(Arc<CacheLog>, CacheTier),
    Files(Arc<FileLog>),
}

impl CacheSource {
    fn tier(&self) -> u32 {
        match self {
            Self::Engine(_, tier) => tier.number(),
            Self::Files(_) => FILE_TIER,
        }
    }

    fn read(&self, cursor: &mut Cursor) -> Option<CacheDelta> {
        match self {
            Self::Engine(log, tier) => log.read(*tier, cursor, MAX_BLOCKS_PER_MESSAGE),
            Self::Files(log) => log.read(cursor, MAX_BLOCKS_PER_MESSAGE),
        }
    }
}

impl CacheTransfers {
    fn new(logs: impl Iterator<Item = Arc<CacheLog>>, files: Option<Arc<FileLog>>, tiers: u32) -> Self {
        let of_log = |(index, log): (u32, Arc<CacheLog>)| CacheTier::ALL.map(|tier| (index, CacheSource::Engine(log.clone(), tier)));
        let sources = (0..).zip(logs).flat_map(of_log).chain(files.map(|log| (0, CacheSource::Files(log))));
        let known = sources.filter(|(_, source)| source.tier() <= tiers);
        let transfer = |(index, source)| CacheTransfer { index, source, cursor: Cursor::default(), is_due: true, deferred: None };
        Self { transfers: known.map(transfer).collect(), next_transfer: 0 }
    }

    fn are_due(&self) -> bool {
        self.transfers.iter().any(|cache| cache.is_due)
    }

    /// Next cache report.
    ///
    /// `reported_epoch` is the life of each replica in the last report to the router.
    fn next(&mut self, reported_epoch: impl Fn(usize) -> u64) -> Option<wire::CacheReport> {
        for _ in 0..self.transfers.len() {
            let at = self.next_transfer;
            let cache = &mut self.transfers[at];
            let delta = cache.next(reported_epoch(cache.index as usize));
            // The parts of one report leave together.
            let report = delta.map(|delta| cache_report(cache.index, cache.source.tier(), delta));
            if !cache.is_due {
                self.next_transfer = (at + 1) % self.transfers.len();
            }
            if report.is_some() {
                return report;
            }
        }
        None
    }
}

impl CacheTransfer {
    fn next(&mut self, reported_epoch: u64) -> Option<CacheDelta> {
        while self.is_due {
            let Some(delta) = self.deferred.take().or_else(|| self.source.read(&mut self.cursor)) else {
                self.is_due = false;
                break;
            };
            let order = match self.source {
                CacheSource::Engine(..) => delta.epoch.cmp(&reported_epoch),
                CacheSource::Files(_) => Ordering::Equal,
            };
            match order {
                // The router has forgotten that life.
                Ordering::Less => {}
                Ordering::Equal => {
                    self.is_due = delta.is_partial;
                    return Some(delta);
                }
                // The next report announces the life.
                Ordering::Greater => (self.deferred, self.is_due) = (Some(delta), false),
            }
        }
        None
    }
}

fn cache_report(index: u32, tier: u32, delta: CacheDelta) -> wire::CacheReport {
    let CacheDelta { epoch, is_snapshot: snapshot, is_partial: partial, stored, removed, count, xor } = delta;
    wire::CacheReport { index, epoch, snapshot, partial, stored, removed, count, digest: xor, tier }
}

/// Bundles being sent, each once: at most as many as this node has.
#[derive(Debug, Default)]
struct FileTransfers {
    sending: VecDeque<FileTransfer>,
}

#[derive(Debug)]
struct FileTransfer {
    bundle: Bundle,
    offset: usize,
}

impl FileTransfers {
    fn push(&mut self, bundle: Bundle) {
        self.sending.retain(|sending| sending.bundle.hash != bundle.hash);
        self.sending.push_back(FileTransfer { bundle, offset: 0 });
    }

    fn next(&mut self) -> Option<wire::FilePart> {
        let FileTransfer { bundle, offset } = self.sending.front_mut()?;
        let begin = *offset;
        *offset = bundle.bytes.len().min(begin + MAX_FILE_BYTES_PER_MESSAGE);
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
