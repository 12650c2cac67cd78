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
    let bounded = parse_load(told);
    let engine = bounded.wire.engine.as_ref().unwrap();
    assert_eq!((bounded.in_flight_elsewhere, bounded.engine_requests), (MAX_REQUESTS, MAX_REQUESTS));
    assert_eq!((bounded.wire.pending_tokens, bounded.wire.context_tokens), (MAX_TOKENS, MAX_TOKENS));
    assert_eq!((engine.kv_blocks * u64::from(engine.block_size), engine.kv_use), (MAX_TOKENS, 0.0));
    let usual = wire::EngineLoad { running: 3, waiting: 4, kv_use: 0.5, kv_blocks: 30_000, block_size: 16, ..wire::EngineLoad::default() };
    let usual = wire::Load { in_flight: 9, in_flight_yours: 2, pending_tokens: 5, engine: Some(usual), ..wire::Load::default() };
    assert_eq!(parse_load(usual), Load { in_flight_elsewhere: 7, engine_requests: 7, wire: usual });
}
