use hostler_proto::agent::v1 as agent;
use hostler_proto::fleet::v1 as wire;

use super::*;

/// A node with one replica, as the router would report it.
pub(crate) fn node(name: &str, state: agent::ReplicaState, change: impl FnOnce(&mut wire::Replica)) -> Node {
    let mut replica = wire::Replica { id: format!("{name}/0"), state: Some(state), ..wire::Replica::default() };
    change(&mut replica);
    wire::Node { name: name.into(), agent_version: "1".into(), attached: true, replicas: vec![replica], job: None }
}

fn job(id: &str, run: u32, ends_in_ms: Option<u64>) -> agent::Job {
    agent::Job { scheduler: "pbs".into(), id: id.into(), run, ends_in_ms, ..agent::Job::default() }
}

fn in_phase(phase: agent::Phase) -> agent::ReplicaState {
    agent::ReplicaState { phase: phase.into(), ..agent::ReplicaState::default() }
}

pub(crate) fn ready() -> agent::ReplicaState {
    let model = agent::Model { id: "tiny".into(), ..agent::Model::default() };
    agent::ReplicaState { models: vec![model], engine_version: "0.32.0".into(), ..in_phase(agent::Phase::Ready) }
}

pub(crate) fn finding(kind: &str, evidence: &str, advice: &str) -> agent::Finding {
    agent::Finding { kind: kind.into(), evidence: evidence.into(), advice: advice.into() }
}

fn cache(exact: bool, reason: &str) -> wire::Cache {
    wire::Cache { exact, blocks: 1234, reason: reason.into(), tokenizer: "proved".into(), ..wire::Cache::default() }
}

fn with_cache(cache: wire::Cache) -> Node {
    node("n", agent::ReplicaState { gpu: "NVIDIA H200".into(), ..ready() }, |replica| replica.cache = Some(cache))
}

fn gpus(count: u32) -> Vec<agent::Gpu> {
    let gpu =
        |index| agent::Gpu { index, uuid: format!("GPU-{index}"), name: "NVIDIA H200".into(), memory_bytes: 141 << 30, reading: None };
    (0..count).map(gpu).collect()
}

/// GPUs with their readings.
fn busy_gpus(count: u32) -> Vec<agent::Gpu> {
    gpus(count).into_iter().map(|gpu| agent::Gpu { reading: Some(reading(gpu.index)), ..gpu }).collect()
}

fn reading(index: u32) -> agent::GpuReading {
    agent::GpuReading {
        uuid: format!("GPU-{index}"),
        memory_used_bytes: Some(98 << 30),
        utilisation: Some(80 + index),
        watts: Some(612.4),
        celsius: Some(60 + index),
        throttled: vec!["power limit".into()],
        ..agent::GpuReading::default()
    }
}

fn fleet() -> Vec<Node> {
    let progress = agent::Progress { stage: "loading weights".into(), percent: 45, seconds_left: 20 };
    let failure = agent::Failure {
        kind: "memory".into(),
        cause: "CUDA out of memory".into(),
        remedy: "end process 4242, which holds 70 GiB of GPU 0".into(),
    };
    let advised = vec![finding("eager", "seen", "change"), finding("context", "seen", "change")];
    let served = |replica: &mut wire::Replica| {
        let engine = agent::EngineLoad { running: 31, waiting: 2, kv_use: 0.421, ..agent::EngineLoad::default() };
        replica.load = Some(agent::Load { in_flight: 33, served: 1207, engine: Some(engine), ..agent::Load::default() });
        replica.cache = Some(cache(true, ""));
    };
    vec![
        node("n0", agent::ReplicaState { gpus: busy_gpus(1), ..ready() }, served),
        node("n1", agent::ReplicaState { gpus: busy_gpus(4), findings: advised, ..ready() }, served),
        node("n2", agent::ReplicaState { gpus: gpus(1), progress: Some(progress), ..in_phase(agent::Phase::Loading) }, |_| {}),
        node(
            "n3",
            agent::ReplicaState { failure: Some(failure), reason: "rc 1\nlast lines".into(), ..in_phase(agent::Phase::Failed) },
            |_| {},
        ),
        node("n4", agent::ReplicaState { reason: "XID 79 on GPU 0".into(), ..in_phase(agent::Phase::Quarantined) }, |_| {}),
    ]
}

#[test]
fn the_table_shows_gpus_progress_failures_and_advice() {
    insta::assert_snapshot!(lines(&fleet()).join("\n"));
}

#[test]
fn the_table_has_no_gpu_column_without_gpus() {
    let lines = lines(&[node("n", ready(), |replica| replica.cache = Some(cache(false, "")))]);
    insta::assert_snapshot!(lines.join("\n"), @"
    REPLICA  PHASE  MODEL  IN FLIGHT  RUNNING  WAITING  KV  CACHE  SERVED  RESTARTS  ENGINE
    n/0      ready  tiny   0          0        0        0%  text   0       0         0.32.0
    ");
}

#[test]
fn the_table_shows_batch_jobs_and_their_ends() {
    let in_job = |name: &str, job| Node { job: Some(job), ..node(name, ready(), |_| {}) };
    let mut nodes = vec![
        in_job("x1.12", job("12.head", 1, Some(4_325_000))),
        in_job("x1.19-3", job("19[3].head", 2, Some(36_900))),
        in_job("x2.4711", job("4711", 1, None)),
        node("x3", ready(), |_| {}),
    ];
    nodes[1].attached = false;
    insta::assert_snapshot!(lines(&nodes).join("\n"), @"
    REPLICA    PHASE  MODEL  JOB                           IN FLIGHT  RUNNING  WAITING  KV  CACHE  SERVED  RESTARTS  ENGINE
    x1.12/0    ready  tiny   12.head ends in 1h 12m        0          0        0        0%  text   0       0         0.32.0
    x1.19-3/0  ready  tiny   19[3].head run 2 ends in 36s  0          0        0        0%  text   0       0         0.32.0
    x2.4711/0  ready  tiny   4711                          0          0        0        0%  text   0       0         0.32.0
    x3/0       ready  tiny                                 0          0        0        0%  text   0       0         0.32.0
    ");
}

#[test]
fn gone_jobs_are_listed_with_end_and_reason() {
    let gone = |node: &str, job, gone_ms_ago, reason: &str| wire::GoneJob {
        node: node.into(),
        job: Some(job),
        gone_ms_ago,
        reason: reason.into(),
        drained: false,
    };
    let gone = [
        gone("x1.12", job("12.head", 1, Some(10_000)), 195_000, "agent lost"),
        gone("x2.13", job("13.head", 2, None), 1_500_000, "drained; x2.13/0: CUDA out of memory"),
    ];
    insta::assert_snapshot!(gone_lines(&gone).join("\n"), @"
    x1.12: job 12.head run 1 gone 3m 15s ago: agent lost
    x2.13: job 13.head run 2 gone 25m ago: drained; x2.13/0: CUDA out of memory
    ");
    let json = serde_json::to_value(&gone[0]).unwrap();
    assert_eq!(
        (&json["job"]["id"], &json["job"]["ends_in_seconds"], &json["gone_seconds_ago"]),
        (&"12.head".into(), &10.into(), &195.into())
    );
}

#[test]
fn a_cache_shows_its_blocks_or_why_not() {
    let lines = lines(&[with_cache(cache(true, ""))]);
    assert!(lines[1].contains("  H200  ") && lines[1].contains("exact 1234"), "{lines:?}");
    let lines = super::lines(&[with_cache(cache(false, "the engine keeps no cache"))]);
    assert!(lines[1].contains("  text  ") && lines[1].ends_with("  placed by text: the engine keeps no cache"), "{lines:?}");
    let lines = super::lines(&[with_cache(wire::Cache { distrusted: true, ..cache(false, "") })]);
    assert!(lines[1].ends_with("placed by text: its reports of cached blocks contradict themselves"), "{lines:?}");
    // The cache is on its way: nothing is wrong.
    let lines = super::lines(&[with_cache(cache(false, ""))]);
    assert!(!lines[1].contains("placed by text"), "{lines:?}");
}

#[test]
fn a_gpu_with_few_readings_shows_those() {
    let bare = agent::GpuReading { uuid: "GPU-0".into(), utilisation: Some(7), ..agent::GpuReading::default() };
    let gpus = vec![agent::Gpu { reading: Some(bare), ..gpus(1).remove(0) }];
    let node = node("n", agent::ReplicaState { gpus, ..ready() }, |_| {});
    assert_eq!(gpu_cell(&node.replicas[0]), "0 H200 7%");
}

#[test]
fn nonadjacent_gpus_are_listed_one_by_one() {
    let gpus = gpus(3);
    let some = |indices: &[usize]| {
        node("n", agent::ReplicaState { gpus: indices.iter().map(|&index| gpus[index].clone()).collect(), ..ready() }, |_| {})
    };
    assert_eq!(gpu_cell(&some(&[0, 2]).replicas[0]), "0,2 2×H200");
    assert_eq!(gpu_cell(&some(&[0, 1, 2]).replicas[0]), "0-2 3×H200");
}

#[test]
fn the_json_holds_everything_of_each_replica() {
    let json = serde_json::to_value(fleet()).unwrap();
    let replica = &json[0]["replicas"][0];
    assert_eq!((&replica["phase"], &replica["cache"]["blocks"]), (&"ready".into(), &1234.into()));
    for name in ["exact", "matches", "resyncs", "distrusted", "tokenizer", "reason"] {
        assert!(!replica["cache"][name].is_null(), "{name}");
    }
    assert_eq!(replica["rates"]["slowness"], 0.0);
    let gpu = &json[1]["replicas"][0]["gpus"][3];
    assert_eq!((&gpu["index"], &gpu["utilisation"], &gpu["sm_mhz"]), (&3.into(), &83.into(), &serde_json::Value::Null));
    assert_eq!(gpu["throttled"][0], "power limit");
    assert_eq!(json[1]["replicas"][0]["findings"][0]["kind"], "eager");
    assert_eq!(json[2]["replicas"][0]["progress"]["seconds_left"], 20);
    assert_eq!(json[3]["replicas"][0]["failure"]["kind"], "memory");
    assert!(json[0]["replicas"][0]["failure"].is_null());
}

/// A node of which everything is known, as the router would report it.
fn whole_node() -> Node {
    let mut whole = node(
        "n0",
        agent::ReplicaState {
            reason: "serves".into(),
            engine_pid: 4242,
            engine_socket: "/run/e.sock".into(),
            restarts: 3,
            gpu: "NVIDIA H200".into(),
            gpus: busy_gpus(1),
            progress: Some(agent::Progress { stage: "loading weights".into(), percent: 45, seconds_left: 20 }),
            launch: Some(agent::Launch {
                profile: "latency".into(),
                tensor_parallel: 1,
                front_end: "rust".into(),
                arguments: vec!["--no-log-requests".into()],
                kv_tokens: 100_000,
                ..agent::Launch::default()
            }),
            findings: vec![finding("eager", "seen", "change")],
            failure: Some(agent::Failure { kind: "memory".into(), cause: "out of memory".into(), remedy: "end it".into() }),
            ..ready()
        },
        |replica| {
            let engine = agent::EngineLoad { running: 31, waiting: 2, kv_use: 0.5, ..agent::EngineLoad::default() };
            replica.load = Some(agent::Load { in_flight: 33, served: 1207, engine: Some(engine), ..agent::Load::default() });
            (replica.epoch, replica.local_in_flight) = (7, 12);
            replica.cache = Some(cache(true, ""));
            replica.rates = Some(wire::Rates { step: 0.01, prefill: 0.001, slowness: 1.0, ..wire::Rates::default() });
        },
    );
    whole.job = Some(agent::Job { array_index: Some(3), leaves_in_ms: Some(9_500), ..job("12[3].head", 2, Some(10_900)) });
    whole
}

/// Scripts read these names and values.
#[test]
fn the_json_keeps_its_names() {
    let mut starting = node("n1", agent::ReplicaState::default(), |replica| replica.suspect = true);
    starting.attached = false;
    let gone = wire::GoneJob {
        node: "n2".into(),
        job: Some(job("13.head", 1, None)),
        gone_ms_ago: 195_900,
        reason: "agent lost".into(),
        ..wire::GoneJob::default()
    };
    let listed = ListResponse { nodes: vec![whole_node(), starting], gone_jobs: vec![gone], ..ListResponse::default() };
    insta::assert_snapshot!(json_lines("", &fleet_json(listed)).join("\n"));
}

/// A line for each value of a JSON document, sorted by its path: the order of fields is nobody's
/// business.
fn json_lines(path: &str, value: &serde_json::Value) -> Vec<String> {
    let mut lines: Vec<String> = match value {
        serde_json::Value::Object(fields) => fields.iter().flat_map(|(name, value)| json_lines(&format!("{path}.{name}"), value)).collect(),
        serde_json::Value::Array(items) if !items.is_empty() => {
            items.iter().enumerate().flat_map(|(index, item)| json_lines(&format!("{path}[{index}]"), item)).collect()
        }
        other => vec![format!("{path} = {other}")],
    };
    lines.sort();
    lines
}

#[test]
fn what_an_engine_died_of_is_shown_once_it_serves_again() {
    let event = |number, subject: &str, words: &str, grave| wire::FleetEvent {
        number,
        at_ms: number * 60_000,
        kind: "replica_phase".into(),
        subject: subject.into(),
        words: words.into(),
        grave,
    };
    let events = [
        event(1, "n/0", "n/0 ready → failed: out of memory", true),
        event(2, "n/0", "n/0 ready → failed: it was killed by signal 9", true),
        event(3, "n/0", "n/0 loading → ready", false),
        event(4, "n/1", "n/1 ready → failed: it hung", true),
    ];
    let now = UNIX_EPOCH + Duration::from_secs(5 * 60);
    assert_eq!(last_failure("n/0", &events, now).unwrap(), "3m ago: n/0 ready → failed: it was killed by signal 9");
    assert_eq!(last_failure("n/2", &events, now), None);
}
