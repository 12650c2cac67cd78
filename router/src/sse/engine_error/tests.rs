use super::*;

#[test]
fn a_dead_cores_error_is_recognized_and_cannot_be_forged() {
    let is_dead = |error: &[u8]| EngineEnd::read(error) == Some(EngineEnd::CoreDied);
    let dead = "EngineCore encountered an issue. See stack trace (above) for the root cause.";
    assert!(is_dead(format!("data: {{\"error\": {{\"message\": \"{dead}\", \"type\": \"InternalServerError\"}}}}\n\n").as_bytes()));
    assert!(is_dead(format!("{{\"error\":{{\"message\":\"{dead}\"}}}}").as_bytes()));
    let error_body = serde_json::json!({"error": {"message": format!("template error at {{\"message\":\"{dead}\"}}")}});
    assert!(!is_dead(error_body.to_string().as_bytes()));
    let repeated = format!(r#"{{"error":{{"message":"no","input":{{"message":"{dead}"}}}},"detail":[{{"message":"{dead}"}}]}}"#);
    assert!(!is_dead(repeated.as_bytes()));
    let named = format!("event: error\ndata: {{\"type\":\"error\",\"error\":{{\"type\":\"api_error\",\"message\":\"{dead}\"}}}}\n\n");
    assert!(is_dead(named.as_bytes()) && is_dead(format!("data: {{\"message\":\"{dead}\"}}").as_bytes()));
    assert!(!is_dead(br#"{"error":{"message":"maximum recursion depth exceeded","code":500}}"#));
    let of_messages = |message: &str| {
        let pydantic = "2 validation errors for ChatCompletionStreamResponse\\nmodel\\n  Field required [type=missing, input_value=";
        format!(
            "event: error\ndata: {{\"type\":\"error\",\"error\":{{\"type\":\"internal_error\",\"message\":\"{pydantic}{message}\"}}}}\n\n"
        )
    };
    let shown = "{'error': {'message': 'En...am': None, 'code': 500}}, input_type=dict]";
    assert!(is_dead(of_messages(shown).as_bytes()));
    assert!(!is_dead(of_messages(&shown.replace("En", "ma")).as_bytes()));
}

#[test]
fn a_stopping_engines_error_is_recognized_and_cannot_be_forged() {
    let is_stopping = |error: &[u8]| EngineEnd::read(error) == Some(EngineEnd::Stopping);
    let stopping = "cannot schedule new futures after shutdown";
    assert!(is_stopping(format!(r#"{{"error":{{"message":"{stopping}","type":"InternalServerError","code":500}}}}"#).as_bytes()));
    assert!(is_stopping(format!("data: {{\"error\": {{\"message\": \"{stopping}\"}}}}\n\n").as_bytes()));
    assert!(!is_stopping(format!(r#"{{"error":{{"message":"no such model: {stopping}"}}}}"#).as_bytes()));
    assert!(!is_stopping(format!(r#"{{"error":{{"message":"no","input":{{"message":"{stopping}"}}}}}}"#).as_bytes()));
}
