//! Reading a body on its way into the fleet takes no more memory than the body's length.

use bytes::Bytes;
use hostler_api::Route;
use hostler_prompt::PromptRequest;
use http::HeaderMap;

use super::super::body_format::BodyFormat;
use super::super::invocation;
use super::super::isolation::{Isolation, UnsaltedRequest};
use super::super::media::MediaHosts;
use super::super::peek::peek;
use super::super::work_estimate::{estimate_tokens, estimate_work, output_bounds};
use crate::growth::{assert_linear, assert_proportional};
use crate::resumption::{Sampling, StreamApi, ask_for_tokens, check_message_request, unasked_part, without_asking};

const CHAT: &[(&str, &str)] =
    &[("model", r#""m""#), ("stream", "true"), ("temperature", "0"), ("messages", r#"[{"role":"user","content":"x"}]"#)];

const COMPLETION: &[(&str, &str)] =
    &[("model", r#""m""#), ("stream", "true"), ("temperature", "0"), ("prompt", r#""x""#), ("max_tokens", "9")];

const MESSAGE: &[(&str, &str)] = &[
    ("model", r#""m""#),
    ("stream", "true"),
    ("temperature", "0"),
    ("max_tokens", "9"),
    ("messages", r#"[{"role":"user","content":"x"}]"#),
];

#[test]
fn a_peek_takes_no_more_than_a_bodys_length() {
    assert_linear("peek", COMPLETION, |body| {
        let Ok(peeked) = peek(body) else { return };
        let _ = (estimate_work(Route::Completions, body, &peeked), output_bounds(&peeked));
        let _: u64 = peeked.texts(body).map(estimate_tokens).sum();
    });
}

#[test]
fn keeping_tenants_apart_takes_no_more_than_a_bodys_length() {
    let folder = tempfile::tempdir().unwrap();
    let isolation = Isolation::open(&folder.path().join("secret")).unwrap();
    assert_linear("isolation", COMPLETION, |body| {
        let body = Bytes::copy_from_slice(body);
        let peeked = peek(&body).unwrap();
        let request = UnsaltedRequest { tenant: "t", route: Route::Completions, content: BodyFormat::Json, body: &body, peek: &peeked };
        let Ok(Some(salted)) = isolation.add_salt(&request) else { return };
        for text in &peeked.prompt_parts {
            let _ = salted.relocate(text);
        }
    });
}

#[test]
fn sampling_fields_take_no_more_than_a_bodys_length() {
    for (api, needed) in [(StreamApi::Chat, CHAT), (StreamApi::Completions, COMPLETION)] {
        assert_linear("sampling", needed, |body| {
            let _ = Sampling::parse(api, body);
            let asking = ask_for_tokens(body);
            let _ = (without_asking(&asking), unasked_part(body));
        });
    }
}

#[test]
fn replay_rules_take_no_more_than_a_bodys_length() {
    assert_linear("replay rules", MESSAGE, |body| {
        let _ = check_message_request(body);
    });
}

#[test]
fn media_are_found_in_no_more_than_a_bodys_length() {
    let hosts = MediaHosts::new(&["h".to_owned()]).unwrap();
    let with_url: Vec<_> = CHAT.iter().copied().chain([("image_url", r#""http://h/x""#)]).collect();
    assert_linear("media", &with_url, |body| {
        let _ = hosts.check(body, true);
    });
}

#[test]
fn an_invocation_is_unwrapped_in_no_more_than_its_length() {
    assert_linear("invocation", CHAT, |body| {
        let _ = invocation::carried_request(Route::Invocations, &HeaderMap::new(), body);
    });
}

#[test]
fn a_prompt_is_parsed_in_no_more_than_its_length() {
    for (path, needed) in [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)] {
        assert_linear(path, needed, |body| {
            let _ = PromptRequest::parse(path, body).map(|request| request.forms());
        });
    }
}

#[test]
fn reading_a_form_takes_no_more_than_its_length() {
    let form = |part: &str, count: usize| format!("--b\r\n{}--b--\r\n", part.repeat(count)).into_bytes();
    let disposition = "content-disposition: form-data; name=\"prompt\"";
    for (name, part) in [
        ("parts", format!("{disposition}\r\n\r\nx\r\n--b\r\n")),
        ("headers of parts", "x: y\r\n".to_owned()),
        ("parameters of a header", "; name=\"x\"".to_owned()),
        ("line ends", "\r\n".to_owned()),
        ("hyphens", "--".to_owned()),
        ("near boundaries", "\r\n--a".to_owned()),
    ] {
        // Not more parts than are read.
        let count = (48 * 1024 / part.len()).min(240);
        let part = part.repeat(48 * 1024 / part.len() / count);
        let write = |count| form(&part, count);
        assert_proportional(name, count, write, |body| {
            let _ = super::super::form::peek("multipart/form-data; boundary=b", body);
        });
    }
}
