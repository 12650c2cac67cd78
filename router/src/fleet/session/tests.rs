use super::*;

#[test]
fn no_number_of_an_agent_is_more_than_any_replica_can_have() {
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
