//! Fuzzes the peek into a request's body.
//!
//! It must accept every JSON document and nothing else, read the model as an engine does, and point
//! only to whole values of the body.
#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use serde_json::value::RawValue;

#[path = "../../router/src/inbound/peek.rs"]
mod peek;

fuzz_target!(|body: &[u8]| {
    let peeked = peek::peek(body);
    let _ = peek::is_invalid_for_engines(body);
    // Values parsed by serde are at most 128 levels deep; beyond that the two may differ.
    if let Ok(value) = serde_json::from_slice::<Value>(body) {
        let peeked = peeked.as_ref().expect("what is JSON is taken");
        let model = value.as_object().and_then(|fields| fields.get("model")).and_then(Value::as_str);
        assert_eq!(peeked.model.as_deref(), model);
        let stream = value.as_object().and_then(|fields| fields.get("stream")).and_then(Value::as_bool);
        assert_eq!(peeked.is_stream, stream.unwrap_or(false));
    }
    if let Ok(peeked) = peeked {
        for place in peeked.prompt_parts.iter().chain(&peeked.raw_salts) {
            serde_json::from_slice::<&RawValue>(&body[place.clone()]).expect("what is pointed to is a value");
        }
    }
});
