use std::time::Duration;

use super::*;
use crate::fleet::CacheTier;
use crate::placement::OutputBounds;
use crate::placement::PlacementRequest;
use crate::placement::decisions::PlacementOutcome;
use crate::placement::prompt::tests::{exact_stream, text};
use crate::placement::tests::{FILES, Fixture};

/// A placed request, and the decision that placed it.
fn place(fixture: &Fixture, prompt: &Prompt) -> (PlacementFeedback, InFlight, Arc<PlacementDecision>) {
    let chosen = fixture.choose(prompt);
    let in_flight = fixture.placer.count_in_flight(prompt, &chosen, Instant::now());
    let slot = chosen.approx_prefix_slot();
    let record = Arc::new(PlacementDecision::new(1, prompt, chosen));
    let placed = PlacementFeedback::new(&fixture.placer, prompt, record.clone(), &in_flight, slot);
    (placed, in_flight, record)
}

fn stream(of: char, bytes: usize) -> Prompt {
    let prompt_parts = vec![of.to_string().repeat(bytes).into()];
    Prompt::from_text(PlacementRequest { model: Some("m".into()), prompt_parts, is_stream: true, ..PlacementRequest::default() }, "")
}

fn usage(completion_tokens: u64, cached_tokens: Option<u64>) -> Option<TokenUsage> {
    Some(TokenUsage { prompt_tokens: 1000, completion_tokens, cached_tokens })
}

#[tokio::test(start_paused = true)]
async fn answer_lengths_are_learned_only_up_to_their_limit() {
    let fixture = Fixture::approximate(1).await;
    let lengths = |most, context| {
        let output_bounds = OutputBounds { least: 0, most };
        let request =
            PlacementRequest { model: Some("m".into()), prompt_parts: vec!["hi".into()], output_bounds, ..PlacementRequest::default() };
        let (placed, _in_flight, _) = place(&fixture, &Prompt::from_text(request, ""));
        placed.record_end(usage(1_000_000_000_000_000_000, None), 0, context, true);
        fixture.placer.output_lengths.expected(OutputBounds::default())
    };
    assert!(lengths(Some(300), 4096) < 300.0);
    assert!(lengths(None, 4096) < 4096.0);
    assert!(lengths(Some(u64::MAX), 4096) < 4096.0);
}

#[tokio::test(start_paused = true)]
async fn answers_with_several_choices_teach_no_length() {
    let fixture = Fixture::approximate(1).await;
    let before = fixture.placer.output_lengths.expected(OutputBounds::default());
    let request = PlacementRequest { model: Some("m".into()), prompt_parts: vec!["hi".into()], ..PlacementRequest::default() };
    let (placed, _in_flight, _) = place(&fixture, &Prompt::from_text(request, ""));
    placed.record_end(usage(131_072, None), 0, 131_072, false);
    assert_eq!(fixture.placer.output_lengths.expected(OutputBounds::default()), before);
}

#[test]
fn the_cached_part_of_an_approximate_prefix_is_bounded() {
    assert_eq!(scale_tokens(1000, 50, 100), 500);
    assert_eq!(scale_tokens(u32::MAX, u64::MAX, 1), u32::MAX);
    assert_eq!(scale_tokens(4000, u64::MAX, u64::MAX), 4000);
    assert_eq!(scale_tokens(1000, 50, 0), 1000);
}

#[tokio::test(start_paused = true)]
async fn a_streams_first_token_teaches_the_replicas_speed() {
    let fixture = Fixture::approximate(1).await;
    let local_load = fixture.fleet.view().replicas[0].local_load.clone();
    let before = local_load.learned().rates.prefill;
    // No prompt shares cached blocks with the next.
    for of in 'a'..='t' {
        let (mut placed, in_flight, record) = place(&fixture, &stream(of, 16_000));
        tokio::time::sleep(Duration::from_secs(2)).await;
        placed.record_start();
        assert_eq!(record.outcome.lock().first_token_seconds, Some(2.0));
        drop(in_flight);
    }
    assert!(local_load.learned().rates.prefill > 2.0 * before, "{} was {before}", local_load.learned().rates.prefill);
}

#[tokio::test(start_paused = true)]
async fn a_first_token_that_waited_for_a_load_teaches_how_long_loading_takes_if_the_engine_loaded() {
    let (fixture, _) = Fixture::known(1).await;
    let prompt = exact_stream(40_000, FILES);
    let files = fixture.index.open();
    fixture.index.store(files, &prompt.token_keys(16));
    fixture.know(CacheTier::Files, (0, 0), files).await;
    let load = |record: &PlacementDecision| record.decision.choice().terms.load;
    let learned = async |cached| {
        let (mut placed, in_flight, _) = place(&fixture, &prompt);
        tokio::time::sleep(Duration::from_secs(10)).await;
        placed.record_start();
        placed.record_end(usage(2, Some(cached)), 2, 50_000, true);
        drop(in_flight);
        load(&place(&fixture, &prompt).2)
    };
    let before = load(&place(&fixture, &prompt).2);
    assert_eq!(learned(16_000).await, before, "the engine computed some of them");
    let first = learned(39_984).await;
    assert!(before < first && first < learned(39_984).await, "{before} s, then {first}");
}

#[tokio::test(start_paused = true)]
async fn a_plain_answer_teaches_its_length_but_no_speed() {
    let fixture = Fixture::approximate(1).await;
    let before = fixture.fleet.view().replicas[0].local_load.learned().rates;
    let (mut placed, _in_flight, record) = place(&fixture, &text(&"a".repeat(16_000)));
    tokio::time::sleep(Duration::from_secs(9)).await;
    placed.record_start();
    placed.record_end(usage(1000, None), 0, 4096, true);
    let learned = PlacementOutcome { answer_tokens: Some(1000), ..PlacementOutcome::default() };
    assert_eq!((*record.outcome.lock(), fixture.fleet.view().replicas[0].local_load.learned().rates), (learned, before));
    assert!(fixture.placer.output_lengths.expected(OutputBounds::default()) > 256.0);
}

#[tokio::test(start_paused = true)]
async fn the_time_between_tokens_teaches_the_step_time() {
    let fixture = Fixture::approximate(1).await;
    let local_load = fixture.fleet.view().replicas[0].local_load.clone();
    let before = local_load.learned().rates.step;
    for _ in 0..50 {
        let (mut placed, _in_flight, _) = place(&fixture, &stream('a', 100));
        placed.record_start();
        tokio::time::sleep(Duration::from_secs(5)).await;
        // Without usage each event counts as a token.
        placed.record_end(None, 51, 4096, true);
    }
    assert!(local_load.learned().rates.step > 2.0 * before, "{} was {before}", local_load.learned().rates.step);
}

#[tokio::test(start_paused = true)]
async fn an_engines_reported_cache_hits_correct_the_decision() {
    let fixture = Fixture::approximate(2).await;
    let prompt = stream('a', 16_000);
    let matched = || fixture.choose(&prompt).decision.choice().candidate.matched;
    for cached in [0, 3900, 64] {
        let (mut placed, in_flight, record) = place(&fixture, &prompt);
        placed.record_start();
        placed.record_end(usage(10, Some(cached)), 10, 4096, true);
        assert_eq!(record.outcome.lock().cached_tokens.map(u64::from), Some(cached));
        drop(in_flight);
        assert_eq!(matched(), 62 * 64);
    }
}
