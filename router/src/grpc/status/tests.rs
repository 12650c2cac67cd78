use bytes::Bytes;
use tonic_types::ErrorDetails;

use super::*;

fn details(status: &Status) -> ErrorDetails {
    status.get_error_details()
}

fn reason(status: &Status) -> String {
    let info = details(status).error_info().unwrap().clone();
    assert_eq!(info.domain, DOMAIN);
    info.reason
}

/// The body of a recorded answer.
fn body(raw: &[u8]) -> &[u8] {
    &raw[memchr::memmem::find(raw, b"\r\n\r\n").unwrap() + 4..]
}

#[test]
fn recorded_engine_refusals_keep_their_words_and_field() {
    let too_long = engine_refusal(400, &[], body(include_bytes!("../../../../tests/fixtures/vllm/err_400_too_long.raw")));
    assert_eq!((too_long.code(), reason(&too_long).as_str()), (Code::InvalidArgument, "ENGINE_REFUSED"));
    assert!(too_long.message().starts_with("This model's maximum context length is 4096 tokens."), "{}", too_long.message());
    let violations = details(&too_long).bad_request().unwrap().field_violations.clone();
    assert_eq!(violations[0].field, "input_tokens");
    assert_eq!(details(&too_long).error_info().unwrap().metadata["http_status"], "400");

    let busy = engine_refusal(503, &[], body(include_bytes!("../../../../tests/fixtures/vllm/err_503_admission_stream.raw")));
    assert_eq!((busy.code(), details(&busy).retry_info().unwrap().retry_delay), (Code::Unavailable, Some(RETRY_DELAY)));

    let model = engine_refusal(404, &[], body(include_bytes!("../../../../tests/fixtures/vllm/err_404_model.raw")));
    assert_eq!(model.code(), Code::NotFound);
    let route = engine_refusal(404, &[], body(include_bytes!("../../../../tests/fixtures/vllm/err_404_route.raw")));
    assert_eq!((route.code(), route.message()), (Code::Unimplemented, "the engine that serves this model does not offer it: Not Found"));
}

#[test]
fn refusals_of_other_forms_are_parsed_or_named_by_code() {
    let bare = engine_refusal(400, &[], br#"{"object":"error","message":"no","type":"BadRequestError","param":null,"code":400}"#);
    assert_eq!((bare.code(), bare.message()), (Code::InvalidArgument, "no"));
    let listed = engine_refusal(422, &[], br#"{"detail":[{"msg":"Field required"}]}"#);
    assert_eq!((listed.code(), listed.message()), (Code::InvalidArgument, r#"[{"msg":"Field required"}]"#));
    for nonsense in [&b""[..], b"<html>", br#"{"error":"words"}"#, b"[1]"] {
        let status = engine_refusal(500, &[], nonsense);
        assert_eq!((status.code(), status.message()), (Code::Internal, "the engine answered 500"), "{nonsense:?}");
    }
    let header = Header { name: Bytes::from_static(b"Retry-After"), value: Bytes::from_static(b"7") };
    let later = engine_refusal(429, &[header], b"{}");
    assert_eq!(details(&later).retry_info().unwrap().retry_delay, Some(Duration::from_secs(7)));
}

#[test]
fn a_refusal_by_the_router_has_reason_and_delay() {
    let unknown = Rejection::Fleet(Refusal::UnknownModel { model: "a".into(), known: "b, c".into() });
    let status = rejection(&unknown);
    assert_eq!((status.code(), reason(&status).as_str()), (Code::NotFound, "MODEL_NOT_FOUND"));
    assert_eq!(details(&status).error_info().unwrap().metadata["models"], "b, c");
    let overloaded = rejection(&Rejection::Fleet(Refusal::Overloaded { message: "full".into(), retry_after: 3 }));
    assert_eq!((overloaded.code(), reason(&overloaded).as_str()), (Code::ResourceExhausted, "OVERLOADED"));
    assert_eq!(details(&overloaded).retry_info().unwrap().retry_delay, Some(Duration::from_secs(3)));
    let lost = rejection(&Rejection::Fleet(Refusal::Lost { attempts: 2, last: "it died".into(), retry_after: 4 }));
    assert_eq!((lost.code(), details(&lost).error_info().unwrap().metadata["attempts"].as_str()), (Code::Unavailable, "2"));
    assert_eq!(details(&lost).retry_info().unwrap().retry_delay, Some(Duration::from_secs(4)));
    let loading = rejection(&Rejection::Fleet(Refusal::NotReady { message: "it loads".into(), retry_after: 45 }));
    assert_eq!(details(&loading).retry_info().unwrap().retry_delay, Some(Duration::from_secs(45)));
    let slow = rejection(&Rejection::Fleet(Refusal::TooSlow(Duration::from_secs(1))));
    assert_eq!(slow.code(), Code::DeadlineExceeded);
    let field = invalid_field("sampling.top_p", "this is no finite number");
    assert_eq!(details(&field).bad_request().unwrap().field_violations[0].field, "sampling.top_p");
}

#[test]
fn a_status_never_exceeds_what_clients_accept() {
    let error =
        serde_json::json!({"error": {"message": "é".repeat(100_000), "type": "t".repeat(1000), "param": "p".repeat(1000), "code": 400}});
    let status = engine_refusal(400, &[], error.to_string().as_bytes());
    assert!(status.message().len() < 1100 && status.message().ends_with('…'));
    // In trailers, percent encoding may triple the message, and base64 adds a third to the details.
    assert!(
        status.message().len() * 3 + status.details().len() * 4 / 3 < 8192,
        "{} and {}",
        status.message().len(),
        status.details().len()
    );
}
