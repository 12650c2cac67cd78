//! Resumption of streams whose engine dies, hangs or is stopped: they continue from another one,
//! and equal the streams without that.

use std::time::Duration;

use hostler_agent::{AgentConfig, FrontEnd};
use hostler_proto::agent::v1::Phase;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::harness::{Answer, Answering, CHAT, Fleet, Seen, Setup, chat_stream, hostler, soon};

mod waits;

/// Tokens of an answer: some two seconds.
const TOKENS: usize = 200;

/// Tokens of an answer that takes longer than a drain may.
const LONG: usize = 300;

const SHORT_DRAIN: Duration = Duration::from_secs(1);

fn resuming() -> Setup {
    Setup::two_agents().engine("--sim-step-ms 10")
}

fn stream_of(number: usize, tokens: usize) -> Value {
    let mut body = chat_stream(tokens);
    body["messages"][0]["content"] = format!("{number} is a question").into();
    body["stream_options"] = json!({"include_usage": true});
    body
}

/// Streams that have all begun, half of them on each of two replicas.
async fn open(fleet: &Fleet, count: usize) -> Vec<Answering> {
    open_of(fleet, count, TOKENS).await
}

async fn open_of(fleet: &Fleet, count: usize, tokens: usize) -> Vec<Answering> {
    open_as(fleet, count, |number| stream_of(number, tokens)).await
}

async fn open_as(fleet: &Fleet, count: usize, request: impl Fn(usize) -> Value) -> Vec<Answering> {
    let mut opened = Vec::new();
    for number in 0..count {
        let mut stream = fleet.edge().open(CHAT, &request(number)).await;
        stream.events(3).await;
        opened.push(stream);
    }
    fleet.until_in_flight("n0/0", u32::try_from(count / 2).unwrap()).await;
    opened
}

async fn finish(streams: Vec<Answering>) -> Vec<Answer> {
    let mut reading = JoinSet::new();
    for (number, stream) in streams.into_iter().enumerate() {
        reading.spawn(async move { (number, stream.finish().await) });
    }
    let mut answers = reading.join_all().await;
    answers.sort_by_key(|(number, _)| *number);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

/// Text, finish reasons, number of ids, and the usage without cached tokens.
fn content(answer: &Answer) -> (String, Vec<Value>, usize, Value) {
    answer.assert_whole_stream();
    let events: Vec<Value> = answer.events().iter().filter_map(|event| serde_json::from_str(event).ok()).collect();
    let text = events.iter().filter_map(|event| event.pointer("/choices/0/delta/content")?.as_str()).collect();
    let reasons = events.iter().filter_map(|event| event.pointer("/choices/0/finish_reason").filter(|reason| !reason.is_null()));
    let mut ids: Vec<&Value> = events.iter().map(|event| &event["id"]).collect();
    ids.dedup();
    let usage = events.iter().map(|event| &event["usage"]).find(|usage| usage.is_object()).cloned().unwrap_or_default();
    assert!(!answer.text().contains("token_ids\":["), "{}", answer.text());
    (text, reasons.cloned().collect(), ids.len(), json!([usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]]))
}

/// Checks that the answers equal undisturbed answers to equal requests.
async fn assert_same(fleet: &Fleet, answers: &[Answer], tokens: usize) {
    assert_same_as(fleet, answers, |number| stream_of(number, tokens)).await;
}

async fn assert_same_as(fleet: &Fleet, answers: &[Answer], request: impl Fn(usize) -> Value) {
    let mut undisturbed = Vec::new();
    for number in 0..answers.len() {
        undisturbed.push(fleet.edge().open(CHAT, &request(number)).await);
    }
    for (answer, undisturbed) in answers.iter().zip(finish(undisturbed).await) {
        assert_eq!(content(answer), content(&undisturbed), "{}", answer.text());
    }
}

/// Checks that all answers are whole and equal undisturbed ones, and that `resumed` of them had to
/// continue elsewhere.
async fn assert_unharmed(fleet: &Fleet, answers: &[Answer], resumed: usize) {
    assert_unharmed_as(fleet, answers, resumed, |number| stream_of(number, TOKENS)).await;
}

async fn assert_unharmed_as(fleet: &Fleet, answers: &[Answer], resumed: usize, request: impl Fn(usize) -> Value) {
    let seams = answers.iter().filter(|answer| answer.text().contains(": resumed\n\n")).count();
    assert_eq!(seams, resumed);
    assert_same_as(fleet, answers, request).await;
    assert_eq!(fleet.routers[0].metric("hostler_resumptions_total").await, resumed as f64);
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn streams_of_a_killed_engine_resume_on_another() {
    let fleet = Fleet::start(resuming()).await;
    let opened = open(&fleet, 8).await;
    fleet.kill("n0/0").await;
    assert_unharmed(&fleet, &finish(opened).await, 4).await;
}

#[tokio::test(start_paused = true)]
async fn streams_of_a_models_only_engine_go_on_at_its_standby_until_it_is_back() {
    let setup = Setup::agents(1).agent(|agent| agent.standby = true).engine("--sim-step-ms 10");
    let fleet = Fleet::start(setup).await;
    let begin = async || {
        let mut opened = Vec::new();
        for number in 0..6 {
            let mut stream = fleet.edge().open(CHAT, &stream_of(number, TOKENS)).await;
            stream.events(3).await;
            opened.push(stream);
        }
        opened
    };
    let opened = begin().await;
    fleet.until_in_flight("n0/0", 6).await;
    fleet.kill("n0/0").await;
    assert_unharmed(&fleet, &finish(opened).await, 6).await;
    fleet.until_replica("n0/0", "serves again", Seen::is_ready).await;
    let served = fleet.replica("n0/1").await.served;
    finish(begin().await).await;
    fleet.until_idle().await;
    assert_eq!(fleet.replica("n0/1").await.served, served, "a standby has no requests while the other engine serves");
}

#[tokio::test(start_paused = true)]
async fn streams_of_a_killed_rust_front_end_resume_on_another() {
    let fleet = Fleet::start(resuming().agent(|agent| agent.front_end = FrontEnd::Rust)).await;
    // That front-end answers the same request differently where it samples without a seed.
    let greedy = |number| {
        let mut body = stream_of(number, TOKENS);
        body["temperature"] = 0.into();
        body
    };
    let opened = open_as(&fleet, 8, greedy).await;
    fleet.kill("n0/0").await;
    let answers = finish(opened).await;
    assert!(!answers.iter().any(|answer| answer.text().contains("logprobs")), "no event has what that front-end leaves out");
    assert_unharmed_as(&fleet, &answers, 4, greedy).await;
}

#[tokio::test(start_paused = true)]
async fn streams_of_a_dead_core_resume_on_another_engine() {
    let fleet = Fleet::start(resuming()).await;
    let opened = open(&fleet, 8).await;
    fleet.fault("n0/0", "error_event").await;
    assert_unharmed(&fleet, &finish(opened).await, 4).await;
}

#[tokio::test(start_paused = true)]
async fn streams_of_a_hung_engine_resume_on_another() {
    let hasty = |agent: &mut AgentConfig| agent.stall_timeout = Duration::from_secs(1);
    let fleet = Fleet::start(resuming().agent(hasty)).await;
    let opened = open(&fleet, 4).await;
    fleet.fault("n0/0", "hang").await;
    assert_unharmed(&fleet, &finish(opened).await, 2).await;
}

#[tokio::test(start_paused = true)]
async fn streams_of_an_engine_stopped_from_outside_resume_on_another() {
    let fleet = Fleet::start(resuming()).await;
    let opened = open(&fleet, 8).await;
    // The engine ends its streams with `abort` and `[DONE]`.
    fleet.terminate("n0/0").await;
    assert_unharmed(&fleet, &finish(opened).await, 4).await;
}

#[tokio::test(start_paused = true)]
async fn a_stream_of_ollamas_api_resumes_on_another_engine() {
    let fleet = Fleet::start(resuming()).await;
    let body = json!({"model": "simulated", "messages": [{"role": "user", "content": "Hi"}], "options": {"num_predict": TOKENS}});
    let text_of = |answer: &Answer| {
        assert_eq!(answer.ended, Ok(()), "{}", answer.text());
        let text = answer.text();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.last().unwrap()["done"], true, "{text}");
        lines.iter().filter_map(|line| line["message"]["content"].as_str()).collect::<String>()
    };
    let alone = text_of(&fleet.edge().post("/api/chat", &body).await);
    let mut stream = fleet.edge().open("/api/chat", &body).await;
    assert!(stream.piece().await.unwrap());
    let running = fleet.admin().replicas().await.unwrap().into_iter().find(|replica| replica.in_flight == 1).unwrap();
    fleet.kill(&running.id).await;
    assert_eq!(text_of(&stream.finish().await), alone);
    assert_eq!(fleet.routers[0].metric("hostler_resumptions_total").await, 1.0);
}

#[tokio::test(start_paused = true)]
async fn a_stream_may_resume_on_its_restarted_engine() {
    let fleet = Fleet::start(resuming()).await;
    let body = chat_stream(1000);
    let mut stream = fleet.edge().open(CHAT, &body).await;
    for seams in 1..=3 {
        stream.events(50 * seams).await;
        let replicas = fleet.admin().replicas().await.unwrap();
        let running = replicas.into_iter().find(|replica| replica.in_flight == 1).unwrap();
        fleet.terminate(&running.id).await;
        fleet.until_replica(&running.id, "its next life", |replica| replica.is_ready() && replica.pid != running.pid).await;
    }
    let answer = stream.finish().await;
    assert_eq!(content(&answer), content(&fleet.edge().post(CHAT, &body).await));
    assert_eq!(answer.text().matches(": resumed\n\n").count(), 3);
}

/// Three replicas, two of which have the name of a poet.
///
/// The third has only the name that stands first at all of them.
fn poets() -> Setup {
    let named = |setup: Setup, (agent, names)| setup.engine_of(agent, &format!("--served-model-name {names}"));
    let names = [(0, "simulated poet"), (1, "simulated poet"), (2, "simulated")];
    names.into_iter().fold(Setup::agents(3).engine("--sim-step-ms 10"), named)
}

fn poem(number: usize) -> Value {
    let mut body = stream_of(number, TOKENS);
    body["model"] = "poet".into();
    body
}

#[tokio::test(start_paused = true)]
async fn streams_resume_only_where_their_model_is_served() {
    let fleet = Fleet::start(poets()).await;
    let mut opened = Vec::new();
    for number in 0..8 {
        opened.push(fleet.edge().open(CHAT, &poem(number)).await);
        opened[number].events(3).await;
    }
    fleet.until_in_flight("n0/0", 4).await;
    fleet.kill("n0/0").await;
    let answers = finish(opened).await;
    assert_eq!(answers.iter().filter(|answer| answer.text().contains(": resumed\n\n")).count(), 4);
    assert_same_as(&fleet, &answers, poem).await;
}

#[tokio::test(start_paused = true)]
async fn a_stream_of_an_otherwise_unserved_model_awaits_its_engine() {
    let setup = resuming().engine_of(0, "--served-model-name simulated poet").engine_of(1, "--served-model-name simulated");
    let fleet = Fleet::start(setup).await;
    let mut stream = fleet.edge().open(CHAT, &poem(0)).await;
    stream.events(50).await;
    let lost = fleet.replica("n0/0").await.epoch;
    fleet.kill("n0/0").await;
    let answer = stream.finish().await;
    assert!(fleet.replica("n0/0").await.epoch > lost);
    assert_eq!(answer.text().matches(": resumed\n\n").count(), 1);
    assert_same_as(&fleet, &[answer], poem).await;
    fleet.until_idle().await;
}

/// Two replicas that may not wait for long answers when they drain.
async fn hasty_fleet() -> Fleet {
    Fleet::start(resuming().agent(|agent| agent.drain_timeout = SHORT_DRAIN)).await
}

/// Checks that each answer has moved this many times, and equals the undisturbed one.
async fn assert_moved(fleet: &Fleet, answers: &[Answer], moves: impl Fn(usize) -> bool) {
    assert_same(fleet, answers, LONG).await;
    let moved: Vec<usize> = answers.iter().map(|answer| answer.text().matches(": resumed\n\n").count()).collect();
    assert!(moves(moved.iter().sum()), "{moved:?}");
    fleet.until_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_moves_streams_that_outlast_it_and_counts_them() {
    let fleet = hasty_fleet().await;
    let opened = open_of(&fleet, 8, LONG).await;
    let drained = hostler(&["drain", "n0/0", "--admin", fleet.admin().socket()]).await;
    let words = "draining n0/0\n4 streams were moved to other replicas\n";
    assert_eq!((drained.stdout.as_str(), drained.success), (words, true), "{}", drained.stderr);
    fleet.until_replica("n0/0", "stopped", |replica| replica.phase == Phase::Stopped).await;
    let answers = finish(opened).await;
    assert_eq!(fleet.routers[0].metric("hostler_resumptions_total").await, 4.0);
    assert_moved(&fleet, &answers, |moves| moves == 4).await;
}

#[tokio::test(start_paused = true)]
async fn a_leaving_agents_streams_are_moved() {
    let mut fleet = hasty_fleet().await;
    let opened = open_of(&fleet, 8, LONG).await;
    let agent = fleet.agents.remove(0);
    agent.shutdown.drain();
    soon("the agent's end", agent.task).await.unwrap().unwrap();
    assert_moved(&fleet, &finish(opened).await, |moves| moves == 4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_harms_no_long_stream() {
    let fleet = hasty_fleet().await;
    let opened = open_of(&fleet, 8, LONG).await;
    let rolled = hostler(&["restart", "--rolling", "all", "--wait", "60s", "--admin", fleet.admin().socket()]).await;
    assert!(rolled.success, "{}", rolled.stderr);
    assert_moved(&fleet, &finish(opened).await, |moves| moves >= 8).await;
}
