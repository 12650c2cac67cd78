//! What clients may ask for, and the words for the rest.

use super::*;

fn message(result: Result<BatchOrder, BatchesError>) -> String {
    result.unwrap_err().to_string()
}

fn order(change: impl FnOnce(&mut Value)) -> Result<BatchOrder, BatchesError> {
    let mut order = json!({"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"});
    change(&mut order);
    parse_order(order.to_string().as_bytes())
}

#[test]
fn a_batch_is_for_one_api_of_json_bodies() {
    for endpoint in ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/rerank"] {
        assert_eq!(order(|order| order["endpoint"] = endpoint.into()).unwrap().endpoint, endpoint);
    }
    for endpoint in ["", "/v1/audio/transcriptions", "/v1/batches", "/v1/models", "/v1/x", "/tokenize", "/v1/load_lora_adapter", "/v1/../x"]
    {
        assert!(message(order(|order| order["endpoint"] = endpoint.into())).contains("path of an API"), "{endpoint}");
    }
}

#[test]
fn a_batchs_fields_are_checked() {
    assert!(message(order(|order| order["completion_window"] = "7d".into())).contains("24h"));
    assert!(message(order(|order| order["input_file_id"] = Value::Null)).contains("input_file_id"));
    assert!(message(order(|order| order["metadata"] = json!({"a": "x".repeat(513)}))).contains("metadata"));
    let many: BTreeMap<String, String> = (0..17).map(|number| (number.to_string(), String::new())).collect();
    assert!(message(order(|order| order["metadata"] = json!(many))).contains("at most 16 pairs"));
    for (after, lifetime) in [
        (json!({"anchor": "created_at", "seconds": 3600}), Some(3600)),
        (json!({"anchor": "created_at", "seconds": 3599}), None),
        (json!({"anchor": "created_at", "seconds": KEPT_SECONDS + 1}), None),
        (json!({"anchor": "used_at", "seconds": 3600}), None),
        (Value::Null, Some(KEPT_SECONDS)),
    ] {
        let read = order(|order| order["output_expires_after"] = after.clone());
        assert_eq!(read.ok().map(|order| order.output_lifetime), lifetime, "{after}");
    }
    assert!(message(parse_order(&[b'['; 1000])).len() < 400);
}

#[test]
fn a_lists_query_has_bounds() {
    let read = |query| parse_query(query, (20, 100));
    let query = read("limit=7&order=asc&purpose=batch&after=file%2D1&other").unwrap();
    assert_eq!(
        (query.limit, query.is_ascending, query.purpose.as_deref(), query.after.as_deref()),
        (7, true, Some("batch"), Some("file-1"))
    );
    assert_eq!(read("").unwrap().limit, 20);
    for odd in ["limit=0", "limit=101", "limit=x", "order=up"] {
        assert!(read(odd).is_err(), "{odd}");
    }
}

#[test]
fn errors_have_openais_form_and_a_status_for_their_cause() {
    for (error, status) in [
        (BatchesError::TooLarge("large".to_owned()), 413),
        (BatchesError::Quota("many".to_owned()), 429),
        (BatchesError::Conflict("ended".to_owned()), 409),
        (BatchesError::DiskFull, 507),
        (BatchesError::Disk("cannot read /secret/path".to_owned()), 500),
    ] {
        let response = refused(&error);
        assert_eq!(response.status().as_u16(), status, "{error}");
        let EdgeBody::Local(Some(body)) = response.body() else { panic!("its own body") };
        let body: Value = serde_json::from_slice(body).unwrap();
        assert!(body["error"]["message"].is_string() && !body.to_string().contains("/secret"), "{body}");
    }
}
