use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::request::{Segment, keys};

fn hardware() -> Hardware {
    Hardware { step: 1.0, prefill: 0.01, attention: 0.0, decode: 0.1, context: 0.0, kv_tokens: 1024, budget: 128, sequences: 8 }
}

fn request(name: u64, prompt: u32, output: u32) -> Request {
    let keys = keys(&[Segment { name, tokens: prompt }, Segment { name: name + 1_000, tokens: output }]);
    Request { keys, prompt, output, session: name }
}

fn run(engine: &mut SimulatedEngine) -> (usize, Vec<(usize, StepOutput)>) {
    let mut given = Vec::new();
    for step in 0..10_000 {
        if engine.is_idle() {
            return (step, given);
        }
        engine.begin_step();
        given.extend(engine.end_step().into_iter().map(|one| (step, one)));
    }
    panic!("it never ends");
}

#[test]
fn a_prompt_is_prefilled_in_chunks_and_then_decoded() {
    let mut engine = SimulatedEngine::new(hardware());
    engine.add(0, request(1, 300, 3));
    let durations: Vec<f64> = (0..5)
        .map(|_| {
            let seconds = engine.begin_step();
            engine.end_step();
            seconds
        })
        .collect();
    let expected = [1.0 + 1.28, 1.0 + 1.28, 1.0 + 0.44, 1.1, 1.1];
    assert!(durations.iter().zip(expected).all(|(is, should)| (is - should).abs() < 1e-9), "{durations:?}");
    assert!(engine.is_idle());
}

#[test]
fn an_equal_prompt_in_the_same_step_shares_blocks() {
    let mut engine = SimulatedEngine::new(hardware());
    engine.add(0, request(1, 100, 2));
    engine.add(1, request(1, 100, 2));
    assert!((engine.begin_step() - (1.0 + 1.0 + 0.04)).abs() < 1e-9, "100 tokens and the four after the last whole block");
    assert_eq!(engine.end_step(), [StepOutput::FirstToken { id: 0, cached: 0 }, StepOutput::FirstToken { id: 1, cached: 96 }]);
}

#[test]
fn a_later_turn_finds_prompt_and_answer_cached() {
    let mut engine = SimulatedEngine::new(hardware());
    let whole: Arc<[u64]> = keys(&[Segment { name: 1, tokens: 200 }]);
    engine.add(0, Request { keys: whole.clone(), prompt: 64, output: 33, session: 1 });
    run(&mut engine);
    engine.add(1, Request { keys: whole, prompt: 150, output: 1, session: 1 });
    // The last token that was given is not in the cache.
    assert_eq!(run(&mut engine).1[0].1, StepOutput::FirstToken { id: 1, cached: 96 });
}

#[test]
fn a_full_cache_preempts_the_last_request_and_answers_all() {
    let mut engine = SimulatedEngine::new(Hardware { kv_tokens: 256, ..hardware() });
    for id in 0..4 {
        engine.add(id, request(id as u64, 60, 100));
    }
    let (_, given) = run(&mut engine);
    assert!(engine.preemptions() > 0);
    assert_eq!(given.iter().filter(|(_, one)| matches!(one, StepOutput::FirstToken { .. })).count(), 4);
    assert_eq!(given.iter().filter(|(_, one)| matches!(one, StepOutput::LastToken { .. })).count(), 4);
    assert_eq!(engine.blocks.free(), 16);
}

proptest! {
    #[test]
    fn every_request_is_answered_once_and_frees_its_blocks(
        requests in prop::collection::vec((0_u64..6, 1_u32..200, 1_u32..40), 1..30),
        kv_tokens in 240_u32..800,
    ) {
        let mut engine = SimulatedEngine::new(Hardware { kv_tokens, ..hardware() });
        let mut given = Vec::new();
        for (id, &(name, prompt, output)) in requests.iter().enumerate() {
            engine.add(id, request(name, prompt, output));
            engine.begin_step();
            given.extend(engine.end_step());
        }
        given.extend(run(&mut engine).1.into_iter().map(|(_, one)| one));
        for id in 0..requests.len() {
            let first = given.iter().filter(|one| matches!(one, StepOutput::FirstToken { id: of, .. } if *of == id)).count();
            prop_assert_eq!((first, given.iter().filter(|one| **one == StepOutput::LastToken { id }).count()), (1, 1));
        }
        prop_assert_eq!(engine.blocks.free(), (kv_tokens / BLOCK_TOKENS) as usize);
    }
}
