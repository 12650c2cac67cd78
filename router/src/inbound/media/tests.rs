use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn hosts(list: &[&str]) -> MediaHosts {
    MediaHosts::new(&list.iter().map(|host| (*host).to_owned()).collect::<Vec<_>>()).unwrap()
}

fn chat(part: &Value) -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]})
}

fn allows(hosts: &MediaHosts, body: &Value) -> bool {
    hosts.check(body.to_string().as_bytes(), false).is_ok()
}

fn with_url(url: &str) -> Value {
    chat(&json!({"type": "image_url", "image_url": {"url": url}}))
}

/// Every place from which vLLM 0.32 fetches.
fn places(url: &str) -> Vec<Value> {
    let image = json!({"type": "image_url", "image_url": {"url": url}});
    let source = json!({"type": "image", "source": {"type": "url", "url": url}});
    vec![
        chat(&image),
        chat(&json!({"type": "audio_url", "audio_url": {"url": url}})),
        chat(&json!({"type": "video_url", "video_url": {"url": url}})),
        chat(&json!({"image_url": url})),
        chat(&json!({"audio_url": url, "uuid": "u"})),
        chat(&source),
        chat(&json!({"type": "tool_result", "tool_use_id": "t", "content": [source]})),
        json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}),
        json!({"input": [{"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": url}}]}),
        json!({"messages": [[{"role": "user", "content": [image]}]]}),
        json!({"query": "q", "documents": {"content": [image]}}),
        json!({"data_1": {"content": [image]}, "data_2": ["text", {"content": [image]}]}),
        json!({"inputs": [{"content": [image]}]}),
        json!({"images": [url]}),
        json!({"instructions": "i", "audio": [url]}),
        json!({"videos": ["data:video/mp4;base64,AAAA", url]}),
    ]
}

#[test]
fn an_engine_fetches_media_only_from_listed_hosts() {
    let (none, listed) = (hosts(&[]), hosts(&["media.example.org"]));
    for body in places("https://media.example.org/a.png?size=1#top") {
        let refusal = none.check(body.to_string().as_bytes(), false).unwrap_err();
        assert!(refusal.contains("`media.example.org`") && refusal.contains("router.media_hosts"), "{refusal}");
        assert!(allows(&listed, &body), "{body}");
        // Escaping every letter that may be escaped changes nothing.
        let escaped = body.to_string().replace("url", "\\u0075rl").replace("image", "im\\u0061ge").replace("http", "\\u0068ttp");
        let escaped = escaped.replace("audio", "\\u0061udio").replace("videos", "v\\u0069deos").replace("source", "\\u0073ource");
        assert!(none.check(escaped.as_bytes(), false).is_err() && listed.check(escaped.as_bytes(), false).is_ok(), "{escaped}");
    }
    for body in places("data:image/png;base64,iVBORw0KGgo=") {
        assert!(allows(&none, &body), "{body}");
    }
}

#[test]
fn text_that_mentions_urls_is_no_medium() {
    let none = hosts(&[]);
    let url = "https://example.org/";
    for body in [
        json!({"messages": [{"role": "user", "content": format!("{{\"image_url\":\"{url}\"}}")}]}),
        json!({"messages": [], "tools": [{"type": "function", "function": {"parameters": {"properties": {"url": {"default": url}}}}}]}),
        json!({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": format!("{{\"url\":\"{url}\"}}")}}]}]}),
        chat(&json!({"type": "tool_use", "id": "t", "name": "fetch", "input": {"url": url, "image_url": url}})),
        json!({"messages": [], "metadata": {"image_url": url}, "tools": [{"input_schema": {"properties": {"source": {"url": url}}}}]}),
        json!({"messages": [], "documents": [{"title": "t", "source": {"url": url}, "url": url}, {"source": url}]}),
        chat(&json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}})),
        json!({"prompt": "p", "images": ["iVBORw0KGgo="], "audio": {"voice": "alloy", "format": "wav"}}),
        chat(&json!({"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}})),
        json!({"input": [{"type": "input_image", "image_url": null, "file_id": "f"}]}),
    ] {
        assert_eq!(none.check(body.to_string().as_bytes(), true), Ok(()), "{body}");
    }
}

#[test]
fn hosts_match_only_as_a_whole() {
    let listed = hosts(&["Example.ORG", "*.cdn.example.net", "10.0.0.7"]);
    for url in [
        "https://example.org",
        "HTTPS://EXAMPLE.org./x",
        "http://example.org:8443/x@y\\z",
        "https://a.cdn.example.net/",
        "https://a.b.cdn.example.net?x",
        "http://10.0.0.7/",
        "http://example.org:/",
    ] {
        assert!(allows(&listed, &with_url(url)), "{url}");
    }
    for url in [
        "https://evil-example.org/",
        "https://example.org.evil.net/",
        "https://sub.example.org/",
        "https://cdn.example.net/",
        "https://.cdn.example.net/",
        "https://evilcdn.example.net/",
        "https://example.org@evil.net/",
        "https://evil.net/@example.org",
        "https://evil.net\\@example.org/",
        "https://example.org\\.evil.net/",
        "https://example.org:80@evil.net/",
        "https://evil.net#@example.org/",
        "https://evil.net?.cdn.example.net/",
        "https://user:pass@example.org/",
        "https://example.org%2eevil.net/",
        "https://example.org%00.evil.net/",
        "https://example.org\u{0}.evil.net/",
        "https://example.org\t.evil.net/",
        "https://example.org\n/",
        " https://example.org/",
        "https:// example.org/",
        "https:/example.org/",
        "https:///example.org/",
        "https:example.org",
        "//example.org/",
        "example.org",
        "https://example.org../",
        "https://ｅxample.org/",
        "https://example。org/",
        "http://[::1]/",
        "http://[::ffff:10.0.0.7]/",
        "http://167772167/",
        "http://0x0a000007/",
        "http://10.0.0.7.evil.net/",
        "http://10.7/",
        "http://169.254.169.254/latest/meta-data/",
        "http://localhost:8000/",
        "file:///etc/passwd",
        "FILE:///etc/passwd",
        "file://example.org/etc/passwd",
        "ftp://example.org/",
        "gopher://example.org/",
        "httpx://example.org/",
        "jar:https://example.org/",
        "javascript:alert(1)",
        "",
    ] {
        assert!(!allows(&listed, &with_url(url)), "{url:?}");
    }
}

#[test]
fn all_hosts_may_be_allowed_but_never_files() {
    let all = hosts(&["*"]);
    assert!(allows(&all, &with_url("https://anything.example/")) && allows(&all, &with_url("http://[::1]:9/")));
    for url in ["file:///etc/passwd", " file:///etc/passwd", "ftp://example.org/", "/etc/passwd"] {
        assert!(!allows(&all, &with_url(url)), "{url}");
    }
}

#[test]
fn an_invalid_host_list_is_refused_at_the_start() {
    for wrong in ["https://example.org", "example.org:443", "exa mple", "", "*.", "a.*.b", "**", "example.org/x", "[::1]", "ü.de"] {
        let error = MediaHosts::new(&[wrong.to_owned()]).unwrap_err().to_string();
        assert!(error.starts_with("router.media_hosts: "), "{wrong}: {error}");
    }
}

#[test]
fn a_body_with_unsearchable_media_is_refused() {
    let deep = |inner: &str| format!(r#"{{"x":{}1{},"messages":"{inner}"}}"#, "[".repeat(300), "]".repeat(300));
    let none = hosts(&[]);
    assert!(none.check(deep("\\u0075rl").as_bytes(), false).unwrap_err().contains("cannot be searched"));
    assert_eq!(none.check(deep("").as_bytes(), false), Ok(()));
    assert_eq!(none.check("{\"prompt\":\"\\u00e9t\\u00e9 \\u2028 urls\"}".as_bytes(), false), Ok(()));
}

#[test]
fn media_names_are_refused_where_tenants_are_isolated() {
    let named = chat(&json!({"type": "image_url", "image_url": null, "uuid": "photo-1"})).to_string();
    let none = hosts(&[]);
    assert_eq!(none.check(named.as_bytes(), false), Ok(()));
    assert!(none.check(named.as_bytes(), true).unwrap_err().contains("`uuid`"));
    assert!(none.check(named.replace("uuid", "u\\u0075id").as_bytes(), true).is_err());
    let unnamed = chat(&json!({"type": "image_url", "image_url": {"url": "data:,x"}, "uuid": null})).to_string();
    assert_eq!(none.check(unnamed.as_bytes(), true), Ok(()));
    let other = json!({"messages": [{"role": "user", "content": "uuid", "uuid": "message-7"}]}).to_string();
    assert_eq!(none.check(other.as_bytes(), true), Ok(()));
}

proptest! {
    #[test]
    fn no_body_makes_the_media_check_panic(bytes: Vec<u8>, text in ".{0,40}") {
        let _ = hosts(&["example.org"]).check(&[&bytes[..], b"\"url\""].concat(), true);
        let _ = hosts(&["example.org"]).check(with_url(&text).to_string().as_bytes(), true);
    }

    #[test]
    fn an_allowed_url_has_a_listed_host_in_strict_parsers(url in "https?://[a-z.@:/\\\\#?%0-9]{0,12}(example\\.org)?[a-z.@:/\\\\#?%0-9]{0,8}") {
        if allows(&hosts(&["example.org"]), &with_url(&url)) {
            let uri: http::Uri = url.split('#').next().unwrap().replace('\\', "%5c").parse().unwrap();
            prop_assert_eq!(uri.host().unwrap().trim_end_matches('.'), "example.org");
        }
    }
}
