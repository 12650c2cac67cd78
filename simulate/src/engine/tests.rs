use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::request::{Segment, keys};

fn hardware() -> Hardware {
    Hardware {
        step: 1.0,
        prefill: 0.01,
        attention: 0.0,
        decode: 0.1,
        context: 0.0,
        kv_tokens: 1024,
        load: 0.1,
        budget: 128,
        sequences: 8,
        ..Hardware::default()
    }
}

fn request(name: u64, prompt: u32, output: u32) -> Request {
    let keys = keys(&[Segment { name, tokens: prompt }, Segment { name: name + 1_000, tokens: output }]);
    Request { keys, prompt, output, session: name }
}

fn run(engine: &mut SimulatedEngine) -> (usize, Vec<(usize, StepOutput)>) {
    let (mut given, mut now) = (Vec::new(), 0.0);
    for step in 0..10_000 {
        if engine.is_idle() {
            return (step, given);
        }
        now = match engine.begin_step(now) {
            Some(seconds) => now + seconds,
            None => engine.next_loaded(now).expect("there is work, and nothing is loaded"),
        };
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
            let seconds = engine.begin_step(0.0).unwrap();
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
    assert!((engine.begin_step(0.0).unwrap() - (1.0 + 1.0 + 0.04)).abs() < 1e-9, "100 tokens and the four after the last whole block");
    assert_eq!(
        engine.end_step(),
        [
            StepOutput::FirstToken { id: 0, found: FoundTokens { cached: 0, loaded: 0 } },
            StepOutput::FirstToken { id: 1, found: FoundTokens { cached: 96, loaded: 0 } }
        ]
    );
}

#[test]
fn a_later_turn_finds_prompt_and_answer_cached() {
    let mut engine = SimulatedEngine::new(hardware());
    let whole: Arc<[u64]> = keys(&[Segment { name: 1, tokens: 200 }]);
    engine.add(0, Request { keys: whole.clone(), prompt: 64, output: 33, session: 1 });
    run(&mut engine);
    engine.add(1, Request { keys: whole, prompt: 150, output: 1, session: 1 });
    // The last token that was given is not in the cache.
    assert_eq!(run(&mut engine).1[0].1, StepOutput::FirstToken { id: 1, found: FoundTokens { cached: 96, loaded: 0 } });
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

/// An engine with this host tier that has computed these prompts of 200 tokens, and then one that
/// needed the whole GPU.
fn with_copies(host_tokens: u32, names: &[u64]) -> SimulatedEngine {
    let mut engine = SimulatedEngine::new(Hardware { host_tokens, ..hardware() });
    for (name, prompt) in names.iter().map(|name| (*name, 200)).chain([(99, 1_020)]) {
        engine.add(0, request(name, prompt, 1));
        run(&mut engine);
    }
    engine
}

#[test]
fn a_prompt_that_has_left_the_gpu_is_loaded_while_others_are_computed() {
    let mut engine = with_copies(4096, &[1]);
    engine.add(2, request(1, 200, 1));
    engine.add(3, request(3, 100, 3));
    // 192 tokens at 0.1 s each.
    assert_eq!(engine.begin_step(100.0), Some(2.0), "the other prompt alone");
    assert_eq!((engine.load(100.0).running, engine.load(100.0).waiting), (1, 1));
    assert_eq!(engine.end_step(), [StepOutput::FirstToken { id: 3, found: FoundTokens::default() }]);
    engine.begin_step(102.0);
    engine.end_step();
    engine.begin_step(103.1);
    assert_eq!(engine.end_step(), [StepOutput::LastToken { id: 3 }]);
    assert_eq!((engine.begin_step(104.2), engine.end_step()), (None, vec![]));
    let loaded_at = engine.next_loaded(104.2).unwrap();
    assert!((loaded_at - 119.2).abs() < 1e-9, "{loaded_at}");
    let seconds = engine.begin_step(loaded_at).unwrap();
    assert!((seconds - 1.08).abs() < 1e-9, "eight tokens are left to compute: {seconds}");
    assert_eq!(engine.end_step()[0], StepOutput::FirstToken { id: 2, found: FoundTokens { cached: 192, loaded: 192 } });
    engine.add(4, request(1, 200, 1));
    engine.begin_step(200.0);
    assert_eq!(engine.end_step()[0], StepOutput::FirstToken { id: 4, found: FoundTokens { cached: 192, loaded: 0 } });
}

#[test]
fn an_equal_prompt_waits_for_the_load_of_the_first_and_another_for_the_link() {
    let mut engine = with_copies(4096, &[1, 2]);
    for (id, name) in [(2, 1), (3, 1), (4, 2)] {
        engine.add(id, request(name, 200, 1));
    }
    assert_eq!(engine.begin_step(100.0), None);
    let loaded_at: Vec<f64> = engine.running.iter().map(|sequence| sequence.loaded_at - 100.0).collect();
    // 192 tokens each at 0.1 s, once for the first two.
    assert!(loaded_at.iter().zip([19.2, 19.2, 38.4]).all(|(is, should)| (is - should).abs() < 1e-9), "{loaded_at:?}");
}

#[test]
fn the_host_keeps_what_was_used_last_and_a_restart_loses_it() {
    let mut engine = with_copies(1024, &[1]);
    engine.add(2, request(1, 200, 1));
    assert_eq!(run(&mut engine).1[0].1, StepOutput::FirstToken { id: 2, found: FoundTokens { cached: 16, loaded: 16 } });
    let mut engine = with_copies(4096, &[1]);
    engine.restart();
    engine.add(2, request(1, 200, 1));
    assert_eq!(run(&mut engine).1[0].1, StepOutput::FirstToken { id: 2, found: FoundTokens::default() });
}

proptest! {
    #[test]
    fn every_request_is_answered_once_and_frees_its_blocks(
        requests in prop::collection::vec((0_u64..6, 1_u32..200, 1_u32..40), 1..30),
        kv_tokens in 240_u32..800,
        host_tokens in 0_u32..2_000,
    ) {
        let mut engine = SimulatedEngine::new(Hardware { kv_tokens, host_tokens, ..hardware() });
        let mut given = Vec::new();
        for (id, &(name, prompt, output)) in requests.iter().enumerate() {
            engine.add(id, request(name, prompt, output));
            engine.begin_step(0.0);
            given.extend(engine.end_step());
        }
        given.extend(run(&mut engine).1.into_iter().map(|(_, one)| one));
        for id in 0..requests.len() {
            let first = given.iter().filter(|one| matches!(one, StepOutput::FirstToken { id: of, .. } if *of == id)).count();
            prop_assert_eq!((first, given.iter().filter(|one| **one == StepOutput::LastToken { id }).count()), (1, 1));
        }
        prop_assert_eq!(engine.blocks.free(), (kv_tokens / BLOCK_TOKENS) as usize);
        prop_assert_eq!(engine.copies.free(), (host_tokens / BLOCK_TOKENS) as usize);
    }
}
