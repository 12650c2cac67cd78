//! Parts in the order in which a router would get them.

use std::collections::BTreeSet;

use bytes::Bytes;

use super::*;
use crate::cache::CacheLogWriter;
use crate::cache::kv_event::{BlocksStored, KvEvent};

/// A log in its life `epoch`, with this many blocks, and its writer.
fn log(epoch: u64, blocks: u32) -> (Arc<CacheLog>, CacheLogWriter) {
    let log = Arc::<CacheLog>::default();
    let writer = log.begin_life(epoch);
    store(&writer, 0, blocks);
    (log, writer)
}

/// Stores this many more blocks of one token. A different `salt` makes different blocks.
fn store(writer: &CacheLogWriter, salt: u32, blocks: u32) {
    let hashes = (0..blocks).map(|block| u64::from(salt) << 32 | u64::from(block)).collect();
    let tokens = (0..blocks).map(|block| salt + block).collect();
    writer.apply(&[KvEvent::Stored(Box::new(BlocksStored { hashes, tokens, block_size: 1, ..BlocksStored::default() }))]);
}

fn caches(logs: &[&Arc<CacheLog>]) -> CacheTransfers {
    CacheTransfers::new(logs.iter().map(|&log| log.clone()), None, 1)
}

/// Everything that is due.
fn drain(caches: &mut CacheTransfers, reported_epoch: impl Fn(usize) -> u64) -> Vec<wire::CacheReport> {
    std::iter::from_fn(|| caches.next(&reported_epoch)).collect()
}

fn mark(caches: &mut CacheTransfers) {
    caches.transfers.iter_mut().for_each(|cache| cache.is_due = true);
}

#[test]
fn a_large_cache_is_sent_in_parts_that_add_up() {
    let (log, _) = log(1, 100_000);
    let mut caches = caches(&[&log]);
    let parts = drain(&mut caches, |_| 1);
    assert_eq!(parts.iter().map(|part| part.snapshot).collect::<Vec<_>>(), [true, false, false, false]);
    assert_eq!(parts.iter().map(|part| part.partial).collect::<Vec<_>>(), [true, true, true, false]);
    assert!(parts.iter().all(|part| part.stored.len() <= MAX_BLOCKS_PER_MESSAGE && (part.index, part.epoch) == (0, 1)));
    let keys: BTreeSet<u64> = parts.iter().flat_map(|part| part.stored.iter().copied()).collect();
    let last = parts.last().unwrap();
    assert_eq!((keys.len() as u64, keys.iter().fold(0, |xor, key| xor ^ key)), (last.count, last.digest));
    assert!(!caches.are_due());
}

#[test]
fn only_changes_are_sent_after_the_first_report() {
    let (log, writer) = log(1, 10);
    let mut caches = caches(&[&log]);
    drain(&mut caches, |_| 1);
    store(&writer, 1 << 20, 3);
    assert_eq!(drain(&mut caches, |_| 1), [], "a change waits for its report");
    mark(&mut caches);
    let parts = drain(&mut caches, |_| 1);
    assert_eq!(parts.len(), 1);
    assert_eq!((parts[0].snapshot, parts[0].stored.len(), parts[0].count), (false, 3, 13));
    mark(&mut caches);
    assert_eq!(drain(&mut caches, |_| 1), []);
}

#[test]
fn a_life_unknown_to_the_router_waits_for_its_report() {
    let ((new, _), (old, _)) = (log(5, 4), log(2, 6));
    let mut caches = caches(&[&new, &old]);
    let parts = drain(&mut caches, |_| 2);
    assert_eq!(parts.iter().map(|part| (part.index, part.epoch)).collect::<Vec<_>>(), [(1, 2)]);
    assert!(!caches.are_due(), "nothing is tried in vain until the next report");
    mark(&mut caches);
    let parts = drain(&mut caches, |index| [5, 2][index]);
    assert_eq!(parts.iter().map(|part| (part.index, part.snapshot, part.count)).collect::<Vec<_>>(), [(0, true, 4)]);
}

#[test]
fn a_life_over_for_the_router_is_no_longer_reported() {
    let (log, _) = log(1, 100_000);
    let mut caches = caches(&[&log]);
    assert!(caches.next(|_| 1).unwrap().partial);
    assert_eq!(drain(&mut caches, |_| 2), [], "the report of the next life came before the log heard of it");
    store(&log.begin_life(2), 0, 5);
    mark(&mut caches);
    let parts = drain(&mut caches, |_| 2);
    assert_eq!(parts.iter().map(|part| (part.epoch, part.snapshot, part.count)).collect::<Vec<_>>(), [(2, true, 5)]);
}

#[test]
fn a_router_out_of_sync_gets_that_one_cache_whole() {
    let mut bulk = TransferQueue::new([log(1, 10).0, log(1, 20).0].into_iter(), None, 1);
    drain(&mut bulk.caches, |_| 1);
    bulk.resync(&[1]);
    let whole = |parts: Vec<wire::CacheReport>| parts.iter().map(|part| (part.index, part.snapshot, part.count)).collect::<Vec<_>>();
    assert_eq!(whole(drain(&mut bulk.caches, |_| 1)), [(1, true, 20)]);
    bulk.resync(&[]);
    let mut all = whole(drain(&mut bulk.caches, |_| 1));
    all.sort_unstable();
    assert_eq!(all, [(0, true, 10), (1, true, 20)]);
}

fn bundle(bytes: usize) -> Bundle {
    let content: Vec<u8> = (0_u8..=255).cycle().take(bytes).collect();
    Bundle { hash: Bytes::from(format!("{bytes}")), bytes: content.into() }
}

#[test]
fn a_bundle_is_sent_in_parts_and_restarts_on_request() {
    let bundle = bundle(600_000);
    let mut files = FileTransfers::default();
    files.push(bundle.clone());
    files.next().unwrap();
    files.push(bundle.clone());
    let parts: Vec<wire::FilePart> = std::iter::from_fn(|| files.next()).collect();
    let mut together = Vec::new();
    for part in &parts {
        assert_eq!((part.offset, &part.hash), (together.len() as u64, &bundle.hash));
        assert!(part.data.len() <= MAX_FILE_BYTES_PER_MESSAGE);
        together.extend_from_slice(&part.data);
    }
    assert_eq!((parts.len(), together), (3, bundle.bytes.to_vec()));
}

#[test]
fn a_large_cache_and_a_large_file_are_sent_interleaved() {
    let mut bulk = TransferQueue::new(std::iter::once(log(1, 100_000).0), None, 1);
    bulk.send_files(bundle(600_000));
    let kinds: Vec<bool> = std::iter::from_fn(|| bulk.next(|_| 1)).map(|message| matches!(message, Message::File(_))).collect();
    assert_eq!(kinds, [true, false, true, false, true, false, false]);
    assert!(!bulk.is_due());
}

/// Stores this many copies in the host's memory of the blocks that [`store`] stored first.
fn copy(writer: &CacheLogWriter, blocks: u32) {
    let copies = (0..blocks).map(|block| {
        let (hashes, medium) = (vec![u64::from(block)], Some("CPU".to_owned()));
        KvEvent::Stored(Box::new(BlocksStored { hashes, medium, ..BlocksStored::default() }))
    });
    writer.apply(&copies.collect::<Vec<_>>());
}

#[test]
fn each_tier_is_reported_as_a_set_of_its_own_once_the_engine_has_shown_it() {
    let (log, writer) = log(1, 10);
    let mut caches = caches(&[&log]);
    let tiers = |parts: Vec<wire::CacheReport>| parts.iter().map(|part| (part.tier, part.snapshot, part.count)).collect::<Vec<_>>();
    assert_eq!(tiers(drain(&mut caches, |_| 1)), [(0, true, 10)]);
    copy(&writer, 4);
    mark(&mut caches);
    assert_eq!(tiers(drain(&mut caches, |_| 1)), [(1, true, 4)]);
    store(&writer, 1 << 20, 3);
    copy(&writer, 6);
    mark(&mut caches);
    assert_eq!(tiers(drain(&mut caches, |_| 1)), [(0, false, 13), (1, false, 6)]);
}

#[test]
fn a_router_that_knows_no_host_tier_gets_no_report_of_it() {
    let (log, writer) = log(1, 10);
    copy(&writer, 4);
    let mut caches = CacheTransfers::new(std::iter::once(log), None, 0);
    assert_eq!(drain(&mut caches, |_| 1).iter().map(|part| (part.tier, part.count)).collect::<Vec<_>>(), [(0, 10)]);
}

/// A log whose engine has written the blocks that [`store`] stored first to a file.
fn written(epoch: u64, blocks: u32) -> (Arc<CacheLog>, Arc<FileLog>) {
    let files = Arc::<FileLog>::default();
    let log = Arc::new(CacheLog::new(Some(files.clone())));
    let writer = log.begin_life(epoch);
    store(&writer, 0, blocks);
    let (hashes, tokens) = ((0..u64::from(blocks)).collect(), (0..blocks).collect());
    let file = BlocksStored { hashes, tokens, block_size: 1, medium: Some("STORAGE".to_owned()), ..BlocksStored::default() };
    writer.apply(&[KvEvent::Stored(Box::new(file))]);
    (log, files)
}

#[test]
fn files_are_the_nodes_and_outlive_the_engine_that_wrote_them() {
    let (log, files) = written(1, 4);
    let mut caches = CacheTransfers::new(std::iter::once(log.clone()), Some(files.clone()), 2);
    let tiers = |parts: Vec<wire::CacheReport>| parts.iter().map(|part| (part.tier, part.epoch, part.count)).collect::<Vec<_>>();
    assert_eq!(tiers(drain(&mut caches, |_| 1)), [(0, 1, 4), (2, 0, 4)]);
    log.begin_life(2);
    mark(&mut caches);
    assert_eq!(tiers(drain(&mut caches, |_| 2)), [(0, 2, 0)], "the files are as they were");
    caches = CacheTransfers::new(std::iter::once(log), Some(files), 1);
    assert_eq!(tiers(drain(&mut caches, |_| 2)), [(0, 2, 0)], "the router does not know files");
}
