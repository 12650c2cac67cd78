//! Copies of cached blocks in the host's memory: known by tier, preferred to computing, and left
//! out of everything where engines have none.

use serde_json::{Value, json};

use crate::harness::{Answer, CHAT, Fleet, MODEL, Setup};

/// A cache on the GPU for about one of the texts below, copies on the host for many, and a usage
/// that says how much of a prompt was cached.
const TIERED: &str = "--enable-prompt-tokens-details --num-gpu-blocks-override 129 --max-model-len 2048 --sim-host-blocks 2000";

/// A text of some 1,500 tokens that begins like no other.
fn text(name: &str) -> String {
    (0..)
        .map(|number| format!("{name}q{number}z "))
        .scan(0, |length, word| {
            (*length < 1500).then(|| {
                *length += word.len();
                word
            })
        })
        .collect()
}

fn chat(content: &str) -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 2})
}

fn cached(answer: &Answer) -> u64 {
    answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)
}

/// Makes an engine compute a text without a router.
async fn seed(fleet: &Fleet, id: &str, content: &str) -> u64 {
    let answer = fleet.engine(id).await.post(CHAT, &chat(content)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["usage"]["prompt_tokens"].as_u64().unwrap() / 16
}

#[tokio::test(start_paused = true)]
async fn a_prompt_that_has_left_the_gpu_goes_where_its_copy_is() {
    let fleet = Fleet::start(Setup::two_agents().engine(TIERED)).await;
    fleet.until_exact().await;
    let first = seed(&fleet, "n1/0", &text("a")).await;
    let other = seed(&fleet, "n1/0", &text("b")).await;
    fleet.until_replica("n1/0", "both copies", |replica| replica.cache.host_blocks >= first + other).await;
    assert!(fleet.replica("n1/0").await.cache.blocks < first + other, "the GPU has no room for both");
    let answer = fleet.edge().post(CHAT, &chat(&text("a"))).await;
    let decision = fleet.admin().explain(answer.header("x-hostler-id").unwrap(), 1).await.unwrap().remove(0);
    let chosen = &decision.scored[decision.chosen as usize];
    assert_eq!((chosen.replica.as_str(), decision.level.as_str()), ("n1/0", "exact"));
    assert!(chosen.loaded > 0 && chosen.terms.unwrap().load > 0.0, "{chosen:?}");
    assert_eq!(u64::from(chosen.matched), cached(&answer), "the engine found what was predicted");
    assert!(chosen.matched >= 1400, "{chosen:?}");
}

#[tokio::test(start_paused = true)]
async fn engines_without_copies_have_no_second_tier() {
    let fleet = Fleet::start(Setup::two_agents().engine("--enable-prompt-tokens-details")).await;
    fleet.until_exact().await;
    let blocks = seed(&fleet, "n0/0", &text("a")).await;
    fleet.until_cached("n0/0", "the text", |now| now >= blocks).await;
    let answer = fleet.edge().post(CHAT, &chat(&text("a"))).await;
    let decision = fleet.admin().explain(answer.header("x-hostler-id").unwrap(), 1).await.unwrap().remove(0);
    assert!(decision.scored.iter().all(|scored| (scored.loaded, scored.terms.unwrap().load) == (0, 0.0)), "{decision:?}");
    assert_eq!(fleet.replica("n0/0").await.cache.host_blocks, 0);
}

#[tokio::test(start_paused = true)]
async fn copies_end_with_their_engines_life() {
    let fleet = Fleet::start(Setup::two_agents().engine(TIERED)).await;
    fleet.until_exact().await;
    let blocks = seed(&fleet, "n0/0", &text("a")).await;
    fleet.until_replica("n0/0", "the copy", |replica| replica.cache.host_blocks >= blocks).await;
    let before = fleet.replica("n0/0").await.epoch;
    fleet.admin().restart("n0/0").await.unwrap();
    fleet.until_replica("n0/0", "its next life", |replica| replica.epoch > before && replica.is_ready()).await;
    assert_eq!(fleet.replica("n0/0").await.cache.host_blocks, 0);
    seed(&fleet, "n0/0", &text("b")).await;
    fleet.until_replica("n0/0", "copies of the new life", |replica| replica.cache.host_blocks > 0).await;
}
