//! Crash suspects: requests that crash engines, or make them err.
//!
//! They cost a fleet two engines and nobody else an answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use http::Request;
use http_body_util::Full;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::harness::{Answer, CHAT, Endpoint, Fleet, MODEL, Setup, hostler, until};

/// Text that kills the engines of these tests.
const DEADLY: &str = "say-the-word-that-kills";

/// Text that the engines answer with 500.
const INDIGESTIBLE: &str = "left-recursive-grammar";

/// A chat with this content.
fn chat_body(content: &str, tokens: usize, stream: bool) -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": tokens, "stream": stream})
}

/// Engines that die this many milliseconds after a deadly request has come.
fn setup(agents: usize, milliseconds: u64) -> Setup {
    Setup::agents(agents).engine(&format!("--sim-die-on {DEADLY} --sim-die-on-ms {milliseconds} --sim-err-on {INDIGESTIBLE}"))
}

/// Epochs of the engines, and the number of their restarts.
async fn lives(fleet: &Fleet) -> (Vec<u64>, u32) {
    let replicas = fleet.admin().replicas().await.unwrap();
    (replicas.iter().map(|replica| replica.epoch).collect(), replicas.iter().map(|replica| replica.restarts).sum())
}

/// Waits until this many engines have crashed since the beginning, and all serve again.
async fn until_crashed(fleet: &Fleet, crashes: u32) {
    until(&format!("{crashes} crashes"), async || {
        let (_, restarts) = lives(fleet).await;
        if restarts >= crashes { Ok(()) } else { Err(format!("{restarts} restarts")) }
    })
    .await;
    fleet.until_ready().await;
    assert_eq!(lives(fleet).await.1, crashes);
}

/// Clients that send one question after another, each time a new one, until told to stop.
struct Load {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicUsize>,
    clients: JoinSet<Vec<Answer>>,
}

impl Load {
    fn start(fleet: &Fleet, clients: usize) -> Self {
        let (stop, answered) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let mut running = JoinSet::new();
        for client in 0..clients {
            let (edge, stop, answered) = (fleet.edge(), stop.clone(), answered.clone());
            running.spawn(async move {
                let mut answers = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    // Request only whole answers, so that none of them is ever broken off.
                    let question = chat_body(&format!("question {} of client {client}", answers.len()), 10, false);
                    answers.push(edge.post(CHAT, &question).await);
                    answered.fetch_add(1, Ordering::Relaxed);
                }
                answers
            });
        }
        Self { stop, answered, clients: running }
    }

    /// Ends the load once at least this many requests were answered, all of them well.
    async fn end_after(self, least: usize) {
        until("enough answers", async || {
            let answered = self.answered.load(Ordering::Relaxed);
            if answered >= least { Ok(()) } else { Err(format!("{answered} answers")) }
        })
        .await;
        self.stop.store(true, Ordering::Relaxed);
        let answers: Vec<Answer> = self.clients.join_all().await.into_iter().flatten().collect();
        for answer in &answers {
            assert_eq!((answer.status.as_u16(), &answer.ended), (200, &Ok(())), "{}", answer.text());
        }
    }
}

fn assert_refused(answer: &Answer) {
    assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (422, None), "{}", answer.text());
    assert_eq!(answer.json()["error"]["type"], "request_kills_engines");
    assert!(answer.message().contains("it was in flight when 2 engines crashed (n"), "{}", answer.text());
    assert!(!answer.text().contains(DEADLY));
}

#[tokio::test(start_paused = true)]
async fn a_killer_request_costs_two_engines_and_no_other_client() {
    let fleet = Fleet::start(setup(8, 30)).await;
    let edge = fleet.edge();
    let load = Load::start(&fleet, 24);
    let killer = chat_body(DEADLY, 50, false);
    assert_refused(&edge.post(CHAT, &killer).await);
    until_crashed(&fleet, 2).await;

    let (before, _) = lives(&fleet).await;
    for _ in 0..10 {
        assert_refused(&edge.post(CHAT, &killer).await);
    }
    assert_eq!(lives(&fleet).await.0, before, "nobody dies of a request that is refused");

    let other = chat_body(&format!("{DEADLY}, in other words"), 50, false);
    assert_refused(&edge.post(CHAT, &other).await);
    until_crashed(&fleet, 4).await;
    assert_refused(&edge.post(CHAT, &other).await);

    load.end_after(100).await;
    assert_eq!(lives(&fleet).await.1, 4);
    // A client has its answer before the router has counted it.
    until("those that were there have been cleared", async || {
        let suspects = fleet.routers[0].metric("hostler_crash_suspects").await;
        if suspects == 2.0 { Ok(()) } else { Err(format!("{suspects} suspects")) }
    })
    .await;
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_dying_with_many_requests_costs_no_answer() {
    let fleet = Fleet::start(setup(3, 30)).await;
    let engines = ["n0/0", "n1/0", "n2/0"];
    for engine in engines {
        fleet.fault(engine, "hang").await;
    }
    let mut requests = JoinSet::new();
    for number in 0..60 {
        let edge = fleet.edge();
        requests.spawn(async move { edge.post(CHAT, &chat_body(&format!("innocent {number}"), 5, number % 2 == 0)).await });
    }
    // The rest is queued for lack of room.
    let fullest = until("all requests taken", async || {
        let replicas = fleet.admin().replicas().await.unwrap();
        let taken: u32 = replicas.iter().map(|replica| replica.in_flight).sum();
        let queued = fleet.routers[0].metric("hostler_queued_requests").await;
        let fullest = replicas.into_iter().max_by_key(|replica| replica.in_flight).filter(|replica| replica.in_flight >= 3);
        fullest.filter(|_| f64::from(taken) + queued == 60.0).ok_or_else(|| format!("{taken} taken, {queued} queued"))
    })
    .await
    .id;
    for engine in engines.into_iter().filter(|engine| *engine != fullest) {
        fleet.fault(engine, "ok").await;
    }
    fleet.crash(&fullest).await;
    while let Some(answer) = requests.join_next().await {
        let answer = answer.unwrap();
        assert_eq!((answer.status.as_u16(), &answer.ended), (200, &Ok(())), "{}", answer.text());
    }
    assert_eq!(fleet.routers[0].metric("hostler_crash_suspects").await, 0.0);
}

#[tokio::test(start_paused = true)]
async fn requests_of_a_crash_get_first_tokens_within_seconds() {
    // An answer takes 4 s: one after another, ten on each of the two remaining engines would need
    // 40 s.
    let fleet = Fleet::start(Setup::agents(3).engine("--sim-step-ms 40")).await;
    fleet.fault("n0/0", "hang").await;
    let mut streams = JoinSet::new();
    for number in 0..60 {
        let edge = fleet.edge();
        streams.spawn(async move {
            let mut stream = edge.open(CHAT, &chat_body(&format!("innocent {number}"), 100, true)).await;
            stream.events(2).await;
            (Instant::now(), stream.finish().await)
        });
    }
    fleet.until_replica("n0/0", "its share of the streams", |replica| replica.in_flight >= 15).await;
    fleet.crash("n0/0").await;
    let killed = Instant::now();
    while let Some(answer) = streams.join_next().await {
        let (begun, answer) = answer.unwrap();
        answer.assert_whole_stream();
        let waited = begun.saturating_duration_since(killed);
        assert!(waited < Duration::from_secs(5), "{waited:?}");
    }
    assert_eq!(fleet.routers[0].metric("hostler_crash_suspects").await, 0.0);
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_killed_two_engines_is_banned() {
    let fleet = Fleet::start(setup(4, 200)).await;
    // Simulated engines die of a text, which a continuation from tokens does not contain: this
    // stream has none.
    let mut killer = chat_body(DEADLY, 500, true);
    killer["stop"] = "never said".into();
    for crash in 1..=2 {
        fleet.edge().post(CHAT, &killer).await.assert_broken_stream();
        until("the engine's crash", async || {
            let (_, restarts) = lives(&fleet).await;
            if restarts >= crash { Ok(()) } else { Err(format!("{restarts} restarts")) }
        })
        .await;
    }
    assert_refused(&fleet.edge().post(CHAT, &killer).await);
    until_crashed(&fleet, 2).await;
}

#[tokio::test(start_paused = true)]
async fn a_request_that_killed_through_two_routers_is_banned_everywhere() {
    let fleet = Fleet::start(setup(4, 200).routers(2)).await;
    // The stream is not resumed, so each attempt costs one engine.
    let mut killer = chat_body(DEADLY, 500, true);
    killer["stop"] = "never said".into();
    for (crash, router) in (1..).zip(&fleet.routers) {
        router.edge().post(CHAT, &killer).await.assert_broken_stream();
        for router in &fleet.routers {
            until("the crash's report", async || {
                let restarts: u32 = router.admin().replicas().await.unwrap().iter().map(|replica| replica.restarts).sum();
                let suspects = router.metric("hostler_crash_suspects").await;
                if (restarts, suspects) == (crash, 1.0) { Ok(()) } else { Err(format!("{restarts} restarts, {suspects} suspects")) }
            })
            .await;
        }
    }
    for router in &fleet.routers {
        assert_refused(&router.edge().post(CHAT, &killer).await);
    }
    until_crashed(&fleet, 2).await;
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_prompt_in_flight_at_two_outside_kills_is_answered() {
    let fleet = Fleet::start(Setup::agents(1).engine("--sim-step-ms 40")).await;
    // The stream is not resumed, and its client sends it again.
    let mut prompt = chat_body("are you there?", 100, true);
    prompt["stop"] = "never said".into();
    for kill in 1..=2 {
        let mut stream = fleet.edge().open(CHAT, &prompt).await;
        stream.events(2).await;
        fleet.kill("n0/0").await;
        stream.finish().await.assert_broken_stream();
        until_crashed(&fleet, kill).await;
        assert_eq!(fleet.routers[0].metric("hostler_crash_suspects").await, 0.0);
    }
    fleet.edge().post(CHAT, &prompt).await.assert_whole_stream();
}

/// A fleet with a key for each of two tenants.
async fn start_with_tenants(setup: Setup, folder: &tempfile::TempDir) -> (Fleet, [String; 2]) {
    let file = folder.path().join("keys.toml");
    let mut keys = ["reckless", "unsuspecting"].map(str::to_owned);
    for tenant in &mut keys {
        let made = hostler(&["keys", "create", "--tenant", tenant, "--file", file.to_str().unwrap()]).await;
        *tenant = made.stdout.split_whitespace().find(|word| word.starts_with("hk_")).unwrap().to_owned();
    }
    (Fleet::start(setup.router(|router| router.keys_file = file)).await, keys)
}

async fn ask_as(edge: &Endpoint, key: &str, body: &Value) -> Answer {
    let request = Request::post(CHAT).header("content-type", "application/json").header("authorization", format!("Bearer {key}"));
    edge.request(request.body(Full::from(body.to_string())).unwrap()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ban_holds_only_for_the_tenant_that_sent_it() {
    let folder = tempfile::tempdir().unwrap();
    let (fleet, keys) = start_with_tenants(setup(4, 30), &folder).await;
    let killer = chat_body(DEADLY, 50, false);
    for (crashes, key) in [2, 4].into_iter().zip(&keys) {
        assert_refused(&ask_as(&fleet.edge(), key, &killer).await);
        // So the request was sent, and nobody had said that the other tenant's was equal.
        until_crashed(&fleet, crashes).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn six_killers_of_one_tenant_cost_four_engines() {
    let folder = tempfile::tempdir().unwrap();
    let (fleet, [reckless, unsuspecting]) = start_with_tenants(setup(8, 30), &folder).await;
    let edge = fleet.edge();
    let (stop, answered) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
    let mut neighbors = JoinSet::new();
    for client in 0..4 {
        let (edge, key, stop, answered) = (fleet.edge(), unsuspecting.clone(), stop.clone(), answered.clone());
        neighbors.spawn(async move {
            let mut answers = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let question = chat_body(&format!("question {} of client {client}", answers.len()), 10, false);
                answers.push(ask_as(&edge, &key, &question).await);
                answered.fetch_add(1, Ordering::Relaxed);
            }
            answers
        });
    }
    for digit in 0..6 {
        let answer = ask_as(&edge, &reckless, &chat_body(&format!("{DEADLY} {digit}"), 50, false)).await;
        // The later requests find that their only replica is away.
        assert!(matches!(answer.status.as_u16(), 422 | 503), "{}", answer.text());
    }
    assert_eq!(fleet.routers[0].metric("hostler_confined_tenants").await, 1.0);
    let before = answered.load(Ordering::Relaxed);
    until("answers for the other tenant", async || {
        let now = answered.load(Ordering::Relaxed);
        if now >= before + 50 { Ok(()) } else { Err(format!("{now} answers")) }
    })
    .await;
    stop.store(true, Ordering::Relaxed);
    for answer in neighbors.join_all().await.into_iter().flatten() {
        assert_eq!((answer.status.as_u16(), &answer.ended), (200, &Ok(())), "{}", answer.text());
    }
    fleet.until_ready().await;
    let replicas = fleet.admin().replicas().await.unwrap();
    let crashed: Vec<&str> = replicas.iter().filter(|replica| replica.restarts > 0).map(|replica| &*replica.id).collect();
    assert!((3..=4).contains(&crashed.len()), "{crashed:?}");
}

#[tokio::test(start_paused = true)]
async fn an_indigestible_request_gets_its_error_and_marks_no_replica() {
    let fleet = Fleet::start(setup(8, 30)).await;
    let load = Load::start(&fleet, 4);
    for number in 0..6 {
        let answer = fleet.edge().post(CHAT, &chat_body(&format!("{INDIGESTIBLE} {number}"), 5, false)).await;
        assert_eq!(answer.status, 500, "{}", answer.text());
        assert!(answer.message().contains("recursion"), "{}", answer.text());
        let replicas = fleet.admin().replicas().await.unwrap();
        assert!(replicas.iter().all(|replica| replica.is_ready() && replica.restarts == 0), "{replicas:#?}");
    }
    load.end_after(10).await;
    assert_eq!(fleet.routers[0].metric("hostler_retries_total").await, 6.0, "each is tried twice");
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn an_indigestible_request_repeated_gets_its_error_at_once() {
    let fleet = Fleet::start(setup(4, 30)).await;
    let begun = Instant::now();
    let mut clients = JoinSet::new();
    for _ in 0..4 {
        let edge = fleet.edge();
        clients.spawn(async move {
            for _ in 0..5 {
                let answer = edge.post(CHAT, &chat_body(INDIGESTIBLE, 5, false)).await;
                assert_eq!(answer.status, 500, "{}", answer.text());
            }
        });
    }
    clients.join_all().await;
    // An engine might take this long to exit, if the router waited for each of them.
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    assert_eq!(fleet.routers[0].metric("hostler_crash_suspects").await, 0.0);
    fleet.until_idle().await;
}
