use hostler_placement::affinity::ChainGaps;
use hostler_placement::block_keys::BlockKey;
use hostler_proto::agent::v1 as wire;
use hostler_proto::agent::v1::attach_response::Message as ToAgent;
use hostler_proto::agent::v1::directive::Order;
use tokio::time::sleep;
use tonic::Status;

use super::*;
use crate::fleet::tests::{attach, fleet, ready, report as fleet_report};
use crate::fleet::{Replica, fleet_writer::ReplicaChange};
use crate::lanes::Lane;

/// A writer over a fleet of one node with two replicas, and the messages to its agent.
struct Fixture {
    fleet: Fleet,
    index: Arc<CacheIndex>,
    caches: CacheReportQueue,
    directives: Directives,
    messages: mpsc::Receiver<Result<wire::AttachResponse, Status>>,
    _lane: Arc<Lane>,
}

impl Fixture {
    async fn start() -> Self {
        let (fleet, index) = (fleet(), Arc::new(CacheIndex::new()));
        let lane = attach(&fleet, 1, vec![ready(0), ready(1)]).await;
        let caches = CacheReportQueue::start(index.clone(), fleet.clone(), &BackgroundTasks::default());
        let (directives, messages) = Directives::connect();
        Self { fleet, index, caches, directives, messages, _lane: lane }
    }

    async fn update(&self, update: CacheUpdate) {
        self.caches.send(update).await;
        // The clock is paused: this lets the writers run and takes no time.
        sleep(Duration::from_millis(1)).await;
    }

    /// A report of the attachment's first replica.
    async fn report(&self, report: CacheReport) {
        self.update(CacheUpdate::Reported { attachment: 1, directives: self.directives.clone(), report }).await;
    }

    fn replica(&self) -> Arc<Replica> {
        self.fleet.view().replicas[0].clone()
    }

    /// How many blocks of the chain 1, 2, 3 and so on the first replica is known to hold; `None`
    /// while its cache is not known.
    fn known(&self) -> Option<u32> {
        let slot = self.replica().cache.slot?;
        let keys: Vec<BlockKey> = (1..100).collect();
        Some(self.index.matched_blocks(&keys, &[(slot, ChainGaps::Possible)])[0])
    }

    fn figures(&self) -> (u64, bool, u64, bool) {
        let figures = self.replica().cache.stats.clone();
        let (blocks, resyncs) = (figures.blocks.load(Ordering::Relaxed), figures.resyncs.load(Ordering::Relaxed));
        (blocks, figures.matches.load(Ordering::Relaxed), resyncs, figures.distrusted.load(Ordering::Relaxed))
    }

    /// How often the cache was requested since the last call.
    fn count_resyncs(&mut self) -> usize {
        let mut count = 0;
        while let Ok(answer) = self.messages.try_recv() {
            let Some(ToAgent::Directive(directive)) = answer.unwrap().message else { panic!("no directive") };
            assert_eq!(directive.order, Some(Order::ResyncCache(wire::Replicas { indices: vec![0] })));
            count += 1;
        }
        count
    }
}

/// A change after which these blocks are cached.
fn change(stored: &[BlockKey], removed: &[BlockKey], cached: &[BlockKey]) -> CacheReport {
    CacheReport {
        epoch: 1,
        stored: stored.to_vec(),
        removed: removed.to_vec(),
        count: cached.len() as u64,
        digest: cached.iter().fold(0, |digest, key| digest ^ key),
        ..CacheReport::default()
    }
}

/// A snapshot.
fn whole(cached: &[BlockKey]) -> CacheReport {
    CacheReport { snapshot: true, ..change(cached, &[], cached) }
}

/// A snapshot whose agent claims more blocks than it lists.
fn contradiction() -> CacheReport {
    CacheReport { count: 99, ..whole(&[1, 2]) }
}

#[tokio::test(start_paused = true)]
async fn a_cache_is_known_from_its_snapshot_onwards() {
    let mut fixture = Fixture::start().await;
    assert_eq!(fixture.known(), None);
    fixture.report(whole(&[1, 2, 3])).await;
    assert_eq!((fixture.known(), fixture.figures()), (Some(3), (3, true, 0, false)));
    fixture.report(change(&[4, 5], &[], &[1, 2, 3, 4, 5])).await;
    assert_eq!(fixture.known(), Some(5));
    fixture.report(change(&[], &[5, 4, 3], &[1, 2])).await;
    assert_eq!((fixture.known(), fixture.figures(), fixture.count_resyncs()), (Some(2), (2, true, 0, false), 0));
    assert!(fixture.fleet.view().replicas[1].cache.slot.is_none(), "the other replica has said nothing");
}

#[tokio::test(start_paused = true)]
async fn a_partial_snapshot_is_not_used() {
    let mut fixture = Fixture::start().await;
    fixture.report(CacheReport { partial: true, count: 0, ..whole(&[1, 2]) }).await;
    fixture.report(CacheReport { partial: true, count: 0, ..change(&[3], &[], &[]) }).await;
    assert_eq!((fixture.known(), fixture.count_resyncs()), (None, 0));
    fixture.report(change(&[4], &[], &[1, 2, 3, 4])).await;
    assert_eq!((fixture.known(), fixture.figures()), (Some(4), (4, true, 0, false)));
    // Earlier knowledge does not count while the next snapshot is on its way.
    fixture.report(CacheReport { partial: true, count: 0, ..whole(&[1]) }).await;
    assert_eq!(fixture.known(), None);
    fixture.report(change(&[2], &[], &[1, 2])).await;
    assert_eq!((fixture.known(), fixture.count_resyncs()), (Some(2), 0));
}

#[tokio::test(start_paused = true)]
async fn a_wrong_cache_digest_requests_the_whole_cache_once() {
    let mut fixture = Fixture::start().await;
    fixture.report(whole(&[1, 2])).await;
    // The report of block 3 was lost.
    fixture.report(change(&[4], &[], &[1, 2, 3, 4])).await;
    assert_eq!((fixture.count_resyncs(), fixture.figures()), (1, (3, false, 1, false)));
    assert_eq!(fixture.known(), Some(2), "what is mostly right is used until then");
    for _ in 0..5 {
        fixture.report(change(&[5], &[], &[1, 2, 3, 4, 5])).await;
    }
    assert_eq!((fixture.count_resyncs(), fixture.known()), (0, Some(2)), "it is on its way");
    fixture.report(whole(&[1, 2, 3, 4, 5])).await;
    assert_eq!((fixture.known(), fixture.figures(), fixture.count_resyncs()), (Some(5), (5, true, 1, false), 0));
}

#[tokio::test(start_paused = true)]
async fn a_cache_that_contradicts_itself_three_times_is_distrusted() {
    let mut fixture = Fixture::start().await;
    for resyncs in 1..=3 {
        fixture.report(contradiction()).await;
        assert_eq!((fixture.count_resyncs(), fixture.figures()), (1, (2, false, resyncs, false)));
    }
    fixture.report(contradiction()).await;
    assert_eq!((fixture.known(), fixture.count_resyncs(), fixture.figures()), (None, 0, (2, false, 3, true)));
    fixture.report(whole(&[1, 2])).await;
    assert_eq!((fixture.known(), fixture.count_resyncs()), (None, 0), "not even when they are right for once");
    // Another life of the engine, reported by the same agent, may be reported correctly.
    fleet_report(&fixture.fleet, 1, false, vec![ReplicaChange { epoch: 2, ..ready(0) }]).await;
    fixture.report(CacheReport { epoch: 2, ..whole(&[1, 2]) }).await;
    assert_eq!((fixture.known(), fixture.figures()), (Some(2), (2, true, 0, false)));
}

#[tokio::test(start_paused = true)]
async fn rare_cache_differences_do_not_add_up() {
    let mut fixture = Fixture::start().await;
    for resyncs in 1..=6 {
        fixture.report(contradiction()).await;
        fixture.report(whole(&[1, 2])).await;
        assert_eq!((fixture.known(), fixture.figures(), fixture.count_resyncs()), (Some(2), (2, true, resyncs, false), 1));
    }
}

#[tokio::test(start_paused = true)]
async fn a_change_without_a_snapshot_requests_the_whole_cache() {
    let mut fixture = Fixture::start().await;
    fixture.report(change(&[1], &[], &[1])).await;
    assert_eq!((fixture.known(), fixture.count_resyncs()), (None, 1));
    fixture.report(whole(&[1])).await;
    fixture.report(CacheReport { epoch: 2, ..change(&[2], &[], &[1, 2]) }).await;
    assert_eq!((fixture.known(), fixture.count_resyncs()), (Some(1), 1), "of another life");
}

#[tokio::test(start_paused = true)]
async fn a_new_engine_life_starts_with_an_unknown_cache() {
    let mut fixture = Fixture::start().await;
    fixture.report(whole(&[1, 2, 3])).await;
    fleet_report(&fixture.fleet, 1, false, vec![ReplicaChange { epoch: 2, ..ready(0) }]).await;
    assert_eq!(fixture.known(), None);
    fixture.report(CacheReport { epoch: 2, ..whole(&[1]) }).await;
    assert_eq!((fixture.known(), fixture.count_resyncs()), (Some(1), 0));
    until_swept(&fixture, 1).await;
}

#[tokio::test(start_paused = true)]
async fn a_detached_agents_caches_alone_are_forgotten() {
    let fixture = Fixture::start().await;
    fixture.report(whole(&[1, 2, 3])).await;
    let slot = fixture.replica().cache.slot.unwrap();
    let (directives, _told) = Directives::connect();
    fixture.update(CacheUpdate::Reported { attachment: 2, directives, report: whole(&[7, 8]) }).await;
    fixture.update(CacheUpdate::Detached { attachment: 1 }).await;
    assert_eq!(fixture.index.matched_blocks(&[1, 2, 3], &[(slot, ChainGaps::None)]), [0]);
    until_swept(&fixture, 2).await;
}

/// Waits until the index holds nothing but these blocks.
async fn until_swept(fixture: &Fixture, blocks: usize) {
    for _ in 0..100 {
        if fixture.index.len() == blocks {
            return;
        }
        sleep(SWEEP_INTERVAL).await;
    }
    panic!("{} blocks are left", fixture.index.len());
}

#[tokio::test(start_paused = true)]
async fn a_reattached_agent_must_report_its_caches_again() {
    let fixture = Fixture::start().await;
    fixture.report(whole(&[1, 2, 3])).await;
    let _lane = attach(&fixture.fleet, 2, vec![ready(0), ready(1)]).await;
    fixture.update(CacheUpdate::Detached { attachment: 1 }).await;
    assert!(fixture.replica().cache.slot.is_none());
}

#[tokio::test(start_paused = true)]
async fn leftovers_are_removed_while_reports_keep_coming() {
    let fixture = Fixture::start().await;
    fixture.report(whole(&[1, 2, 3])).await;
    let (directives, _told) = Directives::connect();
    fixture.update(CacheUpdate::Reported { attachment: 2, directives: directives.clone(), report: whole(&[7, 8]) }).await;
    fixture.update(CacheUpdate::Detached { attachment: 1 }).await;
    for _ in 0..200 {
        fixture.update(CacheUpdate::Reported { attachment: 2, directives: directives.clone(), report: change(&[], &[], &[7, 8]) }).await;
    }
    assert_eq!(fixture.index.len(), 2);
}

fn on_host(report: CacheReport) -> CacheReport {
    CacheReport { tier: CacheTier::Host, ..report }
}

fn in_files(report: CacheReport) -> CacheReport {
    CacheReport { tier: CacheTier::Files, epoch: 0, ..report }
}

impl Fixture {
    /// How many blocks of the chain 1, 2, 3 and so on the first replica has in its host's memory.
    fn known_on_host(&self) -> Option<u32> {
        self.matched(self.replica().host_cache.slot)
    }

    /// How many blocks of the chain 1, 2, 3 and so on each replica finds in files.
    fn known_in_files(&self) -> Vec<Option<u32>> {
        self.fleet.view().replicas.iter().map(|replica| self.matched(replica.file_cache.slot)).collect()
    }

    fn matched(&self, slot: Option<ReplicaSlot>) -> Option<u32> {
        let keys: Vec<BlockKey> = (1..100).collect();
        Some(self.index.matched_blocks(&keys, &[(slot?, ChainGaps::Possible)])[0])
    }
}

#[tokio::test(start_paused = true)]
async fn files_are_every_replicas_and_outlive_their_engines() {
    let mut fixture = Fixture::start().await;
    fixture.report(whole(&[1])).await;
    assert_eq!(fixture.known_in_files(), [None, None]);
    fixture.report(in_files(whole(&[1, 2, 3]))).await;
    assert_eq!(fixture.known_in_files(), [Some(3), Some(3)]);
    fleet_report(&fixture.fleet, 1, false, vec![ReplicaChange { epoch: 2, ..ready(0) }, ready(2)]).await;
    fixture.report(CacheReport { epoch: 2, ..whole(&[7]) }).await;
    fixture.report(in_files(change(&[], &[3], &[1, 2]))).await;
    assert_eq!(fixture.known_in_files(), [Some(2), Some(2), Some(2)], "a replica that comes later has them too");
    assert_eq!(fixture.count_resyncs(), 0);
    let _lane = attach(&fixture.fleet, 2, vec![ready(0)]).await;
    fixture.update(CacheUpdate::Detached { attachment: 1 }).await;
    assert!(fixture.known_in_files().iter().all(Option::is_none), "the next attachment reports them again");
}

#[tokio::test(start_paused = true)]
async fn the_tiers_of_a_cache_are_sets_of_their_own() {
    let mut fixture = Fixture::start().await;
    fixture.report(whole(&[1, 2, 3])).await;
    assert_eq!((fixture.known(), fixture.known_on_host()), (Some(3), None), "an engine without the tier has none");
    fixture.report(on_host(whole(&[1, 2, 3, 4]))).await;
    fixture.report(change(&[], &[2, 3], &[1])).await;
    fixture.report(on_host(change(&[5], &[], &[1, 2, 3, 4, 5]))).await;
    assert_eq!((fixture.known(), fixture.known_on_host(), fixture.count_resyncs()), (Some(1), Some(5), 0));
    // A difference in one tier leaves the other as it is.
    fixture.report(on_host(change(&[6], &[], &[1, 2]))).await;
    assert_eq!((fixture.known(), fixture.count_resyncs()), (Some(1), 1));
    fixture.report(on_host(whole(&[1, 2]))).await;
    assert_eq!((fixture.known(), fixture.known_on_host()), (Some(1), Some(2)));
}

#[tokio::test(start_paused = true)]
async fn a_host_tier_ends_with_its_engines_life() {
    let fixture = Fixture::start().await;
    fixture.report(whole(&[1])).await;
    fixture.report(on_host(whole(&[1, 2, 3]))).await;
    fleet_report(&fixture.fleet, 1, false, vec![ReplicaChange { epoch: 2, ..ready(0) }]).await;
    assert_eq!(fixture.known_on_host(), None);
    fixture.report(CacheReport { epoch: 2, ..whole(&[7]) }).await;
    until_swept(&fixture, 1).await;
    assert_eq!(fixture.known_on_host(), None);
}
