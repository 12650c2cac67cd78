use std::time::SystemTime;

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use super::*;
use crate::edge::translation::samples::{any_delta, pieces};
use crate::edge::translation::{ArrivalTime, ChunkTranslator, StreamTranslation, TranslationError};

fn body(more: Value) -> Vec<u8> {
    let mut body = json!({"model": "m", "input": "hi"});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.to_string().into_bytes()
}

fn chat(more: Value) -> Value {
    chat_request(&body(more)).unwrap().0
}

/// The fields that `more` adds to the chat of a plain request.
fn added(more: Value) -> Value {
    let mut chat = chat(more);
    for plain in ["model", "messages"] {
        chat.as_object_mut().unwrap().remove(plain);
    }
    chat
}

#[test]
fn a_plain_request_becomes_a_plain_chat() {
    assert_eq!(chat(json!({})), json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]}));
    let more =
        json!({"instructions": "Be brief.", "max_output_tokens": 5, "temperature": "hot", "stream": true, "store": false, "include": []});
    assert_eq!(
        chat(more),
        json!({
            "model": "m",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
            "max_tokens": 5,
            "temperature": "hot",
            "stream": true,
            "stream_options": {"include_usage": true},
        })
    );
}

#[test]
fn a_turns_reasoning_text_and_calls_become_one_message() {
    let input = json!([
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"},
        ]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "rest", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": "thanks"},
    ]);
    let call = |id: &str, name: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}});
    assert_eq!(
        chat(json!({"input": input}))["messages"],
        json!([
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": [
                {"type": "text", "text": "what?"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "auto"}},
            ]},
            {"role": "assistant", "reasoning": "hm", "content": "I look.", "tool_calls": [call("c1", "look"), call("c2", "rest")]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            {"role": "tool", "tool_call_id": "c2", "content": "done"},
            {"role": "assistant", "content": "It rains."},
            {"role": "user", "content": "thanks"},
        ])
    );
}

#[test]
fn tools_text_format_and_effort_get_their_chat_names() {
    let tools = json!([{"type": "function", "name": "look", "description": null, "parameters": {"type": "object"}, "strict": true}]);
    let told = json!([{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}, "strict": true}}]);
    assert_eq!(added(json!({"tools": tools})), json!({"tools": told, "tool_choice": "auto"}));
    let bare = added(json!({"tools": [{"type": "function", "name": "rest", "parameters": null}]}));
    assert_eq!(bare["tools"][0]["function"], json!({"name": "rest", "parameters": {"type": "object", "properties": {}}}));
    let named = json!({"tools": tools, "tool_choice": {"type": "function", "name": "look"}, "parallel_tool_calls": false});
    let choice = json!({"type": "function", "function": {"name": "look"}});
    assert_eq!(added(named), json!({"tools": told, "tool_choice": choice, "parallel_tool_calls": false}));
    assert_eq!(added(json!({"tools": [], "tool_choice": "auto", "parallel_tool_calls": true})), json!({}));
    let format = json!({"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": true});
    assert_eq!(
        added(json!({"text": {"format": format}, "reasoning": {"effort": "low"}})),
        json!({
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": true}},
            "reasoning_effort": "low",
        })
    );
    assert_eq!(added(json!({"text": {"format": {"type": "text"}}})), json!({}));
}

/// Tools of a coding agent: a namespace, free-form ones, and one that OpenAI's servers run.
fn agents_tools() -> Value {
    let parameters = json!({"type": "object"});
    json!([
        {"type": "web_search", "external_web_access": false},
        {"type": "function", "name": "exec", "strict": false, "parameters": parameters},
        {"type": "namespace", "name": "mcp__toy", "description": "Toys.", "tools": [
            {"type": "function", "name": "weather", "description": "It rains?", "strict": false, "parameters": parameters},
            {"type": "custom", "name": "note"},
        ]},
        {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}},
    ])
}

fn function_names(chat: &Value) -> Vec<&str> {
    chat["tools"].as_array().unwrap().iter().map(|tool| tool["function"]["name"].as_str().unwrap()).collect()
}

#[test]
fn tools_of_namespaces_and_in_free_form_become_functions() {
    let added = added(json!({"tools": agents_tools(), "tool_choice": "auto"}));
    assert_eq!(function_names(&added), ["exec", "mcp__toy__weather", "mcp__toy__note", "apply_patch"]);
    let patch = &added["tools"][3]["function"];
    assert_eq!(patch["parameters"]["required"], json!(["input"]));
    assert!(patch["description"].as_str().unwrap().ends_with("The input follows this lark grammar:\nstart: x"));
    assert_eq!(added["tool_choice"], "auto");
    assert_eq!(self::added(json!({"tools": [{"type": "image_generation"}], "tool_choice": "auto"})), json!({}), "nobody can run it");
    let chosen = |choice: Value| self::added(json!({"tools": agents_tools(), "tool_choice": choice}));
    let weather = json!({"type": "function", "name": "weather", "namespace": "mcp__toy"});
    assert_eq!(chosen(weather.clone())["tool_choice"]["function"]["name"], "mcp__toy__weather");
    assert_eq!(chosen(json!({"type": "custom", "name": "apply_patch"}))["tool_choice"]["function"]["name"], "apply_patch");
    let allowed = chosen(json!({"type": "allowed_tools", "mode": "required", "tools": [weather, {"type": "function", "name": "exec"}]}));
    assert_eq!((function_names(&allowed), &allowed["tool_choice"]), (vec!["exec", "mcp__toy__weather"], &json!("required")));
}

#[test]
fn calls_that_other_servers_ran_are_left_out_of_the_history() {
    let input = json!([
        {"role": "user", "content": "hi"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "reasoning", "id": "rs_9", "summary": [], "encrypted_content": "abc"},
        {"type": "compaction", "encrypted_content": "abc"},
        {"type": "function_call", "id": "fc_2", "name": "weather", "namespace": "mcp__toy", "arguments": "{}", "call_id": "c2"},
        {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c3", "name": "apply_patch", "input": "*** \"Begin\""},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sunny"}]},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": "ok"},
    ]);
    let call =
        |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let calls = json!([call("c2", "mcp__toy__weather", "{}"), call("c3", "apply_patch", r#"{"input":"*** \"Begin\""}"#)]);
    assert_eq!(
        chat(json!({"input": input}))["messages"],
        json!([
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c2", "content": "sunny"},
            {"role": "tool", "tool_call_id": "c3", "content": "ok"},
        ])
    );
}

#[test]
fn calls_come_back_under_the_clients_names() {
    let (_, fields, _) = chat_request(&body(json!({"tools": agents_tools()}))).unwrap();
    let call = |index: u32, name: &str, arguments: &str| json!({"index": index, "id": format!("c{index}"), "type": "function", "function": {"name": name, "arguments": arguments}});
    let calls = [call(0, "mcp__toy__weather", "{}"), call(1, "apply_patch", r#"{"input":"*** Begin"}"#), call(2, "exec", "{}")];
    let whole = json!({"id": "chatcmpl-1", "model": "m", "choices": [{"index": 0, "message": {"role": "assistant", "content": null, "tool_calls": calls}, "finish_reason": "tool_calls"}]});
    let expected = json!([
        {"id": "fc_1_0", "type": "function_call", "call_id": "c0", "name": "weather", "namespace": "mcp__toy", "arguments": "{}", "status": "completed"},
        {"id": "ctc_1_1", "type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin", "status": "completed"},
        {"id": "fc_1_2", "type": "function_call", "call_id": "c2", "name": "exec", "arguments": "{}", "status": "completed"},
    ]);
    let answer: Value =
        serde_json::from_slice(&translate_answer(&fields, whole.to_string().as_bytes(), SystemTime::UNIX_EPOCH).unwrap()).unwrap();
    assert_eq!(answer["output"], expected);

    let mut translator = ResponsesTranslator::new(fields);
    let (mut output, now) = (Vec::new(), ArrivalTime { time: SystemTime::UNIX_EPOCH, instant: Instant::now() });
    let chunk = |delta: Value, finish: Value| json!({"id": "chatcmpl-1", "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]});
    let pieces = [
        json!({"tool_calls": [call(0, "mcp__toy__weather", "")]}),
        json!({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}),
        json!({"tool_calls": [call(1, "apply_patch", r#"{"inp"#)]}),
        json!({"tool_calls": [{"index": 1, "function": {"arguments": r#"ut":"*** Begin"}"#}}]}),
        json!({"tool_calls": [call(2, "exec", "{}")]}),
    ];
    for piece in pieces {
        let chunk = serde_json::from_str(&chunk(piece, Value::Null).to_string()).unwrap();
        translator.read_chunk(chunk, now, &mut output).unwrap();
    }
    translator.read_chunk(serde_json::from_str(&chunk(json!({}), "tool_calls".into()).to_string()).unwrap(), now, &mut output).unwrap();
    translator.finish(now, &mut output).unwrap();
    let text = String::from_utf8(output).unwrap();
    let events: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok()).collect();
    let of = |name: &str| events.iter().filter(|event| event["type"] == name).collect::<Vec<_>>();
    assert_eq!(of("response.completed")[0]["response"]["output"], expected);
    let (added, done) = (of("response.output_item.added"), of("response.output_item.done"));
    assert_eq!((&added[0]["item"]["namespace"], &added[0]["item"]["name"]), (&json!("mcp__toy"), &json!("weather")));
    assert_eq!(done.iter().map(|event| event["item"].clone()).collect::<Vec<_>>(), expected.as_array().unwrap()[..]);
    assert_eq!(of("response.custom_tool_call_input.delta")[0]["delta"], "*** Begin");
    assert_eq!(of("response.custom_tool_call_input.done")[0]["input"], "*** Begin");
}

#[test]
fn a_call_that_the_limit_has_cut_is_incomplete_and_not_to_be_run() {
    let tools = json!([{"type": "custom", "name": "shell"}, {"type": "function", "name": "look"}]);
    for (name, arguments, kept) in [("shell", r#"{"input":"rm -r"#, ("input", "")), ("look", r#"{"at":"#, ("arguments", r#"{"at":"#))] {
        let (_, fields, _) = chat_request(&body(json!({"tools": tools.clone()}))).unwrap();
        let call = json!({"index": 0, "id": "c0", "type": "function", "function": {"name": name, "arguments": arguments}});
        let choice = json!({"message": {"tool_calls": [call]}, "finish_reason": "length"});
        let whole = json!({"id": "chatcmpl-1", "model": "m", "choices": [choice]}).to_string();
        let answer = translate_answer(&fields, whole.as_bytes(), SystemTime::UNIX_EPOCH).unwrap();
        let item = &serde_json::from_slice::<Value>(&answer).unwrap()["output"][0];
        assert_eq!((&item["status"], &item[kept.0]), (&json!("incomplete"), &json!(kept.1)), "{item}");

        let stream = [chunk(&json!({"tool_calls": [call]}), None), chunk(&json!({}), Some("length"))].concat();
        let (told, _) = translate_stream(fields, &[stream.as_bytes()]);
        let events = events(&told);
        assert!(!events.iter().any(|event| event["type"].as_str().unwrap().ends_with("input.done")), "{told}");
        assert!(!events.iter().any(|event| event["type"].as_str().unwrap().ends_with("arguments.done")), "{told}");
        let end = &events.last().unwrap()["response"];
        assert_eq!((&end["status"], &end["output"][0]), (&json!("incomplete"), item));
    }
}

#[test]
fn tools_that_would_have_one_name_in_the_chat_are_refused() {
    let plain = |name: &str| json!({"type": "function", "name": name});
    let within = |namespace: &str, name: &str| json!({"type": "namespace", "name": namespace, "tools": [plain(name)]});
    for tools in [
        [plain("a__b"), within("a", "b")],
        [within("a", "b"), plain("a__b")],
        [within("a__b", "c"), within("a", "b__c")],
        [plain("x"), json!({"type": "custom", "name": "x"})],
    ] {
        let refused = chat_request(&body(json!({"tools": tools}))).expect_err("a call could be of either");
        assert!(refused.contains("two tools have the name"), "{refused}");
    }
    let twice = added(json!({"tools": [plain("x"), plain("x")]}));
    assert_eq!(function_names(&twice), ["x", "x"], "engines take them");
}

#[test]
fn features_of_the_python_front_end_are_refused_with_advice() {
    for (more, words) in [
        (
            json!({"previous_response_id": "resp_1"}),
            "`previous_response_id`: whoever runs the engines starts their agents with --front-end python",
        ),
        (json!({"background": true}), "--front-end python"),
        (json!({"tools": [{"type": "local_shell"}]}), "unknown variant `local_shell`"),
        (json!({"tools": [{"type": "web_search"}], "tool_choice": "required"}), "nobody here can run"),
        (json!({"tool_choice": "required"}), "the request has no tools"),
        (json!({"tools": [{"type": "function", "name": ""}]}), "a tool needs a name"),
        (
            json!({"tools": agents_tools(), "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}}),
            "none of the request's tools",
        ),
        (
            json!({"tools": agents_tools(), "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "mcp__toy"}]}}),
            "a tool of `allowed_tools` is a function or custom tool",
        ),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "unknown variant `item_reference`"),
        (json!({"input": null}), "input is needed"),
        (json!({"input": [{"role": "user", "content": 7}]}), "a content is a text or a list of parts"),
        (json!({"text": {"format": {"type": "grammar"}}}), "json_schema"),
        (json!({"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "file_search"}}), "tool_choice is a word"),
        (json!({"kv_transfer_params": {"do_remote_decode": true}}), "`kv_transfer_params`: whoever runs the engines"),
        (json!({"previous_input_messages": [{}]}), "--front-end python"),
        (json!({"enable_response_messages": true}), "--front-end python"),
        (json!({"moderation": {"model": "m"}}), "no engine does `moderation`"),
        (json!({"context_management": [{"type": "compaction"}]}), "no engine does `context_management`"),
        (json!({"instructions": ["Be brief."]}), "instructions is a text"),
        (json!({"stream": "yes"}), "stream is true or false"),
        (json!({"tools": {}}), "tools is a list"),
        (json!({"include": "message.output_text.logprobs"}), "include is a list"),
        (json!({"text": "plain"}), "text is an object"),
        (json!({"reasoning": "low"}), "reasoning is an object"),
        (json!({"truncation": "most"}), "truncation is `auto` or `disabled`"),
    ] {
        let refused = chat_request(&body(more.clone())).expect_err("it cannot be done");
        assert!(refused.contains(words), "{refused}");
    }
    let needs = |more| needs_kept_responses(&body(more));
    assert!(needs(json!({"store": true})) && needs(json!({"background": true})) && needs(json!({"previous_response_id": "x"})));
    assert!(!needs(json!({"store": null, "background": false, "previous_response_id": null})));
}

#[test]
fn vllm_extensions_of_responses_are_passed_to_chats() {
    let given = json!({
        "logit_bias": {"7": 1.0}, "include_reasoning": false, "stop_token_ids": [7], "ignore_eos": true, "skip_special_tokens": false,
        "include_stop_str_in_output": true, "structured_outputs": {"choice": ["a"]}, "vllm_xargs": {"a": 1}, "watermarking": true,
        "request_id": "mine", "session_id": "s", "mm_processor_kwargs": {}, "media_io_kwargs": {},
    });
    assert_eq!(added(given.clone()), given);
    let asks_nothing = json!({
        "include": ["reasoning.encrypted_content"], "top_logprobs": 3, "text": {"format": null, "verbosity": "low"}, "reasoning": {"summary": "auto"},
        "truncation": "disabled", "moderation": null, "context_management": [], "kv_transfer_params": null, "max_tool_calls": 3, "service_tier": "auto",
        "safety_identifier": "u", "prompt_cache_key": "k", "metadata": {"a": "b"},
    });
    assert_eq!(added(asks_nothing), json!({}));
    assert_eq!(added(json!({"truncation": "auto"})), json!({"truncate_prompt_tokens": -1}));
    let include = json!(["reasoning.encrypted_content", "message.output_text.logprobs"]);
    assert_eq!(added(json!({"include": include})), json!({"logprobs": true}));
    assert_eq!(added(json!({"include": include, "top_logprobs": 2})), json!({"logprobs": true, "top_logprobs": 2}));
    let deferred = added(json!({"tools": [{"type": "function", "name": "f", "defer_loading": true}]}));
    assert_eq!(deferred["tools"][0]["function"]["defer_loading"], true);
}

#[test]
fn an_incomplete_output_item_is_continued() {
    let input = |status: &str| {
        let begun =
            json!({"type": "message", "role": "assistant", "status": status, "content": [{"type": "output_text", "text": "It is"}]});
        added(json!({"input": [{"role": "user", "content": "weather?"}, begun]}))
    };
    for partial in ["in_progress", "incomplete"] {
        assert_eq!(input(partial), json!({"add_generation_prompt": false, "continue_final_message": true}));
    }
    assert_eq!(input("completed"), json!({}));
}

fn fields() -> ResponseFields {
    chat_request(&body(json!({"instructions": "Be brief.", "metadata": {"a": "b"}}))).unwrap().1
}

#[test]
fn a_whole_answer_becomes_a_response_repeating_its_request() {
    let call = json!({"id": "t1", "type": "function", "function": {"name": "look", "arguments": "{\"at\": 1}"}});
    let message = json!({"role": "assistant", "reasoning": "hm", "content": "I look.", "tool_calls": [call]});
    let usage = json!({"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}});
    let answer = |finish: &str| {
        let body = json!({"id": "chatcmpl-1", "model": "m", "choices": [{"message": message.clone(), "finish_reason": finish}], "usage": usage.clone()});
        let told = translate_answer(&fields(), body.to_string().as_bytes(), SystemTime::UNIX_EPOCH).unwrap();
        serde_json::from_slice::<Map<String, Value>>(&told).unwrap()
    };
    let told = answer("tool_calls");
    assert_eq!((&told["id"], &told["object"], &told["status"]), (&json!("resp_1"), &json!("response"), &json!("completed")));
    assert_eq!((&told["instructions"], &told["metadata"], &told["store"]), (&json!("Be brief."), &json!({"a": "b"}), &json!(false)));
    assert_eq!(
        told["output"],
        json!([
            {"id": "rs_1_0", "type": "reasoning", "summary": [], "status": "completed", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"id": "msg_1_1", "type": "message", "role": "assistant", "status": "completed",
                "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
            {"id": "fc_1_2", "type": "function_call", "call_id": "t1", "name": "look", "arguments": "{\"at\": 1}", "status": "completed"},
        ])
    );
    assert_eq!((&told["usage"]["input_tokens_details"]["cached_tokens"], &told["usage"]["total_tokens"]), (&json!(4), &json!(12)));
    let cut = answer("length");
    assert_eq!((&cut["status"], &cut["incomplete_details"]), (&json!("incomplete"), &json!({"reason": "max_output_tokens"})));
}

/// The log probability of one token.
fn logprob(token: &str) -> Value {
    json!({"token": token, "logprob": -0.5, "bytes": token.as_bytes(), "top_logprobs": [{"token": token, "logprob": -0.5, "bytes": null}]})
}

#[test]
fn log_probabilities_are_those_of_the_text() {
    let choice =
        json!({"message": {"content": "It is"}, "logprobs": {"content": [logprob("It"), logprob(" is")]}, "finish_reason": "stop"});
    let body = json!({"id": "chatcmpl-1", "choices": [choice]});
    let told: Value =
        serde_json::from_slice(&translate_answer(&fields(), body.to_string().as_bytes(), SystemTime::UNIX_EPOCH).unwrap()).unwrap();
    assert_eq!(told["output"][0]["content"][0]["logprobs"], json!([logprob("It"), logprob(" is")]));

    let chunk = |delta: Value, tokens: &[&str]| {
        let logprobs: Vec<Value> = tokens.iter().map(|token| logprob(token)).collect();
        let chunk = json!({"id": "chatcmpl-1", "choices": [{"delta": delta, "logprobs": {"content": logprobs}}]});
        format!("data: {chunk}\n\n")
    };
    let stream = [
        chunk(json!({"reasoning": "hm"}), &["hm"]),
        chunk(json!({"content": "It"}), &["It"]),
        // A character may come in two tokens.
        chunk(json!({"content": ""}), &["\u{fffd}"]),
        chunk(json!({"content": "é"}), &["é"]),
        self::chunk(&json!({}), Some("stop")),
    ];
    let (told, cut) = told_of(&[stream.concat().as_bytes()]);
    assert_eq!(cut, None);
    let events = events(&told);
    let of_deltas: Vec<&Value> =
        events.iter().filter(|event| event["type"] == "response.output_text.delta").map(|event| &event["logprobs"]).collect();
    assert_eq!(of_deltas, [&json!([logprob("It")]), &json!([logprob("\u{fffd}"), logprob("é")])]);
    let all = json!([logprob("It"), logprob("\u{fffd}"), logprob("é")]);
    let done = events.iter().find(|event| event["type"] == "response.output_text.done").unwrap();
    assert_eq!((&done["logprobs"], &events.last().unwrap()["response"]["output"][1]["content"][0]["logprobs"]), (&all, &all));
}

#[test]
fn a_response_has_the_id_given_by_its_client() {
    let fields = chat_request(&body(json!({"request_id": "mine"}))).unwrap().1;
    let answer = json!({"id": "chatcmpl-mine", "choices": [{"message": {"content": "x"}}]}).to_string();
    let told: Value = serde_json::from_slice(&translate_answer(&fields, answer.as_bytes(), SystemTime::UNIX_EPOCH).unwrap()).unwrap();
    assert_eq!(told["id"], "mine");
}

/// Translates a stream in these pieces. Returns the output, and the error that ended it.
fn told_of(pieces: &[&[u8]]) -> (String, Option<TranslationError>) {
    translate_stream(fields(), pieces)
}

fn translate_stream(fields: ResponseFields, pieces: &[&[u8]]) -> (String, Option<TranslationError>) {
    let now = ArrivalTime { instant: Instant::now(), time: SystemTime::UNIX_EPOCH };
    let mut translation = StreamTranslation::new(ResponsesTranslator::new(fields));
    let mut told = Vec::new();
    let cut = pieces.iter().try_for_each(|piece| translation.push(piece, now).map(|more| told.extend(more)));
    let cut = cut.and_then(|()| translation.finish(now).map(|more| told.extend(more))).err();
    if let Some(TranslationError(message)) = &cut {
        told.extend(translation.fail(message));
    }
    (String::from_utf8(told).unwrap(), cut)
}

/// The events, each with the name that its data repeats.
fn events(told: &str) -> Vec<Value> {
    let event = |event: &str| {
        let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name);
        data
    };
    told.split_terminator("\n\n").map(event).collect()
}

/// Fails unless clients can read these events. They are numbered, items follow each other, each is
/// closed with the text of its deltas, and a response of these items ends the stream.
fn assert_valid(events: &[Value]) {
    let (mut open, mut closed, mut text): (Option<Value>, Vec<Value>, String) = (None, Vec::new(), String::new());
    for (number, event) in events.iter().enumerate() {
        let name = event["type"].as_str().unwrap();
        if name == "error" {
            assert_eq!(number, events.len() - 1, "{event} is the last one");
            return;
        }
        assert_eq!(event["sequence_number"], number, "{event}");
        if let Some(index) = event["output_index"].as_u64() {
            assert_eq!(index, closed.len() as u64, "{event}");
        }
        if let Some(item) = event["item_id"].as_str() {
            assert_eq!(open.as_ref().unwrap()["id"], item, "{event}");
        }
        match name {
            "response.created" => assert_eq!(number, 0),
            "response.output_item.added" => {
                assert!(open.replace(event["item"].clone()).is_none(), "{event}");
                text.clear();
            }
            "response.output_item.done" => {
                let begun = open.take().unwrap();
                assert_eq!((&begun["id"], &begun["type"]), (&event["item"]["id"], &event["item"]["type"]));
                let whole = event["item"]["arguments"].as_str().or(event["item"]["content"][0]["text"].as_str()).unwrap();
                assert_eq!(whole, text);
                closed.push(event["item"].clone());
            }
            "response.completed" | "response.incomplete" => {
                assert!(open.is_none() && number == events.len() - 1, "{event}");
                assert_eq!(event["response"]["output"], Value::Array(closed.clone()));
            }
            _ => text.push_str(event["delta"].as_str().unwrap_or_default()),
        }
    }
}

fn chunk(delta: &Value, finish: Option<&str>) -> String {
    let chunk = json!({"id": "chatcmpl-1", "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]});
    format!("data: {chunk}\n\n")
}

/// Reasoning, text, a call with a blank amid its arguments, another call, the end and the usage.
fn stream() -> String {
    let call = |index: usize, more: Value| {
        let mut call = json!({"index": index});
        call.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"tool_calls": [call]})
    };
    let deltas = [
        json!({"role": "assistant", "content": ""}),
        json!({"reasoning": "hm"}),
        json!({"content": "I look."}),
        call(0, json!({"id": "t1", "function": {"name": "look", "arguments": ""}})),
        call(0, json!({"function": {"arguments": "{\"at\""}})),
        json!({"content": " "}),
        call(0, json!({"function": {"arguments": ": 1}"}})),
        call(1, json!({"id": "t2", "function": {"name": "rest", "arguments": "{}"}})),
    ];
    let mut stream: String = deltas.iter().map(|delta| chunk(delta, None)).collect();
    stream.push_str(&chunk(&json!({}), Some("tool_calls")));
    stream.push_str(
        "data: {\"id\":\"chatcmpl-1\",\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":5}}\n\ndata: [DONE]\n\n",
    );
    stream
}

#[test]
fn chunks_become_events_of_consecutive_items() {
    let (told, cut) = told_of(&[stream().as_bytes()]);
    assert_eq!(cut, None);
    let events = events(&told);
    assert_valid(&events);
    let names: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap().trim_start_matches("response.")).collect();
    insta::assert_snapshot!(names.join(" "), @"created in_progress output_item.added content_part.added reasoning_text.delta reasoning_text.done content_part.done output_item.done output_item.added content_part.added output_text.delta output_text.done content_part.done output_item.done output_item.added function_call_arguments.delta function_call_arguments.delta function_call_arguments.done output_item.done output_item.added function_call_arguments.delta function_call_arguments.done output_item.done completed");
    let response = &events.last().unwrap()["response"];
    assert_eq!((&response["output"][2]["arguments"], &response["usage"]["input_tokens"]), (&json!("{\"at\": 1}"), &json!(7)));
}

#[test]
fn blanks_around_calls_are_left_out() {
    let call =
        |index: u32| json!({"tool_calls": [{"index": index, "id": format!("t{index}"), "function": {"name": "f", "arguments": "{}"}}]});
    let text = |text: &str| json!({"content": text});
    let kinds = |deltas: &[Value]| {
        let stream: String = deltas.iter().map(|delta| chunk(delta, None)).chain([chunk(&json!({}), Some("stop"))]).collect();
        let (output, cut) = told_of(&[stream.as_bytes()]);
        assert_eq!(cut, None);
        let events = events(&output);
        assert_valid(&events);
        let items = events.last().unwrap()["response"]["output"].as_array().unwrap().clone();
        items.iter().map(|item| item["content"][0]["text"].as_str().unwrap_or("call").to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(kinds(&[text("\n"), call(0), text("\n"), call(1), text("\n")]), ["call", "call"]);
    assert_eq!(kinds(&[text("\n"), text("I look."), call(0), text("Done")]), ["\nI look.", "call", "Done"]);
    assert_eq!(kinds(&[text("\n")]), ["\n"], "the whole answer");
}

#[test]
fn an_incomplete_answer_ends_with_an_error_event() {
    let failing = stream().replace("data: [DONE]", "data: {\"error\":{\"message\":\"the core died\",\"code\":500}}");
    let unfinished = stream().replace("\"finish_reason\":\"tool_calls\"", "\"finish_reason\":null");
    for (stream, words) in [(failing.as_str(), "the core died"), (&unfinished, "before it was complete"), ("", "before it was complete")] {
        let (told, cut) = told_of(&[stream.as_bytes()]);
        let events = events(&told);
        assert_valid(&events);
        assert!(cut.unwrap().0.contains(words), "{stream}");
        assert_eq!(events.last().unwrap()["type"], "error");
        assert!(!told.contains("response.completed"));
    }
}

#[test]
fn the_translation_of_a_response_buffers_within_bounds() {
    let text = chunk(&json!({"content": "x".repeat(500_000)}), None);
    let now = ArrivalTime { instant: Instant::now(), time: SystemTime::UNIX_EPOCH };
    let mut translation = StreamTranslation::new(ResponsesTranslator::new(fields()));
    let taken = (0..1000).take_while(|_| translation.push(text.as_bytes(), now).is_ok()).count();
    assert!((1..100).contains(&taken), "{taken} pieces were held");
}

proptest! {
    #[test]
    fn response_events_do_not_depend_on_how_bytes_are_cut(cuts in prop::collection::vec(any::<usize>(), 0..40)) {
        let stream = stream();
        let (whole, _) = told_of(&[stream.as_bytes()]);
        prop_assert_eq!(told_of(&pieces(stream.as_bytes(), &cuts)), (whole, None));
    }

    #[test]
    fn any_chunks_become_valid_response_events(deltas in prop::collection::vec(any_delta(), 0..12), ends: bool) {
        let mut stream: String = deltas.iter().map(|delta| chunk(delta, None)).collect();
        if ends {
            stream.push_str(&chunk(&json!({}), Some("stop")));
            stream.push_str("data: [DONE]\n\n");
        }
        let (told, cut) = told_of(&[stream.as_bytes()]);
        let events = events(&told);
        assert_valid(&events);
        let last = events.last().map(|event| event["type"].clone());
        prop_assert_eq!(last, Some(if cut.is_none() { json!("response.completed") } else { json!("error") }));
    }

    #[test]
    fn no_body_makes_the_responses_translator_panic(body: Vec<u8>) {
        let _ = (chat_request(&body), needs_kept_responses(&body), translate_answer(&fields(), &body, SystemTime::UNIX_EPOCH));
        let _ = told_of(&[b"data:", &body, b"\n"]);
    }
}
