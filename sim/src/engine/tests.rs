//! Tests of the stepping task on a paused clock.

use std::future::poll_fn;
use std::time::Duration;

use tokio::time::Instant;

use super::*;
use crate::faults::Fault;
use crate::metrics::render;
use crate::scheduler::Step;

/// An engine with 10 ms steps whose task runs.
fn start(flags: &[&str]) -> EngineHandle {
    let mut all = vec!["--sim-prefill-us", "0", "--sim-decode-us", "0"];
    all.extend(flags);
    let (core, stepping) = EngineHandle::new(Arc::new(EngineArgs::from_flags(&all)));
    tokio::spawn(stepping.run());
    core
}

fn work(text: u32, tokens: usize) -> GenerationRequest {
    let limit = Limit { tokens, finish: Finish::Length };
    GenerationRequest {
        prompts: vec![Prompt { tokens: vec![text; 8], limit }],
        choices: 1,
        seed: 0,
        salt: None,
        adapter: None,
        structured: None,
    }
}

/// Reads a generation to its end, and returns each token with its time since `start`.
async fn read(generation: Generation, start: Instant) -> Vec<(u32, Duration)> {
    let (mut tokens, mut deltas) = (Vec::new(), Vec::new());
    loop {
        poll_fn(|context| generation.mailbox.poll_deltas(context, &mut deltas)).await;
        for delta in &deltas {
            tokens.extend(delta.tokens.iter().map(|token| (*token, start.elapsed())));
            if delta.finish.is_some() {
                return tokens;
            }
        }
    }
}

fn gauge(core: &EngineHandle, name: &str) -> f64 {
    let text = render(&core.metrics, &core.args, &[name.to_owned()]);
    text.lines().last().unwrap().rsplit_once(' ').unwrap().1.parse().unwrap()
}

#[tokio::test(start_paused = true)]
async fn all_sequences_of_a_step_emit_together() {
    let core = start(&[]);
    let begin = Instant::now();
    let mut reads = Vec::new();
    for text in 0..8 {
        reads.push(read(core.submit(work(text, 5)).await.unwrap(), begin));
        // These requests arrive within one step and so run from the next one on.
        tokio::time::sleep(Duration::from_micros(100)).await;
    }
    let all = futures_util::future::join_all(reads).await;
    let times = |read: &Vec<(u32, Duration)>| read.iter().map(|(_, time)| *time).collect::<Vec<_>>();
    for read in &all[2..] {
        assert_eq!(times(read), times(&all[1]));
    }
    assert_eq!(times(&all[0])[1..], times(&all[1])[..4], "the first one only began a step earlier");
    let gaps: Vec<_> = times(&all[0]).windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(gaps, [Duration::from_millis(10); 4]);
}

#[tokio::test(start_paused = true)]
async fn the_step_grows_with_its_work() {
    let args = EngineArgs::from_flags(&["--sim-step-ms", "5", "--sim-prefill-us", "10", "--sim-decode-us", "100"]);
    assert_eq!(args.step_time(Step { prefill_tokens: 1000, loaded_tokens: 0, decodes: 20 }), Duration::from_millis(5 + 10 + 2));
    let core = start(&[]);
    core.faults.set(Fault::Slow { factor: 7.0 });
    let begin = Instant::now();
    let tokens = read(core.submit(work(1, 3)).await.unwrap(), begin).await;
    assert_eq!(tokens[2].1, Duration::from_millis(210));
}

#[tokio::test(start_paused = true)]
async fn answers_depend_only_on_engine_and_seed() {
    let begin = Instant::now();
    let mut answers = Vec::new();
    for flags in [&["--seed", "3"], &["--seed", "3"], &["--seed", "4"], &["--served-model-name", "other"]] {
        let core = start(flags);
        let _noise = core.submit(work(9, 50)).await.unwrap();
        let read = read(core.submit(work(1, 20)).await.unwrap(), begin).await;
        answers.push(read.into_iter().map(|(token, _)| token).collect::<Vec<_>>());
    }
    assert_eq!(answers[0], answers[1]);
    assert_ne!(answers[0], answers[2]);
    assert_ne!(answers[0], answers[3]);
}

#[tokio::test(start_paused = true)]
async fn the_gauge_is_zero_one_step_after_the_client_left() {
    let core = start(&[]);
    let generation = core.submit(work(1, 500)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(35)).await;
    assert_eq!(gauge(&core, "vllm:num_requests_running"), 1.0);
    drop(generation);
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert_eq!(gauge(&core, "vllm:num_requests_running"), 0.0);
    assert_eq!(core.in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn queue_slots_are_returned() {
    let core = start(&["--max-num-queued-reqs", "2"]);
    let first = core.submit(work(1, 500)).await.unwrap();
    let second = core.submit(work(2, 500)).await.unwrap();
    assert_eq!(core.submit(work(3, 5)).await.unwrap_err(), Refusal::Busy);
    drop(first);
    let third = core.submit(work(3, 5)).await.unwrap();
    let two = GenerationRequest { choices: 2, ..work(4, 5) };
    drop((second, third));
    assert!(core.submit(GenerationRequest { choices: 3, ..two.clone() }).await.is_err(), "each choice takes a place");
    assert!(core.submit(two).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn stopping_aborts_at_once_or_after_the_grace() {
    for (grace, tokens) in [("0", 3), ("1", 103)] {
        let core = Arc::new(start(&["--shutdown-timeout", grace]));
        let begin = Instant::now();
        let generation = core.submit(work(1, 500)).await.unwrap();
        let reading = tokio::spawn(read(generation, begin));
        tokio::time::sleep(Duration::from_millis(35)).await;
        core.stop().await;
        assert_eq!(reading.await.unwrap().len(), tokens, "grace {grace}");
        assert_eq!(core.submit(work(1, 1)).await.unwrap_err(), Refusal::Stopped);
    }
}
