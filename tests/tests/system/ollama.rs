//! Ollama's API at the edge: the same engines answer clients that only know this API, with the same
//! promises.

use http::{Method, Request, StatusCode};
use http_body_util::Full;
use serde_json::{Value, json};

use crate::harness::{Answer, CHAT, Fleet, MODEL, Setup};

const OLLAMAS_CHAT: &str = "/api/chat";

/// A chat of at most `tokens` tokens, which streams as Ollama's do unless told otherwise.
fn chat(tokens: usize) -> Value {
    let messages = json!([{"role": "user", "content": "Tell me about engines."}]);
    json!({"model": MODEL, "messages": messages, "options": {"num_predict": tokens, "seed": 1}})
}

fn edited(mut body: Value, changes: Value) -> Value {
    body.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    body
}

fn lines(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.header("content-type"), Some("application/x-ndjson"), "{}", answer.text());
    answer.text().lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

fn text_of(lines: &[Value]) -> String {
    lines.iter().map(|line| line["message"]["content"].as_str().or(line["response"].as_str()).unwrap()).collect()
}

/// Only message of an error in Ollama's form.
fn error(answer: &Answer) -> String {
    let body = answer.json();
    assert_eq!(body.as_object().unwrap().len(), 1, "{body}");
    body["error"].as_str().unwrap_or_else(|| panic!("no message: {body}")).to_owned()
}

/// Fails unless these are the figures of an answer of `tokens` tokens.
fn assert_figures(last: &Value, tokens: u64) {
    assert_eq!((&last["done"], &last["eval_count"], &last["load_duration"]), (&json!(true), &json!(tokens), &json!(0)), "{last}");
    let of = |name: &str| last[name].as_u64().unwrap_or_else(|| panic!("no {name}: {last}"));
    assert!(of("prompt_eval_count") > 0 && of("eval_duration") > 0, "{last}");
    assert!(of("total_duration") >= of("eval_duration"), "{last}");
    if last["prompt_eval_duration"].is_u64() {
        assert_eq!(of("prompt_eval_duration") + of("eval_duration"), of("total_duration"), "{last}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_chat_says_the_same_streamed_whole_and_as_openais() {
    let fleet = Fleet::start(Setup::two_agents()).await;
    let edge = fleet.edge();
    let streamed = edge.post(OLLAMAS_CHAT, &chat(8)).await;
    assert_eq!((streamed.status, &streamed.ended), (StatusCode::OK, &Ok(())));
    assert!(streamed.header("x-hostler-id").is_some());
    let lines = lines(&streamed);
    let (last, rest) = lines.split_last().unwrap();
    assert!(rest.iter().all(|line| line["done"] == false && line["model"] == MODEL), "{lines:?}");
    assert_eq!((&last["done_reason"], &last["message"]), (&json!("length"), &json!({"role": "assistant", "content": ""})));
    assert!(last["prompt_eval_duration"].is_u64());
    assert_figures(last, 8);

    let whole = edge.post(OLLAMAS_CHAT, &edited(chat(8), json!({"stream": false, "keep_alive": "5m"}))).await;
    assert_eq!((whole.status, whole.header("content-type")), (StatusCode::OK, Some("application/json")));
    assert_figures(&whole.json(), 8);
    let body = json!({"model": MODEL, "messages": chat(8)["messages"], "max_tokens": 8, "seed": 1});
    let openais = edge.post(CHAT, &body).await.json()["choices"][0]["message"]["content"].take();
    assert_eq!((json!(text_of(&lines)), &whole.json()["message"]["content"]), (openais.clone(), &openais));

    // An image comes as its own bytes, so no list of hosts forbids it.
    let messages = json!([{"role": "user", "content": "What is it?", "images": ["iVBORw0KGgoAAAANSUhEUg=="]}]);
    let seen = edge.post(OLLAMAS_CHAT, &edited(chat(8), json!({"stream": false, "messages": messages}))).await;
    assert_eq!((seen.status, &seen.json()["eval_count"]), (StatusCode::OK, &json!(8)), "{}", seen.text());

    // Ollama's documentation sends JSON without declaring it.
    let curl = Request::post(OLLAMAS_CHAT).header("content-type", "application/x-www-form-urlencoded");
    let answer = edge.request(curl.body(Full::from(edited(chat(8), json!({"stream": false})).to_string())).unwrap()).await;
    assert_eq!(answer.json()["message"]["content"], openais, "{}", answer.text());
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_prompt_is_answered_through_the_template_or_raw() {
    let fleet = Fleet::start(Setup::agents(1).engine("--sim-output-tokens 20 --max-model-len 100")).await;
    let edge = fleet.edge();
    let prompt = json!({"model": "simulated:latest", "prompt": "Once upon a time", "options": {"num_predict": 5, "seed": 1}});
    let streamed = lines(&edge.post("/api/generate", &prompt).await);
    assert_figures(streamed.last().unwrap(), 5);
    assert_eq!(streamed[0]["model"], "simulated:latest", "a model has the name that its client knows");
    let whole = edge.post("/api/generate", &edited(prompt.clone(), json!({"stream": false}))).await.json();
    assert_eq!(whole["response"], text_of(&streamed));

    let raw = edge.post("/api/generate", &edited(prompt.clone(), json!({"stream": false, "raw": true}))).await.json();
    let body = json!({"model": MODEL, "prompt": "Once upon a time", "max_tokens": 5, "seed": 1});
    let openais = edge.post("/v1/completions", &body).await.json();
    assert_eq!((&raw["response"], &raw["eval_count"]), (&openais["choices"][0]["text"], &json!(5)));
    assert_eq!(raw["prompt_eval_count"], openais["usage"]["prompt_tokens"]);
    assert_ne!(raw["prompt_eval_count"], whole["prompt_eval_count"], "only one of them went through the template");
    // Completions of engines end after 16 tokens by default; Ollama's do not.
    let long =
        edge.post("/api/generate", &edited(prompt, json!({"stream": false, "raw": true, "options": {"num_predict": -1}}))).await.json();
    let fits = 100 - raw["prompt_eval_count"].as_u64().unwrap();
    assert_eq!((&long["eval_count"], &long["done_reason"]), (&json!(fits), &json!("length")), "{long}");
    // A request that only wants a loaded model already has one.
    let loaded = edge.post("/api/generate", &json!({"model": MODEL})).await.json();
    assert_eq!((&loaded["done"], &loaded["done_reason"]), (&json!(true), &json!("load")));
}

#[tokio::test(start_paused = true)]
async fn tools_are_called_with_objects_and_their_results_are_answered() {
    let fleet = Fleet::start(Setup::agents(1).engine("--sim-call-tools")).await;
    let edge = fleet.edge();
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let tools = json!([{"type": "function", "function": {"name": "weather", "parameters": parameters}}]);
    let ask = edited(chat(64), json!({"tools": tools}));
    let whole = edge.post(OLLAMAS_CHAT, &edited(ask.clone(), json!({"stream": false}))).await.json();
    let streamed = lines(&edge.post(OLLAMAS_CHAT, &ask).await);
    let called = streamed.iter().find(|line| !line["message"]["tool_calls"].is_null()).unwrap_or_else(|| panic!("no call: {streamed:?}"));
    for message in [&whole["message"], &called["message"]] {
        let function = &message["tool_calls"][0]["function"];
        assert_eq!((&function["name"], function["arguments"]["city"].is_string()), (&json!("weather"), true), "{message}");
    }
    assert_eq!((&whole["done_reason"], &streamed.last().unwrap()["done_reason"]), (&json!("stop"), &json!("stop")));

    let mut messages = chat(1)["messages"].take();
    messages.as_array_mut().unwrap().extend([whole["message"].clone(), json!({"role": "tool", "tool_name": "weather", "content": "rain"})]);
    let answer = edge.post(OLLAMAS_CHAT, &edited(ask, json!({"stream": false, "messages": messages}))).await.json();
    assert!(answer["message"]["tool_calls"].is_null() && answer["message"]["content"] != "", "{answer}");
    assert!(answer["prompt_eval_count"].as_u64() > whole["prompt_eval_count"].as_u64(), "call and result are not in the prompt: {answer}");
}

#[tokio::test(start_paused = true)]
async fn texts_are_embedded_as_in_openais_api() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let edge = fleet.edge();
    let openais = edge.post("/v1/embeddings", &json!({"model": MODEL, "input": ["one", "two"]})).await.json();
    let ours = edge.post("/api/embed", &json!({"model": MODEL, "input": ["one", "two"]})).await.json();
    assert_eq!(ours["embeddings"], json!([openais["data"][0]["embedding"], openais["data"][1]["embedding"]]));
    assert_eq!(ours["prompt_eval_count"], openais["usage"]["prompt_tokens"]);
    let one = edge.post("/api/embeddings", &json!({"model": MODEL, "prompt": "two"})).await.json();
    assert_eq!(one, json!({"embedding": openais["data"][1]["embedding"]}));
    assert_eq!(edge.post("/api/embed", &json!({"model": MODEL, "input": []})).await.json()["embeddings"], json!([]));
}

#[tokio::test(start_paused = true)]
async fn the_fleets_models_are_listed_shown_and_running() {
    let flags = "--served-model-name shared large/v2 --max-model-len 4096";
    let fleet = Fleet::start(Setup::two_agents().engine_of(0, flags).engine_of(1, "--served-model-name shared")).await;
    let edge = fleet.edge();
    for path in ["/api/tags", "/api/ps"] {
        let list = edge.get(path).await.json();
        let names: Vec<&Value> = list["models"].as_array().unwrap().iter().map(|model| &model["model"]).collect();
        assert_eq!(names, ["large/v2", "shared"], "{path}: {list}");
        let digests: Vec<&str> = list["models"].as_array().unwrap().iter().map(|model| model["digest"].as_str().unwrap()).collect();
        assert!(digests.iter().all(|digest| digest.len() == 64) && digests[0] != digests[1], "{digests:?}");
    }
    for (stream, text) in [(json!(false), "{\"status\":\"success\"}"), (Value::Null, "{\"status\":\"success\"}\n")] {
        let pulled = edge.post("/api/pull", &json!({"model": "shared", "stream": stream})).await;
        assert_eq!((pulled.status.as_u16(), pulled.text().as_str()), (200, text));
    }
    assert_eq!(edge.post("/api/pull", &json!({"model": "none"})).await.status.as_u16(), 404);
    let shown = edge.post("/api/show", &json!({"model": "large/v2:latest"})).await.json();
    assert_eq!((&shown["model_info"]["vllm.context_length"], &shown["capabilities"]), (&json!(4096), &json!(["completion", "tools"])));
    assert_eq!(edge.post("/api/show", &json!({"name": "shared"})).await.status, 200, "the older name of the field");
    let missing = edge.post("/api/show", &json!({"model": "none"})).await;
    assert_eq!(missing.status.as_u16(), 404);
    assert!(error(&missing).contains("`none`") && error(&missing).contains("large/v2, shared"), "{}", missing.text());
    assert_eq!(edge.get("/api/version").await.json()["hostler"], env!("CARGO_PKG_VERSION"));

    let probe = edge.get("/").await;
    assert_eq!((probe.status.as_u16(), probe.text().contains("Ollama is running")), (200, true));
    for path in ["/", "/api/tags", "/api/version"] {
        let head = edge.request(Request::head(path).body(Full::default()).unwrap()).await;
        assert_eq!((head.status.as_u16(), head.body.len()), (200, 0), "{path}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_unsupported_request_is_refused_in_ollamas_form() {
    let fleet = Fleet::start(Setup::agents(1).router(|router| router.max_body_bytes = 4096)).await;
    let edge = fleet.edge();
    let post = |path: &str, body: String| Request::post(path).body(Full::from(body)).unwrap();
    let delete = |path: &str| Request::builder().method(Method::DELETE).uri(path).body(Full::default()).unwrap();
    for (request, status, words) in [
        (post(OLLAMAS_CHAT, edited(chat(1), json!({"model": "none:latest"})).to_string()), 404, "The model `none:latest` does not exist."),
        (post("/api/generate", json!({"model": "none"}).to_string()), 404, "The model `none` does not exist."),
        (post(OLLAMAS_CHAT, edited(chat(1), json!({"options": {"temperature": -1}})).to_string()), 400, "temperature must be non-negative"),
        (post(OLLAMAS_CHAT, "{\"model\": }".to_owned()), 400, "the body cannot be understood: expected value"),
        (post(OLLAMAS_CHAT, json!({"messages": []}).to_string()), 400, "the body names no model"),
        (post("/api/generate", json!({"model": MODEL, "prompt": "p", "template": "t"}).to_string()), 400, "`template` cannot be set here"),
        (post(OLLAMAS_CHAT, " ".repeat(5000)), 413, "router.max_body_bytes"),
        (post("/api/push", json!({"model": MODEL}).to_string()), 403, "models are served by the fleet's operator"),
        (post("/api/create", String::new()), 403, "models are served by the fleet's operator"),
        (delete("/api/delete"), 403, "models are served by the fleet's operator"),
        (delete(OLLAMAS_CHAT), 405, "this path takes POST"),
        (post("/api/tags", String::new()), 405, "this path takes GET"),
        (post("/api/nothing", String::new()), 404, "there is no /api/nothing here"),
    ] {
        let what = format!("{} {}", request.method(), request.uri());
        let answer = edge.request(request).await;
        assert_eq!(answer.status.as_u16(), status, "{what}: {}", answer.text());
        assert!(error(&answer).contains(words), "{what}: {}", answer.text());
    }
    fleet.until_idle().await;

    let alone = Fleet::start(Setup::agents(0)).await;
    let answer = alone.edge().post(OLLAMAS_CHAT, &chat(1)).await;
    assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (503, Some("10")));
    assert!(error(&answer).contains("no agent has attached yet"), "{}", answer.text());
}

#[tokio::test(start_paused = true)]
async fn a_broken_answer_ends_with_a_line_that_says_so() {
    let fleet = Fleet::start(Setup::agents(1).engine("--sim-step-ms 10").router(|router| router.resume_streams = false)).await;
    let mut stream = fleet.edge().open(OLLAMAS_CHAT, &chat(5000)).await;
    while !stream.read.ends_with(b"\n") || stream.read.is_empty() {
        assert_eq!(stream.piece().await, Ok(true));
    }
    fleet.kill("n0/0").await;
    let answer = stream.finish().await;
    assert!(answer.ended.is_err(), "the answer ended cleanly: {}", answer.text());
    let lines = lines(&answer);
    let (last, rest) = lines.split_last().unwrap();
    assert!(last["error"].is_string() && last.as_object().unwrap().len() == 1, "{last}");
    assert!(!rest.is_empty() && rest.iter().all(|line| line["done"] == false), "{rest:?}");
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_lost_attempt_is_retried_unnoticed_by_the_client() {
    for streams in [false, true] {
        let fleet = Fleet::start(Setup::two_agents().engine("--sim-step-ms 10").engine_of(0, "--sim-die-on deadly")).await;
        let ask = |number: usize| {
            let messages = json!([{"role": "user", "content": format!("deadly question {number}")}]);
            let body = edited(chat(4), json!({"messages": messages, "stream": streams}));
            let edge = fleet.edge();
            async move { edge.post(OLLAMAS_CHAT, &body).await }
        };
        // Two requests at once mostly go to one engine each; which of two idle ones comes first is
        // chance.
        for number in 0..20 {
            let (one, other) = tokio::join!(ask(2 * number), ask(2 * number + 1));
            for answer in [one, other] {
                assert_eq!((answer.status, &answer.ended), (StatusCode::OK, &Ok(())), "{}", answer.text());
                let last: Value = serde_json::from_str(answer.text().lines().last().unwrap()).unwrap();
                assert_figures(&last, 4);
            }
            if fleet.routers[0].metric("hostler_retries_total").await >= 1.0 {
                break;
            }
        }
        assert!(fleet.routers[0].metric("hostler_retries_total").await >= 1.0, "none of them went to the engine that dies");
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_stops_when_its_client_leaves() {
    let fleet = Fleet::start(Setup::agents(1).engine("--sim-step-ms 10 --enable-server-load-tracking")).await;
    for streams in [true, false] {
        let edge = fleet.edge();
        let body = edited(chat(10_000), json!({"stream": streams}));
        let asking = tokio::spawn(async move {
            let mut stream = edge.open(OLLAMAS_CHAT, &body).await;
            while stream.piece().await == Ok(true) {}
        });
        fleet.until_replica("n0/0", "one request", |replica| replica.in_flight == 1).await;
        asking.abort();
        fleet.until_idle().await;
        let engine = fleet.engine("n0/0").await;
        crate::harness::until("an idle engine", async || {
            let load = engine.get("/load").await.json();
            if load["server_load"] == 0 { Ok(()) } else { Err(load.to_string()) }
        })
        .await;
    }
}
