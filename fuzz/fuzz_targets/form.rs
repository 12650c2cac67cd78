//! Fuzzes the peek into a multipart form. The first line of an input is the content type, the rest
//! is the body.
//!
//! A form without its end must be rejected, and a model found must be the whole value of a part.
#![no_main]

use libfuzzer_sys::fuzz_target;
use memchr::memmem;

#[path = "../../router/src/inbound/form.rs"]
mod form;
#[path = "../../router/src/inbound/peek.rs"]
mod peek;

fuzz_target!(|input: &[u8]| {
    let line = memchr::memchr(b'\n', input).unwrap_or(input.len());
    let (kind, body) = (&input[..line], input.get(line + 1..).unwrap_or_default());
    let Ok(kind) = std::str::from_utf8(kind) else { return };
    let Ok(peeked) = form::peek(kind, body) else { return };
    let mut end = body;
    while let Some(before) = end.strip_suffix(b"\r\n") {
        end = before;
    }
    assert!(form::peek(kind, &end[..end.len() - 1]).is_err(), "it lacks its end");
    if let Some(model) = peeked.model {
        let value = [b"\r\n\r\n", model.as_bytes(), b"\r\n--"].concat();
        assert!(memmem::find(body, &value).is_some(), "{model} is the value of a part");
    }
});
