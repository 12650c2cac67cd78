//! Engines that die, err or are full.
//!
//! A begun answer ends with an error and never looks whole; an answer that had not begun moves to
//! another engine. Streams that continue from another engine are in `resumption`.

use std::time::Duration;

use hostler_agent::AgentConfig;
use hostler_proto::agent::v1::Phase;
use http::StatusCode;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::harness::{Answer, Answering, CHAT, Endpoint, Fleet, MODEL, Setup, chat, chat_stream, unresumed_stream, until};

/// Streams that have all begun, as evenly spread as the router spreads them, and that are not
/// resumed.
async fn streams(fleet: &Fleet, count: usize, tokens: usize) -> Vec<Answering> {
    let mut opened = Vec::new();
    for _ in 0..count {
        let mut stream = fleet.edge().open(CHAT, &unresumed_stream(tokens)).await;
        stream.events(2).await;
        opened.push(stream);
    }
    opened
}

async fn finish(streams: Vec<Answering>) -> Vec<Answer> {
    let mut reading: JoinSet<Answer> = streams.into_iter().map(Answering::finish).collect();
    let mut answers = Vec::new();
    while let Some(answer) = reading.join_next().await {
        answers.push(answer.unwrap());
    }
    answers
}

/// Counts whole answers and broken ones; each must be one or the other.
fn whole_and_broken(answers: &[Answer]) -> (usize, usize) {
    let broken = answers.iter().filter(|answer| answer.ended.is_err()).count();
    for answer in answers {
        if answer.ended.is_err() { answer.assert_broken_stream() } else { answer.assert_whole_stream() }
    }
    (answers.len() - broken, broken)
}

#[tokio::test(start_paused = true)]
async fn a_killed_engines_streams_fail_and_the_others_go_on() {
    let fleet = Fleet::start(Setup::two_agents().engine("--sim-step-ms 10")).await;
    let opened = streams(&fleet, 16, 250).await;
    let victim = fleet.until_replica("n0/0", "half of the streams", |replica| replica.in_flight == 8).await;
    fleet.kill("n0/0").await;
    assert_eq!(whole_and_broken(&finish(opened).await), (8, 8));
    assert_eq!(fleet.routers[0].metric("hostler_retries_total").await, 0.0, "what has begun is not sent again");

    let back = fleet.until_replica("n0/0", "a new life", |replica| replica.is_ready() && replica.epoch > victim.epoch).await;
    assert_eq!(back.restarts, 1);
    assert!(!fleet.is_running(victim.pid) && fleet.is_running(back.pid));
    let served = back.served;
    // Use different prompts: the first one is still cached at the other engine.
    for number in 0..8 {
        let mut body = chat_stream(5);
        body["messages"][0]["content"] = format!("{number} is another question").into();
        fleet.edge().post(CHAT, &body).await.assert_whole_stream();
    }
    fleet.until_replica("n0/0", "requests again", |replica| replica.served > served).await;
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_without_a_first_byte_is_answered_elsewhere() {
    let fleet = Fleet::start(Setup::two_agents()).await;
    let ids = ["n0/0", "n1/0"];
    for id in ids {
        fleet.fault(id, "hang").await;
    }
    let edge = fleet.edge();
    let mut requests = JoinSet::new();
    for index in 0..12 {
        let edge = edge.clone();
        let body = if index % 2 == 0 { chat(10) } else { chat_stream(10) };
        requests.spawn(async move { edge.post(CHAT, &body).await });
    }
    // Both hang until then: an engine that answered the early ones would attract the late ones.
    let in_flight = until("all requests placed", async || {
        let counts = [fleet.replica(ids[0]).await.in_flight, fleet.replica(ids[1]).await.in_flight];
        if counts[0] + counts[1] == 12 { Ok(counts) } else { Err(format!("{counts:?} in flight")) }
    })
    .await;
    // The split varies: on a slow machine one engine held 11 of them.
    let fuller = usize::from(in_flight[1] > in_flight[0]);
    fleet.fault(ids[1 - fuller], "ok").await;
    fleet.until_in_flight(ids[1 - fuller], 0).await;
    fleet.kill(ids[fuller]).await;
    while let Some(answer) = requests.join_next().await {
        let answer = answer.unwrap();
        assert_eq!((answer.status, &answer.ended), (StatusCode::OK, &Ok(())), "{}", answer.text());
        assert!(answer.text().contains("\"finish_reason\":\"length\""), "{}", answer.text());
    }
    assert!(fleet.routers[0].metric("hostler_retries_total").await >= f64::from(in_flight[fuller]));
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn an_engines_error_event_passes_without_its_done() {
    let fleet = Fleet::start(Setup::two_agents().engine("--sim-step-ms 10")).await;
    let opened = streams(&fleet, 6, 150).await;
    fleet.until_in_flight("n0/0", 3).await;
    fleet.fault("n0/0", "error_event").await;
    let answers = finish(opened).await;
    assert_eq!(whole_and_broken(&answers), (3, 3));
    let passed = answers.iter().filter(|answer| answer.text().contains("EngineCore encountered an issue"));
    assert_eq!(passed.count(), 3, "the engine's own words reach the client");
    assert_eq!(fleet.replica("n0/0").await.restarts, 0);
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_begins_with_an_error_is_retried_elsewhere() {
    // The first token takes far longer than the test.
    let fleet = Fleet::start(Setup::two_agents().engine_of(0, "--sim-step-ms 60000")).await;
    let edge = fleet.edge();
    let mut requests = JoinSet::new();
    for _ in 0..4 {
        let edge = edge.clone();
        requests.spawn(async move { edge.post(CHAT, &chat_stream(10)).await });
    }
    // A request that is placed only after the fault would wait for its first token.
    until("all requests placed, and those at the quick engine answered", async || {
        let (slow, quick) = (fleet.replica("n0/0").await, fleet.replica("n1/0").await);
        let placed = u64::from(slow.in_flight) + quick.served;
        if slow.in_flight >= 1 && placed == 4 { Ok(()) } else { Err(format!("{placed} placed")) }
    })
    .await;
    fleet.fault("n0/0", "error_event").await;
    while let Some(answer) = requests.join_next().await {
        answer.unwrap().assert_whole_stream();
    }
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn streams_of_a_hung_engine_end_with_the_watchdogs_finding() {
    let hasty = |agent: &mut AgentConfig| agent.stall_timeout = Duration::from_secs(1);
    let fleet = Fleet::start(Setup::agents(1).engine("--sim-step-ms 10").agent(hasty)).await;
    let mut stream = fleet.edge().open(CHAT, &unresumed_stream(10_000)).await;
    stream.events(2).await;
    fleet.fault("n0/0", "hang").await;
    let answer = stream.finish().await;
    answer.assert_broken_stream();
    assert!(answer.text().contains("the engine of replica 0 hung: no token for "), "{}", answer.text());
    until("the hang is counted", async || {
        let hangs = fleet.routers[0].metric("hostler_replica_hangs_total").await;
        if hangs == 1.0 { Ok(()) } else { Err(format!("{hangs} hangs")) }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_stopped_from_outside_breaks_streams_and_restarts() {
    let fleet = Fleet::start(Setup::two_agents().engine("--sim-step-ms 10")).await;
    let opened = streams(&fleet, 6, 150).await;
    let victim = fleet.until_replica("n0/0", "half of the streams", |replica| replica.in_flight == 3).await;
    // The engine ends its streams with `abort` and `[DONE]`, and exits with code 0.
    fleet.terminate(&victim.id).await;
    let reading = tokio::spawn(finish(opened));
    let failed = fleet.until_replica("n0/0", "a crash", |replica| replica.phase == Phase::Failed).await;
    assert!(failed.reason.contains("without having been asked to") && failed.reason.contains("exit status: 0"), "{}", failed.reason);
    assert_eq!(whole_and_broken(&reading.await.unwrap()), (3, 3));
    let back = fleet.until_replica("n0/0", "a new life", |replica| replica.is_ready() && replica.epoch > victim.epoch).await;
    assert_eq!(back.restarts, 1);
}

#[tokio::test(start_paused = true)]
async fn a_truncated_answer_is_never_given_as_whole() {
    let fleet = Fleet::start(Setup::two_agents().engine("--sim-step-ms 10")).await;
    let edge = fleet.edge();
    let request = tokio::spawn(async move { edge.post(CHAT, &chat(100)).await });
    let victim = until("the request's replica", async || {
        let replicas = fleet.admin().replicas().await.unwrap();
        let running = replicas.iter().find(|replica| replica.in_flight == 1);
        running.cloned().ok_or_else(|| format!("{replicas:#?}"))
    })
    .await;
    fleet.terminate(&victim.id).await;
    let answer = request.await.unwrap();
    assert_eq!(
        (answer.status, &answer.json()["choices"][0]["finish_reason"]),
        (StatusCode::OK, &Value::from("length")),
        "{}",
        answer.text()
    );
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_busy_engine_is_hidden_while_another_has_room() {
    let fleet = Fleet::start(Setup::two_agents()).await;
    fleet.fault("n0/0", "busy").await;
    for _ in 0..8 {
        assert_eq!(fleet.edge().post(CHAT, &chat(2)).await.status, 200);
    }
    fleet.fault("n1/0", "busy").await;
    let answer = fleet.edge().post(CHAT, &chat(2)).await;
    assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (503, Some("1")));
    assert!(answer.message().starts_with("The engine is currently busy"), "{}", answer.text());
    fleet.fault("n0/0", "ok").await;
    assert_eq!(fleet.edge().post(CHAT, &chat(2)).await.status, 200);
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn errors_that_engines_answer_with_are_the_fleets_failures() {
    let fleet = Fleet::start(Setup::agents(1).engine("--sim-err-on indigestible")).await;
    let edge = fleet.edge();
    let mut indigestible = chat(2);
    indigestible["messages"][0]["content"] = "indigestible".into();
    for _ in 0..3 {
        assert_eq!(edge.post(CHAT, &chat(2)).await.status, 200);
        assert_eq!(edge.post(CHAT, &indigestible).await.status, 500);
    }
    let last = fleet.admin().explain("", 2).await.unwrap();
    let told = last.iter().map(|decision| (decision.status, decision.end.as_str())).collect::<Vec<_>>();
    assert_eq!(told, [(Some(500), "error"), (Some(200), "complete")]);
    assert_eq!(edge.post(CHAT, &json!({"model": MODEL, "messages": "no list"})).await.status, 400, "which is the client's own fault");
    fleet.fault("n0/0", "busy").await;
    for _ in 0..4 {
        assert_eq!(edge.post(CHAT, &chat(2)).await.status, 503);
    }
    let findings = fleet.admin().list().await.unwrap().findings;
    let [finding] = &findings[..] else { panic!("{findings:#?}") };
    assert_eq!(
        finding.evidence,
        "7 of the 10 requests that ended in the last minute failed: 4 were refused by an engine without room, \
         3 were answered with an error by their engine"
    );
    let page = Endpoint::Tcp(fleet.routers[0].admin).get("/metrics").await.text();
    for (verdict, count) in [("answered", 3), ("client_fault", 1), ("full", 4), ("error", 3), ("client_left", 0)] {
        assert!(page.contains(&format!("hostler_requests_total{{verdict=\"{verdict}\"}} {count}\n")), "{page}");
    }
}

#[tokio::test(start_paused = true)]
async fn two_dead_core_errors_ban_a_request_before_engines_exit() {
    let fleet = Fleet::start(Setup::two_agents().engine("--sim-step-ms 10")).await;
    let edge = fleet.edge();
    let request = tokio::spawn(async move { edge.post(CHAT, &chat(2000)).await });
    let mut erred: Vec<String> = Vec::new();
    for _ in 0..2 {
        let running = until("the request's next replica", async || {
            let replicas = fleet.admin().replicas().await.unwrap();
            let running = replicas.iter().find(|replica| replica.in_flight == 1 && !erred.contains(&replica.id));
            running.map(|replica| replica.id.clone()).ok_or_else(|| format!("{replicas:#?}"))
        })
        .await;
        // The fault ends only requests that the engine has by then, so repeat it until the request
        // has left.
        let own = async || fleet.replica(&running).await.local_in_flight;
        while own().await == 1 && !request.is_finished() {
            fleet.fault(&running, "error_event").await;
        }
        erred.push(running);
    }
    let answer = request.await.unwrap();
    assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (422, None), "{}", answer.text());
    assert_eq!(fleet.routers[0].metric("hostler_retries_total").await, 1.0);

    // These engines reported it but live; they serve other requests.
    let opened = streams(&fleet, 4, 300).await;
    fleet.until_in_flight("n0/0", 2).await;
    fleet.until_in_flight("n1/0", 2).await;
    drop(opened);
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_client_of_a_stopped_only_engine_may_retry() {
    let fleet = Fleet::start(Setup::agents(1).engine("--sim-step-ms 10 --shutdown-timeout 60")).await;
    // Until this one ends, the engine accepts others and begins none; then it answers them with
    // 500.
    let mut running = fleet.engine("n0/0").await.open(CHAT, &chat_stream(300)).await;
    running.events(2).await;
    let running = tokio::spawn(running.finish());
    fleet.terminate("n0/0").await;
    let (edge, bodies) = (fleet.edge(), [chat(1), chat_stream(1)]);
    let refused = until("refusals", async || {
        let (plain, stream) = tokio::join!(edge.post(CHAT, &bodies[0]), edge.post(CHAT, &bodies[1]));
        if [&plain, &stream].iter().any(|answer| answer.status == StatusCode::OK) {
            return Err("the signal has not come".into());
        }
        Ok([plain, stream])
    });
    for answer in refused.await {
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{}", answer.text());
        assert!(answer.header("retry-after").is_some(), "{}", answer.text());
    }
    running.await.unwrap().assert_whole_stream();
}
