use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use hostler_api::Route;
use hostler_placement::cost::ChoiceReason;
use hostler_prompt::Dialect;

use super::prompt::tests::{exact, stream, text};
use super::*;
use crate::fleet::tests::{ReplicaChange, attach, attach_node, fleet, ready, report, report_job, state};
use crate::fleet::{CacheTier, EngineLaunch, EngineLoad, FleetUpdate, Phase, ReplicaCache, ReplicaLoad, ReplicaStatus};
use crate::lanes::Lane;
use crate::prompt::FilesHash;
use crate::prompt::tests::{Answers, serve};

/// The files of the fixture's model.
pub(super) const FILES: FilesHash = [7; 32];

/// Tokens per block of that model.
const BLOCK: u32 = 16;

/// A placer over a fleet of one node.
pub(super) struct Fixture {
    pub(super) fleet: Fleet,
    pub(super) index: Arc<CacheIndex>,
    pub(super) placer: Arc<Placer>,
    lane: Arc<Lane>,
}

impl Fixture {
    /// A fixture with this many replicas whose caches are known exactly, and their slots in the
    /// index.
    pub(super) async fn known(replicas: u32) -> (Self, Vec<ReplicaSlot>) {
        let fixture = Self::approximate(replicas).await;
        let slots: Vec<ReplicaSlot> = (0..replicas).map(|_| fixture.index.open()).collect();
        for (index, slot) in (0..).zip(&slots) {
            fixture.know(CacheTier::Gpu, (index, 1), *slot).await;
        }
        (fixture, slots)
    }

    /// Makes one tier of a replica, in this life, known by its slot.
    pub(super) async fn know(&self, tier: CacheTier, (index, epoch): (u32, u64), slot: ReplicaSlot) {
        let cache = ReplicaCache { slot: Some(slot), ..ReplicaCache::default() };
        self.fleet.update(FleetUpdate::CacheChanged { attachment: 1, tier, index, epoch, cache }).await;
        report(&self.fleet, 1, false, Vec::new()).await;
    }

    /// A fixture with this many replicas without reports about their caches.
    pub(super) async fn approximate(replicas: u32) -> Self {
        Self::with_prefill_windows(replicas, Duration::ZERO).await
    }

    /// A fixture with prefill windows at intervals of `every`.
    pub(super) async fn with_prefill_windows(replicas: u32, every: Duration) -> Self {
        let (fleet, index) = (fleet(), Arc::new(CacheIndex::new()));
        let lane = attach(&fleet, 1, (0..replicas).map(replica).collect()).await;
        let prefill_windows = PrefillWindows::new(every, Instant::now(), SystemTime::UNIX_EPOCH);
        let prompts = Prompts::new(PathBuf::new(), 1);
        let placer = Arc::new(Placer::new(fleet.clone(), index.clone(), prompts, Arc::default(), prefill_windows));
        Self { fleet, index, placer, lane }
    }

    /// Takes the files of all replicas away, and has their engines answer like this. All were found
    /// to render prompts.
    pub(super) async fn render_with(&self, answers: Answers) {
        serve(&self.lane, answers);
        for index in 0..u32::try_from(self.fleet.view().replicas.len()).unwrap() {
            let ReplicaChange { state: Some(state), .. } = replica(index) else { panic!("it has a state") };
            let state = ReplicaStatus { files: None, ..state };
            report(&self.fleet, 1, false, vec![ReplicaChange { state: Some(state), ..ready(index) }]).await;
        }
        for replica in &self.fleet.view().replicas {
            let engine = replica.rendering_engine();
            assert!(engine.known.begin_probe(engine.epoch, Instant::now()));
            self.placer.prompts.probe_rendering(&engine, "m").await;
            assert!(engine.known.is_offered(engine.epoch));
        }
    }

    /// Adds a replica whose engine has the Rust front-end.
    pub(super) async fn add_with_rust(&self, index: u32) {
        let ReplicaChange { state: Some(mut state), .. } = replica(index) else { panic!("it has a state") };
        state.launch = Some(EngineLaunch { dialect: Dialect::Rust, ..EngineLaunch::default() });
        report(&self.fleet, 1, false, vec![ReplicaChange { state: Some(state), ..ready(index) }]).await;
    }

    /// Gives a replica its files back.
    pub(super) async fn restore_files(&self, index: u32) {
        report(&self.fleet, 1, false, vec![replica(index)]).await;
    }

    /// Adds another node, `later`, which stays, while this one leaves its job in so many seconds.
    /// The caller keeps the returned lane.
    pub(super) async fn leave_in(&self, seconds: u64) -> Arc<Lane> {
        let lane = attach_node(&self.fleet, 2, "later", vec![replica(0)]).await;
        report_job(&self.fleet, 1, (seconds, seconds + 5)).await;
        lane
    }

    pub(super) fn choose(&self, prompt: &Prompt) -> ChosenReplica {
        self.placer.choose(prompt, &[], Instant::now()).unwrap()
    }

    fn enter(&self, prompt: &Prompt, chosen: &ChosenReplica) -> InFlight {
        self.placer.count_in_flight(prompt, chosen, Instant::now())
    }

    /// Prompt tokens that each replica is assumed to have cached.
    fn matched(&self, prompt: &Prompt) -> Vec<u32> {
        self.choose(prompt).decision.scored.iter().map(|scored| scored.candidate.matched).collect()
    }
}

#[tokio::test(start_paused = true)]
async fn a_prompt_that_engines_refuse_for_its_length_keeps_nobody_waiting() {
    let fixture = Fixture::approximate(1).await;
    let mut state = state(Phase::Ready, "m");
    state.launch = Some(EngineLaunch { max_context_tokens: Some(4096), ..EngineLaunch::default() });
    report(&fixture.fleet, 1, false, vec![ReplicaChange { state: Some(state), ..ready(0) }]).await;
    let has_room = || !fixture.placer.is_full(&fixture.fleet.view(), Some("m"), Instant::now());
    let hold = |number: u32, bytes: usize| {
        let prompt = text(&format!("{number} ").repeat(bytes / 2));
        fixture.enter(&prompt, &fixture.choose(&prompt))
    };
    let endless: Vec<InFlight> = (0..3).map(|number| hold(number, 16 << 20)).collect();
    assert!(has_room(), "8 million tokens are refused at once");
    drop(endless);
    let long: Vec<InFlight> = (0..9).map(|number| hold(number, 4 * 4000)).collect();
    assert!(!has_room(), "{} prompts of 4,000 tokens are computed", long.len());
}

#[tokio::test(start_paused = true)]
async fn a_request_goes_only_to_front_ends_with_its_route() {
    let fixture = Fixture::approximate(2).await;
    let ReplicaChange { state: Some(mut state), .. } = replica(0) else { panic!("it has a state") };
    let missing_routes = vec!["/v1/responses".to_owned()];
    state.launch = Some(EngineLaunch { dialect: Dialect::Rust, missing_routes, ..EngineLaunch::default() });
    report(&fixture.fleet, 1, false, vec![ReplicaChange { state: Some(state), ..ready(0) }]).await;
    let request = |path: &str| PlacementRequest { model: Some("m".into()), path: path.to_owned(), ..PlacementRequest::default() };
    let candidates = |path| fixture.choose(&Prompt::from_text(request(path), "")).decision.candidates;
    assert_eq!(candidates("/v1/chat/completions"), 2);
    assert_eq!((candidates("/v1/responses"), candidates("/v1/responses/resp_1/cancel")), (1, 1));
    assert_eq!(&*fixture.choose(&Prompt::from_text(request("/v1/responses"), "")).replica.id, "n/1");
    let view = fixture.fleet.view();
    assert!(view.may_lack_route(Some("m"), Route::Responses) && !view.may_lack_route(Some("other"), Route::Responses));
    assert!(!view.may_lack_route(Some("m"), Route::Messages));
}

/// A stream of at most so many tokens.
fn answer_of(most: u64) -> Prompt {
    let model = Some("m".to_owned());
    Prompt::from_text(
        PlacementRequest {
            model,
            output_bounds: OutputBounds { least: 0, most: Some(most) },
            is_stream: true,
            ..PlacementRequest::default()
        },
        "",
    )
}

#[tokio::test(start_paused = true)]
async fn a_long_answer_goes_to_a_node_that_stays() {
    let fixture = Fixture::approximate(1).await;
    let _lane = fixture.leave_in(10).await;
    let places = |prompt: &Prompt| (0..40).map(|_| fixture.choose(prompt).replica.id.to_string()).collect::<BTreeSet<_>>();
    let both = BTreeSet::from(["later/0".to_owned(), "n/0".to_owned()]);
    // Long answers so far suggest 1,024 tokens, which need 16 s.
    let stays = BTreeSet::from(["later/0".to_owned()]);
    assert_eq!((places(&stream("hi")), places(&answer_of(5000)), places(&answer_of(100))), (stays.clone(), stays.clone(), both));
    let scored = &fixture.choose(&answer_of(100)).decision.scored;
    assert!(scored[0].candidate.time_left.is_infinite() && (9.0..10.0).contains(&scored[1].candidate.time_left), "{scored:?}");
    tokio::time::sleep(Duration::from_secs(9)).await;
    for attachment in [1, 2] {
        report(&fixture.fleet, attachment, false, Vec::new()).await;
    }
    assert_eq!(places(&answer_of(100)), stays, "by now that is too long, too");
}

#[tokio::test(start_paused = true)]
async fn a_leaving_node_is_used_when_no_other_remains() {
    let fixture = Fixture::approximate(1).await;
    report_job(&fixture.fleet, 1, (3, 8)).await;
    let chosen = fixture.choose(&stream("hi"));
    assert!(&*chosen.replica.id == "n/0" && chosen.has_room() && chosen.ends_first());
    assert_eq!(chosen.decision.why, ChoiceReason::EndsFirst);
}

#[tokio::test(start_paused = true)]
async fn a_job_end_moved_forward_counts_from_then_on() {
    let fixture = Fixture::approximate(1).await;
    let _lane = fixture.leave_in(3600).await;
    assert!(fixture.choose(&stream("hi")).decision.scored.iter().all(|scored| !scored.ends_first()));
    report_job(&fixture.fleet, 1, (5, 10)).await;
    assert_eq!(&*fixture.choose(&stream("hi")).replica.id, "later/0");
}

#[tokio::test(start_paused = true)]
async fn a_standby_is_used_only_while_no_other_replica_will_do() {
    let fixture = Fixture::approximate(1).await;
    let standby = ReplicaChange { state: Some(ReplicaStatus { is_standby: true, ..state(Phase::Ready, "m") }), ..ready(1) };
    report(&fixture.fleet, 1, false, vec![standby]).await;
    let prompt = answer_of(64);
    let chosen = || fixture.choose(&prompt).replica.index;
    assert_eq!(chosen(), 0);
    assert_eq!(fixture.choose(&prompt).decision.candidates, 1, "its room is no room for new requests");
    let tried = [fixture.choose(&prompt).replica.id.clone()];
    assert_eq!(fixture.placer.choose(&prompt, &tried, Instant::now()).unwrap().replica.index, 1);
    let view = fixture.fleet.view();
    view.avoid(&view.replicas[0], Instant::now());
    assert_eq!(chosen(), 1, "it goes before a replica that has just lost a request");
    let failed = ReplicaChange { state: Some(state(Phase::Failed, "m")), ..ready(0) };
    report(&fixture.fleet, 1, false, vec![failed]).await;
    tokio::time::advance(Duration::from_secs(2)).await;
    assert_eq!(chosen(), 1);
    report(&fixture.fleet, 1, false, vec![ready(0)]).await;
    assert_eq!(chosen(), 0);
}

fn replica(index: u32) -> ReplicaChange {
    let base = state(Phase::Ready, "m");
    let state = ReplicaStatus { files: Some(FILES), exact_cache: Some(ChainGaps::None), block_tokens: BLOCK, token_budget: 8192, ..base };
    ReplicaChange { state: Some(state), ..ready(index) }
}

#[tokio::test(start_paused = true)]
async fn a_prompt_goes_where_the_most_of_it_is_cached() {
    let (fixture, slots) = Fixture::known(3).await;
    let prompt = exact(4000, FILES);
    let keys = prompt.token_keys(BLOCK);
    fixture.index.store(slots[0], &keys[..20]);
    fixture.index.store(slots[2], &keys[..200]);
    let chosen = fixture.choose(&prompt);
    assert_eq!((&*chosen.replica.id, chosen.level, chosen.uncached_tokens()), ("n/2", CacheLevel::Exact, 800));
    assert_eq!(fixture.matched(&prompt), [320, 0, 3200]);
}

#[tokio::test(start_paused = true)]
async fn a_prompt_goes_where_its_beginning_lies_on_the_host_and_what_the_gpu_has_is_not_loaded() {
    let (fixture, slots) = Fixture::known(3).await;
    let prompt = exact(4000, FILES);
    let keys = prompt.token_keys(BLOCK);
    fixture.index.store(slots[0], &keys[..100]);
    fixture.index.store(slots[2], &keys[..50]);
    let host = fixture.index.open();
    fixture.index.store(host, &keys[..200]);
    fixture.know(CacheTier::Host, (2, 1), host).await;
    let chosen = fixture.choose(&prompt);
    let candidate = chosen.decision.choice().candidate;
    assert_eq!((&*chosen.replica.id, candidate.matched, candidate.loaded), ("n/2", 3200, 2400));
    assert_eq!(fixture.matched(&prompt), [1600, 0, 3200]);
    // A tier that has less than the GPU adds nothing.
    fixture.index.remove(host, &keys[30..]);
    assert_eq!(fixture.matched(&prompt), [1600, 0, 800]);
}

#[tokio::test(start_paused = true)]
async fn all_replicas_of_a_node_find_its_files_and_the_one_that_reads_least_is_chosen() {
    let (fixture, slots) = Fixture::known(3).await;
    let prompt = exact(4000, FILES);
    let keys = prompt.token_keys(BLOCK);
    fixture.index.store(slots[1], &keys[..150]);
    let files = fixture.index.open();
    fixture.index.store(files, &keys[..200]);
    fixture.know(CacheTier::Files, (0, 0), files).await;
    let chosen = fixture.choose(&prompt);
    let candidate = chosen.decision.choice().candidate;
    assert_eq!((&*chosen.replica.id, candidate.matched, candidate.loaded, candidate.read), ("n/1", 3200, 800, 800));
    assert_eq!(fixture.matched(&prompt), [3200; 3]);
    let in_flight = fixture.placer.count_in_flight(&prompt, &chosen, Instant::now());
    assert_eq!((in_flight.load().loading_tokens(), in_flight.load().reading_tokens()), (800, 800));
    drop(in_flight);
    // A file that is missing ends what an engine finds, whatever follows it.
    fixture.index.remove(files, &keys[64..80]);
    assert_eq!(fixture.matched(&prompt), [1024, 2400, 1024]);
}

#[tokio::test(start_paused = true)]
async fn a_prompt_without_candidates_counts_as_no_arrival() {
    let (fixture, _) = Fixture::known(1).await;
    let prompt = exact(4000, FILES);
    assert!(fixture.placer.choose(&prompt, &["n/0".into()], Instant::now()).is_none());
    fixture.choose(&prompt);
    let again = exact(4000, FILES);
    fixture.choose(&again);
    let never = |_: &[_], _| panic!("a prompt arrives once");
    assert_eq!((prompt.arrivals(never).through_block(0), again.arrivals(never).through_block(0)), (0.0, 1.0), "both by their tokens");
}

#[tokio::test(start_paused = true)]
async fn an_engine_always_computes_a_prompts_last_token() {
    let (fixture, slots) = Fixture::known(2).await;
    for (tokens, matched) in [(64, 48), (65, 64), (80, 64), (16, 0)] {
        let prompt = exact(tokens, FILES);
        fixture.index.store(slots[0], &prompt.token_keys(BLOCK));
        assert_eq!(fixture.matched(&prompt)[0], matched, "of {tokens}");
    }
}

#[tokio::test(start_paused = true)]
async fn blocks_in_flight_count_until_reported_or_lost() {
    let (fixture, _) = Fixture::known(2).await;
    let prompt = exact(4000, FILES);
    let chosen = fixture.choose(&prompt);
    let at = chosen.decision.chosen;
    let mut in_flight = fixture.enter(&prompt, &chosen);
    let next = fixture.choose(&prompt);
    assert_eq!((next.decision.scored[at].candidate.matched, next.decision.scored[1 - at].candidate.matched), (3984, 0));
    assert_eq!(next.decision.scored[at].candidate.pending, 4000);
    // From now on the agent reports the blocks.
    in_flight.finish_prefill();
    assert_eq!(fixture.matched(&prompt), [0, 0]);
    drop(in_flight);
    drop(fixture.enter(&prompt, &chosen));
    assert_eq!(fixture.matched(&prompt), [0, 0], "it has left");
}

#[tokio::test(start_paused = true)]
async fn a_prompt_without_tokens_goes_where_its_text_was_sent() {
    let fixture = Fixture::approximate(2).await;
    let prompt = text(&"a".repeat(40_000));
    let chosen = fixture.choose(&prompt);
    assert_eq!((chosen.level, chosen.uncached_tokens()), (CacheLevel::Text, 10_000));
    drop(fixture.enter(&prompt, &chosen));
    let longer = text(&"a".repeat(44_000));
    let next = fixture.choose(&longer);
    assert_eq!((&next.replica.id, next.decision.choice().candidate.matched), (&chosen.replica.id, 156 * TEXT_BLOCK_TOKENS));
}

#[tokio::test(start_paused = true)]
async fn tokens_of_another_tokenizer_are_ignored() {
    let (fixture, slots) = Fixture::known(2).await;
    let prompt = exact(4000, [8; 32]);
    fixture.index.store(slots[0], &prompt.token_keys(BLOCK));
    let chosen = fixture.choose(&prompt);
    assert_eq!((chosen.level, fixture.matched(&prompt)), (CacheLevel::Load, vec![0, 0]), "this one has no text either");
}

#[tokio::test(start_paused = true)]
async fn an_unknown_cache_is_predicted_from_the_approximate_prefix() {
    let (fixture, _) = Fixture::known(2).await;
    fixture
        .fleet
        .update(FleetUpdate::CacheChanged { attachment: 1, tier: CacheTier::Gpu, index: 0, epoch: 1, cache: ReplicaCache::default() })
        .await;
    report(&fixture.fleet, 1, false, Vec::new()).await;
    let view = fixture.fleet.view();
    let prompt = text(&"a".repeat(4000));
    assert!(matches!(fixture.placer.cache_knowledge(&prompt, &view.replicas[0]), CacheKnowledge::Approximate(_)));
    let prompt = exact(4000, FILES);
    assert!(matches!(
        fixture.placer.cache_knowledge(&prompt, &view.replicas[1]),
        CacheKnowledge::Exact(KnownCache { block_tokens: BLOCK, .. })
    ));
}

#[tokio::test(start_paused = true)]
async fn an_empty_caches_block_size_comes_from_its_figures() {
    let (fixture, _) = Fixture::known(1).await;
    let prompt = exact(4000, FILES);
    let known = || fixture.placer.cache_knowledge(&prompt, &fixture.fleet.view().replicas[0]);
    let cold = ReplicaStatus { files: Some(FILES), exact_cache: Some(ChainGaps::None), ..state(Phase::Ready, "m") };
    report(&fixture.fleet, 1, false, vec![ReplicaChange { state: Some(cold), ..ready(0) }]).await;
    assert!(matches!(known(), CacheKnowledge::Unknown), "nobody has said");
    let load = ReplicaLoad { engine: EngineLoad { block_tokens: 32, ..EngineLoad::default() }, ..ReplicaLoad::default() };
    report(&fixture.fleet, 1, false, vec![ReplicaChange { state: None, load: Some(load), ..ready(0) }]).await;
    assert!(matches!(known(), CacheKnowledge::Exact(KnownCache { block_tokens: 32, .. })));
}

#[tokio::test(start_paused = true)]
async fn absurd_engine_figures_break_no_placement() {
    let fixture = Fixture::approximate(2).await;
    let engine = EngineLoad { running: u32::MAX, waiting: u32::MAX, kv_blocks: u64::MAX, block_tokens: u32::MAX, kv_use: f64::MAX };
    let load = ReplicaLoad {
        in_flight_elsewhere: u32::MAX,
        pending_tokens_elsewhere: u64::MAX,
        context_tokens_elsewhere: u64::MAX,
        engine,
        ..ReplicaLoad::default()
    };
    let loaded = |index| ReplicaChange { state: None, load: Some(load.clone()), ..ready(index) };
    report(&fixture.fleet, 1, false, vec![loaded(0), loaded(1)]).await;
    let prompt = text("hi");
    let chosen = fixture.choose(&prompt);
    let _in_flight = fixture.enter(&prompt, &chosen);
    fixture.choose(&prompt);
}

#[tokio::test(start_paused = true)]
async fn a_replica_already_tried_is_no_candidate() {
    let fixture = Fixture::approximate(2).await;
    let prompt = text("Hello, engine, how are you?");
    let mut tried = Vec::new();
    for _ in 0..2 {
        tried.push(fixture.placer.choose(&prompt, &tried, Instant::now()).unwrap().replica.id.clone());
    }
    assert_ne!(tried[0], tried[1]);
    assert!(fixture.placer.choose(&prompt, &tried, Instant::now()).is_none());
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_lost_a_request_is_used_last() {
    let fixture = Fixture::approximate(2).await;
    let view = fixture.fleet.view();
    let prompt = text("Hello, engine, how are you?");
    view.avoid(&view.replicas[0], Instant::now());
    for _ in 0..20 {
        assert_eq!(&*fixture.choose(&prompt).replica.id, "n/1");
    }
    let tried = [view.replicas[1].id.clone()];
    assert_eq!(&*fixture.placer.choose(&prompt, &tried, Instant::now()).unwrap().replica.id, "n/0");
}

#[tokio::test(start_paused = true)]
async fn the_load_of_all_routers_counts_towards_a_replica() {
    let fixture = Fixture::approximate(2).await;
    let prompt = text(&"a".repeat(4000));
    let chosen = fixture.placer.choose(&prompt, &[fixture.fleet.view().replicas[1].id.clone()], Instant::now()).unwrap();
    let _in_flight: Vec<InFlight> = (0..5).map(|_| fixture.enter(&prompt, &chosen)).collect();
    let load =
        ReplicaLoad { in_flight_elsewhere: 3, pending_tokens_elsewhere: 7000, context_tokens_elsewhere: 700, ..ReplicaLoad::default() };
    report(&fixture.fleet, 1, false, vec![ReplicaChange { state: None, load: Some(load), ..ready(0) }]).await;
    let candidate = fixture.choose(&prompt).decision.scored[0].candidate;
    // The counts are this router's own five, and the others' by the agent's count.
    assert_eq!((candidate.in_flight, candidate.pending, candidate.context), (8, 5 * 1000 + 7000, 5 * 1000 + 700));
    let engine = EngineLoad { running: 9, waiting: 3, ..EngineLoad::default() };
    let load = ReplicaLoad { in_flight_elsewhere: 3, engine, ..ReplicaLoad::default() };
    report(&fixture.fleet, 1, false, vec![ReplicaChange { state: None, load: Some(load), ..ready(0) }]).await;
    assert_eq!(fixture.choose(&prompt).decision.scored[0].candidate.in_flight, 12);
}

#[tokio::test(start_paused = true)]
async fn an_overdue_answer_turns_others_away() {
    let fixture = Fixture::approximate(2).await;
    let prompt = stream("Hello, engine, how are you?");
    let chosen = fixture.choose(&prompt);
    let _waits = fixture.enter(&prompt, &chosen);
    tokio::time::sleep(std::time::Duration::from_secs(60)).await;
    let next = fixture.choose(&prompt);
    assert_ne!(next.replica.id, chosen.replica.id);
    assert!(next.decision.scored[chosen.decision.chosen].terms.queue > 10.0, "{:?}", next.decision);
}

#[tokio::test(start_paused = true)]
async fn a_slow_plain_answer_is_not_overdue() {
    let fixture = Fixture::approximate(2).await;
    let prompt = text("Hello, engine, write me a novel.");
    let chosen = fixture.choose(&prompt);
    let _writes = fixture.enter(&prompt, &chosen);
    tokio::time::sleep(std::time::Duration::from_secs(60)).await;
    assert_eq!(fixture.choose(&prompt).decision.scored[chosen.decision.chosen].candidate.overdue, 0.0);
}
