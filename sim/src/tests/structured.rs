//! Answers in a requested form, over all routes: JSON of a schema, texts of a choice or an
//! expression, calls of tools, and Anthropic's messages.

use serde_json::{Value, json};

use super::wire::assert_same_stream;
use super::{Answer, RunningEngine};

fn weather() -> Value {
    json!({
        "type": "object",
        "properties": { "city": { "enum": ["Bern", "Zürich"] }, "degrees": { "type": "integer", "minimum": -20, "maximum": 40 } },
        "required": ["city", "degrees"],
        "additionalProperties": false,
    })
}

fn is_weather(text: &str) {
    let document: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert!(document["city"].is_string() && document["degrees"].is_i64() && document.as_object().unwrap().len() == 2, "{text}");
}

/// Data of a stream's events, without `[DONE]`.
fn events(answer: &Answer) -> Vec<Value> {
    let data = answer.chunks.iter().map(|chunk| chunk.split_once("data: ").expect("an event has data").1.trim());
    data.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
}

/// Values of the events at a pointer, joined into one text.
fn joined(events: &[Value], pointer: &str) -> String {
    events.iter().filter_map(|event| event.pointer(pointer)?.as_str()).collect()
}

/// Adds these fields to a request.
fn with(body: &Value, more: Value) -> String {
    let mut body = body.clone();
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.to_string()
}

#[tokio::test]
async fn a_chat_follows_its_json_schema_whole_and_streamed() {
    let engine = RunningEngine::start(&[]).await;
    let request = json!({
        "messages": [{ "role": "user", "content": "weather?" }],
        "response_format": { "type": "json_schema", "json_schema": { "name": "weather", "schema": weather(), "strict": true } },
    });
    let whole = engine.post("/v1/chat/completions", &request.to_string()).await.json();
    let text = whole["choices"][0]["message"]["content"].as_str().unwrap();
    is_weather(text);
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    let streamed = engine.post("/v1/chat/completions", &with(&request, json!({ "stream": true, "return_token_ids": true }))).await;
    let events = events(&streamed);
    assert_eq!(joined(&events, "/choices/0/delta/content"), text);
    let tokens: Vec<Value> =
        events.iter().filter_map(|event| event.pointer("/choices/0/token_ids")?.as_array()).flatten().cloned().collect();
    assert_eq!(whole["usage"]["completion_tokens"], tokens.len());
    let again = engine.post("/detokenize", &json!({ "tokens": tokens }).to_string()).await.json();
    assert_eq!(again["prompt"], text, "the tokens are those of the text");

    let cut = engine.post("/v1/chat/completions", &with(&request, json!({ "max_tokens": 5 }))).await.json();
    assert_eq!((&cut["choices"][0]["finish_reason"], &cut["usage"]["completion_tokens"]), (&"length".into(), &5.into()));
    assert!(text.starts_with(cut["choices"][0]["message"]["content"].as_str().unwrap()));
}

#[tokio::test]
async fn a_completion_follows_a_choice_a_regex_or_a_schema() {
    let engine = RunningEngine::start(&[]).await;
    let ask = async |constraint: Value| {
        let body = json!({ "prompt": "hi", "max_tokens": 100, "structured_outputs": constraint }).to_string();
        let whole = engine.post("/v1/completions", &body).await.json();
        let streamed = engine.post("/v1/completions", &body.replacen('{', r#"{"stream":true,"#, 1)).await;
        let text = whole["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{whole}")).to_owned();
        assert_eq!(joined(&events(&streamed), "/choices/0/text"), text);
        assert_eq!(whole["choices"][0]["finish_reason"], "stop", "{whole}");
        text
    };
    assert!(["日本語", "中国"].contains(&ask(json!({ "choice": ["日本語", "中国"] })).await.as_str()));
    let code = ask(json!({ "regex": r"[A-Z]{3}-\d{2}" })).await;
    assert!(code.len() == 6 && code.as_bytes()[3] == b'-', "{code}");
    is_weather(&ask(json!({ "json": weather() })).await);
    is_weather(&ask(json!({ "json": weather().to_string() })).await);
    assert!(serde_json::from_str::<Value>(&ask(json!({ "json_object": true })).await).unwrap().is_object());
    assert_eq!(ask(json!({ "choice": [""] })).await, "");
}

#[tokio::test]
async fn an_unsatisfiable_format_is_a_bad_request() {
    let engine = RunningEngine::start(&[]).await;
    let format = |schema: Value| json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "a", "schema": schema } } });
    for (more, words) in [
        (format(json!({ "type": "foo" })), "Grammar error: Invalid type: foo"),
        (json!({ "structured_outputs": { "choice": [] } }), "Choice '[]' cannot be an empty list"),
        (json!({ "structured_outputs": { "regex": "(" } }), "Grammar error: regex parse error"),
        (json!({ "structured_outputs": { "regex": "a", "choice": ["a"] } }), "You can only use one kind of constraints"),
        (json!({ "structured_outputs": { "json": "" } }), "structured_outputs.json cannot be an empty string"),
        (json!({ "structured_outputs": {} }), "You must use one kind of structured outputs constraint"),
        (json!({ "structured_outputs": { "grammar": "root ::= \"a\"" } }), "The simulated engine has no grammars"),
        (json!({ "response_format": { "type": "json_schema" } }), "When response_format type is 'json_schema'"),
        (json!({ "tool_choice": "required" }), "When using `tool_choice`, `tools` must be set."),
    ] {
        let body = with(&json!({ "messages": [{ "role": "user", "content": "hi" }] }), more);
        let answer = engine.post("/v1/chat/completions", &body).await;
        assert_eq!(answer.status, 400, "{body}");
        let error = answer.json()["error"].clone();
        assert!(error["message"].as_str().unwrap().starts_with(words) && error["type"] == "BadRequestError", "{body}: {error}");
    }
    assert_eq!(engine.metric("vllm:num_requests_running").await, 0.0);
}

#[tokio::test]
async fn a_returned_tool_call_is_found_in_the_cache() {
    let engine = RunningEngine::start(&["--enable-prompt-tokens-details"]).await;
    let question = json!({ "role": "user", "content": "what is the weather there ".repeat(4) });
    let tools = json!([{ "type": "function", "function": { "name": "get_weather", "parameters": weather() } }]);
    let request = json!({ "messages": [question], "tools": tools, "tool_choice": "required" });
    let answer = engine.post("/v1/chat/completions", &request.to_string()).await.json();
    let message = &answer["choices"][0]["message"];
    is_weather(message["tool_calls"][0]["function"]["arguments"].as_str().unwrap());
    let result = json!({ "role": "tool", "tool_call_id": "c", "content": "rain" });
    let turns = json!({ "messages": [question, message, result], "tools": tools, "max_tokens": 1 });
    let next = engine.post("/v1/chat/completions", &turns.to_string()).await.json();
    let cached = next["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let before = answer["usage"]["total_tokens"].as_u64().unwrap();
    assert_eq!(cached, (before - 1) / 16 * 16, "all full blocks of the question and the call: {next}");
}

#[tokio::test]
async fn a_response_follows_its_schema_or_required_call() {
    let engine = RunningEngine::start(&[]).await;
    let request = json!({ "input": "weather?", "text": { "format": { "type": "json_schema", "name": "weather", "schema": weather() } } });
    let whole = engine.post("/v1/responses", &request.to_string()).await.json();
    is_weather(whole["output"][0]["content"][0]["text"].as_str().unwrap());
    assert_eq!(whole["status"], "completed");

    let tools = json!([{ "type": "function", "name": "get_weather", "parameters": weather() }]);
    for choice in [json!("required"), json!({ "type": "function", "name": "get_weather" })] {
        let request = json!({ "input": "weather?", "tools": tools, "tool_choice": choice });
        let whole = engine.post("/v1/responses", &request.to_string()).await.json();
        let call = &whole["output"][0];
        assert_eq!((&call["type"], &call["name"], &whole["tool_choice"]), (&"function_call".into(), &"get_weather".into(), &choice));
        is_weather(call["arguments"].as_str().unwrap());
        let events = events(&engine.post("/v1/responses", &with(&request, json!({ "stream": true }))).await);
        let mut kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
        kinds.dedup();
        let (item, arguments) = ("response.output_item", "response.function_call_arguments");
        let expected = ["response.created", "response.in_progress", &format!("{item}.added"), &format!("{arguments}.delta")];
        assert_eq!(kinds[..4], expected);
        assert_eq!(kinds[4..], [&format!("{arguments}.done"), &format!("{item}.done"), "response.completed"]);
        assert_eq!(joined(&events, "/delta"), call["arguments"].as_str().unwrap());
        assert_eq!(events.last().unwrap()["response"]["output"][0]["arguments"], call["arguments"]);

        let result = json!({ "type": "function_call_output", "call_id": call["call_id"], "output": "rain" });
        let input = json!([{ "role": "user", "content": "weather?" }, call, result]);
        let after = engine.post("/v1/responses", &json!({ "input": input, "tools": tools }).to_string()).await.json();
        assert_eq!(after["output"][0]["type"], "message", "{after}");
    }
    let named = json!({ "input": "hi", "tools": tools, "tool_choice": { "type": "function", "name": "other" } });
    assert_eq!(engine.post("/v1/responses", &named.to_string()).await.status, 400);
}

#[tokio::test]
async fn a_streamed_message_has_the_recorded_events() {
    let engine = RunningEngine::start(&["--enable-request-id-headers"]).await;
    let body = r#"{"model":"tiny","max_tokens":4,"messages":[{"role":"user","content":"hi"}],"stream":true}"#;
    let answer = engine.post("/v1/messages", body).await;
    assert_same_stream(&answer, "sse_anthropic_messages.raw", true);
    let whole = engine.post("/v1/messages", &body.replace("true", "false")).await.json();
    assert_eq!(whole["content"][0]["text"], joined(&events(&answer), "/delta/text"));
    assert_eq!((&whole["stop_reason"], &whole["usage"]["output_tokens"]), (&"max_tokens".into(), &4.into()));
    let counted = engine.post("/v1/messages/count_tokens", body).await.json();
    assert_eq!(counted["input_tokens"], whole["usage"]["input_tokens"]);
}

#[tokio::test]
async fn a_message_calls_the_tool_and_reads_its_result() {
    let engine = RunningEngine::start(&[]).await;
    let question = json!({ "role": "user", "content": [{ "type": "text", "text": "weather?" }] });
    let tools = json!([{ "name": "get_weather", "description": "d", "input_schema": weather() }]);
    for choice in [json!({ "type": "any" }), json!({ "type": "tool", "name": "get_weather" })] {
        let request = json!({ "model": "tiny", "max_tokens": 200, "system": "be brief", "messages": [question], "tools": tools, "tool_choice": choice });
        let whole = engine.post("/v1/messages", &request.to_string()).await.json();
        let call = &whole["content"][0];
        assert_eq!((&call["type"], &whole["stop_reason"]), (&"tool_use".into(), &"tool_use".into()), "{whole}");
        is_weather(&call["input"].to_string());
        let events = events(&engine.post("/v1/messages", &with(&request, json!({ "stream": true }))).await);
        let partial: Value = serde_json::from_str(&joined(&events, "/delta/partial_json")).unwrap();
        assert_eq!(partial, call["input"]);
        assert_eq!(joined(&events, "/delta/stop_reason"), "tool_use");
        let cut = engine.post("/v1/messages", &with(&request, json!({ "max_tokens": 3 }))).await.json();
        assert_eq!((&cut["stop_reason"], &cut["content"][0]["type"]), (&"max_tokens".into(), &"text".into()));

        // An equal conversation as a chat has equal tokens.
        let result = json!({ "type": "tool_result", "tool_use_id": call["id"], "content": [{ "type": "text", "text": "rain" }] });
        let turns = json!([question, { "role": "assistant", "content": [call] }, { "role": "user", "content": [result] }]);
        let counted = engine.post("/v1/messages/count_tokens", &with(&request, json!({ "messages": turns }))).await.json();
        let function = json!({ "name": "get_weather", "arguments": call["input"].to_string() });
        let chat = json!({
            "messages": [
                { "role": "system", "content": "be brief" },
                { "role": "user", "content": "weather?" },
                { "role": "assistant", "tool_calls": [{ "id": "c", "type": "function", "function": function }] },
                { "role": "tool", "tool_call_id": "c", "content": "rain" },
            ],
            "tools": [{ "type": "function", "function": { "name": "get_weather", "parameters": weather() } }],
        });
        assert_eq!(counted["input_tokens"], engine.post("/tokenize", &chat.to_string()).await.json()["count"]);
    }
}

#[tokio::test]
async fn an_invalid_message_gets_an_error_of_anthropics_form() {
    let engine = RunningEngine::start(&[]).await;
    let hello = json!({ "model": "nope", "max_tokens": 4, "messages": [{ "role": "user", "content": "hi" }] });
    for path in ["/v1/messages", "/v1/messages/count_tokens"] {
        let answer = engine.post(path, &hello.to_string()).await;
        assert_eq!(answer.status, 404);
        let error = answer.json();
        assert_eq!((&error["type"], &error["error"]["type"]), (&"error".into(), &"NotFoundError".into()));
    }
    let answer = engine.post("/v1/messages", r#"{"model":"tiny","messages":[]}"#).await;
    assert_eq!((answer.status.as_u16(), &answer.json()["error"]["param"]), (400, &"body.max_tokens".into()));
}

#[tokio::test]
async fn a_failing_engine_ends_a_message_with_an_error() {
    let engine = RunningEngine::start(&[]).await;
    let body = r#"{"model":"tiny","max_tokens":3000,"messages":[{"role":"user","content":"hi"}],"stream":true}"#;
    let (answer, _) = tokio::join!(engine.post("/v1/messages", body), async {
        engine.wait_for_metric("vllm:num_requests_running", 1.0).await;
        engine.post("/sim/fault", r#"{"kind":"error_event"}"#).await
    });
    let events = events(&answer);
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["error"]["type"]), (&"error".into(), &"internal_error".into()));
}
