//! Orders of operators under load: sleep and wake, LoRA adapters, release, a rolling restart.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use hostler_proto::agent::v1::Phase;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tonic::Code;

use crate::harness::{Answer, CHAT, Endpoint, Fleet, Seen, Setup, chat, chat_stream, hostler, until};

/// Prompt so long that engines have whole blocks of it in their caches.
fn long_prompt() -> Value {
    json!({"model": "simulated", "prompt": "one two three four ".repeat(50), "max_tokens": 2})
}

fn of_adapter(name: &str) -> Value {
    let mut body = chat(4);
    body["model"] = name.into();
    body
}

async fn content(edge: &Endpoint, body: &Value) -> String {
    let answer = edge.post(CHAT, body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

#[tokio::test(start_paused = true)]
async fn a_replica_sleeps_when_idle_and_serves_again_when_woken() {
    let fleet = Fleet::start(Setup::two_agents().engine("--enable-sleep-mode --sim-step-ms 10")).await;
    let (edge, admin) = (fleet.edge(), fleet.admin());
    let (mut one, mut other) = (edge.open(CHAT, &chat_stream(100)).await, edge.open(CHAT, &chat_stream(100)).await);
    one.events(2).await;
    other.events(2).await;
    fleet.until_in_flight("n0/0", 1).await;
    let before = fleet.replica("n0/0").await;
    let ordered = tokio::spawn(async move { admin.sleep("n0/0", 1).await });
    fleet.until_replica("n0/0", "out of service at once", |replica| replica.phase == Phase::Sleeping).await;
    assert!(!ordered.is_finished(), "its answer says that it sleeps, and a request still runs");
    for _ in 0..6 {
        assert_eq!(edge.post(CHAT, &chat(2)).await.status, 200, "the other one serves");
    }
    one.finish().await.assert_whole_stream();
    other.finish().await.assert_whole_stream();
    assert_eq!(ordered.await.unwrap().unwrap(), ["n0/0"]);
    assert_eq!(fleet.engine("n0/0").await.get("/is_sleeping").await.json(), json!({"is_sleeping": true}));
    let asleep = fleet.replica("n0/0").await;
    assert_eq!((asleep.epoch, asleep.in_flight, asleep.served), (before.epoch, 0, before.served + 1));

    assert_eq!(admin.wake("n0/0").await.unwrap(), ["n0/0"]);
    fleet.until_replica("n0/0", "ready", Seen::is_ready).await;
    admin.sleep("n1/0", 1).await.unwrap();
    assert_eq!(edge.post(CHAT, &chat(2)).await.status, 200, "the woken one serves alone");
    assert_eq!(fleet.replica("n0/0").await.epoch, before.epoch, "it is the same life");
}

#[tokio::test(start_paused = true)]
async fn a_sleeping_fleet_says_so_and_answers_after_waking() {
    let fleet = Fleet::start(Setup::agents(1).agent(|agent| agent.replicas = 2).engine("--enable-sleep-mode")).await;
    let (edge, admin) = (fleet.edge(), fleet.admin());
    let before = content(&edge, &chat(12)).await;
    for level in [1, 2] {
        assert_eq!(admin.sleep("n0", level).await.unwrap(), ["n0/0", "n0/1"]);
        // A router may act on its state of a moment before.
        until("a refusal that says why", async || {
            let refused = edge.post(CHAT, &chat(2)).await;
            assert_eq!(refused.status, 503);
            if refused.message().contains("n0/0 is sleeping") { Ok(()) } else { Err(refused.text()) }
        })
        .await;
        assert_eq!(admin.wake("n0").await.unwrap(), ["n0/0", "n0/1"]);
        fleet.until_ready().await;
        // Unless its weights are read again, a simulated engine talks nonsense after level 2, like
        // a real one.
        assert_eq!(content(&edge, &chat(12)).await, before, "level {level}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_has_slept_has_nothing_cached() {
    let fleet = Fleet::start(Setup::agents(1).engine("--enable-sleep-mode")).await;
    fleet.until_exact().await;
    assert_eq!(fleet.edge().post("/v1/completions", &long_prompt()).await.status, 200);
    fleet.until_cached("n0/0", "something", |blocks| blocks > 0).await;
    fleet.admin().sleep("n0/0", 1).await.unwrap();
    until("an empty cache", async || {
        let cache = fleet.replica("n0/0").await.cache;
        if cache.blocks == 0 && cache.matches { Ok(()) } else { Err(format!("{cache:?}")) }
    })
    .await;
    fleet.admin().wake("n0/0").await.unwrap();
    fleet.until_ready().await;
    let answer = fleet.edge().post("/v1/completions", &long_prompt()).await;
    assert_eq!(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"], 0, "{}", answer.text());
    fleet.until_cached("n0/0", "what came since", |blocks| blocks > 0).await;
}

#[tokio::test(start_paused = true)]
async fn a_senseless_order_is_refused_and_changes_nothing() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let admin = fleet.admin();
    let refused = admin.sleep("n0/0", 1).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().starts_with("n0/0: this engine cannot sleep: start it with --enable-sleep-mode"), "{refused}");
    let refused = admin.lora("", "poet", "/tmp").await.unwrap_err();
    assert!(refused.message().contains("n0/0: ") && refused.message().contains("--enable-lora"), "{refused}");
    let refused = admin.wake("n0/0").await.unwrap_err();
    assert!(refused.message().contains("the engine is ready, and only a sleeping one can do this"), "{refused}");
    let refused = admin.release("n0").await.unwrap_err();
    assert_eq!(refused.message(), "there is nothing to release: n0/0 is ready");
    let refused = admin.lora("", "nobody", "").await.unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::NotFound, "no replica has an adapter called \"nobody\"; adapters: there are none")
    );
    assert!(fleet.replica("n0/0").await.is_ready());
    assert_eq!(fleet.edge().post(CHAT, &chat(2)).await.status, 200);
}

#[tokio::test(start_paused = true)]
async fn a_stopped_replica_is_released() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    fleet.admin().drain("n0/0").await.unwrap();
    let stopped = fleet.until_replica("n0/0", "stopped", |replica| replica.phase == Phase::Stopped).await;
    assert_eq!(fleet.admin().release("n0/0").await.unwrap(), ["n0/0"]);
    fleet.until_replica("n0/0", "another life", |replica| replica.is_ready() && replica.epoch > stopped.epoch).await;
}

#[tokio::test(start_paused = true)]
async fn a_release_calls_off_a_drain_without_a_restart() {
    let fleet = Fleet::start(Setup::agents(1).engine("--sim-step-ms 10")).await;
    let mut stream = fleet.edge().open(CHAT, &chat_stream(800)).await;
    stream.events(2).await;
    fleet.admin().drain("n0/0").await.unwrap();
    let draining = fleet.until_replica("n0/0", "draining", |replica| replica.phase == Phase::Draining).await;
    assert_eq!(fleet.admin().release("n0/0").await.unwrap(), ["n0/0"]);
    let back = fleet.until_replica("n0/0", "ready again", Seen::is_ready).await;
    assert_eq!((back.pid, back.epoch), (draining.pid, draining.epoch));
    assert_eq!(fleet.edge().post(CHAT, &chat(2)).await.status, 200);
    stream.finish().await.assert_whole_stream();
    assert_eq!(fleet.replica("n0/0").await.restarts, 0);
}

#[tokio::test(start_paused = true)]
async fn requests_for_an_adapter_go_where_it_is_loaded() {
    let fleet = Fleet::start(Setup::two_agents().engine("--enable-lora")).await;
    let (edge, admin) = (fleet.edge(), fleet.admin());
    let own = content(&edge, &chat(4)).await;
    assert_eq!(edge.post(CHAT, &of_adapter("poet")).await.status, 404);
    assert_eq!(admin.lora("n1/0", "poet", "/tmp").await.unwrap(), ["n1/0"]);
    // The model is listed at once: the order is answered after the report.
    until("a model of the fleet", async || {
        let models = edge.get("/v1/models").await.text();
        if models.contains("poet") { Ok(()) } else { Err(models) }
    })
    .await;
    let before = fleet.replica("n1/0").await.served;
    for _ in 0..6 {
        assert_ne!(content(&edge, &of_adapter("poet")).await, own);
    }
    fleet.until_replica("n1/0", "all six", |replica| replica.served == before + 6).await;

    // Clients cannot change the adapters of a fleet, whatever they write.
    let escaped = edge.post("/v1/unload%5Flora_adapter", &json!({"lora_name": "poet"})).await;
    assert_eq!(escaped.status, 400, "an escape of what needs none");
    for path in ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"] {
        let refused = edge.post(path, &json!({"lora_name": "poet", "lora_path": "/tmp"})).await;
        assert_eq!(refused.status, 403);
        assert!(refused.message().contains("hostler lora"), "{}", refused.text());
    }
    assert_eq!(admin.lora("", "poet", "").await.unwrap(), ["n0/0", "n1/0"]);
    until("no model of the fleet", async || {
        let answer = edge.post(CHAT, &of_adapter("poet")).await;
        if answer.status == 404 { Ok(()) } else { Err(answer.text()) }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn an_adapters_cached_blocks_are_separate_and_found_again() {
    let fleet = Fleet::start(Setup::two_agents().engine("--enable-lora")).await;
    fleet.until_exact().await;
    let (edge, admin) = (fleet.edge(), fleet.admin());
    admin.lora("", "poet", "/tmp").await.unwrap();
    for router in &fleet.routers {
        until("the adapter everywhere", async || {
            let replicas = router.admin().replicas().await.unwrap();
            if replicas.iter().all(|replica| replica.models == ["simulated", "poet"]) { Ok(()) } else { Err(format!("{replicas:?}")) }
        })
        .await;
    }
    let mut poem = long_prompt();
    poem["model"] = "poet".into();
    assert_eq!(edge.post("/v1/completions", &poem).await.status, 200);
    let served = until("the blocks of the poem", async || {
        let replicas = fleet.admin().replicas().await.unwrap();
        let known = replicas.iter().find(|replica| replica.cache.blocks > 0 && replica.cache.matches).map(|replica| replica.id.clone());
        known.ok_or_else(|| format!("{replicas:?}"))
    })
    .await;
    let matched = async |body: &Value| {
        let answer = edge.post("/v1/completions", body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let decision = fleet.admin().explain("", 1).await.unwrap().remove(0);
        assert_eq!(decision.level, "exact", "{decision:?}");
        decision.scored.iter().find(|scored| scored.replica == served).unwrap().matched
    };
    assert!(matched(&poem).await > 0, "the same prompt of the same adapter is cached");
    assert_eq!(matched(&long_prompt()).await, 0, "the same prompt without it is not");
}

#[tokio::test(start_paused = true)]
async fn a_restarted_engine_has_its_adapters_again_before_it_serves() {
    let fleet = Fleet::start(Setup::agents(1).engine("--enable-lora")).await;
    let admin = fleet.admin();
    admin.lora("n0", "poet", "/tmp").await.unwrap();
    assert_eq!(admin.lora("n0", "poet", "/tmp").await.unwrap(), ["n0/0"], "loading it again is no error");
    let conflict = admin.lora("n0", "poet", "/var").await.unwrap_err();
    assert!(conflict.message().contains("poet is loaded from /tmp"), "{conflict}");
    let missing = admin.lora("n0", "lost", "/no/where").await.unwrap_err();
    assert!(missing.message().contains("No adapter found for /no/where"), "{missing}");
    let before = fleet.until_replica("n0/0", "the adapter", |replica| replica.models == ["simulated", "poet"]).await;
    fleet.kill("n0/0").await;
    let after = fleet.until_replica("n0/0", "another life", |replica| replica.is_ready() && replica.epoch > before.epoch).await;
    assert_eq!(after.models, ["simulated", "poet"], "known from the first moment");
    assert_eq!(fleet.edge().post(CHAT, &of_adapter("poet")).await.status, 200);
    admin.lora("", "poet", "").await.unwrap();
    fleet.kill("n0/0").await;
    let last = fleet.until_replica("n0/0", "a third life", |replica| replica.is_ready() && replica.epoch > after.epoch).await;
    assert_eq!(last.models, ["simulated"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_adapter_is_reported_until_nobody_wants_it() {
    let fleet = Fleet::start(Setup::agents(1).engine("--enable-lora")).await;
    let admin = fleet.admin();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap().to_owned();
    admin.lora("n0", "poet", &path).await.unwrap();
    let before = fleet.replica("n0/0").await;
    folder.close().unwrap();
    fleet.kill("n0/0").await;
    let after = fleet.until_replica("n0/0", "another life", |replica| replica.is_ready() && replica.epoch > before.epoch).await;
    assert_eq!(after.models, ["simulated"]);
    let advised = async || hostler(&["advise", "n0/0", "--admin", admin.socket()]).await.stdout;
    until("advice about the adapter", async || {
        let advice = advised().await;
        if advice.contains(&format!("poet ({path})")) { Ok(()) } else { Err(advice) }
    })
    .await;
    assert_eq!(admin.lora("", "poet", "").await.unwrap(), ["n0/0"], "although no replica serves it");
    until("no advice", async || {
        let advice = advised().await;
        if advice.starts_with("nothing to advise") { Ok(()) } else { Err(advice) }
    })
    .await;
    let unknown = admin.lora("", "poet", "").await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
}

#[tokio::test(start_paused = true)]
async fn unloading_an_adapter_from_one_replica_fails_no_request() {
    let fleet = Fleet::start(Setup::two_agents().engine("--enable-lora")).await;
    fleet.admin().lora("", "poet", "/tmp").await.unwrap();
    fleet.until_replica("n0/0", "the adapter", |replica| replica.models.len() == 2).await;
    fleet.until_replica("n1/0", "the adapter", |replica| replica.models.len() == 2).await;
    let load = Load::start(&fleet, 6, |number| if number % 2 == 0 { of_adapter("poet") } else { chat_stream(4) });
    tokio::time::sleep(Duration::from_millis(200)).await;
    fleet.admin().lora("n0", "poet", "").await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    load.assert_all_answered().await;
    assert_eq!(fleet.replica("n0/0").await.models, ["simulated"]);
    assert_eq!(fleet.replica("n1/0").await.models, ["simulated", "poet"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_of_all_replicas_fails_no_request() {
    let fleet = Fleet::start(Setup::two_agents().agent(|agent| agent.replicas = 2)).await;
    let before = fleet.admin().replicas().await.unwrap();
    let load = Load::start(&fleet, 8, |number| if number % 2 == 0 { chat(20) } else { chat_stream(20) });
    let admin = fleet.admin().socket();
    let begun = Instant::now();
    let rolled = hostler(&["restart", "--rolling", "all", "--wait", "60s", "--admin", admin]).await;
    assert!(rolled.success, "{}{}", rolled.stdout, rolled.stderr);
    let took = begun.elapsed();
    let answered = load.assert_all_answered().await;
    println!("four replicas in {took:?}, {answered} requests\n{}", rolled.stdout);
    for (before, after) in before.iter().zip(fleet.admin().replicas().await.unwrap()) {
        assert!(after.epoch > before.epoch && after.is_ready() && after.restarts == 1, "{after:?}");
        assert!(rolled.stdout.contains(&format!("{}: ready again after", after.id)), "{}", rolled.stdout);
    }
    assert!(answered > 2 * 8, "the clients hardly asked: {answered} requests in {took:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_spares_the_only_replica_unless_forced() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let admin = fleet.admin().socket();
    let before = fleet.replica("n0/0").await;
    let refused = hostler(&["restart", "--rolling", "n0", "--admin", admin]).await;
    assert!(!refused.success && refused.stderr.contains("the only ready replica of simulated"), "{}", refused.stderr);
    assert_eq!(fleet.replica("n0/0").await.epoch, before.epoch);
    let forced = hostler(&["restart", "--rolling", "--force", "n0", "--admin", admin]).await;
    assert!(forced.success, "{}", forced.stderr);
    let after = fleet.replica("n0/0").await;
    assert!(after.is_ready() && after.epoch > before.epoch, "{after:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operator_commands_report_what_they_did() {
    let fleet = Fleet::start(Setup::two_agents().engine("--enable-lora --enable-sleep-mode")).await;
    let admin = fleet.admin().socket();
    let ask = async |arguments: &[&str]| {
        let ended = hostler(&[arguments, &["--admin", admin]].concat()).await;
        assert!(ended.success, "{arguments:?}: {}", ended.stderr);
        ended.stdout
    };
    assert_eq!(ask(&["lora", "list"]).await, "no adapters are loaded\n");
    assert_eq!(ask(&["lora", "load", "poet", "/tmp", "--on", "n1"]).await, "loaded poet on n1/0\n");
    assert_eq!(ask(&["lora", "list"]).await, "ADAPTER  PATH  REPLICAS\npoet     /tmp  n1/0\n");
    assert_eq!(ask(&["lora", "load", "poet", "/tmp"]).await, "loaded poet on n0/0, n1/0\n");
    assert_eq!(ask(&["lora", "unload", "poet"]).await, "unloaded poet on n0/0, n1/0\n");
    assert_eq!(ask(&["sleep", "n0/0", "--level", "2"]).await, "asleep n0/0\n");
    assert!(ask(&["ps"]).await.contains("sleeping"));
    assert_eq!(ask(&["wake", "n0/0"]).await, "awake n0/0\n");
    ask(&["drain", "n0"]).await;
    fleet.until_replica("n0/0", "stopped", |replica| replica.phase == Phase::Stopped).await;
    assert_eq!(ask(&["release", "n0"]).await, "released n0/0\n");
    let refused = hostler(&["release", "n1/0", "--admin", admin]).await;
    assert_eq!(refused.stderr, "error: there is nothing to release: n1/0 is ready\n");
    let refused = hostler(&["restart", "--admin", admin]).await;
    assert!(!refused.success && refused.stderr.contains("TARGET"), "{}", refused.stderr);
}

struct Load {
    stop: Arc<AtomicBool>,
    clients: JoinSet<Vec<Answer>>,
}

impl Load {
    fn start(fleet: &Fleet, clients: usize, question: fn(usize) -> Value) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let mut running = JoinSet::new();
        for client in 0..clients {
            let (edge, stop) = (fleet.edge(), stop.clone());
            running.spawn(async move {
                let mut answers = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    answers.push(edge.post(CHAT, &question(client + answers.len())).await);
                }
                answers
            });
        }
        Self { stop, clients: running }
    }

    /// Stops asking, and returns the number of answers, all of which were whole.
    async fn assert_all_answered(self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        let answers: Vec<Answer> = self.clients.join_all().await.into_iter().flatten().collect();
        for answer in &answers {
            assert_eq!(answer.status, 200, "{}", answer.text());
            let is_stream = answer.header("content-type").is_some_and(|content| content.starts_with("text/event-stream"));
            if is_stream {
                answer.assert_whole_stream();
            } else {
                assert_eq!(answer.ended, Ok(()));
                assert_eq!(answer.json()["choices"][0]["finish_reason"], "length", "{}", answer.text());
            }
        }
        answers.len()
    }
}
