use http::HeaderMap;
use proptest::prelude::*;

use super::headers::{incoming, outgoing};
use super::peek::{Peek, peek};

fn model(name: &str) -> Peek {
    Peek { model: Some(name.into()) }
}

#[test]
fn the_model_is_read_and_every_other_field_is_left_to_the_engine() {
    let body = br#" {"messages":[{"role":"user","content":"\u00e9\"model\":\"no\""}],"model":"m\u00fc","x":{"model":"inner"}}"#;
    assert_eq!(peek(body).unwrap(), model("mü"));
    assert_eq!(peek(br#"{"model":"first","model":"last"}"#).unwrap(), model("last"));
    for body in [r#"{"model":7}"#, r#"{"model":null}"#, "{}", "[1]", "\"text\""] {
        assert_eq!(peek(body.as_bytes()).unwrap(), Peek::default(), "{body}");
    }
}

#[test]
fn malformed_json_is_refused_with_its_position() {
    let error = peek(b"{\"model\":\"m\",\n \"x\": }").unwrap_err().to_string();
    assert_eq!(error, "the body is not valid JSON: expected value at line 2 column 7");
    assert!(peek(b"{} trailing").is_err() && peek(b"").is_err());
}

#[test]
fn deep_nesting_is_not_our_business() {
    let body = format!("{{\"x\":{}{},\"model\":\"m\"}}", "[".repeat(10_000), "]".repeat(10_000));
    assert_eq!(peek(body.as_bytes()).unwrap(), model("m"));
}

#[test]
fn headers_pass_but_for_those_of_one_connection() {
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("authorization", "Bearer x"),
        ("x-request-id", "r"),
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
    let passed = outgoing(&headers);
    let names: Vec<&[u8]> = passed.iter().map(|header| &header.name[..]).collect();
    assert_eq!(names, [&b"authorization"[..], b"x-request-id", b"x-twice", b"x-twice"]);
    let back = incoming(passed);
    assert_eq!(back.get_all("x-twice").iter().collect::<Vec<_>>(), ["1", "2"]);
}

proptest! {
    #[test]
    fn peeking_never_panics(bytes: Vec<u8>) {
        let _ = peek(&bytes);
    }

    #[test]
    fn any_model_name_is_read_back(name: String, key in "[a-l]{1,8}", before: bool) {
        let mut body = serde_json::Map::new();
        if before {
            body.insert(key, 1.into());
        }
        body.insert("model".into(), name.clone().into());
        let body = serde_json::Value::Object(body).to_string();
        prop_assert_eq!(peek(body.as_bytes()).unwrap().model, Some(name));
    }
}
