//! Engines with vLLM's Rust front-end, which lacks routes.
//!
//! If a chat can stand for a route, the router answers through one; otherwise it names the remedy.

use std::collections::BTreeMap;

use hostler_agent::FrontEnd;
use http::{Request, StatusCode};
use serde_json::{Value, json};

use crate::harness::{Answer, CHAT, Fleet, MODEL, Setup, chat, json_request, until};

const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";

/// Engines that play the Rust front-end.
fn with_rust(agents: usize) -> Setup {
    Setup::agents(agents).agent(|agent| agent.front_end = FrontEnd::Rust)
}

/// Greedy, as that front-end answers the same request differently otherwise.
fn message(tokens: usize) -> Value {
    json!({"model": MODEL, "max_tokens": tokens, "temperature": 0, "messages": [{"role": "user", "content": "Tell me about engines."}]})
}

fn edited(mut body: Value, changes: Value) -> Value {
    body.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    body
}

/// Data of a stream's events, each of which has a name that its data repeats.
fn events(answer: &Answer) -> Vec<Value> {
    assert!(answer.header("content-type").unwrap().starts_with("text/event-stream"), "{}", answer.text());
    let event = |event: &str| {
        let (name, data) = event.strip_prefix("event: ").unwrap_or_else(|| panic!("{event}")).split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name);
        data
    };
    answer.text().split_terminator("\n\n").map(event).collect()
}

#[tokio::test(start_paused = true)]
async fn a_message_equals_its_chat_whole_and_streamed() {
    let fleet = Fleet::start(with_rust(2).engine("--enable-prompt-tokens-details")).await;
    let edge = fleet.edge();
    let chat = edge.post(CHAT, &message(8)).await.json();
    let text = &chat["choices"][0]["message"]["content"];

    let whole = edge.post(MESSAGES, &message(8)).await;
    assert_eq!((whole.status, whole.header("content-type")), (StatusCode::OK, Some("application/json")), "{}", whole.text());
    assert!(whole.header("x-hostler-id").is_some());
    let whole = whole.json();
    assert_eq!((&whole["type"], &whole["role"], &whole["stop_reason"]), (&json!("message"), &json!("assistant"), &json!("max_tokens")));
    assert_eq!(whole["content"], json!([{"type": "text", "text": text}]));
    let usage = &whole["usage"];
    assert_eq!(usage["output_tokens"], 8);
    let prompt = usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!(json!(prompt), chat["usage"]["prompt_tokens"]);

    let streamed = edge.post(MESSAGES, &edited(message(8), json!({"stream": true}))).await;
    assert_eq!((streamed.status, &streamed.ended), (StatusCode::OK, &Ok(())), "{}", streamed.text());
    let events = events(&streamed);
    let output: String = events.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
    assert_eq!(json!(output), *text);
    assert!(events[0]["message"]["usage"]["input_tokens"].as_u64().unwrap() > 0, "{}", events[0]);
    let [.., delta, stop] = &events[..] else { panic!("{events:?}") };
    assert_eq!(
        (&delta["delta"]["stop_reason"], &delta["usage"]["output_tokens"], &stop["type"]),
        (&json!("max_tokens"), &json!(8), &json!("message_stop"))
    );

    let counted = edge.post("/v1/messages/count_tokens", &message(8)).await;
    assert_eq!((counted.status, &counted.json()["input_tokens"]), (StatusCode::OK, &chat["usage"]["prompt_tokens"]), "{}", counted.text());
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_response_equals_its_chat_whole_and_streamed() {
    let fleet = Fleet::start(with_rust(2)).await;
    let edge = fleet.edge();
    let request_body = json!({"model": MODEL, "input": "Tell me about engines.", "max_output_tokens": 8, "temperature": 0});
    let chat = edge.post(CHAT, &message(8)).await.json();
    let text = &chat["choices"][0]["message"]["content"];
    let whole = edge.post(RESPONSES, &request_body).await;
    assert_eq!((whole.status, whole.header("content-type")), (StatusCode::OK, Some("application/json")), "{}", whole.text());
    let whole = whole.json();
    assert_eq!((&whole["object"], &whole["status"], &whole["store"]), (&json!("response"), &json!("incomplete"), &json!(false)));
    assert_eq!(whole["output"][0]["content"][0]["text"], *text);
    assert_eq!((&whole["usage"]["output_tokens"], &whole["usage"]["input_tokens"]), (&json!(8), &chat["usage"]["prompt_tokens"]));

    let streamed = edge.post(RESPONSES, &edited(request_body.clone(), json!({"stream": true}))).await;
    assert_eq!((streamed.status, &streamed.ended), (StatusCode::OK, &Ok(())), "{}", streamed.text());
    let events = events(&streamed);
    let output: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!(json!(output), *text);
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["response"]["output"][0]["content"][0]["text"]), (&json!("response.incomplete"), text));

    // An engine would have to keep these responses.
    for kept in [json!({"previous_response_id": "resp_1"}), json!({"background": true})] {
        let refused = edge.post(RESPONSES, &edited(request_body.clone(), kept)).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST);
        assert!(refused.json()["error"]["message"].as_str().unwrap().contains("--front-end python"), "{}", refused.text());
    }
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn requested_log_probabilities_arrive_or_are_refused() {
    let fleet = Fleet::start(with_rust(1)).await;
    let edge = fleet.edge();
    let chat = edge.post(CHAT, &edited(message(4), json!({"logprobs": true, "top_logprobs": 2}))).await.json();
    let of_chat = &chat["choices"][0]["logprobs"]["content"];
    assert_eq!((of_chat.as_array().unwrap().len(), of_chat[0]["top_logprobs"].as_array().unwrap().len()), (4, 2), "{chat}");

    let request_body =
        json!({"model": MODEL, "input": "Tell me about engines.", "max_output_tokens": 4, "temperature": 0, "top_logprobs": 2});
    let request_body = edited(request_body, json!({"include": ["message.output_text.logprobs"]}));
    let whole = edge.post(RESPONSES, &request_body).await.json();
    assert_eq!(whole["output"][0]["content"][0]["logprobs"], *of_chat, "{whole}");
    let events = events(&edge.post(RESPONSES, &edited(request_body.clone(), json!({"stream": true}))).await);
    let deltas: Vec<&Value> = events.iter().filter(|event| event["type"] == "response.output_text.delta").collect();
    let output: Vec<&Value> = deltas.iter().flat_map(|delta| delta["logprobs"].as_array().unwrap()).collect();
    assert_eq!(output, of_chat.as_array().unwrap().iter().collect::<Vec<_>>());
    assert_eq!(events.last().unwrap()["response"]["output"][0]["content"][0]["logprobs"], *of_chat);

    for (path, body, words) in [
        (RESPONSES, edited(request_body.clone(), json!({"kv_transfer_params": {"do_remote_decode": true}})), "--front-end python"),
        (RESPONSES, edited(request_body.clone(), json!({"moderation": {"model": "m"}})), "leave it out"),
        (RESPONSES, edited(request_body, json!({"instructions": ["Be brief."]})), "instructions is a text"),
        (MESSAGES, edited(message(4), json!({"logprobs": true})), "ask for a chat completion"),
        (MESSAGES, edited(message(4), json!({"mcp_servers": [{"name": "m"}]})), "mcp_servers"),
    ] {
        let refused = edge.post(path, &body).await;
        let error = refused.json();
        assert_eq!((refused.status, error["type"] == "error"), (StatusCode::BAD_REQUEST, path == MESSAGES), "{error}");
        assert!(error["error"]["message"].as_str().unwrap().contains(words), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_invocation_goes_to_the_route_of_its_content() {
    let fleet = Fleet::start(with_rust(2)).await;
    let edge = fleet.edge();
    let text = |answer: &Answer| {
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
        let choice = &answer.json()["choices"][0];
        choice["text"].as_str().or(choice["message"]["content"].as_str()).unwrap().to_owned()
    };
    let completion = json!({"model": MODEL, "prompt": "Tell me", "max_tokens": 8, "temperature": 0});
    for (path, body) in [(CHAT, message(8)), ("/v1/completions", completion)] {
        let direct = edge.post(path, &body).await;
        assert_eq!(text(&edge.post("/invocations", &body).await), text(&direct), "{path}");
        // Engines take the model from the header.
        let other = json_request("/invocations", &edited(body.clone(), json!({"model": "none"})));
        let (mut head, content) = other.into_parts();
        head.headers.insert("x-amzn-sagemaker-adapter-identifier", MODEL.parse().unwrap());
        assert_eq!(text(&edge.request(Request::from_parts(head, content)).await), text(&direct), "{path}");
        let unknown = edge.post("/invocations", &edited(body, json!({"model": "none"}))).await;
        assert!(unknown.status == StatusCode::NOT_FOUND && unknown.message().contains("`none` does not exist"), "{}", unknown.text());
    }
    edge.post("/invocations", &edited(message(4), json!({"stream": true}))).await.assert_whole_stream();
    let embedding = edge.post("/invocations", &json!({"model": MODEL, "input": "text"})).await;
    assert_eq!(embedding.status, StatusCode::NOT_FOUND);
    assert!(embedding.message().contains("--front-end python"), "{}", embedding.text());
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_required_tool_is_called_and_its_result_is_read() {
    let fleet = Fleet::start(with_rust(1)).await;
    let edge = fleet.edge();
    let tools = json!([{"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}]);
    let request_body = edited(message(64), json!({"tools": tools, "tool_choice": {"type": "any"}}));
    let whole = edge.post(MESSAGES, &request_body).await.json();
    let call = whole["content"].as_array().unwrap().last().unwrap().clone();
    assert_eq!((&whole["stop_reason"], &call["type"], &call["name"]), (&json!("tool_use"), &json!("tool_use"), &json!("look")), "{whole}");
    assert!(call["input"].is_object());

    let events = events(&edge.post(MESSAGES, &edited(request_body.clone(), json!({"stream": true}))).await);
    let arguments: String = events.iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect();
    assert!(serde_json::from_str::<Value>(&arguments).unwrap().is_object(), "{arguments}");

    let result = json!({"type": "tool_result", "tool_use_id": call["id"], "content": "rain"});
    let turns = json!([request_body["messages"][0], {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]);
    let after = edge.post(MESSAGES, &edited(message(4), json!({"messages": turns}))).await;
    assert_eq!(after.status, StatusCode::OK, "{}", after.text());
    let before = edge.post(MESSAGES, &message(4)).await;
    assert!(after.json()["usage"]["input_tokens"].as_u64() > before.json()["usage"]["input_tokens"].as_u64());
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn every_error_of_a_message_has_anthropics_form() {
    let fleet = Fleet::start(with_rust(1)).await;
    let edge = fleet.edge();
    for (body, status, words) in [
        (edited(message(4), json!({"model": "none"})), StatusCode::NOT_FOUND, "none"),
        (edited(message(4), json!({"temperature": "hot"})), StatusCode::BAD_REQUEST, "temperature"),
        (edited(message(4), json!({"max_tokens": 0})), StatusCode::BAD_REQUEST, "max_tokens"),
        (edited(message(4), json!({"messages": [{"role": "user", "content": [{"type": "video"}]}]})), StatusCode::BAD_REQUEST, "video"),
    ] {
        let refused = edge.post(MESSAGES, &body).await;
        let error = refused.json();
        assert_eq!((refused.status, &error["type"]), (status, &json!("error")), "{error}");
        assert!(error["error"]["message"].as_str().unwrap().contains(words), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_broken_stream_ends_with_an_error_and_broken_connection() {
    let fleet = Fleet::start(with_rust(1).engine("--sim-die-on killer --sim-die-on-ms 200")).await;
    let killer = json!({"stream": true, "messages": [{"role": "user", "content": "killer"}]});
    let broken = fleet.edge().post(MESSAGES, &edited(message(4000), killer)).await;
    assert!(broken.ended.is_err(), "{}", broken.text());
    let events = events(&broken);
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["error"]["type"]), (&json!("error"), &json!("api_error")), "{last}");
    assert!(
        events.iter().any(|event| event["type"] == "content_block_delta") && events.iter().all(|event| event["type"] != "message_stop")
    );
}

#[tokio::test(start_paused = true)]
async fn an_untranslatable_route_is_refused_with_advice() {
    let fleet = Fleet::start(with_rust(2)).await;
    let edge = fleet.edge();
    for (path, body) in
        [("/v1/embeddings", json!({"model": MODEL, "input": "text"})), ("/api/embed", json!({"model": MODEL, "input": "text"}))]
    {
        let refused = edge.post(path, &body).await;
        assert_eq!(refused.status, StatusCode::NOT_FOUND, "{path}");
        let words = refused.text();
        assert!(words.contains("has no /v1/embeddings") && words.contains("--front-end python"), "{words}");
    }
    // The front-end itself answers the routes that it has.
    assert_eq!(edge.post("/tokenize", &json!({"model": MODEL, "prompt": "x"})).await.status, StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn the_simulated_engine_has_the_python_front_end_by_default() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let embedded = fleet.edge().post("/v1/embeddings", &json!({"model": MODEL, "input": "text"})).await;
    assert_eq!(embedded.status, StatusCode::OK, "{}", embedded.text());
}

#[tokio::test(start_paused = true)]
async fn a_messages_limit_beyond_the_context_is_cut_to_what_is_left() {
    for (fleet, name) in [
        (Fleet::start(Setup::agents(1).engine("--max-model-len 512")).await, "Python"),
        (Fleet::start(with_rust(1).engine("--max-model-len 512")).await, "Rust"),
    ] {
        let edge = fleet.edge();
        let mut body = message(32_000);
        body["stream"] = json!(false);
        let answer = edge.post(MESSAGES, &body).await;
        assert_eq!(answer.status, 200, "{name}: {}", answer.text());
    }
}

#[tokio::test(start_paused = true)]
async fn requests_of_several_answers_get_the_same_from_either_front_end() {
    const COMPLETIONS: &str = "/v1/completions";
    let python = Fleet::start(Setup::agents(1)).await;
    let rust = Fleet::start(with_rust(2)).await;
    let seeded_chat = |more: Value| edited(chat(4), edited(json!({"seed": 7}), more));
    let completion = |more: Value| edited(json!({"model": MODEL, "max_tokens": 4, "seed": 7}), more);
    let usage = json!({"include_usage": true});
    for (path, body) in [
        (CHAT, seeded_chat(json!({"n": 3}))),
        (CHAT, seeded_chat(json!({"n": 3, "stream": true, "stream_options": usage.clone()}))),
        (COMPLETIONS, completion(json!({"prompt": ["one", "two"]}))),
        (COMPLETIONS, completion(json!({"prompt": ["one"]}))),
        (COMPLETIONS, completion(json!({"prompt": [[1, 2, 3], [4, 5]], "n": 2}))),
        (COMPLETIONS, completion(json!({"prompt": ["one", "two"], "n": 2, "stream": true, "stream_options": usage}))),
    ] {
        let [expected, answer] = [&python, &rust].map(|fleet| fleet.edge());
        let (expected, answer) = (expected.post(path, &body).await, answer.post(path, &body).await);
        assert_eq!((expected.status, answer.status), (StatusCode::OK, StatusCode::OK), "{body}: {}", answer.text());
        assert_eq!(choices_and_usage(&answer.text()), choices_and_usage(&expected.text()), "{body}");
    }
    let edge = rust.edge();
    let many = edge.post(CHAT, &seeded_chat(json!({"n": 129}))).await;
    assert!(many.status == 400 && many.text().contains("128 answers at most"), "{}", many.text());
    let long = edge.post(COMPLETIONS, &completion(json!({"prompt": ["one", "two ".repeat(100_000)]}))).await;
    assert!(long.status == 400 && long.text().contains("context"), "{}", long.text());
    rust.until_replica("n0/0", "all ended", |replica| replica.in_flight == 0).await;
}

/// The text of each choice of an answer or a stream, its end, and the usage of all.
fn choices_and_usage(answer: &str) -> (BTreeMap<u64, (String, Value)>, Value) {
    let (mut choices, mut usage) = (BTreeMap::<u64, (String, Value)>::new(), Value::Null);
    let data = answer.lines().map(|line| line.strip_prefix("data: ").unwrap_or(line)).filter(|line| line.starts_with('{'));
    for part in data.map(|data| serde_json::from_str::<Value>(data).unwrap()) {
        for choice in part["choices"].as_array().unwrap() {
            let of_choice = choices.entry(choice["index"].as_u64().unwrap()).or_default();
            for text in [&choice["text"], &choice["message"]["content"], &choice["delta"]["content"]] {
                of_choice.0.push_str(text.as_str().unwrap_or_default());
            }
            if !choice["finish_reason"].is_null() {
                of_choice.1 = choice["finish_reason"].clone();
            }
        }
        if part["usage"].is_object() {
            usage = ["prompt_tokens", "completion_tokens", "total_tokens"].iter().map(|name| part["usage"][*name].clone()).collect();
        }
    }
    (choices, usage)
}

#[tokio::test(start_paused = true)]
async fn several_answers_are_sent_anew_when_their_engine_dies_before_the_first() {
    let fleet = Fleet::start(with_rust(2).engine("--sim-step-ms 50")).await;
    let edge = fleet.edge();
    let body = edited(chat(40), json!({"n": 4, "seed": 7}));
    let expected = edge.post(CHAT, &body).await.text();
    let (answer, ()) = tokio::join!(edge.post(CHAT, &body), async {
        let mut busy = None;
        until("the request at an engine", async || {
            for id in ["n0/0", "n1/0"] {
                if fleet.replica(id).await.in_flight == 4 {
                    busy = Some(id);
                    return Ok(());
                }
            }
            Err("nothing is in flight".to_owned())
        })
        .await;
        fleet.crash(busy.unwrap()).await;
    });
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(choices_and_usage(&answer.text()), choices_and_usage(&expected));
}
