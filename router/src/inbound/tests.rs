mod growth;

use http::HeaderMap;
use proptest::prelude::*;

use super::headers::{asks_engine_priority as is_urgent_by_header, headers_for_client, headers_for_engine};
use super::peek::{Peek, RequestedCount, is_invalid_for_engines, peek};
use super::work_estimate::output_bounds;
use crate::placement::OutputBounds;

fn model(name: &str) -> Peek {
    Peek { model: Some(name.into()), ..Peek::default() }
}

#[test]
fn only_the_model_is_read_and_other_fields_pass() {
    let body = br#" {"x":[{"role":"user","content":"\u00e9\"model\":\"no\""}],"model":"m\u00fc","y":{"model":"inner"}}"#;
    assert_eq!(peek(body).unwrap(), model("mü"));
    assert_eq!(peek(br#"{"model":"first","model":"last"}"#).unwrap(), model("last"));
    for body in [r#"{"model":7}"#, r#"{"model":null}"#, "{}", "[1]", "\"text\""] {
        assert_eq!(peek(body.as_bytes()).unwrap(), Peek::default(), "{body}");
    }
}

#[test]
fn fields_for_placement_are_read_or_ignored_by_type() {
    let body = r#"{"messages":[{"role":"user","content":"hi"}],"stream":true,"max_tokens":7,"priority":-2,"user":"u","system":"s"}"#;
    let peeked = peek(body.as_bytes()).unwrap();
    let text: Vec<&str> = peeked.texts(body.as_bytes()).collect();
    assert_eq!(text, [r#"[{"role":"user","content":"hi"}]"#, r#""s""#]);
    let (priority, user) = (Some(-2), Some("u".into()));
    let expected = Peek {
        is_stream: true,
        max_output: RequestedCount::Count(7),
        max_tokens_at: Some(72..73),
        priority,
        is_urgent: true,
        user,
        is_chat: true,
        prompt_parts: peeked.prompt_parts.clone(),
        ..Peek::default()
    };
    assert_eq!(peeked, expected);
    let odd = peek(br#"{"stream":"yes","max_tokens":-1,"priority":1.5,"user":{}}"#).unwrap();
    assert_eq!(odd, Peek { is_urgent: true, max_output: RequestedCount::Unreadable, max_tokens_at: Some(29..31), ..Peek::default() });
    assert_eq!(peek(br#"{"max_tokens":1,"max_tokens":2,"max_tokens":3}"#).unwrap().max_tokens_at, None, "it is there more than once");
}

#[test]
fn a_priority_not_plainly_nonnegative_counts_as_urgent() {
    let is_urgent = |priority: &str| peek(format!("{{\"pri\\u006frity\":{priority}}}").as_bytes()).unwrap().is_urgent;
    for urgent in
        ["-1", "-0", "-9223372036854775808", "1.0", "1e0", "\"-1\"", "\"1\"", "true", "[]", "-1,\"priority\":1", "1,\"priority\":-1"]
    {
        assert!(is_urgent(urgent), "{urgent}");
    }
    for patient in ["0", "1", "18446744073709551616", "null", "1,\"x\":{\"priority\":-1}"] {
        assert!(!is_urgent(patient), "{patient}");
    }
    for (values, urgent) in
        [(&[][..], false), (&["7"], false), (&["-7"], true), (&["7", "-7"], true), (&["x"], true), (&[""], true), (&["\u{b2}"], true)]
    {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append("x-vllm-priority", value.parse().unwrap());
        }
        assert_eq!(is_urgent_by_header(&headers), urgent, "{values:?}");
    }
}

#[test]
fn the_larger_of_two_length_limits_counts() {
    let most = |body: &str| peek(body.as_bytes()).unwrap().max_output.count();
    assert_eq!(most(r#"{"max_completion_tokens":1000,"max_tokens":1}"#), Some(1000));
    assert_eq!(most(r#"{"max_tokens":1000,"max_output_tokens":null}"#), Some(1000));
    assert_eq!(most(r#"{"max_tokens":"1000","max_output_tokens":1}"#), Some(1000));
    assert_eq!(most(r#"{"max_output_tokens":1,"max_tokens":1e3}"#), Some(1000));
    assert_eq!(most(r#"{"max_tokens":1000,"m\u0061x_tokens":1}"#), Some(1000));
    assert_eq!(most(r#"{"sampling_params":{"max_tokens":70,"n":4},"max_tokens":1}"#), Some(70));
    assert_eq!(most(r#"{"sampling_params":{"max_tokens":"70","max_tokens":7}}"#), Some(70));
    assert_eq!(most(r#"{"sampling_params":null,"max_tokens":1}"#), Some(1));
    let choices = |body: &str| peek(body.as_bytes()).unwrap().choices;
    assert_eq!(choices(r#"{"sampling_params":{"n":4}}"#), RequestedCount::Count(4));
    assert_eq!(choices(r#"{"sampling_params":{"n":2,"n":256}}"#), RequestedCount::Count(256));
    assert_eq!(choices(r#"{"sampling_params":[],"n":1}"#), RequestedCount::Unreadable);
    assert_eq!((choices(r#"{"n":2,"best_of":"5"}"#), choices(r#"{"n":"5"}"#)), (RequestedCount::Count(5), RequestedCount::Count(5)));
}

/// The forms in which pydantic 2.14 reads numbers for vLLM 0.32, found by trial.
#[test]
fn numbers_are_read_in_every_form_of_engines() {
    for name in ["max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of"] {
        let read = |value: &str| {
            let body = format!(r#"{{"{name}":{value}}}"#);
            let Peek { max_output, choices, .. } = peek(body.as_bytes()).unwrap();
            if name.starts_with("max") { max_output } else { choices }
        };
        for value in [
            "60",
            "60.0",
            "6e1",
            "6E+1",
            "0.6e2",
            "600e-1",
            r#""60""#,
            r#"" 60 ""#,
            r#""60\n""#,
            r#""\u00a060""#,
            r#""\u0036\u0030""#,
            r#""+60""#,
            r#""0060""#,
            r#""60.0""#,
            r#""60.00""#,
            r#""6_0""#,
            r#""6_0.0""#,
            r#""00_60""#,
        ] {
            assert_eq!(read(value), RequestedCount::Count(60), "{name} {value}");
        }
        for (value, count) in [
            ("true", 1),
            ("false", 0),
            ("-0", 0),
            ("0.0", 0),
            ("1e18", 1_000_000_000_000_000_000),
            ("18446744073709551616", u64::MAX),
            (r#""99999999999999999999999""#, u64::MAX),
        ] {
            assert_eq!(read(value), RequestedCount::Count(count), "{name} {value}");
        }
        assert_eq!(read("null"), RequestedCount::Unset);
        for value in [
            "6.5",
            "-1",
            r#""-5""#,
            r#""6.5""#,
            r#""0x3c""#,
            r#""six""#,
            r#""""#,
            r#"" ""#,
            r#""inf""#,
            r#""NaN""#,
            r#""+-5""#,
            "[60]",
            "{}",
            "1e999",
        ] {
            assert_eq!(read(value), RequestedCount::Unreadable, "{name} {value}");
        }
    }
}

#[test]
fn an_answer_ignoring_its_end_has_its_maximal_length() {
    let bounds = |body: &str| {
        let OutputBounds { least, most } = output_bounds(&peek(body.as_bytes()).unwrap());
        (least, most)
    };
    assert_eq!(bounds(r#"{"max_tokens":100}"#), (0, Some(100)));
    assert_eq!(bounds(r#"{"max_tokens":100,"min_tokens":20,"ignore_eos":false}"#), (20, Some(100)));
    assert_eq!(bounds(r#"{"max_tokens":100,"min_tokens":20,"ignore_eos":true}"#), (100, Some(100)));
    assert_eq!(bounds(r#"{"ignore_eos":true}"#), (0, None));
    assert_eq!(bounds(r#"{"sampling_params":{"max_tokens":70,"ignore_eos":true}}"#), (70, Some(70)));
    assert_eq!(bounds(r#"{"sampling_params":{"max_tokens":70,"min_tokens":"7","ignore_eos":"true"}}"#), (7, Some(70)));
}

#[test]
fn token_ids_are_read_as_a_prompt() {
    let body = br#"{"token_ids":[1,2,3],"sampling_params":{}}"#;
    assert_eq!(peek(body).unwrap().texts(body).collect::<Vec<_>>(), ["[1,2,3]"]);
}

#[test]
fn any_truthy_background_counts_as_background() {
    let background = |value: &str| peek(format!("{{\"background\":{value}}}").as_bytes()).unwrap().background;
    assert!(["true", "1", "\"yes\"", "1.0"].into_iter().all(background));
    assert!(!background("false") && !background("null") && !peek(b"{}").unwrap().background);
}

#[test]
fn a_guided_answer_is_recognized_in_every_dialect() {
    for guided in [
        r#"{"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{}}}}"#,
        r#"{"response_format":{"type":"json_object"}}"#,
        r#"{"text":{"format":{"type":"json_schema","schema":{}}}}"#,
        r#"{"structured_outputs":{"regex":"a+"}}"#,
        r#"{"guided_choice":["a","b"]}"#,
        r#"{"tool_choice":"required"}"#,
        r#"{"tool_choice":{"type":"function","function":{"name":"f"}}}"#,
        r#"{"tool_choice":{"type":"any"}}"#,
    ] {
        assert!(peek(guided.as_bytes()).unwrap().is_guided, "{guided}");
    }
    for free in [
        r#"{"response_format":{"type":"text"}}"#,
        r#"{"response_format":null,"guided_json":null,"text":"t"}"#,
        r#"{"tool_choice":"auto"}"#,
        r#"{"tool_choice":{"type":"auto"}}"#,
        r#"{"prompt":"{\"response_format\":{\"type\":\"json_object\"}}"}"#,
    ] {
        assert!(!peek(free.as_bytes()).unwrap().is_guided, "{free}");
    }
}

#[test]
fn malformed_json_is_refused_with_its_position() {
    let error = peek(b"{\"model\":\"m\",\n \"x\": }").unwrap_err().to_string();
    assert_eq!(error, "the body is not valid JSON: expected value at line 2 column 7");
    assert!(peek(b"{} trailing").is_err() && peek(b"").is_err());
}

#[test]
fn deeply_nested_json_is_accepted() {
    let body = format!("{{\"x\":{}{},\"model\":\"m\"}}", "[".repeat(10_000), "]".repeat(10_000));
    assert_eq!(peek(body.as_bytes()).unwrap(), model("m"));
}

#[test]
fn headers_pass_except_hop_by_hop_ones() {
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("authorization", "Bearer x"),
        ("x-request-id", "r"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("tracestate", "a=b"),
        ("x-twice", "1"),
        ("x-twice", "2"),
        ("connection", "close, X-Hop"),
        ("x-hop", "1"),
        ("host", "edge"),
        ("content-length", "3"),
        ("transfer-encoding", "chunked"),
        ("te", "trailers"),
        ("keep-alive", "5"),
    ] {
        headers.append(name, value.parse().unwrap());
    }
    let passed = headers_for_engine(&headers, true);
    let names: Vec<&[u8]> = passed.iter().map(|header| &header.name[..]).collect();
    assert_eq!(names, [&b"authorization"[..], b"x-request-id", b"traceparent", b"tracestate", b"x-twice", b"x-twice"]);
    let anonymous = headers_for_engine(&headers, false);
    assert_eq!(anonymous.iter().map(|header| &header.name[..]).collect::<Vec<_>>(), names[1..]);
    let back = headers_for_client(passed);
    assert_eq!(back.get_all("x-twice").iter().collect::<Vec<_>>(), ["1", "2"]);
}

proptest! {
    #[test]
    fn no_body_makes_the_peek_panic(bytes: Vec<u8>) {
        let _ = peek(&bytes);
    }

    #[test]
    fn any_model_name_survives_peeking(name: String, key in "[a-l]{1,8}", before: bool) {
        let mut body = serde_json::Map::new();
        if before {
            body.insert(key, 1.into());
        }
        body.insert("model".into(), name.clone().into());
        let body = serde_json::Value::Object(body).to_string();
        prop_assert_eq!(peek(body.as_bytes()).unwrap().model, Some(name));
    }
}

#[test]
fn a_malformed_body_is_passed_on_only_if_surely_refused() {
    for refused in ["", "{", "{'a': 1}", "[1,]", "\"\n\"", "{} x", "01", "\u{1f682}"] {
        assert!(peek(refused.as_bytes()).is_err() && is_invalid_for_engines(refused.as_bytes()), "{refused}");
    }
    // Python's parser accepts these.
    for read in [&b"{\"model\": NaN}"[..], b"-Infinity", b"\xef\xbb\xbf{}", b"{\0}\0", b"\xff\xfe{\0}\0", br#"{"\ud800":1}"#] {
        assert!(peek(read).is_err() && !is_invalid_for_engines(read), "{read:?}");
    }
}
