use super::bounds::*;
use super::*;
use crate::fleet::job::Scheduler;

#[test]
fn an_agents_figures_are_clamped_to_what_replicas_can_have() {
    let engine = wire::EngineLoad {
        running: u32::MAX,
        waiting: u32::MAX,
        kv_use: f64::NAN,
        kv_blocks: u64::MAX,
        block_size: 16,
        ..wire::EngineLoad::default()
    };
    let reported_load = wire::Load {
        in_flight: u32::MAX,
        pending_tokens: u64::MAX,
        context_tokens: u64::MAX,
        engine: Some(engine),
        ..wire::Load::default()
    };
    let change = parse_replica(wire::ReplicaReport { load: Some(reported_load), ..wire::ReplicaReport::default() });
    let ReplicaLoad { in_flight, in_flight_elsewhere, pending_tokens_elsewhere, context_tokens_elsewhere, engine, .. } =
        change.load.unwrap();
    assert_eq!([in_flight, in_flight_elsewhere, engine.running, engine.waiting], [MAX_REQUESTS; 4]);
    assert_eq!((pending_tokens_elsewhere, context_tokens_elsewhere), (MAX_TOKENS, MAX_TOKENS));
    assert_eq!((engine.kv_blocks * u64::from(engine.block_tokens), engine.kv_use), (MAX_TOKENS, 0.0));
    let shown = change.report.load.unwrap();
    assert_eq!((shown.in_flight, shown.pending_tokens), (MAX_REQUESTS, MAX_TOKENS), "operators are shown the same");
    let usual = wire::EngineLoad { running: 3, waiting: 4, kv_use: 0.5, kv_blocks: 30_000, block_size: 16, ..wire::EngineLoad::default() };
    let usual = wire::Load { in_flight: 9, in_flight_yours: 2, pending_tokens: 5, engine: Some(usual), ..wire::Load::default() };
    assert_eq!(bound_load(usual), usual);
    let ReplicaLoad { in_flight, in_flight_elsewhere, pending_tokens_elsewhere, engine, .. } = parse_load(usual);
    assert_eq!((in_flight, in_flight_elsewhere, pending_tokens_elsewhere, engine.running, engine.waiting), (9, 7, 5, 3, 4));
}

#[test]
fn a_jobs_scheduler_id_and_times_are_validated() {
    let now = Instant::now();
    let reported = wire::Job {
        scheduler: "pbs".into(),
        id: "19[3].head".into(),
        array_index: Some(3),
        run: 2,
        ends_in_ms: Some(60_000),
        leaves_in_ms: Some(20_000),
    };
    let job = parse_job(reported.clone(), now).unwrap();
    let at = |seconds| Some(now + Duration::from_secs(seconds));
    assert_eq!((job.scheduler, job.array_index, job.run, job.ends_at, job.leaves_at), (Scheduler::Pbs, Some(3), 2, at(60), at(20)));
    assert_eq!((job.to_string(), job.id.as_str()), ("job 19[3].head run 2".into(), "19[3].head"));
    assert_eq!(parse_job(wire::Job { run: 0, ..reported.clone() }, now).unwrap().to_string(), "job 19[3].head");

    let refused = |change: fn(&mut wire::Job)| {
        let mut reported = reported.clone();
        change(&mut reported);
        parse_job(reported, now).is_none()
    };
    assert!(refused(|job| job.scheduler = "cron".into()) && refused(|job| job.id.clear()));
    assert!(
        refused(|job| job.id = "12\u{1b}[1m".into()) && refused(|job| job.id = "12 head".into()) && refused(|job| job.id = "1".repeat(129))
    );

    let moments = |ends_in_ms, leaves_in_ms| {
        let job = parse_job(wire::Job { ends_in_ms, leaves_in_ms, ..reported.clone() }, now).unwrap();
        (job.ends_at, job.leaves_at)
    };
    assert_eq!(moments(Some(1000), Some(9000)), (at(1), at(1)), "it leaves before its job ends");
    assert_eq!((moments(None, None), moments(Some(1000), None)), ((None, None), (at(1), at(1))));
    let two_years = at(2 * 365 * 24 * 3600);
    assert_eq!(moments(Some(u64::MAX), Some(u64::MAX)), (two_years, two_years));
}

#[test]
fn more_replicas_than_a_node_has_end_the_session() {
    let report = |indices: std::ops::Range<u32>| wire::Report {
        replicas: indices.map(|index| wire::ReplicaReport { index, ..wire::ReplicaReport::default() }).collect(),
        ..wire::Report::default()
    };
    assert!(check_replicas(&report(0..256)).is_ok() && check_index(255).is_ok());
    let many = check_replicas(&report(0..300_000)).unwrap_err();
    assert_eq!(
        (many.code(), many.message()),
        (tonic::Code::InvalidArgument, "a node has at most 256 replicas, and this report has 300000")
    );
    // Reports of changes add replicas too, and caches are kept by the same numbers.
    for further in [check_replicas(&report(256..257)), check_index(256)] {
        let message = "a node has at most 256 replicas, numbered from 0, and this one is number 256";
        assert_eq!(further.unwrap_err().message(), message);
    }
}

#[test]
fn a_nodes_name_has_a_bounded_length() {
    let hello = |node: String| wire::Hello { protocol: PROTOCOL, node, ..wire::Hello::default() };
    assert!(check_hello(&hello("n".repeat(256))).is_ok());
    let refused = check_hello(&hello("n".repeat(3_000_000))).unwrap_err();
    assert_eq!(refused.message(), "a node's name has at most 256 bytes, and this one 3000000");
}

#[test]
fn an_agents_texts_and_lists_are_cut_where_they_enter() {
    let long = || "\u{e4}".repeat(50_000);
    let model = |id: &str, card: usize| wire::Model { id: id.into(), card: vec![b' '; card].into(), alias_of: String::new() };
    let finding = || wire::Finding { kind: long(), evidence: long(), advice: long() };
    let mut state = wire::ReplicaState {
        reason: long(),
        models: std::iter::repeat_n(model("m", 100), 5000).collect(),
        engine_version: long(),
        engine_socket: long(),
        gpu: long(),
        prompt_files: Some(wire::PromptFiles { hash: vec![0; 3_000_000].into(), bytes: 1, error: long() }),
        cache: Some(wire::CacheWatch { reason: long(), ..wire::CacheWatch::default() }),
        gpus: std::iter::repeat_n(wire::Gpu { uuid: "u".repeat(9000), name: "n".repeat(9000), ..wire::Gpu::default() }, 100).collect(),
        progress: Some(wire::Progress { stage: long(), ..wire::Progress::default() }),
        launch: Some(wire::Launch {
            profile: long(),
            front_end: long(),
            arguments: vec!["--flag".repeat(5000); 1000],
            missing_routes: vec!["/route".repeat(100); 1000],
            ..wire::Launch::default()
        }),
        findings: std::iter::repeat_with(finding).take(70).collect(),
        failure: Some(wire::Failure { kind: long(), cause: long(), remedy: long() }),
        ..wire::ReplicaState::default()
    };
    bound_state(&mut state);
    assert_eq!((state.reason.len(), state.models.len(), state.findings.len(), state.gpus.len()), (4096, 1024, 64, 64));
    let bytes = prost::Message::encoded_len(&state);
    assert!(bytes < 10 * 1024 * 1024, "{bytes}");
    state.launch = None;
    let bytes = prost::Message::encoded_len(&state);
    assert!(bytes < 1024 * 1024, "no field is left out of the bounds: {bytes}");

    let kept = |models: Vec<wire::Model>| {
        let mut state = wire::ReplicaState { models, ..wire::ReplicaState::default() };
        bound_state(&mut state);
        state.models.into_iter().map(|model| model.id.len()).collect::<Vec<_>>()
    };
    assert_eq!(kept(vec![model("m", 3_000_000), model(&"m".repeat(1025), 1), model(&"m".repeat(1024), 600)]), [1024]);

    let throttled = vec!["hot".repeat(1000); 1000];
    let readings = bound_readings(vec![wire::GpuReading { uuid: long(), throttled, ..wire::GpuReading::default() }; 65]);
    assert_eq!((readings.len(), readings[0].uuid.len(), readings[0].throttled.len(), readings[0].throttled[0].len()), (64, 256, 64, 256));
}

#[test]
fn what_an_honest_agent_says_is_kept_whole() {
    let mut state = wire::ReplicaState {
        reason: "engine exited with code 1: CUDA out of memory; next start in 8 s".into(),
        models: vec![wire::Model { id: "/models/Qwen3-8B".into(), card: vec![b'x'; 600].into(), alias_of: String::new() }],
        prompt_files: Some(wire::PromptFiles { hash: vec![7; 32].into(), bytes: 9, error: String::new() }),
        gpus: vec![wire::Gpu { name: "NVIDIA H100 80GB HBM3".into(), ..wire::Gpu::default() }; 8],
        launch: Some(wire::Launch { arguments: vec!["--max-model-len".into(), "32768".into()], ..wire::Launch::default() }),
        ..wire::ReplicaState::default()
    };
    let before = state.clone();
    bound_state(&mut state);
    assert_eq!(state, before);
}
