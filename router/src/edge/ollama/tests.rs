use std::time::Duration;

use hostler_api::Route;
use proptest::prelude::*;
use serde_json::json;

use super::catalog::{EngineFlags, resolve};
use super::*;

fn asked(form: OllamaRoute, body: &Value) -> OpenAiRequest {
    OllamaRequest::parse(form, body.to_string().as_bytes())
        .unwrap_or_else(|error| panic!("{error}: {body}"))
        .engine_request
        .expect("something is asked")
}

fn fields(form: OllamaRoute, body: &Value) -> Value {
    Value::Object(asked(form, body).fields)
}

fn refused(form: OllamaRoute, body: &Value) -> String {
    OllamaRequest::parse(form, body.to_string().as_bytes()).expect_err("it cannot be done")
}

/// The fields that `more` adds to a plain chat request that does not stream.
fn added(more: Value) -> Value {
    let mut body = json!({"model": "m", "stream": false, "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let mut fields = asked(OllamaRoute::Chat, &body).fields;
    fields.remove("messages");
    Value::Object(fields)
}

#[test]
fn a_chat_streams_by_default_and_reports_its_usage() {
    let chat = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    let expected = json!({
        "messages": [{"role": "user", "content": "hi"}],
        "stream": true,
        "stream_options": {"include_usage": true},
    });
    assert_eq!(fields(OllamaRoute::Chat, &chat), expected);
    assert_eq!(asked(OllamaRoute::Chat, &chat).engine_route, Route::ChatCompletions);
    assert_eq!(added(json!({})), json!({}));
}

#[test]
fn options_become_the_engines_sampling_parameters() {
    for (options, expected) in [
        (
            json!({"temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05}),
            json!({"temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05}),
        ),
        (
            json!({"repeat_penalty": 1.1, "presence_penalty": 0.25, "frequency_penalty": -0.5}),
            json!({"repetition_penalty": 1.1, "presence_penalty": 0.25, "frequency_penalty": -0.5}),
        ),
        (json!({"seed": 42, "stop": ["a", "b"], "num_predict": 10}), json!({"seed": 42, "stop": ["a", "b"], "max_tokens": 10})),
        // Some languages have only one kind of number.
        (json!({"seed": 42.0, "top_k": 40.0, "num_predict": 10.0}), json!({"seed": 42, "top_k": 40, "max_tokens": 10})),
        // No limit is set.
        (json!({"num_predict": -1}), json!({})),
        (json!({"num_predict": -2}), json!({})),
        (json!({"num_predict": 0}), json!({})),
        // A request cannot change how a model is loaded.
        (json!({"num_ctx": 8192, "num_gpu": 1, "mirostat": 2, "repeat_last_n": 64, "unknown": {}}), json!({})),
        (json!({"temperature": null, "num_predict": null, "stop": []}), json!({})),
    ] {
        assert_eq!(added(json!({"options": options})), expected, "{options}");
    }
    let chat = json!({"model": "m", "messages": [{"role": "user"}], "options": {"num_predict": "many"}});
    assert_eq!(refused(OllamaRoute::Chat, &chat), "options.num_predict must be a whole number, not \"many\"");
}

#[test]
fn format_think_and_logprobs_get_their_engine_names() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    for (more, expected) in [
        (json!({"format": "json"}), json!({"response_format": {"type": "json_object"}})),
        (
            json!({"format": schema}),
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "format", "schema": schema}}}),
        ),
        (json!({"format": "", "think": null, "logprobs": false, "options": null, "keep_alive": "5m"}), json!({})),
        (json!({"think": true}), json!({"chat_template_kwargs": {"enable_thinking": true, "thinking": true}})),
        (json!({"think": false}), json!({"chat_template_kwargs": {"enable_thinking": false, "thinking": false}})),
        (json!({"think": "low"}), json!({"reasoning_effort": "low"})),
        (json!({"logprobs": true}), json!({"logprobs": true, "top_logprobs": 0})),
        (json!({"logprobs": true, "top_logprobs": 3}), json!({"logprobs": true, "top_logprobs": 3})),
        (json!({"tools": [{"type": "function"}]}), json!({"tools": [{"type": "function"}]})),
        (json!({"tools": []}), json!({})),
    ] {
        assert_eq!(added(more.clone()), expected, "{more}");
    }
    for (more, complaint) in [
        (json!({"format": "xml"}), "format must be \"json\" or a JSON schema, not \"xml\""),
        (json!({"think": "hard"}), "think must be true, false, \"low\", \"medium\", \"high\" or \"max\", not \"hard\""),
    ] {
        let mut body = json!({"model": "m", "messages": [{"role": "user"}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        assert_eq!(refused(OllamaRoute::Chat, &body), complaint);
    }
}

#[test]
fn tool_calls_get_ids_and_results_refer_to_them() {
    let call = |name: &str| json!({"function": {"name": name, "arguments": {"city": "Bern", "days": [1, 2]}}});
    let messages = json!([
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "thinking": "hm", "tool_calls": [call("weather"), call("time")]},
        {"role": "tool", "tool_name": "time", "content": "noon"},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "own", "function": {"name": "weather", "arguments": {}}}]},
        {"role": "tool", "tool_call_id": "own", "content": "sun"},
        {"role": "tool", "content": "nobody asked"},
    ]);
    let told = fields(OllamaRoute::Chat, &json!({"model": "m", "messages": messages}))["messages"].take();
    let called = |id: &str, name: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": "{\"city\":\"Bern\",\"days\":[1,2]}"}});
    let expected = json!([
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [called("call00001", "weather"), called("call00002", "time")]},
        {"role": "tool", "content": "noon", "tool_call_id": "call00002", "name": "time"},
        {"role": "tool", "content": "rain", "tool_call_id": "call00001"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "own", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
        {"role": "tool", "content": "sun", "tool_call_id": "own"},
        {"role": "tool", "content": "nobody asked", "tool_call_id": "call00003"},
    ]);
    assert_eq!(told, expected);
}

#[test]
fn images_are_sent_as_data_and_never_as_addresses() {
    let of = |image: &str| json!({"model": "m", "messages": [{"role": "user", "content": "what?", "images": [image]}]});
    for (image, url) in [
        ("iVBORw0KGgoAAAA=", "data:image/png;base64,iVBORw0KGgoAAAA="),
        ("/9j/4AAQ", "data:image/jpeg;base64,/9j/4AAQ"),
        ("R0lGODlh", "data:image/gif;base64,R0lGODlh"),
        ("UklGRiQ", "data:image/webp;base64,UklGRiQ"),
        ("AAAA", "data:application/octet-stream;base64,AAAA"),
        ("data:image/png;base64,iVBORw0KGgo", "data:image/png;base64,iVBORw0KGgo"),
    ] {
        let content = &fields(OllamaRoute::Chat, &of(image))["messages"][0]["content"];
        assert_eq!(*content, json!([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]));
    }
    for image in ["http://10.0.0.1/secret.png", "file:///etc/passwd", "", "data:image/png;base64,", "data:image/png,x", "AA AA"] {
        assert!(refused(OllamaRoute::Chat, &of(image)).contains("base64"), "{image}");
    }
}

#[test]
fn a_prompt_uses_the_models_template_unless_raw() {
    let templated = json!({"model": "m", "prompt": "why?", "system": "be brief", "stream": false, "context": []});
    let expected = json!({"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]});
    assert_eq!(fields(OllamaRoute::Generate, &templated), expected);

    let raw = asked(OllamaRoute::Generate, &json!({"model": "m", "prompt": "<s>why?", "raw": true, "stream": false, "think": true}));
    assert_eq!(
        (raw.engine_route, Value::Object(raw.fields), raw.needs_token_limit),
        (Route::Completions, json!({"prompt": "<s>why?"}), true)
    );
    let fill = asked(OllamaRoute::Generate, &json!({"model": "m", "prompt": "def ", "suffix": "return", "options": {"num_predict": 9}}));
    assert_eq!((fill.engine_route, fill.needs_token_limit), (Route::Completions, false));
    assert_eq!((&fill.fields["suffix"], &fill.fields["max_tokens"], &fill.fields["stream"]), (&json!("return"), &json!(9), &json!(true)));
}

#[test]
fn an_unsupported_option_is_refused_by_name() {
    for (more, named) in [
        (json!({"template": "{{ .Prompt }}"}), "`template`"),
        (json!({"context": [1, 2, 3]}), "`context`"),
        (json!({"raw": true, "system": "s"}), "`system`"),
        (json!({"raw": true, "images": ["AAAA"]}), "`images`"),
        (json!({"suffix": "x", "logprobs": true}), "`logprobs`"),
    ] {
        let mut body = json!({"model": "m", "prompt": "p"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let complaint = refused(OllamaRoute::Generate, &body);
        assert!(complaint.contains(named), "{complaint}");
    }
    for (form, body) in [
        (OllamaRoute::Chat, json!({"messages": []})),
        (OllamaRoute::Generate, json!({"prompt": "p"})),
        (OllamaRoute::Embed, json!({"input": "t"})),
        (OllamaRoute::Embedding, json!({"model": "", "prompt": "p"})),
    ] {
        assert_eq!(refused(form, &body), "the body names no model");
    }
    assert!(refused(OllamaRoute::Chat, &json!({"model": "m", "messages": "no list"})).starts_with("the body cannot be understood: "));
    assert!(OllamaRequest::parse(OllamaRoute::Chat, b"{\"model\": }").is_err() && OllamaRequest::parse(OllamaRoute::Chat, b"").is_err());
}

#[test]
fn a_request_to_load_a_model_gets_an_empty_answer() {
    for (form, body) in [
        (OllamaRoute::Chat, json!({"model": "m"})),
        (OllamaRoute::Chat, json!({"model": "m", "messages": []})),
        (OllamaRoute::Generate, json!({"model": "m", "prompt": "", "keep_alive": 0})),
        (OllamaRoute::Embed, json!({"model": "m", "input": []})),
        (OllamaRoute::Embedding, json!({"model": "m", "prompt": ""})),
    ] {
        assert_eq!(OllamaRequest::parse(form, body.to_string().as_bytes()).unwrap().engine_request, None, "{body}");
    }
    let told = model_loaded_answer(OllamaRoute::Chat, "m", noon());
    assert_eq!((&told["done"], &told["done_reason"], &told["message"]["content"]), (&json!(true), &json!("load"), &json!("")));
}

#[test]
fn embedded_texts_are_truncated_to_fit_unless_forbidden() {
    let embed = |more: Value| {
        let mut body = json!({"model": "m"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        fields(OllamaRoute::Embed, &body)
    };
    let expected = json!({"input": ["a"], "encoding_format": "float", "truncate_prompt_tokens": -1});
    assert_eq!(embed(json!({"input": "a", "options": {"num_ctx": 1}, "keep_alive": "1h"})), expected);
    let expected = json!({"input": ["a", "b"], "encoding_format": "float", "dimensions": 8});
    assert_eq!(embed(json!({"input": ["a", "b"], "truncate": false, "dimensions": 8})), expected);
    assert_eq!(fields(OllamaRoute::Embedding, &json!({"model": "m", "prompt": "a"}))["input"], json!(["a"]));
    assert!(refused(OllamaRoute::Embed, &json!({"model": "m", "input": ["a", ""]})).contains("empty text"));
}

fn noon() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::new(1_700_000_000, 5)
}

const WHOLE: &str = r#"{"id":"c","choices":[{"index":0,"message":{"role":"assistant","content":"Hi","reasoning":"hm","tool_calls":[{"id":"t1","type":"function","function":{"name":"look","arguments":"{\"at\": 1.50}"}}]},"logprobs":{"content":[{"token":"Hi","logprob":-0.10}]},"finish_reason":"tool_calls"}],"usage":{"prompt_tokens":7,"total_tokens":12,"completion_tokens":5}}"#;

fn whole_text(form: OllamaRoute, body: &str) -> String {
    let told = translate_answer(form, "m:latest", body.as_bytes(), Duration::from_millis(1500), noon());
    String::from_utf8(told.unwrap_or_else(|message| format!("error: {message}").into_bytes())).unwrap()
}

#[test]
fn a_whole_answer_is_one_complete_json_object() {
    insta::assert_snapshot!(whole_text(OllamaRoute::Chat, WHOLE), @r#"{"model":"m:latest","created_at":"2023-11-14T22:13:20.000000005Z","message":{"role":"assistant","content":"Hi","thinking":"hm","tool_calls":[{"id":"t1","function":{"index":0,"name":"look","arguments":{"at":1.5}}}]},"logprobs":[{"token":"Hi","logprob":-0.10}],"done":true,"done_reason":"stop","total_duration":1500000000,"load_duration":0,"prompt_eval_count":7,"eval_count":5,"eval_duration":1500000000}"#);
    insta::assert_snapshot!(whole_text(OllamaRoute::Generate, WHOLE), @r#"{"model":"m:latest","created_at":"2023-11-14T22:13:20.000000005Z","response":"Hi","thinking":"hm","logprobs":[{"token":"Hi","logprob":-0.10}],"done":true,"done_reason":"stop","total_duration":1500000000,"load_duration":0,"prompt_eval_count":7,"eval_count":5,"eval_duration":1500000000}"#);
    let cut = r#"{"choices":[{"index":0,"text":"raw","logprobs":null,"finish_reason":"length"}],"usage":null}"#;
    insta::assert_snapshot!(whole_text(OllamaRoute::Generate, cut), @r#"{"model":"m:latest","created_at":"2023-11-14T22:13:20.000000005Z","response":"raw","done":true,"done_reason":"length","total_duration":1500000000,"load_duration":0,"prompt_eval_count":0,"eval_count":0,"eval_duration":1500000000}"#);
}

#[test]
fn an_answer_that_cannot_be_translated_is_an_error() {
    insta::assert_snapshot!(whole_text(OllamaRoute::Chat, &WHOLE.replace("{\\\"at\\\": 1.50}", "{\\\"at\\\": 1.5")), @"error: the model called `look` with arguments that are no JSON object, or was cut short while it did");
    insta::assert_snapshot!(whole_text(OllamaRoute::Chat, r#"{"choices":[]}"#), @"error: the engine's answer is empty");
    assert!(whole_text(OllamaRoute::Chat, "<html>").starts_with("error: the engine's answer cannot be read: "));
    // A function without parameters is called with nothing.
    assert!(whole_text(OllamaRoute::Chat, &WHOLE.replace("{\\\"at\\\": 1.50}", "")).contains(r#""arguments":{}"#));
}

#[test]
fn embeddings_keep_their_digits_and_order() {
    let body =
        r#"{"data":[{"index":1,"object":"embedding","embedding":[0.10,2e-3]},{"index":0,"embedding":[1.0]}],"usage":{"prompt_tokens":4}}"#;
    insta::assert_snapshot!(whole_text(OllamaRoute::Embed, body), @r#"{"model":"m:latest","embeddings":[[1.0],[0.10,2e-3]],"total_duration":1500000000,"load_duration":0,"prompt_eval_count":4}"#);
    insta::assert_snapshot!(whole_text(OllamaRoute::Embedding, body), @r#"{"embedding":[1.0]}"#);
}

#[test]
fn errors_of_every_form_become_one_sentence() {
    for (body, message) in [
        (r#"{"error":{"message":"no such model","type":"NotFoundError","param":null,"code":404}}"#, "no such model"),
        (r#"{"detail":"Not Found"}"#, "Not Found"),
        (r#"{"error":"already Ollama's"}"#, "already Ollama's"),
        (r#"{"detail":[{"loc":["body"]}]}"#, r#"[{"loc":["body"]}]"#),
        ("Bad Gateway", "Bad Gateway"),
    ] {
        assert_eq!(error_message(body.as_bytes()), message);
    }
    let refused = translate_error(reply::error(StatusCode::TOO_MANY_REQUESTS, "RateLimitError", "too much"));
    let EdgeBody::Local(Some(body)) = refused.body() else { panic!("its own body") };
    assert_eq!((refused.status(), &body[..]), (StatusCode::TOO_MANY_REQUESTS, &br#"{"error":"too much"}"#[..]));
}

#[test]
fn the_latest_tag_is_optional_unless_the_fleet_distinguishes_it() {
    let resolve = |name, known: &[&str]| resolve(name, known.iter().copied());
    assert_eq!(resolve("tiny:latest", &["tiny", "other"]), "tiny");
    assert_eq!(resolve("tiny:latest", &["tiny", "tiny:latest"]), "tiny:latest");
    assert_eq!(resolve("tiny", &["tiny:latest"]), "tiny:latest");
    assert_eq!(resolve("org/tiny:latest", &["org/tiny"]), "org/tiny");
    // The fleet's refusal then repeats the client's name.
    assert_eq!(resolve("none:latest", &["tiny"]), "none:latest");
    assert_eq!(resolve("tiny:7b", &["tiny"]), "tiny:7b");
}

#[test]
fn a_models_capabilities_follow_from_its_engines_flags() {
    for (flags, expected) in [
        ("", "completion"),
        ("--enable-auto-tool-choice --tool-call-parser hermes", "completion tools"),
        ("--reasoning-parser qwen3 --enable-auto-tool-choice", "completion tools thinking"),
        ("--reasoning-parser=qwen3", "completion thinking"),
        ("--runner pooling", "embedding"),
        ("--convert=embed", "embedding"),
    ] {
        let words: Vec<String> = flags.split_whitespace().map(str::to_owned).collect();
        assert_eq!(EngineFlags(&words).capabilities().join(" "), expected, "{flags}");
    }
}

#[test]
fn ollamas_paths_are_distinguished_from_the_engines() {
    for path in ["/", "/api", "/api/", "/api/chat", "/api/blobs/sha256:0"] {
        assert!(is_ollama_path(path), "{path}");
    }
    for path in ["/v1/chat/completions", "/apis", "/health", "//", "/v1/api/chat", ""] {
        assert!(!is_ollama_path(path), "{path}");
    }
}

proptest! {
    #[test]
    fn no_body_makes_the_ollama_translator_panic(body: Vec<u8>) {
        for form in [OllamaRoute::Chat, OllamaRoute::Generate, OllamaRoute::Embed, OllamaRoute::Embedding] {
            let _ = OllamaRequest::parse(form, &body);
            let _ = translate_answer(form, "m", &body, Duration::ZERO, noon());
        }
    }
}
