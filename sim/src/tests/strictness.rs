//! What each of vLLM's front-ends makes of unusual requests, in the words of 0.32.

use http::StatusCode;
use serde_json::{Value, json};

use super::{Answer, RunningEngine};

#[tokio::test]
async fn a_field_given_twice_counts_last_or_is_refused() {
    let (python, rust) = (RunningEngine::start(&[]).await, RunningEngine::start(&["--sim-rust-front-end"]).await);
    let twice = r#"{"prompt":"hi","max_tokens":4,"max_tokens":2}"#;
    assert_eq!(python.post("/v1/completions", twice).await.json()["usage"]["completion_tokens"], 2);
    let nested = r#"{"messages":[{"role":"user","content":"a","content":"b"}],"max_tokens":1,"max_tokens":2}"#;
    assert_eq!(python.post("/v1/chat/completions", nested).await.json()["usage"]["completion_tokens"], 2);
    // What vLLM 0.32 says to these bodies, whose model has a name of nine letters there.
    let (completions, chats) = ("/v1/completions", "/v1/chat/completions");
    let user = r#""messages":[{"role":"user","content":"hi"}]"#;
    for (path, rest, words) in [
        (chats, format!(r#""model":"other",{user},"max_tokens":4"#), "duplicate field `model` at line 1 column 28"),
        (
            completions,
            r#""prompt":"Hello","max_tokens":2,"stream":true,"stream_options":{"include_usage":true,"include_usage":false}"#.to_owned(),
            "stream_options: duplicate field `include_usage` at line 1 column 121",
        ),
        (
            chats,
            format!(
                r#"{user},"max_tokens":2,"tools":[{{"type":"function","type":"function","function":{{"name":"a","name":"b","parameters":{{}}}}}}]"#
            ),
            "tools[0]: duplicate field `type` at line 1 column 114",
        ),
        (
            completions,
            r#""prompt":"Hello","max_tokens":2,"echo":"x""#.to_owned(),
            "echo: invalid type: string \"x\", expected a boolean at line 1 column 63",
        ),
    ] {
        let body = format!(r#"{{"model":"tiny"     ,{rest}}}"#);
        let answer = rust.post(path, &body).await;
        let message = format!("Failed to deserialize the JSON body into the target type: {words}");
        let error = json!({"message": message, "type": "invalid_request_error", "param": null, "code": "json_parse_error"});
        assert_eq!((answer.status, &answer.json()["error"]), (StatusCode::BAD_REQUEST, &error), "{body}");
    }
    let lines = rust.post(completions, "{\n\"prompt\":\"hi\",\n \"echo\":\"x\"}").await.json()["error"]["message"].to_string();
    assert!(lines.contains("line 3 column 11"), "{lines}");
    let unknown = r#"{"prompt":"hi","max_tokens":1,"other":1,"other":2}"#;
    assert_eq!(rust.post("/v1/completions", unknown).await.status, 200, "which nobody reads");
    assert_eq!(rust.post("/v1/chat/completions", &nested.replace(r#""max_tokens":1,"#, "")).await.status, 200);
}

#[tokio::test]
async fn custom_tools_are_refused_in_each_front_ends_words() {
    let (python, rust) = (RunningEngine::start(&[]).await, RunningEngine::start(&["--sim-rust-front-end"]).await);
    let chat = r#"{"model":"tiny"     ,"messages":[{"role":"user","content":"hi"}],"max_tokens":4,"tools":[{"type":"custom","custom":{"name":"run"}}]}"#;
    let refused = python.post("/v1/chat/completions", chat).await.json()["error"].clone();
    // As vLLM 0.32 says it.
    let words = "2 validation errors:\n  {'type': 'literal_error', 'loc': 'body.tools.0.type', 'msg': \"Input should be 'function'\", 'input': 'custom', 'ctx': {'expected': \"'function'\"}}\n  {'type': 'missing', 'loc': 'body.tools.0.function', 'msg': 'Field required', 'input': '<dict of 2 items>'}";
    assert_eq!(refused, json!({"message": words, "type": "Bad Request", "param": "body.tools.0.type", "code": 400}));
    let refused = rust.post("/v1/chat/completions", chat).await.json()["error"].clone();
    let words = "Failed to deserialize the JSON body into the target type: tools[0]: missing field `function` at line 1 column 130";
    assert_eq!(refused, json!({"message": words, "type": "invalid_request_error", "param": null, "code": "json_parse_error"}));
    let grammar = r#"{"input":"hi","tools":[{"type":"custom","name":"run","format":{"type":"grammar","syntax":"lark","definition":"start: \"a\""}}]}"#;
    let refused = python.post("/v1/responses", grammar).await.json()["error"].clone();
    let words = "Custom tools with a grammar format are not supported; only free-form text custom tools are accepted. (parameter=tools)";
    assert_eq!(refused, json!({"message": words, "type": "BadRequestError", "param": "tools", "code": 400}));
    let free = r#"{"input":"hi","max_output_tokens":2,"tools":[{"type":"custom","name":"run","format":{"type":"text"}}]}"#;
    assert_eq!(python.post("/v1/responses", free).await.status, 200);
}

#[tokio::test]
async fn echo_shows_the_prompt_as_each_front_end_does() {
    let (python, rust) = (RunningEngine::start(&[]).await, RunningEngine::start(&["--sim-rust-front-end"]).await);
    let body = |more: &str| format!(r#"{{"prompt":"hi there","seed":1{more}}}"#);
    let texts = |answer: &Answer| -> Vec<String> {
        let body = String::from_utf8_lossy(&answer.body);
        let events = body.split("\n\n").filter_map(|event| serde_json::from_str::<Value>(event.strip_prefix("data: ")?).ok());
        events.filter_map(|event| event["choices"][0]["text"].as_str().map(str::to_owned)).collect()
    };
    for engine in [&python, &rust] {
        let text =
            async |more: &str| engine.post("/v1/completions", &body(more)).await.json()["choices"][0]["text"].as_str().unwrap().to_owned();
        let plain = text(r#","max_tokens":3"#).await;
        let echoed = text(r#","max_tokens":3,"echo":true"#).await;
        assert_eq!(echoed, format!("hi there{plain}"));
        assert_eq!(text(r#","max_tokens":0,"echo":true"#).await, "hi there");
        let streamed = engine.post("/v1/completions", &body(r#","max_tokens":3,"echo":true,"stream":true"#)).await;
        assert_eq!(texts(&streamed).concat(), echoed);
        let own_event = texts(&streamed)[0] == "hi there";
        assert_eq!(own_event, std::ptr::eq(engine, &raw const rust), "an event of its own in the Rust front-end alone");
        let whole = engine.post("/v1/completions", &body(r#","max_tokens":2,"echo":true,"logprobs":1"#)).await.json();
        let (choice, prompt) = (&whole["choices"][0], usize::try_from(whole["usage"]["prompt_tokens"].as_u64().unwrap()).unwrap());
        let probabilities = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        assert_eq!((probabilities.len(), probabilities[0].is_null(), probabilities[1].is_f64()), (prompt + 2, true, true));
        assert_eq!(choice["prompt_logprobs"].as_array().unwrap().len(), prompt);
    }
    let refused = async |engine: &RunningEngine| engine.post("/v1/completions", &body(r#","max_tokens":0"#)).await.json()["error"].clone();
    assert_eq!(refused(&python).await["message"], "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)");
    let error = json!({"message": "max_tokens=0 is only supported when echo=true.", "type": "invalid_request_error", "param": "max_tokens", "code": "invalid_request_error"});
    assert_eq!(refused(&rust).await, error);
}

#[tokio::test]
async fn the_rust_front_end_answers_differently_without_a_seed() {
    let rust = RunningEngine::start(&["--sim-rust-front-end"]).await;
    let text = async |more: &str| {
        rust.post("/v1/completions", &format!(r#"{{"prompt":"hi","max_tokens":8{more}}}"#)).await.json()["choices"].clone()
    };
    assert_ne!(text("").await, text("").await);
    assert_ne!(text(r#","seed":-1"#).await, text(r#","seed":-1"#).await, "which is none");
    for more in [r#","seed":7"#, r#","temperature":0"#] {
        assert_eq!(text(more).await, text(more).await, "{more}");
    }
}
