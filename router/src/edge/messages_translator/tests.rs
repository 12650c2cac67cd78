use std::time::SystemTime;

use proptest::prelude::*;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::*;
use crate::edge::translation::samples::{any_delta, pieces};
use crate::edge::translation::{ArrivalTime, StreamTranslation, TranslationError};

/// The chat for a plain request with `more`.
fn chat(more: Value) -> Value {
    let mut body = json!({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    chat_request(body.to_string().as_bytes()).unwrap_or_else(|error| panic!("{error}: {body}")).0
}

/// The fields that `more` adds to the chat.
fn added(more: Value) -> Value {
    let mut chat = chat(more);
    for plain in ["model", "max_tokens", "messages"] {
        chat.as_object_mut().unwrap().remove(plain);
    }
    chat
}

fn refused(more: Value) -> String {
    let mut body = json!({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    chat_request(body.to_string().as_bytes()).expect_err("it cannot be done")
}

#[test]
fn text_documents_are_texts_and_server_tools_are_left_out() {
    let result = json!({"type": "tool_result", "tool_use_id": "t1", "content": [
        {"type": "document", "title": "Notes", "source": {"type": "text", "media_type": "text/plain", "data": "It rains."}},
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}},
        {"type": "tool_reference", "tool_name": "look"},
    ]});
    let messages = json!([
        {"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
            {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "read", "input": {}},
        ]},
        {"role": "user", "content": [result]},
    ]);
    let chat = chat(json!({"messages": messages}));
    assert_eq!(chat["messages"][0]["content"], "I look.");
    assert_eq!(chat["messages"][1], json!({"role": "tool", "tool_call_id": "t1", "content": "Notes\n\nIt rains.\na\nb\nlook"}));
}

#[test]
fn a_plain_message_becomes_a_plain_chat() {
    let plain = json!({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]});
    assert_eq!(chat(json!({"metadata": {"user_id": "u"}})), plain);
    assert_eq!(
        added(json!({"stream": true})),
        json!({"stream": true, "stream_options": {"include_usage": true, "continuous_usage_stats": true}})
    );
}

#[test]
fn sampling_parameters_are_passed_on_unjudged() {
    let unasked = json!({"mcp_servers": [], "logprobs": false, "kv_transfer_params": null});
    assert_eq!(added(unasked), json!({}));
    let given = json!({"temperature": "hot", "top_p": 0.5, "top_k": 3, "stop_sequences": ["x"], "cache_salt": "s", "thinking": null});
    assert_eq!(added(given), json!({"temperature": "hot", "top_p": 0.5, "top_k": 3, "stop": ["x"], "cache_salt": "s"}));
}

#[test]
fn system_prompts_are_gathered_at_the_start_without_billing_lines() {
    let told = chat(json!({
        "system": [{"type": "text", "text": "x-anthropic-billing-header: a1"}, {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": "hi"}, {"role": "system", "content": " Be kind."}],
    }));
    assert_eq!(told["messages"], json!([{"role": "system", "content": "Be brief. Be kind."}, {"role": "user", "content": "hi"}]));
}

#[test]
fn blocks_become_parts_calls_results_and_reasoning() {
    let messages = json!([
        {"role": "user", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
            {"type": "image", "source": {"type": "url", "url": "https://host/a.png"}},
            {"type": "text", "text": "what?"},
        ]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "zz"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}},
            {"type": "tool_use", "id": "t2", "name": "rest", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [
                {"type": "text", "text": "a"}, {"type": "text", "text": "b"},
                {"type": "image", "source": {"type": "url", "url": "https://host/b.png"}},
            ]},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": true},
            {"type": "text", "text": "go on"},
        ]},
    ]);
    let image = |url: &str| json!({"type": "image_url", "image_url": {"url": url}});
    let call =
        |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    assert_eq!(
        chat(json!({"messages": messages}))["messages"],
        json!([
            {"role": "user", "content": [image("data:image/png;base64,AAAA"), image("https://host/a.png"), {"type": "text", "text": "what?"}]},
            {"role": "assistant", "content": "I look.", "reasoning": "hm", "tool_calls": [call("t1", "look", r#"{"at":1}"#), call("t2", "rest", "{}")]},
            {"role": "tool", "tool_call_id": "t1", "content": "a\nb"},
            {"role": "user", "content": [image("https://host/b.png")]},
            {"role": "tool", "tool_call_id": "t2", "content": ""},
            {"role": "user", "content": "go on"},
        ])
    );
}

#[test]
fn tools_and_tool_choices_get_their_chat_form() {
    let tools = json!([{"name": "look", "description": "d", "input_schema": {"properties": {}}, "strict": true}]);
    let function = json!({"name": "look", "description": "d", "strict": true, "parameters": {"properties": {}, "type": "object"}});
    let expected = |choice: Value| json!({"tools": [{"type": "function", "function": function.clone()}], "tool_choice": choice});
    assert_eq!(added(json!({"tools": tools})), expected("auto".into()));
    for (which, choice) in [
        (json!({"type": "auto"}), json!("auto")),
        (json!({"type": "any"}), json!("required")),
        (json!({"type": "none"}), json!("none")),
        (json!({"type": "tool", "name": "look"}), json!({"type": "function", "function": {"name": "look"}})),
    ] {
        assert_eq!(added(json!({"tools": tools, "tool_choice": which})), expected(choice), "{which}");
    }
    let alone = added(json!({"tools": tools, "tool_choice": {"type": "any", "disable_parallel_tool_use": true}}));
    assert_eq!(alone["parallel_tool_calls"], false);
    let deferred = added(json!({"tools": [{"name": "look", "input_schema": {}, "defer_loading": true}]}));
    assert_eq!(deferred["tools"][0]["function"]["defer_loading"], true);
    assert_eq!(added(json!({"tools": [], "tool_choice": {"type": "auto"}})), json!({}), "engines refuse an empty list");
}

#[test]
fn thinking_and_output_formats_get_their_chat_names() {
    assert_eq!(added(json!({"thinking": {"type": "enabled", "budget_tokens": 4}})), json!({"thinking_token_budget": 4}));
    assert_eq!(added(json!({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}})), json!({"reasoning_effort": "low"}));
    assert_eq!(
        added(json!({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"thinking": true}})),
        json!({"chat_template_kwargs": {"thinking": true, "enable_thinking": false}}),
        "the client's word for the template counts"
    );
    assert_eq!(
        added(json!({"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}})),
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": {"type": "object"}}}})
    );
}

#[test]
fn an_unsupported_field_of_a_message_is_refused() {
    for (more, words) in [
        (json!({"max_tokens": null}), "max_tokens is needed"),
        (json!({"mcp_servers": [{"type": "url", "url": "https://host/mcp", "name": "m"}]}), "`mcp_servers` cannot be done"),
        (json!({"kv_transfer_params": {"do_remote_decode": true}}), "--front-end python"),
        (json!({"logprobs": true}), "ask for a chat completion"),
        (json!({"max_tokens": 0}), "max_tokens is needed"),
        (json!({"thinking": {"type": "enabled", "budget_tokens": 9}}), "less than max_tokens"),
        (json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}), "input_schema"),
        (json!({"messages": [{"role": "user", "content": [{"type": "video"}]}]}), "unknown variant `video`"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": "JVBE"}}]}]}),
            "unknown variant `base64`",
        ),
        (json!({"messages": [{"role": "user", "content": 7}]}), "a content is a text or a list of blocks"),
        (json!({"messages": [{"role": "tool", "content": "x"}]}), "unknown variant `tool`"),
        (json!({"system": [{"type": "image", "source": {"type": "url", "url": "x"}}]}), "texts only"),
    ] {
        let refused = refused(more);
        assert!(refused.contains(words), "{refused}");
    }
    assert!(chat_request(b"[]").unwrap_err().starts_with("the body is no request of the Messages API"));
}

#[test]
fn token_counting_reads_only_the_prompt() {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 1, "system": "s"});
    assert_eq!(
        count_request(body.to_string().as_bytes()).unwrap(),
        json!({"model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]})
    );
    assert_eq!(
        String::from_utf8(translate_count(br#"{"count":7,"tokens":[1]}"#).unwrap()).unwrap(),
        r#"{"input_tokens":7,"context_management":{"original_input_tokens":7}}"#
    );
}

fn whole(choice: Value) -> Value {
    let usage = json!({"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}});
    let body = json!({"id": "c1", "model": "m", "choices": [choice], "usage": usage});
    serde_json::from_slice(&translate_answer(body.to_string().as_bytes()).unwrap()).unwrap()
}

#[test]
fn a_whole_answer_becomes_a_message_of_ordered_blocks() {
    let call = json!({"id": "t1", "type": "function", "function": {"name": "look", "arguments": "{\"at\": 1}"}});
    let message = json!({"role": "assistant", "reasoning": "hm", "content": "I look.", "tool_calls": [call]});
    assert_eq!(
        whole(json!({"message": message, "finish_reason": "stop", "stop_reason": null})),
        json!({
            "id": "c1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "tool_use", "stop_sequence": null,
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "c1"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}},
            ],
            "usage": {"input_tokens": 3, "output_tokens": 5, "cache_read_input_tokens": 4},
        })
    );
}

#[test]
fn a_truncated_tool_call_is_left_out_of_its_message() {
    let call = |arguments: &str| json!({"id": "t1", "type": "function", "function": {"name": "look", "arguments": arguments}});
    let told = |finish: &str| json!({"message": {"tool_calls": [call("{}"), call("{\"at")]}, "finish_reason": finish});
    let cut = whole(told("length"));
    assert_eq!(cut["content"], json!([{"type": "tool_use", "id": "t1", "name": "look", "input": {}}]));
    assert_eq!(cut["stop_reason"], "max_tokens");
    let body = json!({"id": "c1", "model": "m", "choices": [told("tool_calls")]}).to_string();
    assert!(translate_answer(body.as_bytes()).unwrap_err().contains("arguments that are no JSON object"));
}

#[test]
fn the_finish_reason_is_translated_to_anthropics_words() {
    for (finish, stop, reason, sequence) in [
        ("length", Value::Null, "max_tokens", Value::Null),
        ("stop", Value::Null, "end_turn", Value::Null),
        ("stop", json!(2), "end_turn", Value::Null),
        ("stop", json!("END"), "stop_sequence", json!("END")),
    ] {
        let told = whole(json!({"message": {"content": null}, "finish_reason": finish, "stop_reason": stop}));
        assert_eq!((&told["stop_reason"], &told["stop_sequence"]), (&json!(reason), &sequence), "{finish} {stop}");
        assert_eq!(told["content"], json!([{"type": "text", "text": ""}]));
    }
}

const STREAM: &str = concat!(
    ": keep-alive\n\n",
    r#"data: {"id":"c1","model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}],"usage":{"prompt_tokens":7,"completion_tokens":0}}"#,
    "\n\n",
    r#"data: {"id":"c1","model":"m","choices":[{"index":0,"delta":{"reasoning":"hm"},"finish_reason":null}],"usage":{"prompt_tokens":7,"completion_tokens":1}}"#,
    "\n\n",
    r#"data: {"id":"c1","model":"m","choices":[{"index":0,"delta":{"content":"Hé\n"},"finish_reason":null}]}"#,
    "\n\n",
    r#"data: {"id":"c1","model":"m","choices":[{"index":0,"delta":{"tool_calls":[{"id":"t1","type":"function","index":0,"function":{"name":"look","arguments":""}}]},"finish_reason":null}]}"#,
    "\n\n",
    r#"data: {"id":"c1","model":"m","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\"at\""}}]},"finish_reason":null}]}"#,
    "\n\n",
    r#"data: {"id":"c1","model":"m","choices":[{"index":0,"delta":{"content":" "},"finish_reason":null}]}"#,
    "\n\n",
    r#"data: {"id":"c1","model":"m","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":": 1}"}},{"index":1,"id":"t2","function":{"name":"rest","arguments":"{}"}}]},"finish_reason":null}]}"#,
    "\n\n",
    r#"data: {"id":"c1","model":"m","choices":[{"index":0,"delta":{},"finish_reason":"tool_calls","stop_reason":null}]}"#,
    "\n\n",
    r#"data: {"id":"c1","model":"m","choices":[],"usage":{"prompt_tokens":7,"total_tokens":12,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":4}}}"#,
    "\n\ndata: [DONE]\n\n",
);

/// Translates a stream in these pieces. Returns the output, and the error that ended it.
fn told_of(pieces: &[&[u8]]) -> (String, Option<TranslationError>) {
    let now = ArrivalTime { instant: Instant::now(), time: SystemTime::UNIX_EPOCH };
    let mut translation = StreamTranslation::new(MessagesTranslator::default());
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

/// Fails unless clients can read these events: one start, blocks in sequence and each closed,
/// nothing after the end. A ping may be anywhere.
fn assert_valid(events: &[Value]) {
    let (mut open, mut blocks, mut ended) = (None, 0, false);
    for (position, event) in events.iter().filter(|event| event["type"] != "ping").enumerate() {
        assert!(!ended, "{event} follows the end");
        assert_eq!(event["type"] == "message_start", position == 0 && event["type"] != "error", "{event}");
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert_eq!((open, event["index"].as_u64()), (None, Some(blocks)), "{event}");
                open = Some(blocks);
                blocks += 1;
            }
            "content_block_delta" => assert_eq!(event["index"].as_u64(), open, "{event}"),
            "content_block_stop" => assert_eq!(event["index"].as_u64(), open.take(), "{event}"),
            "message_delta" => assert!(open.is_none() && blocks > 0, "{event}"),
            "message_stop" | "error" => ended = true,
            _ => {}
        }
    }
}

#[test]
fn blanks_around_calls_are_left_out() {
    let chunk = |delta: Value| format!("data: {}\n\n", json!({"id": "c1", "model": "m", "choices": [{"index": 0, "delta": delta}]}));
    let call =
        |index: u32| json!({"tool_calls": [{"index": index, "id": format!("t{index}"), "function": {"name": "f", "arguments": "{}"}}]});
    let end = "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
    let text = |text: &str| json!({"content": text});
    let texts = |deltas: &[Value]| {
        let stream: String = deltas.iter().cloned().map(chunk).chain([end.to_owned()]).collect();
        let (output, cut) = told_of(&[stream.as_bytes()]);
        assert_eq!(cut, None);
        let events = events(&output);
        assert_valid(&events);
        events.iter().filter_map(|event| event["delta"]["text"].as_str().map(str::to_owned)).collect::<Vec<_>>()
    };
    assert_eq!(texts(&[text("\n"), call(0), text("\n"), call(1), text("\n")]), [""; 0]);
    assert_eq!(texts(&[text("\n"), text("\nI look."), text("\n"), call(0), text("Done")]), ["\n\nI look.", "\n", "Done"]);
    assert_eq!(texts(&[text("\n")]), ["\n"], "the whole answer");
    let whole = json!({"id": "c1", "choices": [{"message": {"content": "\n", "tool_calls": call(0)["tool_calls"]}, "finish_reason": "tool_calls"}]});
    let whole: Value = serde_json::from_slice(&translate_answer(whole.to_string().as_bytes()).unwrap()).unwrap();
    assert_eq!(whole["content"].as_array().unwrap().len(), 1, "{whole}");
}

#[test]
fn chunks_become_events_of_consecutive_blocks() {
    let (told, cut) = told_of(&[STREAM.as_bytes()]);
    assert_eq!(cut, None);
    assert_valid(&events(&told));
    insta::assert_snapshot!(told.replace("\n\n", "\n"), @r#"
    event: ping
    data: {"type": "ping"}
    event: message_start
    data: {"type":"message_start","message":{"id":"c1","type":"message","role":"assistant","content":[],"model":"m","stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":7,"output_tokens":0}}}
    event: content_block_start
    data: {"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"","signature":""}}
    event: content_block_delta
    data: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"hm"}}
    event: content_block_delta
    data: {"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"c1"}}
    event: content_block_stop
    data: {"type":"content_block_stop","index":0}
    event: content_block_start
    data: {"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}
    event: content_block_delta
    data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"Hé\n"}}
    event: content_block_stop
    data: {"type":"content_block_stop","index":1}
    event: content_block_start
    data: {"type":"content_block_start","index":2,"content_block":{"type":"tool_use","id":"t1","name":"look","input":{}}}
    event: content_block_delta
    data: {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"{\"at\""}}
    event: content_block_delta
    data: {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":": 1}"}}
    event: content_block_stop
    data: {"type":"content_block_stop","index":2}
    event: content_block_start
    data: {"type":"content_block_start","index":3,"content_block":{"type":"tool_use","id":"t2","name":"rest","input":{}}}
    event: content_block_delta
    data: {"type":"content_block_delta","index":3,"delta":{"type":"input_json_delta","partial_json":"{}"}}
    event: content_block_stop
    data: {"type":"content_block_stop","index":3}
    event: message_delta
    data: {"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"input_tokens":3,"output_tokens":5,"cache_read_input_tokens":4}}
    event: message_stop
    data: {"type":"message_stop"}
    "#);
}

#[test]
fn an_answer_without_a_token_has_an_empty_block() {
    let stream = "data: {\"id\":\"c\",\"model\":\"m\",\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\",\"stop_reason\":\"END\"}]}\n\ndata: [DONE]\n\n";
    let events = events(&told_of(&[stream.as_bytes()]).0);
    assert_valid(&events);
    let delta = &events[events.len() - 2]["delta"];
    assert_eq!((&delta["stop_reason"], &delta["stop_sequence"]), (&json!("stop_sequence"), &json!("END")));
    assert_eq!(events[1]["content_block"], json!({"type": "text", "text": ""}));
}

#[test]
fn a_call_cut_by_a_stop_sequence_is_not_run() {
    let stream = STREAM.replace(r#""finish_reason":"tool_calls","stop_reason":null"#, r#""finish_reason":"stop","stop_reason":"END""#);
    let reason = |stream: &str| events(&told_of(&[stream.as_bytes()]).0).iter().rev().nth(1).unwrap()["delta"]["stop_reason"].clone();
    assert_eq!(reason(&stream), "tool_use", "the last call is whole");
    assert_eq!(reason(&stream.replace(r#""arguments":"{}""#, r#""arguments":"{""#)), "stop_sequence");
}

#[test]
fn an_incomplete_answer_ends_with_an_error_event() {
    let failing = STREAM.replace("data: [DONE]", "data: {\"error\":{\"message\":\"the core died\",\"code\":500}}");
    let unfinished = STREAM.replace("\"tool_calls\",\"stop_reason\"", "null,\"stop_reason\"");
    for (stream, words) in [
        (failing.as_str(), "the core died"),
        (&unfinished, "before it was complete"),
        ("", "before it was complete"),
        ("data: {\"choices\"\n\n", "cannot be read"),
        (&STREAM.replace("\"index\":1,\"id\":\"t2\",\"function\":{\"name\":\"rest\",", "\"index\":1,\"function\":{"), "had ended"),
    ] {
        let (told, cut) = told_of(&[stream.as_bytes()]);
        let events = events(&told);
        assert_valid(&events);
        assert!(cut.unwrap().0.contains(words), "{stream}");
        assert_eq!(events.last().unwrap()["type"], "error");
        assert!(!told.contains("message_stop"));
    }
}

#[test]
fn the_translation_of_a_message_buffers_within_bounds() {
    let begin = r#"data: {"choices":[{"delta":{"tool_calls":[{"index":0,"id":"t","function":{"name":"look"}}]}}]}"#;
    let text = format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{}\"}}}}]}}\n\n", "x".repeat(500_000));
    let now = ArrivalTime { instant: Instant::now(), time: SystemTime::UNIX_EPOCH };
    let mut translation = StreamTranslation::new(MessagesTranslator::default());
    translation.push(format!("{begin}\n\n").as_bytes(), now).unwrap();
    let taken = (0..1000).take_while(|_| translation.push(text.as_bytes(), now).is_ok()).count();
    assert!((1..100).contains(&taken), "{taken} pieces were held");
}

proptest! {
    #[test]
    fn message_events_do_not_depend_on_how_bytes_are_cut(cuts in prop::collection::vec(any::<usize>(), 0..40)) {
        let (whole, _) = told_of(&[STREAM.as_bytes()]);
        prop_assert_eq!(told_of(&pieces(STREAM.as_bytes(), &cuts)), (whole, None));
    }

    #[test]
    fn any_chunks_become_valid_message_events(deltas in prop::collection::vec(any_delta(), 0..12), ends: bool) {
        let chunk = |delta: &Value| format!("data: {}\n\n", json!({"id": "c", "model": "m", "choices": [{"index": 0, "delta": delta}]}));
        let mut stream: String = deltas.iter().map(chunk).collect();
        if ends {
            stream.push_str("data: {\"id\":\"c\",\"model\":\"m\",\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n");
        }
        let (told, cut) = told_of(&[stream.as_bytes()]);
        let events = events(&told);
        assert_valid(&events);
        let last = events.last().map(|event| event["type"].clone());
        prop_assert_eq!(last, Some(if cut.is_none() { json!("message_stop") } else { json!("error") }));
        if cut.is_none() {
            let texts = |field: &str| deltas.iter().filter_map(|delta| delta[field].as_str()).collect::<String>();
            let told = |field: &str| events.iter().filter_map(|event| event["delta"][field].as_str()).collect::<String>();
            let words = |text: String| text.split_whitespace().collect::<String>();
            prop_assert_eq!(words(told("text")), words(texts("content")), "nothing but blanks is lost");
            prop_assert_eq!(told("thinking"), texts("reasoning"), "nothing is lost");
        }
    }

    #[test]
    fn no_body_makes_the_message_translator_panic(body: Vec<u8>) {
        let _ = (chat_request(&body), count_request(&body), translate_answer(&body), translate_count(&body));
        let _ = told_of(&[b"data:", &body, b"\n"]);
    }
}
