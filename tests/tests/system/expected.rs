//! Models that have no replica and that a controller can bring: their requests wait, and the
//! controller learns of them.

use std::time::Duration;

use hostler_proto::agent::v1::Phase;
use hostler_proto::fleet::v1::ModelDemand;
use hostler_proto::inference::v1::generate_request::Prompt;
use hostler_proto::inference::v1::inference_client::InferenceClient;
use hostler_proto::inference::v1::{GenerateRequest, ListModelsRequest};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::interval;
use tokio_util::task::AbortOnDropHandle;
use tonic::Code;
use tonic::transport::Endpoint as TonicEndpoint;
use tonic_types::StatusExt;

use crate::harness::{Answer, CHAT, Fleet, MODEL, Setup, chat, chat_stream, soon, until};

/// Comment of PBS about a job that waits.
const REASON: &str = "2 jobs wait: Not Running: Insufficient amount of resource: ngpus";

/// Models listed to clients of OpenAI's and of Ollama's API.
async fn listed(fleet: &Fleet) -> Vec<String> {
    let ids = |list: &Value, field: &str| list.as_array().unwrap().iter().map(|model| model[field].as_str().unwrap().to_owned()).collect();
    let openais: Vec<String> = ids(&fleet.edge().get("/v1/models").await.json()["data"], "id");
    let ollamas: Vec<String> = ids(&fleet.edge().get("/api/tags").await.json()["models"], "name");
    assert_eq!(openais, ollamas);
    openais
}

/// Announces the model every few seconds, as a controller does, until this is dropped.
async fn expect(fleet: &Fleet, expected_in_ms: Option<u64>) -> AbortOnDropHandle<()> {
    let admin = fleet.admin();
    admin.expect(MODEL, expected_in_ms, REASON).await.unwrap();
    let controller = tokio::spawn(async move {
        let mut renewal = interval(Duration::from_secs(5));
        loop {
            renewal.tick().await;
            admin.expect(MODEL, expected_in_ms, REASON).await.unwrap();
        }
    });
    until_demand(fleet, "the announced model", |_| true).await;
    AbortOnDropHandle::new(controller)
}

fn ask(fleet: &Fleet) -> JoinHandle<Answer> {
    let edge = fleet.edge();
    tokio::spawn(async move { edge.post(CHAT, &chat(3)).await })
}

async fn until_demand(fleet: &Fleet, what: &str, is: impl Fn(&ModelDemand) -> bool) {
    until(what, async || {
        let demand = fleet.admin().demand(MODEL).await;
        if demand.as_ref().is_some_and(&is) { Ok(()) } else { Err(format!("{demand:?}")) }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_request_for_an_expected_model_waits_for_its_agent() {
    let mut fleet = Fleet::launch(Setup::agents(0)).await;
    assert_eq!(fleet.admin().demand(MODEL).await, None);
    let _controller = expect(&fleet, None).await;
    until_demand(&fleet, "nobody's wish", |demand| *demand == ModelDemand { model: MODEL.into(), ..ModelDemand::default() }).await;
    let request = ask(&fleet);
    until_demand(&fleet, "a request that waits", |demand| demand.waiting == 1 && demand.last_request_ms_ago.is_some()).await;
    let agents = fleet.routers[0].agents.to_string();
    fleet.add_agent(vec![agents]).await;
    let answer = request.await.unwrap();
    assert_eq!(answer.status, 200, "{}", answer.text());
    let mut stream = fleet.edge().open(CHAT, &chat_stream(10_000)).await;
    stream.events(2).await;
    until_demand(&fleet, "a request in flight", |demand| (demand.waiting, demand.in_flight) == (0, 1)).await;
    let described = fleet.edge().get(&format!("/v1/models/{MODEL}")).await.json();
    assert_ne!(described["owned_by"], "hostler", "by its engine now: {described}");
    drop(stream);
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_waits_for_the_next_replica_after_a_drain() {
    let mut fleet = Fleet::start(Setup::agents(1)).await;
    let _controller = expect(&fleet, Some(20_000)).await;
    fleet.admin().drain("n0/0").await.unwrap();
    fleet.until_replica("n0/0", "stopped", |replica| replica.phase == Phase::Stopped).await;
    let request = ask(&fleet);
    until_demand(&fleet, "a request that waits", |demand| demand.waiting == 1).await;
    let agents = fleet.routers[0].agents.to_string();
    fleet.add_agent(vec![agents]).await;
    let answer = request.await.unwrap();
    assert_eq!(answer.status, 200, "{}", answer.text());
}

#[tokio::test(start_paused = true)]
async fn each_api_says_what_a_late_model_waits_for() {
    let fleet = Fleet::start(Setup::agents(1).engine("--served-model-name other")).await;
    // The time is longer than router.max_queue_wait.
    let _controller = expect(&fleet, Some(3_600_000)).await;
    assert_eq!(listed(&fleet).await, ["other", MODEL]);
    let words = format!("no replica of the model `{MODEL}` is ready: {REASON}");
    let messages = json!([{"role": "user", "content": "hello"}]);
    let body = json!({"model": MODEL, "messages": messages, "max_tokens": 3});
    for (path, kind, message) in
        [(CHAT, "/error/type", "/error/message"), ("/v1/messages", "/error/type", "/error/message"), ("/api/chat", "", "/error")]
    {
        let answer = fleet.edge().post(path, &body).await;
        assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (503, Some("60")), "{path}: {}", answer.text());
        let refusal = answer.json();
        assert_eq!(refusal.pointer(message).unwrap(), &json!(words), "{path}: {refusal}");
        let kinds = [("/v1/messages", json!("overloaded_error")), (CHAT, json!("ServiceUnavailableError"))];
        for (_, named) in kinds.iter().filter(|(of, _)| *of == path) {
            assert_eq!(refusal.pointer(kind), Some(named), "{refusal}");
        }
    }
    let endpoint = TonicEndpoint::from_shared(format!("http://{}", fleet.routers[0].edge)).unwrap();
    let mut client = InferenceClient::new(soon("a connection", endpoint.connect()).await.unwrap());
    let request = GenerateRequest { model: MODEL.into(), prompt: Some(Prompt::Text("hello".into())), ..GenerateRequest::default() };
    let refused = soon("a refusal", client.generate(request)).await.unwrap_err();
    assert_eq!((refused.code(), refused.message()), (Code::Unavailable, words.as_str()));
    assert_eq!(refused.get_details_retry_info().unwrap().retry_delay, Some(Duration::from_secs(60)));
    let models = soon("the models", client.list_models(ListModelsRequest::default())).await.unwrap().into_inner().models;
    let counted: Vec<_> = models.iter().map(|model| (model.id.as_str(), model.replicas)).collect();
    assert_eq!(counted, [("other", 1), (MODEL, 0)]);
    until_demand(&fleet, "requests that were refused", |demand| demand.waiting == 0 && demand.last_request_ms_ago.is_some()).await;
}

#[tokio::test(start_paused = true)]
async fn a_request_is_refused_when_its_wait_is_over() {
    let wait = Duration::from_millis(300);
    let fleet = Fleet::launch(Setup::agents(0).router(|router| router.max_queue_wait = wait)).await;
    let _controller = expect(&fleet, None).await;
    let answer = ask(&fleet).await.unwrap();
    assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (503, Some("10")));
    assert!(answer.message().contains(REASON), "{}", answer.text());
    let unknown = fleet.edge().post(CHAT, &json!({"model": "made up", "messages": []})).await;
    assert!(unknown.message().contains("no agent has attached yet"), "{}", unknown.text());
    assert_eq!(fleet.admin().demand("made up").await, None, "what clients name is not kept");
}

#[tokio::test(start_paused = true)]
async fn an_invalid_announcement_is_refused_and_the_last_one_stands() {
    let fleet = Fleet::launch(Setup::agents(0)).await;
    let _controller = expect(&fleet, None).await;
    let refused = fleet.admin().expect("two\nlines", None, "").await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(refused.message().contains("control characters"), "{}", refused.message());
    assert_eq!(listed(&fleet).await, [MODEL]);
}

#[tokio::test(start_paused = true)]
async fn a_model_whose_budget_has_ended_is_refused_at_once_with_the_reason() {
    let fleet = Fleet::launch(Setup::agents(0)).await;
    fleet.admin().expect_no_more(MODEL, "its budget has ended (20.0 of 20 node-hours are used)").await;
    until_demand(&fleet, "the announced model", |_| true).await;
    let asked = tokio::time::Instant::now();
    let answer = ask(&fleet).await.unwrap();
    assert_eq!(answer.status, 503, "{}", answer.text());
    // A router that has just started waits for agents of the one before.
    assert!(asked.elapsed() < Duration::from_secs(5));
    assert!(answer.message().contains("its budget has ended (20.0 of 20 node-hours are used)"), "{}", answer.text());
}
