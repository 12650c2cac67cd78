//! Placement of requests: to the replica that has their beginning cached, or will answer soonest;
//! or nowhere yet, while no replica has room.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use hostler_proto::PROTOCOL;
use hostler_proto::agent::v1::attach_request::Message;
use hostler_proto::agent::v1::attach_response::Message as ToAgent;
use hostler_proto::agent::v1::directive::Order;
use hostler_proto::agent::v1::{AttachRequest, AttachResponse, CacheReport, CacheWatch, Hello, Phase, ReplicaReport, ReplicaState, Report};
use hostler_proto::fleet::v1::{Decision, Scored};
use http::Request;
use http_body_util::Full;
use serde_json::{Value, json};
use tokio::time::sleep;
use tonic::Code;
use tonic::Streaming;

use crate::harness::{Answer, CHAT, Endpoint, Fleet, MODEL, Setup, Workplace, attach, soon, until};

/// Flag with which engines report how much of a prompt they had cached.
const TELLS: &str = "--enable-prompt-tokens-details";

/// A text of this many bytes, each of them a token, that has nothing in common with one of another
/// name.
fn text(name: &str, bytes: usize) -> String {
    let mut text = String::new();
    for number in 0.. {
        if text.len() >= bytes {
            break;
        }
        text.push_str(&format!("{name}q{number}z "));
    }
    text.truncate(bytes);
    text
}

fn user(content: &str) -> Value {
    json!({"role": "user", "content": content})
}

fn talk(messages: &[Value], tokens: usize) -> Value {
    json!({"model": MODEL, "messages": messages, "max_tokens": tokens})
}

fn talk_stream(content: &str, tokens: usize) -> Value {
    let mut body = talk(&[user(content)], tokens);
    body["stream"] = true.into();
    body
}

fn completion_request(body: &Value, headers: &[(&str, &str)]) -> Request<Full<Bytes>> {
    let mut request = Request::post(CHAT).header("content-type", "application/json");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Full::from(body.to_string())).unwrap()
}

/// Answer to a chat that asks why it was placed there.
async fn explained(edge: &Endpoint, body: &Value) -> (Answer, Reason) {
    let answer = edge.request(completion_request(body, &[("x-hostler-explain", "1")])).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let reason = answer.header("x-hostler-reason").expect("a reason was asked for").to_owned();
    let parts = reason.split(' ').map(|part| part.split_once('=').unwrap_or_else(|| panic!("{part:?} in {reason:?}")));
    let parts = parts.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    (answer, Reason(parts))
}

/// Parts of `x-hostler-reason`.
#[derive(Debug)]
struct Reason(HashMap<String, String>);

impl Reason {
    fn word(&self, name: &str) -> &str {
        self.0.get(name).unwrap_or_else(|| panic!("no {name} in {self:?}"))
    }

    fn number(&self, name: &str) -> f64 {
        self.word(name).parse().unwrap_or_else(|error| panic!("{error}: {name} in {self:?}"))
    }

    fn matched(&self) -> u64 {
        self.word("matched").parse().unwrap()
    }
}

/// Prompt tokens, and those among them that the engine reports as cached.
fn usage(answer: &Answer) -> (u64, u64) {
    let usage = &answer.json()["usage"];
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
    (usage["prompt_tokens"].as_u64().unwrap_or_else(|| panic!("{usage}")), cached)
}

/// Makes an engine cache a text without a router, and returns how many blocks of it.
async fn seed(fleet: &Fleet, id: &str, content: &str, block_tokens: u64) -> u64 {
    let answer = fleet.engine(id).await.post(CHAT, &talk(&[user(content)], 1)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    usage(&answer).0 / block_tokens
}

fn chosen(decision: &Decision) -> &Scored {
    &decision.scored[decision.chosen as usize]
}

/// Has a chat of six turns through two routers, and checks that each but the first goes where its
/// beginning is cached, and that the router counts as the engine does.
async fn follow_prefix(fleet: &Fleet) {
    fleet.until_exact().await;
    let mut messages = vec![user(&text("a", 1500))];
    let mut home = String::new();
    for turn in 0..6 {
        let (answer, reason) = explained(&fleet.routers[turn % 2].edge(), &talk(&messages, 8)).await;
        let (tokens, cached) = usage(&answer);
        if turn > 0 {
            assert_eq!((reason.word("replica"), reason.word("level")), (home.as_str(), "exact"), "turn {turn}: {reason:?}");
            assert!(reason.matched() > 1400, "turn {turn}: {reason:?}");
            assert!(reason.matched().abs_diff(cached) <= 16, "turn {turn}: {cached} were cached, {reason:?}");
            assert_eq!(
                reason.number("of"),
                f64::from(u32::try_from(tokens).unwrap()),
                "turn {turn}: the router counts what the engine counts"
            );
        }
        home = reason.word("replica").to_owned();
        fleet.until_cached(&home, "the prompt", |blocks| blocks >= tokens / 16).await;
        messages.push(answer.json()["choices"][0]["message"].clone());
        messages.push(user("And then?"));
    }
}

#[tokio::test(start_paused = true)]
async fn each_chat_turn_follows_its_prefix_through_any_router() {
    follow_prefix(&Fleet::start(Setup::two_agents().routers(2).engine(TELLS)).await).await;
}

/// Engines whose chat template is code, so that agents have no files that would tell of it.
const CODE_TEMPLATE: &str = "--tokenizer-mode mistral";

#[tokio::test(start_paused = true)]
async fn each_turn_of_a_code_template_follows_its_prefix_too() {
    let fleet = Fleet::start(Setup::two_agents().routers(2).engine(TELLS).engine(CODE_TEMPLATE)).await;
    follow_prefix(&fleet).await;
    let seen = fleet.replica("n0/0").await;
    assert_eq!((seen.cache.tokenizer.as_str(), seen.cache.reason.as_str()), ("engine", ""));
    let rendered =
        fleet.routers[0].metric("hostler_prompts_rendered_total").await + fleet.routers[1].metric("hostler_prompts_rendered_total").await;
    assert!((rendered - 6.0).abs() < 0.5, "{rendered}");
}

#[tokio::test(start_paused = true)]
async fn routes_that_render_are_for_clients_only_where_operators_say_so() {
    let render = async |flags: &str| {
        let fleet = Fleet::start(Setup::agents(1).engine(CODE_TEMPLATE).engine(flags)).await;
        fleet.until_exact().await;
        fleet.edge().post("/v1/chat/completions/render", &talk(&[user("hello")], 1)).await
    };
    let withheld = render("").await;
    assert_eq!(withheld.status, 404);
    assert!(withheld.text().contains("opens it with `-- --enable-scale-out`"), "{}", withheld.text());
    let open = render("--enable-scale-out").await;
    assert!(open.status == 200 && open.json()["token_ids"].is_array(), "{}", open.text());
}

#[tokio::test(start_paused = true)]
async fn caches_with_different_block_sizes_are_matched_correctly() {
    let setup = Setup::two_agents().engine(TELLS).engine_of(0, "--block-size 16").engine_of(1, "--block-size 48");
    let fleet = Fleet::start(setup).await;
    fleet.until_exact().await;
    for (id, name, size) in [("n0/0", "a", 16), ("n1/0", "b", 48), ("n1/0", "c", 48), ("n0/0", "d", 16)] {
        let content = text(name, 1600);
        let before = fleet.replica(id).await.cache.blocks;
        let blocks = seed(&fleet, id, &content, size).await;
        fleet.until_cached(id, "the text", |now| now >= before + blocks).await;
        let (answer, reason) = explained(&fleet.edge(), &talk(&[user(&format!("{content} And then?"))], 1)).await;
        assert_eq!((reason.word("replica"), reason.word("level")), (id, "exact"), "{reason:?}");
        assert_eq!(reason.matched(), usage(&answer).1, "{reason:?}");
        assert!(reason.matched() >= 1536 && reason.matched() % size == 0, "{reason:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_restarted_engines_cache_is_forgotten_and_relearned() {
    let fleet = Fleet::start(Setup::two_agents().engine(TELLS)).await;
    fleet.until_exact().await;
    let content = text("a", 1200);
    let blocks = seed(&fleet, "n0/0", &content, 16).await;
    fleet.until_cached("n0/0", "the text", |now| now >= blocks).await;
    let before = fleet.replica("n0/0").await.epoch;
    fleet.admin().restart("n0/0").await.unwrap();
    fleet.until_replica("n0/0", "its next life", |replica| replica.epoch > before && replica.is_ready()).await;
    fleet.until_cached("n0/0", "nothing", |now| now == 0).await;
    let (_, reason) = explained(&fleet.edge(), &talk(&[user(&text("b", 100))], 1)).await;
    assert_eq!(reason.matched(), 0, "{reason:?}");

    seed(&fleet, "n0/0", &content, 16).await;
    fleet.until_cached("n0/0", "the text again", |now| now >= blocks).await;
    let (answer, reason) = explained(&fleet.edge(), &talk(&[user(&content)], 1)).await;
    assert_eq!((reason.word("replica"), reason.word("level"), reason.matched()), ("n0/0", "exact", usage(&answer).1), "{reason:?}");
    assert!(reason.matched() > 1100, "{reason:?}");
}

#[tokio::test(start_paused = true)]
async fn a_cache_reset_is_noticed_at_the_engines_next_step() {
    let fleet = Fleet::start(Setup::two_agents().engine(TELLS)).await;
    fleet.until_exact().await;
    let content = text("a", 1200);
    let blocks = seed(&fleet, "n0/0", &content, 16).await;
    fleet.until_cached("n0/0", "the text", |now| now >= blocks).await;
    let engine = fleet.engine("n0/0").await;
    until("the cache emptied", async || {
        // An engine that is still ending its last step does not empty its cache.
        let answer = engine.post("/reset_prefix_cache", &json!({})).await;
        if answer.json()["success"] == true { Ok(()) } else { Err(answer.text()) }
    })
    .await;
    let other = seed(&fleet, "n0/0", &text("b", 100), 16).await;
    fleet.until_cached("n0/0", "the other text alone", |now| now >= other && now < blocks).await;
    let (_, reason) = explained(&fleet.edge(), &talk(&[user(&content)], 1)).await;
    assert_eq!(reason.matched(), 0, "{reason:?}");
}

#[tokio::test(start_paused = true)]
async fn an_untokenizable_prompt_goes_where_its_text_went_before() {
    let fleet = Fleet::start(Setup::two_agents().engine(TELLS)).await;
    fleet.until_exact().await;
    // Only an engine that trusts its clients renders their own templates.
    let own_template = |messages: &[Value]| {
        let mut body = talk(messages, 4);
        body["chat_template"] = "{{ messages[0].content }}".into();
        body
    };
    let mut messages = vec![user(&text("a", 3000))];
    let (answer, first) = explained(&fleet.edge(), &own_template(&messages)).await;
    assert_eq!((first.word("level"), first.matched()), ("text", 0), "{first:?}");
    messages.extend([answer.json()["choices"][0]["message"].clone(), user("And then?")]);
    let (answer, second) = explained(&fleet.edge(), &own_template(&messages)).await;
    assert_eq!((second.word("replica"), second.word("level")), (first.word("replica"), "text"), "{first:?} {second:?}");
    assert!(second.matched() > 0, "{second:?}");
    let decisions = fleet.admin().explain(answer.header("x-hostler-id").unwrap(), 0).await.unwrap();
    assert_eq!((decisions.len(), decisions[0].fallback.as_str()), (1, "tokenizer failed"), "{decisions:#?}");
    assert_eq!(fleet.routers[0].metric("hostler_prompts_failed_total").await, 2.0);
}

#[tokio::test(start_paused = true)]
async fn a_burst_of_equal_prompts_uses_at_most_two_engines() {
    let fleet = Fleet::start(Setup::agents(4).engine(TELLS).engine("--sim-prefill-us 100")).await;
    fleet.until_exact().await;
    let body = talk_stream(&text("a", 4000), 2);
    let edge = fleet.edge();
    for answer in join_all((0..16).map(|_| edge.post(CHAT, &body))).await {
        answer.assert_whole_stream();
    }
    let mut computed = Vec::new();
    for id in ["n0/0", "n1/0", "n2/0", "n3/0"] {
        let engine = fleet.engine(id).await;
        let uncached = engine.metric("vllm:prefix_cache_queries_total").await - engine.metric("vllm:prefix_cache_hits_total").await;
        if uncached > 3000.0 {
            computed.push(id);
        }
    }
    let decisions = fleet.admin().explain("", 16).await.unwrap();
    assert!((1..=2).contains(&computed.len()), "computed by {computed:?}: {decisions:#?}");
}

#[tokio::test(start_paused = true)]
async fn a_hanging_engine_gets_only_a_few_requests() {
    let fleet = Fleet::start(Setup::two_agents()).await;
    fleet.fault("n0/0", "hang").await;
    let mut stuck = Vec::new();
    for number in 0..40 {
        let (edge, name) = (fleet.edge(), format!("r{number}"));
        let request = completion_request(&talk(&[user(&text(&name, 40))], 1), &[("x-request-id", &name)]);
        let answering = tokio::spawn(async move { edge.request(request).await.status });
        let replica = until("the request placed", async || {
            let decisions = fleet.admin().explain(&name, 1).await.map_err(|status| status.to_string())?;
            Ok(chosen(&decisions[0]).replica.clone())
        })
        .await;
        if replica == "n0/0" {
            stuck.push(answering);
        } else {
            assert_eq!(soon("an answer", answering).await.unwrap(), 200);
        }
    }
    assert!(stuck.len() <= 6, "{} of 40 requests went to an engine that hangs", stuck.len());
    fleet.fault("n0/0", "ok").await;
    for answering in stuck {
        assert_eq!(soon("an answer", answering).await.unwrap(), 200);
    }
    fleet.until_idle().await;
}

/// An engine that computes 256 tokens at a time.
///
/// A request of more than three times that is in flight and will not end before the fault does.
async fn full(setup: Setup) -> (Fleet, tokio::task::JoinHandle<Answer>) {
    let fleet = Fleet::start(setup.engine("--max-num-batched-tokens 256")).await;
    fleet.fault("n0/0", "hang").await;
    let first = send(&fleet, "first", 0);
    fleet.until_replica("n0/0", "the first request", |replica| replica.local_in_flight == 1).await;
    (fleet, first)
}

/// Sends a long prompt with this priority.
fn send(fleet: &Fleet, name: &str, priority: i32) -> tokio::task::JoinHandle<Answer> {
    let mut body = talk_stream(&text(name, 4000), 1);
    body["priority"] = priority.into();
    let request = completion_request(&body, &[("x-request-id", name)]);
    let edge = fleet.edge();
    tokio::spawn(async move { edge.request(request).await })
}

async fn until_queued(fleet: &Fleet, count: f64) {
    until(&format!("{count} queued"), async || {
        let queued = fleet.routers[0].metric("hostler_queued_requests").await;
        if queued == count { Ok(()) } else { Err(format!("{queued} are queued")) }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn requests_queue_in_the_router_and_the_most_urgent_leads() {
    let (fleet, first) = full(Setup::agents(1).router(|router| router.max_queued = 4)).await;
    let mut waiting = vec![first];
    for (queued, (name, priority)) in [(1.0, ("late", 5)), (2.0, ("soon", 1)), (3.0, ("urgent", -3)), (4.0, ("later", 7))] {
        waiting.push(send(&fleet, name, priority));
        until_queued(&fleet, queued).await;
    }
    let refused = send(&fleet, "one-too-many", 0).await.unwrap();
    assert_eq!((refused.status.as_u16(), refused.header("retry-after")), (429, Some("5")), "{}", refused.text());
    assert!(refused.message().contains("router.max_queued"), "{}", refused.text());
    // The agent reports after up to 10 ms.
    fleet.until_replica("n0/0", "the first request alone in the engine", |replica| replica.in_flight == 1).await;
    // A client that leaves gives up its place.
    waiting.pop().unwrap().abort();
    until_queued(&fleet, 3.0).await;

    fleet.fault("n0/0", "ok").await;
    for answering in waiting {
        soon("an answer", answering).await.unwrap().assert_whole_stream();
    }
    let mut decisions = fleet.admin().explain("", 10).await.unwrap();
    decisions.reverse();
    let order: Vec<&str> = decisions.iter().map(|decision| decision.client_id.as_str()).collect();
    assert_eq!(order, ["first", "urgent", "soon", "late"]);
    assert!(decisions[0].queue_seconds == 0.0 && decisions[1..].iter().all(|decision| decision.queue_seconds > 0.0), "{decisions:#?}");
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_that_would_wait_too_long_is_refused() {
    let (fleet, first) = full(Setup::agents(1).router(|router| router.max_queue_wait = Duration::from_millis(1))).await;
    let refused = send(&fleet, "second", 0).await.unwrap();
    assert_eq!((refused.status.as_u16(), refused.header("retry-after")), (429, Some("1")), "{}", refused.text());
    assert!(refused.message().contains("router.max_queue_wait"), "{}", refused.text());
    fleet.fault("n0/0", "ok").await;
    soon("an answer", first).await.unwrap().assert_whole_stream();
    send(&fleet, "third", 0).await.unwrap().assert_whole_stream();
}

#[tokio::test(start_paused = true)]
async fn an_overloaded_engine_has_no_queue_of_its_own() {
    let fleet = Fleet::start(Setup::agents(1).engine("--max-num-batched-tokens 256 --sim-prefill-us 50")).await;
    let answers: Vec<_> = (0..10).map(|number| send(&fleet, &format!("r{number}"), 0)).collect();
    let engine = fleet.engine("n0/0").await;
    let mut most = 0.0_f64;
    while answers.iter().any(|answer| !answer.is_finished()) {
        most = most.max(engine.metric("vllm:num_requests_waiting").await);
        sleep(Duration::from_millis(1)).await;
    }
    for answer in answers {
        answer.await.unwrap().assert_whole_stream();
    }
    assert!(most <= 2.0, "{most} requests waited in the engine");
    let queued = fleet.admin().explain("", 10).await.unwrap().iter().filter(|decision| decision.queue_seconds > 0.0).count();
    assert!(queued >= 5, "only {queued} of 10 requests waited in the router");
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn every_answer_has_an_id_that_explains_its_placement() {
    let fleet = Fleet::start(Setup::two_agents().engine(TELLS)).await;
    fleet.until_exact().await;
    let plain = fleet.edge().post(CHAT, &talk(&[user("Hello, engine, how are you?")], 2)).await;
    assert!(plain.header("x-hostler-id").is_some_and(|id| id.len() == 16) && plain.header("x-hostler-reason").is_none());

    let content = text("a", 900);
    let blocks = seed(&fleet, "n1/0", &content, 16).await;
    fleet.until_cached("n1/0", "the text", |now| now >= blocks).await;
    let (answer, reason) = explained(&fleet.edge(), &talk(&[user(&content)], 2)).await;
    let id = answer.header("x-hostler-id").unwrap();
    assert_ne!(Some(id), plain.header("x-hostler-id"));
    let decisions = fleet.admin().explain(id, 0).await.unwrap();
    let [decision] = &decisions[..] else { panic!("{decisions:#?}") };
    let terms = chosen(decision).terms.unwrap();
    let first_token = terms.queue + terms.prefill + terms.steps + terms.memory;
    let total = first_token + terms.congestion + terms.decode;
    assert!((first_token - reason.number("ttft")).abs() < 1e-4, "{reason:?} {terms:?}");
    assert!((total - reason.number("cost")).abs() < 1e-4, "{reason:?} {terms:?}");
    assert_eq!((chosen(decision).replica.as_str(), u64::from(chosen(decision).matched)), (reason.word("replica"), reason.matched()));
    assert_eq!((decision.scored.len(), decision.candidates, decision.attempt), (2, 2, 1));
    until("the engine's own count", async || {
        let decision = fleet.admin().explain(id, 0).await.unwrap().remove(0);
        if decision.cached.map(u64::from) == Some(usage(&answer).1) { Ok(()) } else { Err(format!("{decision:#?}")) }
    })
    .await;
    let unknown = fleet.admin().explain("nobody", 0).await.unwrap_err();
    assert!(unknown.code() == Code::NotFound && unknown.message().contains("\"nobody\""), "{unknown}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn explain_shows_operators_the_arithmetic() {
    let workplace = Workplace::new();
    let up = workplace.up(2, &[TELLS]);
    up.line("curl").await;
    let admin = up.admin().await.socket();
    let run = async |arguments: &[&str]| workplace.run(&[arguments, &["--admin", admin]].concat()).await;
    let nothing = run(&["explain"]).await;
    assert_eq!((nothing.success, nothing.stdout.as_str()), (true, "this router has had no request yet\n"), "{}", nothing.stderr);

    let request = completion_request(&talk_stream(&text("a", 400), 3), &[("x-request-id", "mine")]);
    let answer = Endpoint::Tcp(up.address("edge").await).request(request).await;
    answer.assert_whole_stream();
    let id = answer.header("x-hostler-id").unwrap();
    for name in [&["explain"][..], &["explain", id], &["explain", "mine"], &["explain", "--last", "3"]] {
        let output = run(name).await;
        assert!(output.success, "{}", output.stderr);
        for part in [id, "client's id mine", "model simulated", "REPLICA", "CONGESTION", "worked out", "first token", "2ρ/(1 − ρ)"] {
            assert!(output.stdout.contains(part), "{part} is not in {}", output.stdout);
        }
    }
    let json: Value = serde_json::from_str(&run(&["explain", id, "--json"]).await.stdout).unwrap();
    assert_eq!((json["decisions"][0]["id"].as_str(), json["decisions"][0]["scored"].as_array().unwrap().len()), (Some(id), 2), "{json}");
    let wrong = completion_request(&json!({"model": "wrong", "prompt": "a"}), &[("x-request-id", "theirs")]);
    let refused = Endpoint::Tcp(up.address("edge").await).request(wrong).await;
    for name in [&["explain"][..], &["explain", refused.header("x-hostler-id").unwrap()], &["explain", "theirs"]] {
        let output = run(name).await;
        let told =
            "POST /v1/chat/completions  model wrong\nrefused with status 404 before a replica was chosen, cause unknown_model\nNo replica";
        assert!(output.success && output.stdout.contains(told), "{}{}", output.stdout, output.stderr);
    }
    let unknown = run(&["explain", "nobody"]).await;
    assert!(!unknown.success && unknown.stderr.starts_with("error: no decision about a request \"nobody\""), "{}", unknown.stderr);

    let list: Value = serde_json::from_str(&run(&["ps", "--json"]).await.stdout).unwrap();
    let replica = &list["nodes"][0]["replicas"][0];
    assert!(replica["cache"]["exact"].is_boolean() && replica["rates"]["prefill"].as_f64().unwrap() > 0.0, "{list}");
    let table = run(&["ps"]).await.stdout;
    assert!(table.contains("CACHE"), "{table}");
}

async fn next(answers: &mut Streaming<AttachResponse>) -> ToAgent {
    soon("a message of the router", answers.message()).await.unwrap().expect("the stream goes on").message.unwrap()
}

/// A report of three blocks that falsely announces more.
fn lie(snapshot: bool) -> AttachRequest {
    let report = CacheReport { epoch: 1, snapshot, stored: vec![11, 22, 33], count: 99, digest: 5, ..CacheReport::default() };
    AttachRequest { message: Some(Message::Cache(report)) }
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_contradicts_itself_three_times_is_distrusted() {
    let fleet = Fleet::start(Setup::two_agents()).await;
    let hello = Hello { protocol: PROTOCOL, agent_version: "9.8.7".into(), node: "liar".into(), life: 7, job: None };
    let cache = CacheWatch { exact: true, block_size: 16, ..CacheWatch::default() };
    let state = ReplicaState { phase: Phase::Ready.into(), cache: Some(cache), ..ReplicaState::default() };
    let replica = ReplicaReport { index: 0, epoch: 1, state: Some(state), ..ReplicaReport::default() };
    let report = Report { sequence: 0, snapshot: true, replicas: vec![replica], job: None };
    let (sender, mut answers) = attach(fleet.routers[0].agents, [Message::Hello(hello), Message::Report(report)]).await.unwrap();
    assert!(matches!(next(&mut answers).await, ToAgent::Welcome(_)));
    let asks = |message: ToAgent| {
        let ToAgent::Directive(directive) = message else { return false };
        matches!(directive.order, Some(Order::ResyncCache(replicas)) if replicas.indices == [0])
    };
    // Blocks that continue nothing are worthless.
    sender.send(lie(false)).await.unwrap();
    assert!(asks(next(&mut answers).await));
    for _ in 0..3 {
        sender.send(lie(true)).await.unwrap();
        assert!(asks(next(&mut answers).await));
    }
    assert!(!fleet.replica("liar/0").await.cache.distrusted);
    sender.send(lie(true)).await.unwrap();
    let seen = fleet.until_replica("liar/0", "distrusted", |replica| replica.cache.distrusted).await;
    assert_eq!((seen.cache.resyncs, seen.cache.exact, seen.cache.matches), (3, false, false));
    let replicas: HashSet<String> = fleet.admin().replicas().await.unwrap().into_iter().map(|replica| replica.id).collect();
    assert_eq!(replicas.len(), 3);
    assert_eq!(fleet.edge().post(CHAT, &talk(&[user("Hello")], 2)).await.status, 200);
}
