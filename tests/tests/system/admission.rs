//! Limits of senders, priorities when the fleet is full, and the answers to refused requests.

use std::path::Path;
use std::time::SystemTime;

use bytes::Bytes;
use hostler_router::keys::{KeyEntry, KeyLimits, Secret, change};
use http::Request;
use http_body_util::Full;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinHandle;

use crate::harness::{Answer, CHAT, Fleet, MODEL, Setup, chat, chat_stream, soon, until};

/// Makes a key with these limits for a tenant of this name.
fn key(file: &Path, tenant: &str, limits: KeyLimits) -> String {
    let secret = Secret::random().unwrap();
    let entry = KeyEntry { name: tenant.to_owned(), limits, ..KeyEntry::new(&secret, tenant, SystemTime::now()) };
    change(file, true, |entries| {
        entries.push(entry);
        Ok(())
    })
    .unwrap();
    secret.reveal().to_owned()
}

fn by(key: &str, body: &Value) -> Request<Full<Bytes>> {
    let request = Request::post(CHAT).header("content-type", "application/json").header("authorization", format!("Bearer {key}"));
    request.body(Full::from(body.to_string())).unwrap()
}

/// Headers of OpenAI's limits in an answer: `limit`, `remaining` and `reset` of requests or tokens.
fn rate<'a>(answer: &'a Answer, of: &str) -> Option<[&'a str; 3]> {
    let header = |what: &str| answer.header(&format!("x-ratelimit-{what}-{of}"));
    Some([header("limit")?, header("remaining")?, header("reset")?])
}

#[tokio::test(start_paused = true)]
async fn a_caller_at_its_limit_learns_which_and_until_when() {
    let keys = TempDir::new().unwrap();
    let file = keys.path().join("keys.toml");
    let limited =
        key(&file, "limited", KeyLimits { requests_per_minute: Some(2), output_per_minute: Some(600_000), ..KeyLimits::default() });
    let free = key(&file, "free", KeyLimits::default());
    let fleet = Fleet::start(Setup::agents(1).router(|router| router.keys_file = file)).await;
    let edge = fleet.edge();

    let first = edge.request(by(&limited, &chat(5))).await;
    assert_eq!(first.status, 200, "{}", first.text());
    let [limit, remaining, reset] = rate(&first, "requests").unwrap();
    assert!((limit, remaining) == ("2", "1") && reset.ends_with('s'), "{:?}", first.headers);
    let models =
        edge.request(Request::get("/v1/models").header("authorization", format!("Bearer {limited}")).body(Full::default()).unwrap());
    assert_eq!(rate(&models.await, "requests").unwrap()[..2], ["2", "1"], "every answer says it, and this one costs nothing");

    // The generated tokens count, not the expected ones: 5 each.
    until("the answer's tokens", async || {
        let models = Request::get("/v1/models").header("authorization", format!("Bearer {limited}")).body(Full::default()).unwrap();
        let answer = edge.request(models).await;
        let [limit, remaining, _] = rate(&answer, "tokens").unwrap();
        let used = limit.parse::<u64>().unwrap() - remaining.parse::<u64>().unwrap();
        if used <= 5 { Ok(()) } else { Err(format!("{used} are counted")) }
    })
    .await;

    assert_eq!(edge.request(by(&limited, &chat(5))).await.status, 200);
    let refused = edge.request(by(&limited, &chat(5))).await;
    assert_eq!(refused.status, 429, "{}", refused.text());
    assert_eq!(refused.json()["error"]["type"], "rate_limit_exceeded");
    assert!(refused.message().contains("`limited` may use 2 requests per minute"), "{}", refused.text());
    let seconds: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=30).contains(&seconds), "{seconds}");
    assert_eq!(rate(&refused, "requests").unwrap()[1], "0");
    assert!(fleet.routers[0].metric("hostler_refused_total").await >= 1.0);

    let other = edge.request(by(&free, &chat(1))).await;
    assert_eq!((other.status.as_u16(), rate(&other, "requests"), rate(&other, "tokens")), (200, None, None));
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_spent_daily_budget_is_refused_without_waiting() {
    let keys = TempDir::new().unwrap();
    let file = keys.path().join("keys.toml");
    let poor = key(&file, "poor", KeyLimits { output_per_day: Some(8), ..KeyLimits::default() });
    let fleet = Fleet::start(Setup::agents(1).router(|router| router.keys_file = file)).await;
    let mut answers = Vec::new();
    for _ in 0..2 {
        answers.push(fleet.edge().request(by(&poor, &chat_stream(4))).await);
        fleet.until_idle().await;
    }
    answers.iter().for_each(Answer::assert_whole_stream);
    let refused = fleet.edge().request(by(&poor, &chat_stream(4))).await;
    assert_eq!((refused.status.as_u16(), &refused.json()["error"]["type"]), (429, &json!("insufficient_quota")), "{}", refused.text());
    assert_eq!(refused.header("x-should-retry"), Some("false"), "SDKs would send it again at once");
    assert!(refused.header("retry-after").unwrap().parse::<u64>().unwrap() > 80_000);
}

#[tokio::test(start_paused = true)]
async fn in_flight_requests_count_until_their_last_byte() {
    let keys = TempDir::new().unwrap();
    let file = keys.path().join("keys.toml");
    let one = key(&file, "one", KeyLimits { in_flight: Some(1), ..KeyLimits::default() });
    let fleet = Fleet::start(Setup::agents(1).router(|router| router.keys_file = file)).await;
    let mut running = fleet.edge().send(by(&one, &chat_stream(10_000))).await;
    running.events(2).await;
    let refused = fleet.edge().request(by(&one, &chat(1))).await;
    assert_eq!((refused.status.as_u16(), refused.header("retry-after")), (429, Some("1")));
    drop(running);
    until("its place", async || {
        let answer = fleet.edge().request(by(&one, &chat(1))).await;
        if answer.status == 200 { Ok(()) } else { Err(answer.text()) }
    })
    .await;
    fleet.until_idle().await;
}

/// A prompt of 6,000 bytes, some 1,500 tokens to a router.
///
/// It has nothing in common with one of another name.
fn long(name: &str) -> Value {
    let words: Vec<String> = (0..900).map(|number| format!("{name}q{number}")).collect();
    let mut content = words.join(" ");
    content.truncate(6000);
    json!({"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 1, "stream": true})
}

/// Sends a long prompt that the engine cannot begin.
fn send(fleet: &Fleet, key: &str, name: &str, priority: i32) -> JoinHandle<Answer> {
    let mut request = by(key, &long(name));
    request.headers_mut().insert("x-request-id", name.parse().unwrap());
    request.headers_mut().insert("x-hostler-priority", priority.to_string().parse().unwrap());
    let edge = fleet.edge();
    tokio::spawn(async move { edge.request(request).await })
}

async fn until_held(fleet: &Fleet, count: f64) {
    until(&format!("{count} queued"), async || {
        let queued = fleet.routers[0].metric("hostler_queued_requests").await;
        if queued == count { Ok(()) } else { Err(format!("{queued} are queued")) }
    })
    .await;
}

/// A fleet of one engine that hangs on a first request larger than one step, and two keys: of a
/// tenant that floods, and of one that does not.
async fn hung(most: usize) -> (Fleet, TempDir, [String; 2], JoinHandle<Answer>) {
    let keys = TempDir::new().unwrap();
    let file = keys.path().join("keys.toml");
    let both = ["flood", "light"].map(|tenant| key(&file, tenant, KeyLimits::default()));
    let setup = Setup::agents(1).engine("--max-num-batched-tokens 256").router(|router| {
        router.keys_file = file;
        router.max_queued = most;
    });
    let fleet = Fleet::start(setup).await;
    fleet.fault("n0/0", "hang").await;
    let first = send(&fleet, &both[0], "first", 0);
    fleet.until_replica("n0/0", "the first request", |replica| replica.local_in_flight == 1).await;
    (fleet, keys, both, first)
}

/// Placed requests in their order, by their clients' names for them.
async fn order(fleet: &Fleet) -> Vec<String> {
    let decisions = fleet.admin().explain("", 100).await.unwrap();
    decisions.iter().rev().map(|decision| decision.client_id.clone()).collect()
}

#[tokio::test(start_paused = true)]
async fn the_least_served_tenant_goes_first_beside_a_flood() {
    let (fleet, _keys, [flood, light], first) = hung(10).await;
    let mut answering = vec![first];
    for number in 1..=8 {
        answering.push(send(&fleet, &flood, &format!("flood{number}"), -9));
        until_held(&fleet, f64::from(number)).await;
    }
    let refused = send(&fleet, &flood, "too-many", 0).await.unwrap();
    assert_eq!((refused.status.as_u16(), refused.header("retry-after")), (429, Some("5")), "{}", refused.text());
    answering.push(send(&fleet, &light, "light", 0));
    until_held(&fleet, 9.0).await;
    fleet.fault("n0/0", "ok").await;
    for answer in answering {
        soon("an answer", answer).await.unwrap().assert_whole_stream();
    }
    let order = order(&fleet).await;
    // A tenant's usage before anybody had to wait is not counted, so one of the flood's requests
    // may go first.
    let turn = order.iter().position(|name| name == "light").unwrap();
    assert!(order.len() == 10 && turn <= 2, "a key that is no admin's has no band before the others': {order:?}");
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_less_urgent_band_has_its_tenth() {
    let (fleet, _keys, [flood, light], first) = hung(100).await;
    let mut answering = vec![first, send(&fleet, &light, "patient", 7)];
    until_held(&fleet, 1.0).await;
    for number in 2..=24 {
        answering.push(send(&fleet, &flood, &format!("urgent{number}"), 0));
        until_held(&fleet, f64::from(number)).await;
    }
    fleet.fault("n0/0", "ok").await;
    for answer in answering {
        soon("an answer", answer).await.unwrap().assert_whole_stream();
    }
    let turn = order(&fleet).await.iter().position(|name| name == "patient").unwrap();
    assert!((8..=12).contains(&turn), "it had turn {turn} of 25");
}

#[tokio::test(start_paused = true)]
async fn a_full_engines_refusal_is_hidden_while_others_have_room() {
    let fleet = Fleet::start(Setup::agents(5)).await;
    for id in ["n0/0", "n1/0", "n2/0", "n3/0"] {
        fleet.fault(id, "busy").await;
    }
    for body in [chat(1), chat_stream(1), chat(2), chat_stream(2)] {
        let answer = fleet.edge().post(CHAT, &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    fleet.until_replica("n4/0", "all four answered", |replica| replica.served == 4).await;
    fleet.fault("n4/0", "busy").await;
    until("a refusal", async || {
        let answer = fleet.edge().post(CHAT, &chat(1)).await;
        let refusal = (answer.status.as_u16(), answer.header("retry-after"));
        if refusal == (503, Some("1")) { Ok(()) } else { Err(answer.text()) }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn engines_that_bound_their_queue_refuse_nothing() {
    let fleet = Fleet::start(Setup::agents(2).engine("--max-num-seqs 8 --max-num-queued-reqs 16")).await;
    let clients = (0..120).map(|number| {
        let edge = fleet.edge();
        async move {
            for choices in [1, 1, 2, 4, 8] {
                let mut body = if number % 2 == 0 { chat(8) } else { chat_stream(8) };
                body["n"] = choices.into();
                let answer = edge.post(CHAT, &body).await;
                assert_eq!(answer.status, 200, "{}", answer.text());
            }
        }
    });
    soon("all answers", futures_util::future::join_all(clients)).await;
    // What an engine has served is reported a moment later.
    until("each was sent once", async || {
        let served = [fleet.replica("n0/0").await.served, fleet.replica("n1/0").await.served];
        if served.iter().sum::<u64>() == 600 { Ok(()) } else { Err(format!("{served:?}")) }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn requests_of_a_crashed_engine_wait_for_a_place_in_another_that_bounds_its_queue() {
    let fleet = Fleet::start(Setup::agents(2).engine("--max-num-seqs 4 --max-num-queued-reqs 8")).await;
    let clients = (0..60).map(|number| {
        let edge = fleet.edge();
        async move {
            let body = if number % 2 == 0 { chat(64) } else { chat_stream(64) };
            let answer = edge.post(CHAT, &body).await;
            let text = answer.text();
            assert!(answer.status == 200 && !text.contains("error"), "{text}");
        }
    });
    let crash = async {
        fleet.until_replica("n1/0", "a full engine", |replica| replica.in_flight >= 8).await;
        fleet.crash("n1/0").await;
    };
    soon("all answers", futures_util::future::join(futures_util::future::join_all(clients), crash)).await;
}
