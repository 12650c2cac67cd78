//! Answers and failures in their lines.

use serde_json::{Value, json};

use super::*;

fn answer(status: u16, body: &str) -> Answer {
    let headers = HeaderMap::from_iter([(http::HeaderName::from_static("x-hostler-id"), "0a".parse().unwrap())]);
    Answer { status: StatusCode::from_u16(status).unwrap(), headers, body: Bytes::copy_from_slice(body.as_bytes()) }
}

fn written(status: u16, body: &str) -> (OutputLine, Value) {
    let line = write("batch_req_1", "mine \"1\"", Outcome::Answered(answer(status, body)));
    let value = serde_json::from_slice(&line.json).unwrap();
    (line, value)
}

#[test]
fn an_answer_is_kept_as_received_on_one_line() {
    let body = "{\n  \"big\": 123456789012345678901234567890,\r\n  \"text\": \"a\\nb\",\n  \"usage\": {\"completion_tokens\": 7}\n}";
    let (line, value) = written(200, body);
    let text = str::from_utf8(&line.json).unwrap();
    assert!(!text.contains('\n') && text.contains("123456789012345678901234567890"), "{text}");
    assert_eq!((line.is_failed, line.tokens), (false, 7));
    assert_eq!((&value["id"], &value["custom_id"], &value["error"]), (&json!("batch_req_1"), &json!("mine \"1\""), &Value::Null));
    let response = &value["response"];
    assert_eq!((&response["status_code"], &response["request_id"]), (&json!(200), &json!("0a")));
    assert_eq!(response["body"]["text"], "a\nb");
}

#[test]
fn a_refused_request_keeps_its_status_and_the_engines_message() {
    let (line, value) = written(400, r#"{"error":{"message":"too long"}}"#);
    assert!(line.is_failed);
    assert_eq!((&value["response"]["status_code"], &value["response"]["body"]["error"]["message"]), (&json!(400), &json!("too long")));
    let (line, value) = written(403, "<html>\nno");
    assert!(line.is_failed);
    assert_eq!(value["response"]["body"], "<html>\nno");
}

#[test]
fn an_answer_that_is_not_json_is_an_error() {
    let (line, value) = written(200, "RIFF....WAVE");
    assert!(line.is_failed && value["response"].is_null());
    assert_eq!(value["error"]["code"], "answer_not_json");
    let expired = Outcome::Failed { code: "batch_expired", message: "no answer".to_owned() };
    let line = write("batch_req_1", "a", expired);
    let value: Value = serde_json::from_slice(&line.json).unwrap();
    assert_eq!((line.is_failed, &value["error"]), (true, &json!({"code": "batch_expired", "message": "no answer"})));
}

#[test]
fn an_answer_aborted_by_its_engine_does_not_count() {
    for (status, reason, expected) in [(200, "abort", true), (200, "error", true), (200, "stop", false), (400, "abort", false)] {
        let body = format!("{{\"choices\":[{{\"finish_reason\":\"length\"}},{{\"finish_reason\":\"{reason}\"}}]}}");
        assert_eq!(is_aborted(&answer(status, &body)), expected, "{status} {reason}");
    }
    assert!(!is_aborted(&answer(200, r#"{"data":[{"embedding":[0.5]}],"usage":{"prompt_tokens":3}}"#)));
}

#[test]
fn an_unknown_model_is_distinguished_from_other_not_found_answers() {
    let body = |message: &str| format!("{{\"error\":{{\"message\":\"{message}\"}}}}");
    let unknown = "The model `m` does not exist.";
    for (status, message, expected) in
        [(404, unknown, true), (400, unknown, false), (404, "Response with id 'a' not found.", false), (404, "", false)]
    {
        assert_eq!(is_unknown_model(&answer(status, &body(message))), expected, "{status} {message}");
    }
}

#[test]
fn error_messages_are_shortened() {
    assert_eq!(error_message(br#"{"error":{"message":"no  replica\nis ready"}}"#), "no replica is ready");
    assert_eq!(error_message("é".repeat(1_000).as_bytes()).chars().count(), 200);
}
