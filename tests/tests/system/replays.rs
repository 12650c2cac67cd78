//! Replays of streams whose engine dies: greedy ones with tools, grammars, log probabilities and
//! similar fields, and those of messages.
//!
//! Their request is sent again, and the client gets one stream.

use std::collections::BTreeMap;

use hostler_agent::FrontEnd;
use hostler_proto::inference::v1::generate_event::Event;
use hostler_proto::inference::v1::generate_request::Prompt;
use hostler_proto::inference::v1::inference_client::InferenceClient;
use hostler_proto::inference::v1::{GenerateRequest, Sampling};
use http::HeaderValue;
use serde_json::{Value, json};
use tonic::transport::Endpoint;

use crate::harness::{Answer, CHAT, Fleet, MODEL, Setup, json_request, soon};

const COMPLETIONS: &str = "/v1/completions";
const MESSAGES: &str = "/v1/messages";

/// Tokens of answers that take a second or more.
const TOKENS: usize = 120;

fn replaying() -> Setup {
    Setup::two_agents().engine("--sim-step-ms 10")
}

/// A greedy stream with these fields.
fn greedy(path: &str, fields: Value) -> Value {
    let question = if path == COMPLETIONS {
        json!({"prompt": "A question"})
    } else {
        json!({"messages": [{"role": "user", "content": "A question"}]})
    };
    let mut body = json!({"model": MODEL, "temperature": 0, "stream": true, "max_tokens": TOKENS});
    for part in [question, fields] {
        body.as_object_mut().unwrap().extend(part.as_object().unwrap().clone());
    }
    body
}

fn parameters() -> Value {
    let words = json!({"type": "array", "items": {"type": "string", "minLength": 3}, "minItems": 15, "maxItems": 15});
    json!({"type": "object", "properties": {"words": words}, "required": ["words"]})
}

/// Texts that a streaming client assembles from an answer's pieces.
fn understood(answer: &Answer) -> BTreeMap<String, Value> {
    assert_eq!((answer.status.as_u16(), &answer.ended), (200, &Ok(())), "{}", answer.text());
    let mut understood = BTreeMap::new();
    for data in answer.text().lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]") {
        collect("", &serde_json::from_str(data).unwrap(), &mut understood);
    }
    understood
}

/// Names of texts that come in pieces, or would come twice if they were repeated.
const TEXTS: [&str; 8] = ["content", "text", "arguments", "partial_json", "name", "role", "token", "finish_reason"];

/// Fields that differ in each answer, such as cached tokens, and the numbers of log probabilities.
const LEFT_OUT: [&str; 10] = [
    "id",
    "created",
    "logprob",
    "token_logprobs",
    "top_logprobs",
    "bytes",
    "prompt_tokens_details",
    "input_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
];

fn collect(path: &str, value: &Value, understood: &mut BTreeMap<String, Value>) {
    let path = &format!("{path}{}", value.get("index").map_or(String::new(), Value::to_string));
    match value {
        Value::Object(fields) => fields.iter().for_each(|(name, value)| match value {
            Value::Null => {}
            Value::String(more) if TEXTS.contains(&&**name) => {
                let text = understood.entry(format!("{path}.{name}")).or_insert_with(|| "".into());
                *text = format!("{}{more}", text.as_str().unwrap()).into();
            }
            Value::Array(tokens) if ["tokens", "text_offset"].contains(&&**name) => {
                let list = understood.entry(format!("{path}.{name}")).or_insert_with(|| json!([]));
                list.as_array_mut().unwrap().extend(tokens.clone());
            }
            _ if LEFT_OUT.contains(&&**name) => {}
            value => collect(&format!("{path}.{name}"), value, understood),
        }),
        Value::Array(values) => values.iter().for_each(|value| collect(path, value, understood)),
        value => drop(understood.insert(path.to_owned(), value.clone())),
    }
}

/// Kills the engine that answers the only request.
async fn kill_the_one_that_answers(fleet: &Fleet) {
    let replicas = fleet.admin().replicas().await.unwrap();
    let running = replicas.into_iter().find(|replica| replica.in_flight == 1).unwrap();
    fleet.kill(&running.id).await;
    fleet.until_replica(&running.id, "its next life", |replica| replica.is_ready() && replica.pid != running.pid).await;
}

/// Checks that each of these streams equals the one without a death of its engine.
async fn assert_replayed(requests: Vec<(&str, Value)>) {
    let fleet = Fleet::start(replaying()).await;
    for (number, (path, fields)) in requests.into_iter().enumerate() {
        let body = greedy(path, fields);
        let alone = fleet.edge().post(path, &body).await;
        let mut stream = fleet.edge().open(path, &body).await;
        stream.events(12).await;
        kill_the_one_that_answers(&fleet).await;
        let answer = stream.finish().await;
        assert_eq!(understood(&answer), understood(&alone), "{body}");
        assert_eq!(answer.text().matches(": resumed\n\n").count(), 1, "{body}");
        let id = |event: &String| Some(serde_json::from_str::<Value>(event).ok()?["id"].as_str()?.to_owned());
        let ids: Vec<String> = answer.events().iter().filter_map(id).collect();
        assert!(ids.windows(2).all(|pair| pair[0] == pair[1]), "{}", answer.text());
        assert_eq!(fleet.routers[0].metric("hostler_resumptions_total").await, (number + 1) as f64);
        fleet.until_idle().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_chat_with_a_tool_or_schema_is_replayed() {
    let function = json!([{"type": "function", "function": {"name": "find", "parameters": parameters()}}]);
    let schema = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": parameters()}});
    let usage = json!({"include_usage": true});
    assert_replayed(vec![
        (CHAT, json!({"tools": function, "tool_choice": "required", "max_tokens": null, "stream_options": usage})),
        (CHAT, json!({"response_format": schema, "max_tokens": null})),
    ])
    .await;
}

#[tokio::test(start_paused = true)]
async fn logprobs_seeded_choices_and_completions_are_replayed() {
    assert_replayed(vec![
        (CHAT, json!({"logprobs": true, "top_logprobs": 2, "presence_penalty": 0.5})),
        (CHAT, json!({"temperature": 1, "seed": 7, "n": 2, "stream_options": {"include_usage": true}})),
        (COMPLETIONS, json!({"logprobs": 2, "stop": ["never said"]})),
    ])
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_message_is_replayed_when_its_engine_dies() {
    let tool = json!([{"name": "find", "input_schema": parameters()}]);
    assert_replayed(vec![
        (MESSAGES, json!({"system": "Be brief"})),
        (MESSAGES, json!({"tools": tool, "tool_choice": {"type": "any"}, "max_tokens": 1000})),
    ])
    .await;
}

#[tokio::test(start_paused = true)]
async fn ollama_and_grpc_streams_are_replayed() {
    let fleet = Fleet::start(replaying()).await;
    let options = json!({"num_predict": TOKENS, "temperature": 0, "stop": ["never said"]});
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "options": options});
    let text_of = |answer: &Answer| {
        let lines: Vec<Value> = answer.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((&answer.ended, &lines.last().unwrap()["done"]), (&Ok(()), &json!(true)), "{}", answer.text());
        lines.iter().filter_map(|line| line["message"]["content"].as_str()).collect::<String>()
    };
    let alone = text_of(&fleet.edge().post("/api/chat", &body).await);
    let mut stream = fleet.edge().open("/api/chat", &body).await;
    assert!(stream.piece().await.unwrap());
    kill_the_one_that_answers(&fleet).await;
    assert_eq!(text_of(&stream.finish().await), alone);
    fleet.until_idle().await;

    let endpoint = Endpoint::from_shared(format!("http://{}", fleet.routers[0].edge)).unwrap();
    let mut client = InferenceClient::new(endpoint.connect().await.unwrap());
    let sampling = Sampling { max_tokens: Some(120), temperature: Some(0.0), stop: vec!["never said".into()], ..Sampling::default() };
    let request = GenerateRequest {
        model: MODEL.into(),
        prompt: Some(Prompt::Text("Hi".into())),
        sampling: Some(sampling),
        ..GenerateRequest::default()
    };
    let mut texts = Vec::new();
    for dies in [false, true] {
        let mut stream = soon("a stream", client.generate_stream(request.clone())).await.unwrap().into_inner();
        let mut text = String::new();
        let mut deltas = 0;
        while let Some(event) = soon("an event", stream.message()).await.unwrap() {
            let Some(Event::Delta(delta)) = event.event else { continue };
            text.push_str(&delta.text);
            deltas += 1;
            if dies && deltas == 10 {
                kill_the_one_that_answers(&fleet).await;
            }
        }
        texts.push(text);
    }
    assert!(!texts[0].is_empty() && texts[0] == texts[1], "{texts:?}");
    assert_eq!(fleet.routers[0].metric("hostler_resumptions_total").await, 2.0);
}

#[tokio::test(start_paused = true)]
async fn operators_and_clients_see_that_a_stream_is_replayable() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    for (path, fields, tier) in [
        (CHAT, json!({"stop": ["x"], "max_tokens": 3}), "replay"),
        (CHAT, json!({"stop": ["x"], "max_tokens": 3, "temperature": 1}), "none:stop"),
        (MESSAGES, json!({"max_tokens": 3}), "replay"),
        (MESSAGES, json!({"max_tokens": 3, "temperature": 1}), "none:sampling"),
    ] {
        assert_tier(&fleet, path, &greedy(path, fields), tier).await;
    }
    let response = json!({"model": MODEL, "input": "Hi", "temperature": 0, "stream": true, "max_output_tokens": 3});
    assert_tier(&fleet, "/v1/responses", &response, "none:route").await;
}

#[tokio::test(start_paused = true)]
async fn a_stream_of_the_rust_front_end_is_replayable() {
    let fleet = Fleet::start(Setup::agents(1).agent(|agent| agent.front_end = FrontEnd::Rust)).await;
    for (fields, tier) in [
        (json!({"max_tokens": 3}), "token_exact"),
        (json!({"max_tokens": 3, "stop": ["x"]}), "replay"),
        (json!({"max_tokens": 3, "temperature": 1, "seed": 7}), "replay"),
        (json!({"max_tokens": 3, "temperature": 1, "stop": ["x"]}), "none:stop"),
    ] {
        assert_tier(&fleet, CHAT, &greedy(CHAT, fields), tier).await;
    }
}

async fn assert_tier(fleet: &Fleet, path: &str, body: &Value, tier: &str) {
    let mut request = json_request(path, body);
    request.headers_mut().insert("x-hostler-explain", HeaderValue::from_static("1"));
    let answer = fleet.edge().request(request).await;
    let reason = answer.header("x-hostler-reason").unwrap_or_else(|| panic!("{}", answer.text())).to_owned();
    assert!(reason.ends_with(&format!("resume={tier}")), "{reason}, of {body}");
}
