use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use hostler_proto::agent::v1 as wire;
use prometheus_client::metrics::counter::Counter;
use tokio::time::{Instant, advance, sleep};

use super::agent_report::AgentReport;
use super::fleet_writer::LOAD_PUBLISH_INTERVAL;
pub(crate) use super::fleet_writer::ReplicaChange;
use super::job::Scheduler;
use super::*;
use crate::background::BackgroundTasks;
use crate::event_log::EventLog;
use crate::lanes::{Lane, Lanes};

pub(crate) const LEASE: Duration = Duration::from_secs(3);

pub(crate) fn state(phase: Phase, model: &str) -> ReplicaStatus {
    ReplicaStatus { phase, models: vec![Model::new(model.into(), "{}".into())], ..ReplicaStatus::default() }
}

pub(crate) fn ready(index: u32) -> ReplicaChange {
    ReplicaChange { index, epoch: 1, state: Some(state(Phase::Ready, "m")), load: None, report: AgentReport::default() }
}

/// Attaches node `n` as a session would, with one lane.
pub(crate) async fn attach(fleet: &Fleet, attachment: u64, replicas: Vec<ReplicaChange>) -> Arc<Lane> {
    attach_told(fleet, attachment, Directives::unconnected(), replicas).await
}

/// Attaches another node as a session would, with one lane.
pub(crate) async fn attach_node(fleet: &Fleet, attachment: u64, node: &str, replicas: Vec<ReplicaChange>) -> Arc<Lane> {
    attach_with(fleet, attachment, node, Directives::unconnected(), replicas).await
}

/// Reports that the agent runs in the job `12.head`, with the seconds until it leaves and until the
/// job ends.
pub(crate) async fn report_job(fleet: &Fleet, attachment: u64, (leaves, ends): (u64, u64)) {
    let moment = |seconds| Some(Instant::now() + Duration::from_secs(seconds));
    let (ends_at, leaves_at) = (moment(ends), moment(leaves));
    let job = Job { scheduler: super::job::Scheduler::Pbs, id: "12.head".into(), array_index: None, run: 1, ends_at, leaves_at };
    fleet.update(FleetUpdate::JobReported { attachment, job }).await;
    sleep(LOAD_PUBLISH_INTERVAL).await;
}

/// Attaches node `n`, with directives that the agent receives.
pub(crate) async fn attach_told(fleet: &Fleet, attachment: u64, directives: Directives, replicas: Vec<ReplicaChange>) -> Arc<Lane> {
    attach_with(fleet, attachment, "n", directives, replicas).await
}

async fn attach_with(fleet: &Fleet, attachment: u64, node: &str, directives: Directives, replicas: Vec<ReplicaChange>) -> Arc<Lane> {
    let lanes = Arc::new(Lanes::default());
    let lane = Lane::new(Counter::default());
    lanes.add(&lane);
    let attached =
        FleetUpdate::Attached { attachment, node: node.into(), agent_version: "1".into(), agent_run: attachment, lanes, directives };
    fleet.update(attached).await;
    report(fleet, attachment, true, replicas).await;
    lane
}

pub(crate) async fn report(fleet: &Fleet, attachment: u64, snapshot: bool, replicas: Vec<ReplicaChange>) {
    fleet.update(FleetUpdate::Reported { attachment, snapshot, replicas }).await;
    // The clock is paused: this lets the writer publish and takes no time.
    sleep(LOAD_PUBLISH_INTERVAL).await;
}

/// Announces these models, each expected in so many seconds.
pub(crate) async fn announce(fleet: &Fleet, models: &[(&str, Option<u64>)]) {
    let mut expectations = Expectations::default();
    for (name, seconds) in models {
        let expected_at = seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
        assert!(expectations.insert(Expectation::new(name, expected_at, "2 jobs wait: ngpus".into())));
    }
    fleet.expect(expectations).await;
    sleep(LOAD_PUBLISH_INTERVAL).await;
}

fn candidates(fleet: &Fleet, model: Option<&str>) -> Vec<usize> {
    fleet.view().eligible(model, &[]).map(|(index, _)| index).collect()
}

pub(crate) fn fleet() -> Fleet {
    Fleet::start(LEASE, EventLog::default(), &BackgroundTasks::default())
}

/// A ready replica of the model at this path, with the path's last part as its alias.
fn of_path(path: &str) -> ReplicaChange {
    let alias = Model { alias_of: Some(path.to_owned()), ..Model::new(path.rsplit('/').next().unwrap().to_owned(), "{}".into()) };
    let models = vec![Model::new(path.to_owned(), "{}".into()), alias];
    ReplicaChange { state: Some(ReplicaStatus { models, ..state(Phase::Ready, "") }), ..ready(0) }
}

#[tokio::test(start_paused = true)]
async fn an_alias_counts_while_no_other_model_has_it() {
    let fleet = fleet();
    let names = || fleet.view().models().iter().map(|model| model.id.clone()).collect::<Vec<_>>();
    attach_node(&fleet, 1, "a", vec![of_path("/a/tiny")]).await;
    attach_node(&fleet, 2, "b", vec![of_path("/a/tiny")]).await;
    assert_eq!((names(), candidates(&fleet, Some("tiny"))), (vec!["/a/tiny".into(), "tiny".into()], vec![0, 1]));
    attach_node(&fleet, 3, "c", vec![of_path("/c/tiny")]).await;
    assert_eq!((names(), candidates(&fleet, Some("tiny"))), (vec!["/a/tiny".into(), "/c/tiny".into()], vec![]));
    report(&fleet, 3, true, vec![ready(0)]).await;
    assert_eq!(candidates(&fleet, Some("tiny")), [0, 1], "the other model is gone");
    announce(&fleet, &[("tiny", Some(20))]).await;
    assert_eq!(candidates(&fleet, Some("tiny")), [0; 0], "a controller can bring a model of that name");
    assert!(fleet.view().expectation(Some("tiny")).is_some());
}

#[tokio::test(start_paused = true)]
async fn an_expected_alias_waits_for_its_own_path_alone() {
    let fleet = fleet();
    let expect = async |paths: &[&str]| {
        let mut expectations = Expectations::default();
        for path in paths {
            assert!(expectations.insert(Expectation::new(path, None, "queued".into())));
            expectations.insert_alias(Expectation::new("tiny", None, "queued".into()), path);
        }
        fleet.expect(expectations).await;
        sleep(LOAD_PUBLISH_INTERVAL).await;
        fleet.view().expectation(Some("tiny")).is_some()
    };
    assert!(expect(&["/a/tiny"]).await);
    attach(&fleet, 1, vec![of_path("/a/tiny")]).await;
    assert_eq!(candidates(&fleet, Some("tiny")), [0]);
    assert!(!expect(&["/a/tiny", "/b/tiny"]).await);
    assert_eq!((candidates(&fleet, Some("tiny")), candidates(&fleet, Some("/a/tiny"))), (vec![], vec![0]));
}

#[tokio::test(start_paused = true)]
async fn only_ready_untried_replicas_of_the_model_are_candidates() {
    let fleet = fleet();
    let draining = ReplicaChange { state: Some(state(Phase::Draining, "m")), ..ready(1) };
    let other = ReplicaChange { state: Some(state(Phase::Ready, "other")), ..ready(2) };
    attach(&fleet, 1, vec![ready(0), draining, other, ready(3)]).await;
    assert_eq!(candidates(&fleet, Some("m")), [0, 3]);
    assert_eq!(candidates(&fleet, None), [0, 2, 3]);
    let view = fleet.view();
    let tried = [view.replicas[0].id.clone()];
    assert_eq!(view.eligible(Some("m"), &tried).count(), 1);
    assert_eq!(view.models().iter().map(|model| &*model.id).collect::<Vec<_>>(), ["m", "other"]);
}

#[tokio::test(start_paused = true)]
async fn successive_load_reports_share_a_view_unlike_phases() {
    let fleet = fleet();
    attach(&fleet, 1, vec![ready(0)]).await;
    let loaded = |in_flight_elsewhere| ReplicaChange {
        state: None,
        load: Some(ReplicaLoad { in_flight_elsewhere, ..ReplicaLoad::default() }),
        ..ready(0)
    };
    let update = async |change| fleet.update(FleetUpdate::Reported { attachment: 1, snapshot: false, replicas: vec![change] }).await;
    let seen = async || {
        sleep(Duration::from_millis(1)).await;
        let view = fleet.view();
        (view.replicas[0].load.in_flight_elsewhere, view.replicas[0].state.phase)
    };
    update(loaded(1)).await;
    assert_eq!(seen().await.0, 1, "the first after a pause is published at once");
    update(loaded(2)).await;
    assert_eq!(seen().await.0, 1);
    update(loaded(3)).await;
    sleep(LOAD_PUBLISH_INTERVAL).await;
    assert_eq!(seen().await.0, 3);
    update(loaded(4)).await;
    update(ReplicaChange { state: Some(state(Phase::Draining, "m")), ..ready(0) }).await;
    assert_eq!(seen().await, (4, Phase::Draining));
}

#[tokio::test(start_paused = true)]
async fn a_silent_agents_replicas_are_suspect_until_it_reports() {
    let fleet = fleet();
    attach(&fleet, 1, vec![ready(0)]).await;
    sleep(LEASE - Duration::from_millis(300)).await;
    assert!(!fleet.view().replicas[0].lease_lapsed);
    sleep(Duration::from_millis(700)).await;
    assert!(fleet.view().replicas[0].lease_lapsed);
    let view = fleet.view();
    assert!(view.is_last_resort(&view.replicas[0], Instant::now()) && candidates(&fleet, None) == [0], "suspect means last, not dead");
    report(&fleet, 1, false, vec![]).await;
    assert!(!fleet.view().replicas[0].lease_lapsed);
}

#[tokio::test(start_paused = true)]
async fn leases_do_not_lapse_while_the_router_is_suspended() {
    let fleet = fleet();
    attach(&fleet, 1, vec![ready(0)]).await;
    let load = fleet.view().replicas[0].local_load.clone();
    let mut change = pin!(load.stream_moves.change());
    change.as_mut().enable();
    advance(LEASE + Duration::from_secs(1)).await;
    // The report waits when the writer wakes.
    fleet.update(FleetUpdate::Reported { attachment: 1, snapshot: false, replicas: vec![] }).await;
    sleep(Duration::from_millis(300)).await;
    assert!(!fleet.view().replicas[0].lease_lapsed);
    assert!(change.now_or_never().is_none(), "its streams had no reason to move");
}

#[tokio::test(start_paused = true)]
async fn the_newest_view_decides_whether_a_replica_is_silent() {
    let fleet = fleet();
    // Ten replicas and more are ordered as numbers.
    attach(&fleet, 1, (0..12).map(ready).collect()).await;
    let before = fleet.view().replicas.clone();
    let silent = || before.iter().filter(|replica| fleet.view().has_lapsed_lease(replica)).count();
    assert_eq!(silent(), 0);
    sleep(LEASE + Duration::from_millis(300)).await;
    assert_eq!((silent(), before[3].lease_lapsed), (12, false));
    report(&fleet, 1, false, vec![]).await;
    assert_eq!(silent(), 0);
    report(&fleet, 1, true, (1..12).map(ready).collect()).await;
    assert_eq!(silent(), 1, "one that is gone");
}

#[tokio::test(start_paused = true)]
async fn a_lost_agents_lanes_break_and_its_node_is_forgotten() {
    let fleet = fleet();
    let lane = attach(&fleet, 1, vec![ready(0)]).await;
    fleet.update(FleetUpdate::Detached { attachment: 1 }).await;
    sleep(Duration::from_millis(1)).await;
    assert!(lane.is_lost() && candidates(&fleet, None).is_empty());
    assert_eq!((fleet.view().nodes.len(), fleet.view().nodes[0].is_attached), (1, false));
    sleep(Duration::from_secs(61)).await;
    assert!(fleet.view().nodes.is_empty() && fleet.view().replicas.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_node_whose_engines_were_stopped_is_forgotten_when_its_agent_goes() {
    let fleet = fleet();
    let stopped = |index| ReplicaChange { state: Some(state(Phase::Stopped, "m")), ..ready(index) };
    let lane = attach(&fleet, 1, vec![stopped(0), stopped(1)]).await;
    assert_eq!(fleet.view().nodes.len(), 1, "its agent is there");
    detach(&fleet, 1).await;
    assert!(lane.is_lost() && fleet.view().nodes.is_empty() && fleet.view().replicas.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_new_attachment_replaces_the_old_and_its_reports() {
    let fleet = fleet();
    let old = attach(&fleet, 1, vec![ready(0), ready(1)]).await;
    let _new = attach(&fleet, 2, vec![ready(0)]).await;
    assert!(old.is_lost());
    assert_eq!(fleet.view().replicas.len(), 1, "a snapshot is all there is");
    report(&fleet, 1, true, vec![]).await;
    fleet.update(FleetUpdate::Detached { attachment: 1 }).await;
    sleep(Duration::from_millis(1)).await;
    assert_eq!(candidates(&fleet, None), [0]);
}

#[tokio::test(start_paused = true)]
async fn a_node_name_is_taken_only_for_other_agents() {
    let fleet = fleet();
    attach(&fleet, 1, vec![ready(0)]).await;
    let is_taken = |name: &str, life| fleet.view().other_holder(name, life, None).is_some();
    assert!(is_taken("n", 2) && !is_taken("n", 1) && !is_taken("other", 2));
    sleep(LEASE + Duration::from_millis(300)).await;
    assert!(!is_taken("n", 2), "a silent agent may be replaced");
}

#[tokio::test(start_paused = true)]
async fn our_in_flight_count_survives_a_reattachment() {
    let fleet = fleet();
    attach(&fleet, 1, vec![ready(0)]).await;
    let in_flight = fleet.view().replicas[0].local_load.start_request(InFlightCost::default(), None);
    attach(&fleet, 2, vec![ReplicaChange { epoch: 2, ..ready(0) }]).await;
    assert_eq!((fleet.view().replicas[0].local_load.in_flight(), fleet.view().replicas[0].epoch), (1, 2));
    drop(in_flight);
    assert_eq!(fleet.view().replicas[0].local_load.in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_startup_grace_lasts_two_seconds() {
    let fleet = fleet();
    assert!(fleet.view().is_in_startup_grace(Instant::now()));
    attach(&fleet, 1, vec![ready(0)]).await;
    assert!(fleet.view().is_in_startup_grace(Instant::now()), "another agent may still be on its way");
    assert!(!fleet.view().is_in_startup_grace(Instant::now() + Duration::from_secs(2)));
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_lost_a_request_is_doubtful_briefly() {
    let fleet = fleet();
    attach(&fleet, 1, vec![ready(0)]).await;
    let view = fleet.view();
    view.avoid(&view.replicas[0], Instant::now());
    assert!(view.is_last_resort(&view.replicas[0], Instant::now()));
    assert!(!view.is_last_resort(&view.replicas[0], Instant::now() + Duration::from_millis(1001)));
}

#[tokio::test(start_paused = true)]
async fn cache_knowledge_counts_for_one_engine_life() {
    let fleet = fleet();
    attach(&fleet, 1, vec![ready(0)]).await;
    let slot = hostler_placement::affinity::CacheIndex::new().open();
    let known = |epoch| FleetUpdate::CacheChanged {
        attachment: 1,
        tier: CacheTier::Gpu,
        index: 0,
        epoch,
        cache: ReplicaCache { slot: Some(slot), ..ReplicaCache::default() },
    };
    let is_known = || fleet.view().replicas[0].cache.slot.is_some();
    fleet.update(known(2)).await;
    report(&fleet, 1, false, vec![]).await;
    assert!(!is_known(), "of a life that was not heard of");
    fleet.update(known(1)).await;
    report(&fleet, 1, false, vec![]).await;
    assert!(is_known());
    report(&fleet, 1, false, vec![ReplicaChange { epoch: 2, ..ready(0) }]).await;
    assert!(!is_known(), "the engine has been started again");
}

#[test]
fn an_adapter_is_known_by_its_parent() {
    assert!(!Model::new("m".into(), r#"{"id":"m","parent":null}"#.into()).is_adapter);
    assert!(Model::new("lora".into(), r#"{"id":"lora","parent":"m"}"#.into()).is_adapter);
}

#[tokio::test(start_paused = true)]
async fn gpu_readings_stay_until_new_ones_arrive() {
    let fleet = fleet();
    let reading = |watts| wire::GpuReading { watts: Some(watts), ..wire::GpuReading::default() };
    let reports = |watts| AgentReport { gpus: Some([reading(watts)].into()), ..AgentReport::default() };
    let shown = || fleet.view().replicas[0].report.gpus.as_deref().unwrap().to_vec();
    attach(&fleet, 1, vec![ReplicaChange { report: reports(70.0), ..ready(0) }]).await;
    report(&fleet, 1, false, vec![ReplicaChange { state: None, ..ready(0) }]).await;
    assert_eq!(shown(), [reading(70.0)]);
    report(&fleet, 1, false, vec![ReplicaChange { state: None, report: reports(400.0), ..ready(0) }]).await;
    assert_eq!(shown(), [reading(400.0)]);
}

#[tokio::test(start_paused = true)]
async fn a_delta_changes_only_what_it_names() {
    let fleet = fleet();
    attach(&fleet, 1, vec![ready(0), ready(1)]).await;
    let load = ReplicaLoad { in_flight_elsewhere: 3, ..ReplicaLoad::default() };
    report(&fleet, 1, false, vec![ReplicaChange { state: None, load: Some(load), ..ready(1) }]).await;
    let view = fleet.view();
    assert_eq!((view.replicas[0].load.in_flight_elsewhere, view.replicas[1].load.in_flight_elsewhere), (0, 3));
    assert!(view.replicas.iter().all(|replica| replica.is_ready()));
    assert_eq!(view.replicas_of_target("n").len(), 2);
    assert_eq!(view.replicas_of_target("n/1").len(), 1);
    assert!(view.replicas_of_target("x").is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_view_shares_the_replicas_of_unchanged_nodes() {
    let fleet = fleet();
    attach(&fleet, 1, vec![ready(0)]).await;
    let lanes = Arc::new(Lanes::default());
    let directives = Directives::unconnected();
    fleet
        .update(FleetUpdate::Attached { attachment: 2, node: "o".into(), agent_version: "1".into(), agent_run: 2, lanes, directives })
        .await;
    report(&fleet, 2, true, vec![ready(0)]).await;
    let before = fleet.view().clone();
    let load = ReplicaLoad { in_flight_elsewhere: 3, ..ReplicaLoad::default() };
    report(&fleet, 2, false, vec![ReplicaChange { state: None, load: Some(load), ..ready(0) }]).await;
    let now = fleet.view();
    assert!(Arc::ptr_eq(&before.replicas[0], &now.replicas[0]));
    assert_eq!((before.replicas[1].load.in_flight_elsewhere, now.replicas[1].load.in_flight_elsewhere), (0, 3));
}

/// Keeps the lines that are logged: their messages, and what they count.
#[derive(Clone, Default)]
struct Lines(Arc<parking_lot::Mutex<Vec<String>>>);

impl tracing::Subscriber for Lines {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        struct LineWords(String);
        impl tracing::field::Visit for LineWords {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                if ["message", "count"].contains(&field.name()) {
                    self.0.push_str(&format!("{value:?} "));
                }
            }
        }
        let mut words = LineWords(String::new());
        event.record(&mut words);
        self.0.lock().push(words.0);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

impl Lines {
    fn count(&self, words: &str) -> usize {
        self.0.lock().iter().filter(|line| line.contains(words)).count()
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_gets_a_bounded_share_of_the_log() {
    let lines = Lines::default();
    let _logged = tracing::subscriber::set_default(lines.clone());
    let fleet = fleet();
    attach(&fleet, 1, vec![ready(0)]).await;
    for turn in 0..2000 {
        let phase = if turn % 2 == 0 { Phase::Draining } else { Phase::Ready };
        let change = ReplicaChange { state: Some(state(phase, "m")), ..ready(0) };
        fleet.update(FleetUpdate::Reported { attachment: 1, snapshot: false, replicas: vec![change] }).await;
    }
    // The name's next agent has what is left of the minute.
    attach(&fleet, 2, (0..100).map(ready).collect()).await;
    assert_eq!((lines.count("phase"), lines.count("left out")), (240, 0));

    // The silent replicas have a line each.
    sleep(Duration::from_secs(60)).await;
    assert_eq!((lines.count("phase"), lines.count("left out")), (240, 1));
    assert!(lines.0.lock().iter().any(|line| line.contains("left out") && line.contains("1960")), "{:?}", lines.0.lock().last());
    for _ in 0..5 {
        report(&fleet, 2, false, vec![]).await;
        sleep(LEASE + Duration::from_millis(300)).await;
    }
    assert_eq!(lines.count("suspect"), 240);

    sleep(Duration::from_secs(60)).await;
    report(&fleet, 2, false, vec![ReplicaChange { state: Some(state(Phase::Draining, "m")), ..ready(0) }]).await;
    assert_eq!(lines.count("phase"), 241, "the next minute has its own");
}

fn job(run: u32) -> Job {
    let ends_at = Some(Instant::now() + Duration::from_secs(60));
    Job { scheduler: Scheduler::Pbs, id: "12.head".into(), array_index: None, run, ends_at, leaves_at: ends_at }
}

/// Attaches node `n` in this run of a job.
async fn attach_in_job(fleet: &Fleet, attachment: u64, run: u32, replicas: Vec<ReplicaChange>) {
    attach(fleet, attachment, vec![]).await;
    fleet.update(FleetUpdate::JobReported { attachment, job: job(run) }).await;
    report(fleet, attachment, true, replicas).await;
}

pub(crate) async fn detach(fleet: &Fleet, attachment: u64) {
    fleet.update(FleetUpdate::Detached { attachment }).await;
    sleep(Duration::from_millis(1)).await;
}

/// Node, run and reason of each gone job.
fn gone(fleet: &Fleet) -> Vec<String> {
    fleet.view().gone_jobs.iter().map(|gone| format!("{} {}: {}", gone.node, gone.job, gone.reason)).collect()
}

#[tokio::test(start_paused = true)]
async fn a_nodes_replicas_share_its_job_until_it_has_none() {
    let fleet = fleet();
    attach_in_job(&fleet, 1, 1, vec![ready(0)]).await;
    report(&fleet, 1, false, vec![ready(1)]).await;
    let jobs = || fleet.view().replicas.iter().map(|replica| replica.job.clone()).collect::<Vec<_>>();
    let [Some(first), Some(second)] = &jobs()[..] else { panic!("{:?}", jobs()) };
    assert!(Arc::ptr_eq(first, second) && first.leaves_at.is_some());
    fleet.update(FleetUpdate::JobReported { attachment: 1, job: Job { leaves_at: None, ..job(1) } }).await;
    sleep(Duration::from_millis(1)).await;
    assert!(jobs().iter().all(|job| job.as_ref().is_some_and(|job| job.leaves_at.is_none())));
    attach(&fleet, 2, vec![ready(0), ready(1)]).await;
    assert_eq!(jobs(), [None, None]);
}

#[tokio::test(start_paused = true)]
async fn a_jobs_later_run_takes_its_node_name_at_once() {
    let fleet = fleet();
    attach_in_job(&fleet, 1, 2, vec![ready(0)]).await;
    let holder = |job: Option<Job>| fleet.view().other_holder("n", 7, job.as_ref()).map(Node::name_refusal);
    assert_eq!(holder(Some(job(3))), None);
    let another = Job { id: "13.head".into(), ..job(9) };
    for claimant in [Some(job(2)), Some(job(1)), Some(another), None] {
        let refusal = holder(claimant).unwrap();
        assert!(
            refusal.starts_with("another agent is attached as node `n`, in job 12.head run 2: ") && refusal.contains("--node"),
            "{refusal}"
        );
    }
    attach_in_job(&fleet, 2, 3, vec![ready(0)]).await;
    assert_eq!(gone(&fleet), ["n job 12.head run 2: agent lost"]);
}

#[tokio::test(start_paused = true)]
async fn a_gone_job_is_remembered_for_half_an_hour() {
    let fleet = fleet();
    attach_in_job(&fleet, 1, 1, vec![ready(0)]).await;
    detach(&fleet, 1).await;
    assert_eq!(gone(&fleet), ["n job 12.head: agent lost"]);

    let stopped = || ReplicaChange { state: Some(state(Phase::Stopped, "m")), ..ready(0) };
    attach_in_job(&fleet, 2, 2, vec![stopped()]).await;
    detach(&fleet, 2).await;
    let failure = wire::Failure { cause: "CUDA out\nof memory".into(), ..wire::Failure::default() };
    let failed =
        AgentReport { state: Some(Arc::new(wire::ReplicaState { failure: Some(failure), ..Default::default() })), ..Default::default() };
    attach_in_job(&fleet, 3, 3, vec![ReplicaChange { report: failed, ..stopped() }]).await;
    detach(&fleet, 3).await;
    attach_in_job(&fleet, 4, 4, vec![ready(0)]).await;
    sleep(Duration::from_secs(61)).await;
    detach(&fleet, 4).await;
    let all = [
        "n job 12.head: agent lost",
        "n job 12.head run 2: drained",
        "n job 12.head run 3: drained; n/0: CUDA out of memory",
        "n job 12.head run 4: agent lost after the job's end",
    ];
    assert_eq!(gone(&fleet), all);
    sleep(Duration::from_secs(30 * 60 - 30)).await;
    assert_eq!(gone(&fleet), all[3..]);
    sleep(Duration::from_secs(31)).await;
    assert_eq!(gone(&fleet), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_job_whose_agent_returns_is_not_gone() {
    let fleet = fleet();
    let lost = async |attachment| {
        let lanes = Arc::new(Lanes::default());
        let directives = Directives::unconnected();
        let (node, agent_version) = ("n".into(), "1".into());
        fleet.update(FleetUpdate::Attached { attachment, node, agent_version, agent_run: 7, lanes, directives }).await;
        fleet.update(FleetUpdate::JobReported { attachment, job: job(1) }).await;
        report(&fleet, attachment, true, vec![ready(0)]).await;
    };
    lost(1).await;
    detach(&fleet, 1).await;
    assert_eq!(gone(&fleet).len(), 1);
    lost(2).await;
    assert_eq!(gone(&fleet).len(), 0, "it was the connection");
    attach(&fleet, 3, vec![ready(0)]).await;
    let after = gone(&fleet);
    detach(&fleet, 3).await;
    assert_eq!((after.len(), gone(&fleet)), (1, after), "of the agent that was pushed out");
}

#[tokio::test(start_paused = true)]
async fn only_the_latest_gone_jobs_are_remembered() {
    let fleet = fleet();
    for attachment in 1..=300 {
        attach_in_job(&fleet, attachment, u32::try_from(attachment).unwrap(), vec![ready(0)]).await;
        detach(&fleet, attachment).await;
    }
    let gone = gone(&fleet);
    assert_eq!((gone.len(), gone[255].as_str()), (256, "n job 12.head run 300: agent lost"));
}

#[tokio::test(start_paused = true)]
async fn a_node_is_lost_unless_it_left_or_returns() {
    let fleet = fleet();
    let stopped = ReplicaChange { state: Some(state(Phase::Stopped, "m")), ..ready(0) };
    attach_node(&fleet, 1, "left", vec![stopped]).await;
    attach_node(&fleet, 2, "back", vec![ready(0)]).await;
    attach_node(&fleet, 3, "lost", vec![ready(0)]).await;
    for attachment in 1..=3 {
        detach(&fleet, attachment).await;
    }
    attach_node(&fleet, 4, "back", vec![ready(0)]).await;
    sleep(Duration::from_secs(58)).await;
    assert_eq!((fleet.view().nodes_lost, fleet.view().nodes.len()), (0, 2), "the first has left for good");
    sleep(Duration::from_secs(4)).await;
    assert_eq!((fleet.view().nodes_lost, fleet.view().nodes.len()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn what_happens_to_nodes_and_replicas_is_remembered() {
    let fleet = fleet();
    let words = |after| fleet.events().after(after, 100).into_iter().map(|event| event.words).collect::<Vec<_>>();
    let loading = ReplicaChange { state: Some(state(Phase::Loading, "m")), ..ready(1) };
    attach(&fleet, 1, vec![ready(0), loading]).await;
    report_job(&fleet, 1, (60, 90)).await;
    assert_eq!(words(0), ["node n has come: 1 of its 2 replicas ready", "node n is in job 12.head"]);
    let failure = Some(wire::Failure { cause: "CUDA out of memory\nmore".into(), ..wire::Failure::default() });
    let told =
        AgentReport { state: Some(Arc::new(wire::ReplicaState { failure, ..wire::ReplicaState::default() })), ..AgentReport::default() };
    let failed = ReplicaChange { state: Some(state(Phase::Failed, "m")), report: told, ..ready(0) };
    report(&fleet, 1, false, vec![failed]).await;
    report(&fleet, 1, false, vec![ReplicaChange { epoch: 2, ..ready(0) }]).await;
    report(&fleet, 1, false, vec![ReplicaChange { epoch: 3, ..ready(0) }]).await;
    assert_eq!(words(2), ["n/0 ready → failed: CUDA out of memory", "n/0 failed → ready", "n/0 has another engine, ready"]);
    assert_eq!(fleet.events().after(2, 100).iter().map(|event| event.grave).collect::<Vec<_>>(), [true, false, false]);
    sleep(LEASE * 2).await;
    report(&fleet, 1, true, vec![ready(0)]).await;
    assert_eq!(
        words(5),
        ["node n is silent: no report within the lease", "node n reports again", "n/1 is gone", "n/0 has another engine, ready"]
    );
    fleet.update(FleetUpdate::Detached { attachment: 1 }).await;
    sleep(Duration::from_secs(62)).await;
    let gone = [
        "node n: its agent is not connected",
        "node n: job 12.head is gone: agent lost; n/0: CUDA out of memory more",
        "node n is gone: its agent has not come back",
    ];
    assert_eq!(words(9), gone);
}
