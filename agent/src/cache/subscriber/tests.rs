//! The subscriber against sockets and a directory like an engine's.

use std::collections::BTreeMap;
use std::sync::Arc;

use hostler_placement::block_keys::{BlockKey, KeyChain, token_keys};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio_util::task::AbortOnDropHandle;
use zeromq::{PubSocket, RouterSocket};

use super::*;
use crate::cache::tests::batch;
use crate::cache::{CacheCounters, CacheLog, CacheStatus, CacheTier, Cursor};

#[derive(Clone, Copy)]
enum Framing {
    UpTo025,
    Since026,
}

type Kept = Arc<Mutex<BTreeMap<u64, Bytes>>>;

struct FakeEngine {
    log: Arc<CacheLog>,
    events: PubSocket,
    kept: Kept,
    _replay: AbortOnDropHandle<()>,
    _follows: AbortOnDropHandle<()>,
    _directory: TempDir,
}

const PATIENCE: Duration = Duration::from_secs(20);

/// Stores block `n` as the first of its sequence; its tokens are `n`, twice.
fn stores(block: u64) -> Bytes {
    batch(&[json!(["BlockStored", [block], null, [block, block], 2, null, "GPU"])])
}

fn key(block: u32) -> BlockKey {
    token_keys(KeyChain::new("", ""), &[block, block], 2)[0]
}

impl FakeEngine {
    async fn start(framing: Framing) -> Self {
        Self::start_with(framing, FollowFrom::Now, 0..0).await
    }

    /// An engine that sent these messages before anybody listened.
    async fn start_with(framing: Framing, since: FollowFrom, sent: std::ops::Range<u64>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (live, replay) = (directory.path().join("kv.sock"), directory.path().join("replay.sock"));
        let mut events = PubSocket::new();
        events.bind(&endpoint(&live)).await.unwrap();
        let mut router = RouterSocket::new();
        router.bind(&endpoint(&replay)).await.unwrap();
        let kept = Kept::default();
        kept.lock().extend(sent.map(|sequence| (sequence, stores(sequence))));
        let replays = tokio::spawn(answer_replays(router, kept.clone(), framing));
        let log = Arc::new(CacheLog::default());
        let (writer, (joined, joining)) = (log.begin_life(1), oneshot::channel());
        let follows = tokio::spawn(async move { follow(&KvEventSource::Sockets { live, replay }, writer, 0, since, joined).await });
        tokio::time::timeout(PATIENCE, joining).await.unwrap().unwrap();
        Self {
            log,
            events,
            kept,
            _replay: AbortOnDropHandle::new(replays),
            _follows: AbortOnDropHandle::new(follows),
            _directory: directory,
        }
    }

    /// Sends a message repeatedly until it has its effect.
    ///
    /// A subscription takes hold some time after it is made, and repeated messages are dropped.
    async fn send_until(&mut self, sequence: u64, payload: Bytes, effect: impl Fn(&CacheLog) -> bool) {
        let sending = async {
            while !effect(&self.log) {
                let frames = vec![Bytes::new(), Bytes::copy_from_slice(&sequence.to_be_bytes()), payload.clone()];
                self.events.send(ZmqMessage::try_from(frames).unwrap()).await.unwrap();
                let _ = tokio::time::timeout(Duration::from_millis(20), changes(&self.log)).await;
            }
        };
        if tokio::time::timeout(PATIENCE, sending).await.is_err() {
            panic!("message {sequence} has no effect: {:?} {:?}", self.counters(), self.watch());
        }
    }

    /// Sends a message that stores a block with the message's own number, and waits until the block
    /// is cached.
    async fn tell(&mut self, sequence: u64) {
        let key = key(u32::try_from(sequence).unwrap());
        self.send_until(sequence, stores(sequence), |log| blocks(log).contains(&key)).await;
    }

    fn keep(&self, sequence: u64) {
        self.kept.lock().insert(sequence, stores(sequence));
    }

    fn counters(&self) -> CacheCounters {
        self.log.counters()
    }

    fn watch(&self) -> CacheStatus {
        self.log.watch().borrow().clone()
    }

    fn blocks(&self) -> Vec<BlockKey> {
        blocks(&self.log)
    }
}

async fn changes(log: &CacheLog) {
    // The watch cannot end while the log exists.
    let _ = log.watch().changed().await;
}

fn blocks(log: &CacheLog) -> Vec<BlockKey> {
    let mut blocks = log.read(CacheTier::Gpu, &mut Cursor::default(), usize::MAX).unwrap().stored;
    blocks.sort_unstable();
    blocks
}

fn keys(blocks: impl IntoIterator<Item = u32>) -> Vec<BlockKey> {
    let mut keys: Vec<BlockKey> = blocks.into_iter().map(key).collect();
    keys.sort_unstable();
    keys
}

async fn answer_replays(mut router: RouterSocket, kept: Kept, framing: Framing) {
    loop {
        let request = router.recv().await.unwrap().into_vec();
        assert_eq!(request.len(), 3);
        let start = u64::from_be_bytes(request[2].as_ref().try_into().unwrap());
        let kept: Vec<_> = kept.lock().range(start..).map(|(&sequence, payload)| (sequence, payload.clone())).collect();
        for (sequence, payload) in kept.into_iter().chain([(u64::MAX, Bytes::new())]) {
            let mut frames = vec![request[0].clone(), Bytes::new()];
            if matches!(framing, Framing::Since026) {
                frames.push(if sequence == u64::MAX { Bytes::new() } else { Bytes::from_static(b"kv-events") });
            }
            frames.extend([Bytes::copy_from_slice(&sequence.to_be_bytes()), payload]);
            if router.send(ZmqMessage::try_from(frames).unwrap()).await.is_err() {
                // The subscriber has what it requested.
                break;
            }
        }
    }
}

#[tokio::test]
async fn events_become_blocks_as_they_come() {
    let mut engine = FakeEngine::start(Framing::Since026).await;
    for sequence in 0..3 {
        engine.tell(sequence).await;
    }
    assert_eq!(engine.blocks(), keys(0..3));
    let counters = engine.counters();
    assert_eq!((counters.events, counters.gaps, counters.resets), (3, 0, 0));
    assert_eq!((engine.watch().block_size, engine.watch().reason.as_str()), (2, ""));
}

#[tokio::test]
async fn missed_events_are_requested_in_the_framing_of_each_release() {
    for framing in [Framing::UpTo025, Framing::Since026] {
        let mut engine = FakeEngine::start(framing).await;
        // The very first messages may be missed, too.
        (0..2).for_each(|sequence| engine.keep(sequence));
        engine.tell(2).await;
        assert_eq!(engine.blocks(), keys(0..3));
        // The engine also sends the present message again, and the one after it, which then arrives
        // twice.
        (2..7).for_each(|sequence| engine.keep(sequence));
        engine.tell(5).await;
        engine.tell(6).await;
        assert_eq!(engine.blocks(), keys(0..7));
        let counters = engine.counters();
        assert_eq!((counters.events, counters.gaps, counters.replays, counters.resets), (7, 2, 2, 0));
    }
}

#[tokio::test]
async fn an_adopted_engines_earlier_blocks_are_known_on_joining() {
    let mut engine = FakeEngine::start_with(Framing::Since026, FollowFrom::FirstEvent, 0..3).await;
    assert!(engine.watch().exact);
    assert_eq!(engine.blocks(), keys(0..3));
    engine.tell(3).await;
    assert_eq!(engine.blocks(), keys(0..4));
    assert_eq!((engine.counters().gaps, engine.counters().resets), (0, 0));
}

#[tokio::test]
async fn an_adopted_engine_without_its_first_events_is_not_exact() {
    let engine = FakeEngine::start_with(Framing::Since026, FollowFrom::FirstEvent, 5..8).await;
    let watch = engine.watch();
    assert!(!watch.exact && watch.reason.contains("lost"), "{watch:?}");
}

#[tokio::test]
async fn a_gap_that_cannot_be_replayed_voids_earlier_blocks() {
    let mut engine = FakeEngine::start(Framing::Since026).await;
    engine.tell(0).await;
    // Here the engine has forgotten message 1.
    (2..4).for_each(|sequence| engine.keep(sequence));
    engine.tell(4).await;
    assert_eq!(engine.blocks(), keys(2..5));
    engine.tell(5).await;
    let counters = engine.counters();
    assert_eq!((counters.gaps, counters.replays, counters.resets), (1, 0, 1));
    // Here the engine has forgotten everything.
    engine.kept.lock().clear();
    engine.tell(9).await;
    assert_eq!(engine.blocks(), keys(9..10));
    assert_eq!(engine.counters().resets, 2);
    let watch = engine.watch();
    assert!(!watch.exact && watch.reason.contains("lost"), "blocks that are still cached are not reported again: {watch:?}");
    // Clearing the cache makes everything known again.
    engine.send_until(10, batch(&[json!(["AllBlocksCleared"])]), |log| log.watch().borrow().exact).await;
}

#[tokio::test]
async fn old_messages_are_dropped_and_a_restarted_sequence_voids_blocks() {
    let mut engine = FakeEngine::start(Framing::Since026).await;
    for sequence in 0..4 {
        engine.tell(sequence).await;
    }
    // An old message has no effect of its own, so the next one shows when it was read.
    let old = vec![Bytes::new(), Bytes::copy_from_slice(&2_u64.to_be_bytes()), stores(99)];
    engine.events.send(ZmqMessage::try_from(old).unwrap()).await.unwrap();
    engine.tell(4).await;
    assert_eq!(engine.blocks(), keys(0..5));
    assert_eq!(engine.counters().resets, 0);
    engine.send_until(0, stores(50), |log| blocks(log) == keys([50])).await;
    engine.tell(1).await;
    assert_eq!(engine.blocks(), keys([1, 50]));
    assert_eq!(engine.counters().resets, 1);
}

#[tokio::test]
async fn an_unreadable_message_voids_all_blocks_and_is_counted() {
    let mut engine = FakeEngine::start(Framing::Since026).await;
    engine.tell(0).await;
    engine.send_until(1, Bytes::from_static(b"\xc1"), |log| log.counters().malformed == 1).await;
    engine.tell(2).await;
    assert_eq!(engine.blocks(), keys(2..3));
    assert_eq!((engine.counters().malformed, engine.counters().resets), (1, 1));
}

#[tokio::test]
async fn removals_and_resets_are_followed() {
    let mut engine = FakeEngine::start(Framing::Since026).await;
    engine.tell(0).await;
    engine.tell(1).await;
    let removal: [Value; 1] = [json!({"type": "BlockRemoved", "block_hashes": [0], "medium": "GPU"})];
    engine.send_until(2, batch(&removal), |log| blocks(log) == keys([1])).await;
    engine.send_until(3, batch(&[json!({"type": "AllBlocksCleared"})]), |log| blocks(log).is_empty()).await;
    assert_eq!(engine.counters().resets, 0, "the engine did that, not we");
}

#[tokio::test]
async fn a_closed_event_socket_makes_the_cache_unknown() {
    let mut engine = FakeEngine::start(Framing::Since026).await;
    engine.tell(0).await;
    let mut watch = engine.log.watch();
    std::mem::replace(&mut engine.events, PubSocket::new()).close().await;
    let unknown = tokio::time::timeout(PATIENCE, watch.wait_for(|watch| !watch.exact)).await.unwrap().unwrap().clone();
    assert!(unknown.reason.starts_with("the engine's cache events cannot be had: "), "{}", unknown.reason);
    assert!(engine.blocks().is_empty());
}

#[tokio::test]
async fn an_engine_without_events_is_unknown_with_the_reason() {
    let log = Arc::new(CacheLog::default());
    let (joined, joining) = oneshot::channel();
    let source = KvEventSource::Nothing { because: "it is too old".to_owned() };
    follow(&source, log.begin_life(1), 0, FollowFrom::Now, joined).await;
    assert!(joining.await.is_err(), "and nobody waits for it");
    let watch = log.watch().borrow().clone();
    assert_eq!((watch.epoch, watch.exact, watch.reason.as_str()), (1, false, "it is too old"));
}

#[tokio::test]
async fn an_unreachable_event_socket_does_not_hold_up_the_engine() {
    let log = Arc::new(CacheLog::default());
    let (joined, joining) = oneshot::channel();
    let path = std::path::PathBuf::from(format!("/tmp/{}", "x".repeat(200)));
    let source = KvEventSource::Sockets { live: path.clone(), replay: path };
    let writer = log.begin_life(1);
    let _follows = AbortOnDropHandle::new(tokio::spawn(async move { follow(&source, writer, 0, FollowFrom::Now, joined).await }));
    assert!(tokio::time::timeout(PATIENCE, joining).await.unwrap().is_err());
    let watch = log.watch().borrow().clone();
    assert!(!watch.exact && watch.reason.starts_with("the engine's cache events cannot be had: "), "{}", watch.reason);
}
