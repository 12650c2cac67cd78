use super::*;

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
    let told = wire::Load {
        in_flight: u32::MAX,
        pending_tokens: u64::MAX,
        context_tokens: u64::MAX,
        engine: Some(engine),
        ..wire::Load::default()
    };
    let change = parse_replica(wire::ReplicaReport { load: Some(told), ..wire::ReplicaReport::default() });
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
    let told = wire::Job {
        scheduler: "pbs".into(),
        id: "19[3].head".into(),
        array_index: Some(3),
        run: 2,
        ends_in_ms: Some(60_000),
        leaves_in_ms: Some(20_000),
    };
    let job = parse_job(told.clone(), now).unwrap();
    let at = |seconds| Some(now + Duration::from_secs(seconds));
    assert_eq!((job.scheduler, job.array_index, job.run, job.ends_at, job.leaves_at), (Scheduler::Pbs, Some(3), 2, at(60), at(20)));
    assert_eq!((job.to_string(), job.id.as_str()), ("job 19[3].head run 2".into(), "19[3].head"));
    assert_eq!(parse_job(wire::Job { run: 0, ..told.clone() }, now).unwrap().to_string(), "job 19[3].head");

    let refused = |change: fn(&mut wire::Job)| {
        let mut told = told.clone();
        change(&mut told);
        parse_job(told, now).is_none()
    };
    assert!(refused(|job| job.scheduler = "cron".into()) && refused(|job| job.id.clear()));
    assert!(
        refused(|job| job.id = "12\u{1b}[1m".into()) && refused(|job| job.id = "12 head".into()) && refused(|job| job.id = "1".repeat(129))
    );

    let moments = |ends_in_ms, leaves_in_ms| {
        let job = parse_job(wire::Job { ends_in_ms, leaves_in_ms, ..told.clone() }, now).unwrap();
        (job.ends_at, job.leaves_at)
    };
    assert_eq!(moments(Some(1000), Some(9000)), (at(1), at(1)), "it leaves before its job ends");
    assert_eq!((moments(None, None), moments(Some(1000), None)), ((None, None), (at(1), at(1))));
    let two_years = at(2 * 365 * 24 * 3600);
    assert_eq!(moments(Some(u64::MAX), Some(u64::MAX)), (two_years, two_years));
}
