//! Lifetime of a request: it counts until its last byte, or until its client leaves; then nothing
//! of it is left anywhere.

use std::time::Duration;

use tokio::time::Instant;

use serde_json::json;
use tokio::task::JoinSet;

use crate::harness::{Answering, CHAT, DEADLINE, Endpoint, Fleet, MODEL, Setup, Workplace, chat, chat_stream, until};

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_cancels_its_request() {
    let fleet = Fleet::start(Setup::agents(1).engine("--sim-step-ms 10")).await;
    let edge = fleet.edge();
    // Leave mid-stream.
    let mut stream = edge.open(CHAT, &chat_stream(10_000)).await;
    stream.events(3).await;
    fleet.until_in_flight("n0/0", 1).await;
    assert_eq!(fleet.engine("n0/0").await.metric("vllm:num_requests_running").await, 1.0);
    drop(stream);
    fleet.until_idle().await;
    // Leave before the first byte.
    let waiting = tokio::spawn(async move { edge.post(CHAT, &chat(10_000)).await });
    fleet.until_in_flight("n0/0", 1).await;
    waiting.abort();
    fleet.until_idle().await;
    let generated = fleet.engine("n0/0").await.metric("vllm:generation_tokens_total").await;
    assert!(generated < 5000.0, "{generated} tokens were made for nobody");
}

#[tokio::test(start_paused = true)]
async fn answers_are_counted_by_how_they_ended() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let edge = fleet.edge();
    for body in [chat(3), chat_stream(3)] {
        for _ in 0..5 {
            assert_eq!(edge.post(CHAT, &body).await.status, 200);
        }
    }
    edge.post("/tokenize", &json!({"model": MODEL, "prompt": "Hello"})).await;
    let mut left = edge.open(CHAT, &chat_stream(10_000)).await;
    left.events(2).await;
    drop(left);
    fleet.until_idle().await;
    let page = Endpoint::Tcp(fleet.routers[0].admin).get("/metrics").await.text();
    for (outcome, count) in [("complete", 11), ("client_left", 1), ("broken", 0)] {
        assert!(page.contains(&format!("hostler_answers_total{{outcome=\"{outcome}\"}} {count}\n")), "{page}");
    }
}

async fn behave(edge: Endpoint, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let tokens = random.usize(1..40);
    let stream = random.bool();
    // Some clients leave, whatever has happened by then.
    let patience = Duration::from_millis(if random.u8(..) < 80 { random.u64(1..150) } else { 30_000 });
    let request = async {
        let mut answer = edge.open(CHAT, &if stream { chat_stream(tokens) } else { chat(tokens) }).await;
        if stream && answer.status == 200 {
            for event in 0..random.usize(0..tokens) {
                // An answer that ended early has ended in any case.
                let _ = tokio::time::timeout(DEADLINE, read_some(&mut answer)).await;
                if event % 4 == 0 && random.u8(..) < 40 {
                    tokio::time::sleep(Duration::from_millis(random.u64(..30))).await;
                }
            }
        }
        if random.bool() {
            let _ = answer.finish().await;
        }
    };
    let _ = tokio::time::timeout(patience, request).await;
}

async fn read_some(answer: &mut Answering) {
    let before = answer.read.len();
    while answer.read.len() == before && answer.piece().await == Ok(true) {}
}

#[tokio::test(start_paused = true)]
async fn every_count_returns_to_zero_after_clients_and_engines_fail() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let fleet = Fleet::start(Setup::two_agents().routers(2)).await;
    let edges = [fleet.routers[0].edge(), fleet.routers[1].edge()];
    let mut clients = JoinSet::new();
    let kill_at = random.usize(50..150);
    for client in 0..200 {
        if client == kill_at {
            fleet.kill("n0/0").await;
        }
        clients.spawn(behave(edges[client % 2].clone(), random.u64(..)));
        tokio::time::sleep(Duration::from_millis(random.u64(..8))).await;
    }
    let deadline = Instant::now() + DEADLINE;
    while let Some(client) = clients.join_next().await {
        client.unwrap();
        assert!(Instant::now() < deadline, "clients still wait; seed {seed}");
    }
    fleet.until_ready().await;
    fleet.until_idle().await;
    let served = fleet.replica("n0/0").await.served + fleet.replica("n1/0").await.served;
    assert!(served > 100, "the run did little: {served} served; seed {seed}");
}

/// Memory of a process in bytes, without its program's own pages.
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_reads_nothing_holds_little_and_stalls_nobody() {
    const TOKENS: usize = 2000;
    const CHOICES: usize = 16;
    const GENERATED: &str = "vllm:generation_tokens_total";
    // Use a separate process, so that its memory is only the router's and the agent's.
    let mut workplace = Workplace::new();
    // The allocator gives free memory back at once.
    workplace.environment.extend([("MIMALLOC_PURGE_DELAY", "0"), ("MIMALLOC_ARENA_EAGER_COMMIT", "0")]);
    let up = workplace.up(1, &["--sim-step-ms", "0", "--sim-decode-us", "0", "--num-gpu-blocks-override", "16384"]);
    up.line("curl").await;
    let (edge, admin) = (Endpoint::Tcp(up.address("edge").await), up.admin().await);
    let replica = admin.replicas().await.unwrap().remove(0);
    let engine = Endpoint::Unix(replica.socket.into());
    let body = json!({"model": MODEL, "prompt": "Everything", "stream": true, "max_tokens": TOKENS, "n": CHOICES, "logprobs": 20});
    // The first such answer leaves behind memory that is not held for a client: a tokenizer, and
    // threads' own memory.
    edge.post("/v1/completions", &body).await.assert_whole_stream();
    let (before, generated_before) = (resident(up.pid()), engine.metric(GENERATED).await);

    let stalled = edge.open("/v1/completions", &body).await;
    let mut most = 0;
    until("the engine to have generated everything", async || {
        most = most.max(resident(up.pid()));
        let generated = engine.metric(GENERATED).await - generated_before;
        if generated >= (TOKENS * CHOICES) as f64 { Ok(()) } else { Err(format!("{generated} tokens")) }
    })
    .await;
    for _ in 0..5 {
        edge.post(CHAT, &chat_stream(20)).await.assert_whole_stream();
        most = most.max(resident(up.pid()));
    }
    assert_eq!(admin.replica(&replica.id).await.local_in_flight, 1, "the stalled answer is not over");

    let buffered = most.saturating_sub(before);
    let whole = stalled.finish().await;
    whole.assert_whole_stream();
    let answer = whole.body.len() as u64;
    println!("{buffered} bytes buffered of {answer}");
    // Windows and buffers come to about 2 MB, which the first answer may have left behind.
    assert!(answer > 14 << 20, "{answer} bytes prove nothing");
    assert!(buffered < 4 << 20, "{buffered} bytes were buffered for a client that read nothing of {answer}");
}
