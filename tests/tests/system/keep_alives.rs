//! Event streams through proxies, which close silent connections: the bytes that a client gets
//! while its request waits or its engine is silent, and the error that it gets then.

use std::time::Duration;

use hostler_agent::FrontEnd;
use serde_json::{Value, json};

use crate::harness::{CHAT, Endpoint, Fleet, MODEL, Setup, chat, chat_stream, until};

const COMMENT: &str = ": keep-alive\n\n";
const PING: &str = "event: ping\ndata: {\"type\": \"ping\"}\n\n";

/// Setup of agents whose clients get a sign of life this often.
fn setup(agents: usize) -> Setup {
    Setup::agents(agents).router(|router| router.stream_keepalive = Duration::from_millis(50))
}

#[tokio::test(start_paused = true)]
async fn a_stream_is_kept_alive_whenever_its_engine_is_silent() {
    let fleet = Fleet::start(setup(1)).await;
    fleet.fault("n0/0", "hang").await;
    let mut answering = fleet.edge().open(CHAT, &chat_stream(4)).await;
    answering.events(3).await;
    assert_eq!(String::from_utf8_lossy(&answering.read), COMMENT.repeat(3));
    assert_eq!(answering.headers["content-type"], "text/event-stream; charset=utf-8");
    assert_eq!((&answering.headers["x-accel-buffering"], answering.headers["x-hostler-id"].len()), (&"no".parse().unwrap(), 16));
    fleet.fault("n0/0", "ok").await;
    let answer = answering.finish().await;
    answer.assert_whole_stream();
    let text = answer.text().replace(COMMENT, "");
    assert_eq!(text.matches("data: ").count(), text.matches("\n\n").count(), "a comment stands within an event: {}", answer.text());

    let mut answering = fleet.edge().open(CHAT, &chat_stream(5000)).await;
    while !String::from_utf8_lossy(&answering.read).contains("data: ") {
        answering.piece().await.unwrap();
    }
    fleet.fault("n0/0", "hang").await;
    let silent = async {
        while !answering.read.ends_with(COMMENT.repeat(2).as_bytes()) {
            answering.piece().await.unwrap();
        }
    };
    crate::harness::soon("comments between events", silent).await;
    fleet.fault("n0/0", "ok").await;
}

#[tokio::test(start_paused = true)]
async fn errors_are_statuses_before_comments_and_events_afterwards() {
    let limit = Duration::from_millis(400);
    for (period, dialect) in [(Duration::from_secs(60), CHAT), (Duration::ZERO, CHAT), (Duration::from_millis(50), CHAT)] {
        let fleet =
            Fleet::start(Setup::agents(1).router(|router| (router.stream_keepalive, router.answer_timeout) = (period, limit))).await;
        fleet.fault("n0/0", "hang").await;
        let answer = fleet.edge().post(dialect, &chat_stream(4)).await;
        if period == Duration::from_millis(50) {
            answer.assert_broken_stream();
            let error: Value = serde_json::from_str(answer.events().last().unwrap()).unwrap();
            assert_eq!((&error["error"]["code"], &error["error"]["type"]), (&json!(504), &json!("TimeoutError")), "{error}");
        } else {
            assert_eq!((answer.status.as_u16(), answer.json()["error"]["code"].clone()), (504, json!(504)), "{period:?}");
        }
        fleet.fault("n0/0", "ok").await;
        fleet.until_idle().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_engines_refusal_after_a_comment_keeps_its_words() {
    // One long prompt fills the engine, so the other waits in the router.
    let fleet = Fleet::start(setup(1).engine("--max-num-batched-tokens 256")).await;
    fleet.fault("n0/0", "hang").await;
    let mut body = chat_stream(4);
    body["messages"][0]["content"] = "many words ".repeat(1000).into();
    let first = fleet.edge().open(CHAT, &body).await;
    fleet.until_replica("n0/0", "the first request", |replica| replica.local_in_flight == 1).await;
    body["max_tokens"] = (-1).into();
    let mut answering = fleet.edge().open(CHAT, &body).await;
    answering.events(1).await;
    fleet.fault("n0/0", "ok").await;
    first.finish().await.assert_whole_stream();
    let answer = answering.finish().await;
    answer.assert_broken_stream();
    let direct = fleet.edge().post(CHAT, &body).await;
    assert_eq!(direct.status, 400, "{}", direct.text());
    let last_event: Value = serde_json::from_str(answer.events().last().unwrap()).unwrap();
    assert_eq!(last_event, direct.json());
}

#[tokio::test(start_paused = true)]
async fn a_stream_kept_alive_still_fails_over() {
    let fleet = Fleet::start(setup(2)).await;
    for id in ["n0/0", "n1/0"] {
        fleet.fault(id, "hang").await;
    }
    let mut answering = fleet.edge().open(CHAT, &chat_stream(4)).await;
    answering.events(1).await;
    let busy = until("the request on its replica", async || {
        let replicas = fleet.admin().replicas().await.map_err(|status| status.to_string())?;
        replicas.iter().find(|replica| replica.in_flight == 1).map(|replica| replica.id.clone()).ok_or_else(|| format!("{replicas:?}"))
    })
    .await;
    let other = if busy == "n0/0" { "n1/0" } else { "n0/0" };
    fleet.fault(other, "ok").await;
    fleet.kill(&busy).await;
    answering.finish().await.assert_whole_stream();
    assert_eq!(Endpoint::Tcp(fleet.routers[0].admin).metric("hostler_retries_total").await, 1.0);
}

#[tokio::test(start_paused = true)]
async fn only_event_streams_are_kept_alive() {
    let fleet = Fleet::start(setup(1).engine("--sim-step-ms 150")).await;
    let plain = fleet.edge().post(CHAT, &chat(3)).await;
    assert_eq!((plain.status.as_u16(), plain.header("x-accel-buffering")), (200, None));
    assert_eq!(plain.json()["usage"]["completion_tokens"], 3);
    let ollama = json!({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "options": {"num_predict": 3}});
    let lines = fleet.edge().post("/api/chat", &ollama).await;
    assert_eq!((lines.status.as_u16(), lines.header("x-accel-buffering")), (200, Some("no")));
    assert!(lines.text().lines().all(|line| line.starts_with('{')), "{}", lines.text());
    let streamed = fleet.edge().post(CHAT, &chat_stream(3)).await;
    streamed.assert_whole_stream();
    assert!(streamed.text().contains(COMMENT), "{}", streamed.text());
}

/// Routes that a chat stands for if engines have vLLM's Rust front-end: the request, the keep-alive
/// of the stream, and its last event.
fn translated() -> [(&'static str, Value, &'static str, &'static str); 2] {
    let hello = json!([{"role": "user", "content": "Hello"}]);
    let message = json!({"model": MODEL, "messages": hello, "stream": true, "max_tokens": 4});
    let response = json!({"model": MODEL, "input": hello, "stream": true, "max_output_tokens": 4});
    [("/v1/messages", message, PING, "message_stop"), ("/v1/responses", response, COMMENT, "response.incomplete")]
}

#[tokio::test(start_paused = true)]
async fn a_translated_stream_is_kept_alive_like_any_other() {
    let fleet = Fleet::start(setup(1).agent(|agent| agent.front_end = FrontEnd::Rust)).await;
    for (path, mut body, alive, last) in translated() {
        fleet.fault("n0/0", "hang").await;
        let mut answering = fleet.edge().open(path, &body).await;
        answering.events(3).await;
        assert_eq!(String::from_utf8_lossy(&answering.read), alive.repeat(3));
        assert_eq!(answering.headers["content-type"], "text/event-stream; charset=utf-8");
        assert_eq!((&answering.headers["x-accel-buffering"], answering.headers["x-hostler-id"].len()), (&"no".parse().unwrap(), 16));
        fleet.fault("n0/0", "ok").await;
        let answer = answering.finish().await;
        assert_eq!(answer.ended, Ok(()), "{}", answer.text());
        let text = answer.text().replace(alive, "");
        assert!(text.rsplit("event: ").next().unwrap().starts_with(last) && !text.contains(": keep-alive"), "{}", answer.text());

        for longest in ["max_tokens", "max_output_tokens"] {
            body.as_object_mut().unwrap().entry(longest).and_modify(|tokens| *tokens = 4000.into());
        }
        let mut answering = fleet.edge().open(path, &body).await;
        while !String::from_utf8_lossy(&answering.read).contains("delta") {
            answering.piece().await.unwrap();
        }
        fleet.fault("n0/0", "hang").await;
        let silent = async {
            while !answering.read.ends_with(alive.repeat(2).as_bytes()) {
                answering.piece().await.unwrap();
            }
        };
        crate::harness::soon("what keeps the stream alive between events", silent).await;
        fleet.fault("n0/0", "ok").await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_error_of_a_translated_stream_has_its_routes_form() {
    let limits = |period, answer| {
        Setup::agents(1)
            .agent(|agent| agent.front_end = FrontEnd::Rust)
            .router(move |router| (router.stream_keepalive, router.answer_timeout) = (period, answer))
    };
    let fleet = Fleet::start(limits(Duration::from_millis(50), Duration::from_millis(400))).await;
    fleet.fault("n0/0", "hang").await;
    for (path, body, alive, _) in translated() {
        let answer = fleet.edge().post(path, &body).await;
        assert!(answer.status == 200 && answer.ended.is_err(), "{}", answer.text());
        let (name, error) =
            answer.text().replace(alive, "").split_once("\ndata: ").map(|(name, data)| (name.to_owned(), data.to_owned())).unwrap();
        let error: Value = serde_json::from_str(&error).unwrap();
        assert_eq!((name.as_str(), &error["type"]), ("event: error", &json!("error")), "{error}");
        assert!(error.to_string().contains("no engine began to answer"), "{error}");
    }
    let fleet = Fleet::start(limits(Duration::ZERO, Duration::from_millis(400))).await;
    fleet.fault("n0/0", "hang").await;
    for (path, body, ..) in translated() {
        assert_eq!(fleet.edge().post(path, &body).await.status, 504, "{path}");
    }
}
