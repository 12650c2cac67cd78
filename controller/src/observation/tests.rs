use std::time::{Duration, SystemTime};

use hostler_proto::agent::v1 as agent;
use hostler_proto::fleet::v1::ModelDemand;
use hostler_scheduler::JobState;

use super::*;

pub(crate) fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

pub(crate) fn entry(size: hostler_cluster::FleetSize) -> FleetEntry {
    FleetEntry {
        name: "qwen".into(),
        model: "Qwen/Qwen3-8B".into(),
        size,
        walltime: Duration::from_secs(7200),
        engine_args: Vec::new(),
        nodes_per_replica: 1,
        queue: String::new(),
        account: String::new(),
        resources: String::new(),
        budget: hostler_cluster::Budget::default(),
        asked: 0,
    }
}

/// A job submitted at second 100, and started at 400 unless it waits.
pub(crate) fn job(id: &str, state: JobState) -> ScheduledJob {
    let has_started = state.has_started();
    ScheduledJob {
        id: id.into(),
        state,
        comment: String::new(),
        submitted: Some(at(100)),
        started: has_started.then(|| at(400)),
        run_time: None,
        estimated_start: None,
        host: String::new(),
    }
}

/// A job's node with a replica for each phase and number of restarts.
pub(crate) fn node(job: &str, replicas: &[(Phase, u32)]) -> Node {
    let replica = |(phase, restarts): &(Phase, u32)| {
        let state = agent::ReplicaState { phase: (*phase).into(), restarts: *restarts, ..agent::ReplicaState::default() };
        Replica { state: Some(state), ..Replica::default() }
    };
    let job = agent::Job { scheduler: "pbs".into(), id: job.into(), run: 1, ..agent::Job::default() };
    Node { name: "x1".into(), attached: true, replicas: replicas.iter().map(replica).collect(), job: Some(job), ..Node::default() }
}

#[test]
fn a_nodes_state_follows_from_its_replicas() {
    use Phase::{Draining, Failed, Loading, Quarantined, Ready, Sleeping, Starting, Stopped};
    for (replicas, expected) in [
        (&[][..], NodeState::Loading),
        (&[(Ready, 0), (Loading, 0)], NodeState::Loading),
        (&[(Ready, 0), (Ready, 0)], NodeState::Ready),
        (&[(Ready, 0), (Starting, 1)], NodeState::Ready),
        (&[(Ready, 0), (Failed, 0)], NodeState::Ready),
        (&[(Ready, 0), (Draining, 0)], NodeState::Ready),
        (&[(Sleeping, 0)], NodeState::Ready),
        (&[(Failed, 0), (Stopped, 0)], NodeState::Loading),
        (&[(Loading, 2), (Draining, 0)], NodeState::Loading),
        (&[(Draining, 0), (Stopped, 0)], NodeState::Draining),
        (&[(Stopped, 0), (Stopped, 0)], NodeState::Failed),
        (&[(Quarantined, 0), (Stopped, 0)], NodeState::Failed),
    ] {
        assert_eq!(node_state(Some(&node("12.head", replicas))), expected, "{replicas:?}");
    }
    assert_eq!(node_state(Some(&Node { attached: false, ..node("12.head", &[(Ready, 0)]) })), NodeState::NotAttached);
    assert_eq!(node_state(None), NodeState::NotAttached);
}

#[test]
fn a_jobs_node_is_that_of_its_present_run() {
    let mut nodes = vec![node("12.head", &[]), node("12.head", &[]), node("13.head", &[]), node("12[1].head", &[]), node("4711_3", &[])];
    nodes[0].attached = false;
    nodes[1].name = "x2".into();
    nodes[1].job.as_mut().unwrap().run = 2;
    assert_eq!(find_node(&nodes, "12.head.example.org").unwrap().name, "x2");
    assert_eq!(find_node(&nodes, "12[1].head"), Some(&nodes[3]));
    assert_eq!(find_node(&nodes, "4711_3"), Some(&nodes[4]));
    assert_eq!(find_node(&nodes, "4711_2"), None);
}

#[test]
fn a_model_has_its_served_names_or_its_own() {
    let named = |arguments: &[&str], configured: &[&str]| {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let entry = FleetEntry { engine_args: words(arguments), ..entry(hostler_cluster::FleetSize::Fixed(1)) };
        model_names(&entry, &words(configured))
    };
    assert_eq!(named(&["--max-model-len", "8192"], &["--served-model-name", "other"]), ["Qwen/Qwen3-8B"]);
    assert_eq!(named(&[], &["--served-model-name", "other"]), ["other"]);
    assert_eq!(named(&["--served-model-name", "a", "b", "--seed", "1"], &[]), ["a", "b"]);
    assert_eq!(named(&["--served_model_name=a", "b"], &[]), ["a"]);
}

#[test]
fn demand_counts_each_waiting_and_in_flight_request_once() {
    let demand = |model: &str, waiting, ago| ModelDemand {
        model: model.into(),
        waiting,
        in_flight: 7,
        last_request_ms_ago: ago,
        alias_of: String::new(),
    };
    let (own, other) =
        (ModelDemand { alias_of: "a".into(), ..demand("x", 4, None) }, ModelDemand { alias_of: "c".into(), ..demand("y", 8, None) });
    let listed = ListResponse {
        nodes: vec![node("12.head", &[(Phase::Ready, 0)])],
        demand: vec![demand("a", 1, None), demand("b", 2, Some(1500)), demand("c", 9, Some(1)), own, other],
        ..ListResponse::default()
    };
    let jobs = [job("12.head", JobState::Running), job("13.head", JobState::Queued)];
    let seen = observe(&jobs, &listed, &["a".to_owned(), "b".to_owned()], at(0));
    assert_eq!((seen.demand.waiting, seen.demand.in_flight, seen.demand.last_request), (7, 7, Some(Duration::from_millis(1500))));
    let states: Vec<_> = seen.jobs.iter().map(|job| (job.state, job.node)).collect();
    assert_eq!(states, [(JobState::Running, NodeState::Ready), (JobState::Queued, NodeState::NotAttached)]);
}
