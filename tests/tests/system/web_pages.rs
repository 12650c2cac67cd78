//! Web pages of other origins: the answer to a browser about who may read it, whoever gives the
//! answer.

use std::time::SystemTime;

use bytes::Bytes;
use hostler_router::keys::{KeyEntry, KeyLimits, Secret, change};
use http::{Method, Request};
use http_body_util::Full;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::{Answer, CHAT, Fleet, MODEL, Setup, chat, chat_stream, raw};

const PAGE: &str = "https://chat.example.org";

fn request(method: Method, path: &str, body: Option<&Value>, headers: &[(&str, &str)]) -> Request<Full<Bytes>> {
    let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
    let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    request.body(body.map_or_else(Full::default, |body| Full::from(body.to_string()))).unwrap()
}

async fn ask(fleet: &Fleet, method: Method, path: &str, body: Option<&Value>, headers: &[(&str, &str)]) -> Answer {
    fleet.edge().request(request(method, path, body, headers)).await
}

/// Values of all headers of one name.
fn values<'a>(answer: &'a Answer, name: &str) -> Vec<&'a str> {
    answer.headers.get_all(name).iter().map(|value| value.to_str().unwrap()).collect()
}

fn assert_readable(answer: &Answer, origin: &str, what: &str) {
    assert_eq!(values(answer, "access-control-allow-origin"), [origin], "{what}: {answer:?}");
    assert_eq!(values(answer, "access-control-expose-headers"), ["*"], "{what}: {answer:?}");
    assert_eq!(values(answer, "vary"), ["Origin"], "{what}: {answer:?}");
}

/// A fleet with these origins and one key, which may send one request a minute.
async fn keyed(origins: &[&str]) -> (Fleet, TempDir, String) {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("keys.toml");
    let secret = Secret::random().unwrap();
    let limits = KeyLimits { requests_per_minute: Some(1), ..KeyLimits::default() };
    let entry = KeyEntry { limits, ..KeyEntry::new(&secret, "page", SystemTime::now()) };
    change(&file, true, |entries| {
        entries.push(entry);
        Ok(())
    })
    .unwrap();
    let origins = origins.iter().map(|origin| (*origin).to_owned()).collect();
    let setup = Setup::agents(1).router(|router| (router.keys_file, router.allowed_origins) = (file, origins));
    (Fleet::start(setup).await, folder, format!("Bearer {}", secret.reveal()))
}

#[tokio::test(start_paused = true)]
async fn a_page_of_an_allowed_origin_reads_every_answer() {
    let (fleet, _folder, bearer) = keyed(&["https://other.example.org", PAGE]).await;
    let (page, key) = (("origin", PAGE), ("authorization", bearer.as_str()));
    for (method, path, body, headers, status) in [
        (Method::GET, "/v1/models", None, &[page, key][..], 200),
        (Method::GET, "/health", None, &[page], 200),
        (Method::GET, "/v1/models", None, &[page], 401),
        (Method::GET, "/nothing", None, &[page, key], 404),
        (Method::GET, "/v1/models/none", None, &[page, key], 404),
        (Method::POST, "/v1/load_lora_adapter", Some(json!({})), &[page, key], 403),
        (Method::POST, CHAT, Some(chat_stream(2)), &[page, key], 200),
        (Method::POST, CHAT, Some(chat(2)), &[page, key], 429),
        (Method::POST, "/v1/messages", Some(chat(2)), &[page, key], 429),
        (Method::POST, "/api/chat", Some(json!({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]})), &[page, key], 429),
        (Method::POST, "/api/chat", Some(json!({})), &[page], 401),
    ] {
        let answer = ask(&fleet, method, path, body.as_ref(), headers).await;
        assert_eq!(answer.status, status, "{path}: {}", answer.text());
        assert_readable(&answer, PAGE, path);
    }
    let unasked = ask(&fleet, Method::GET, "/v1/models", None, &[key]).await;
    assert_eq!((unasked.status.as_u16(), unasked.header("access-control-allow-origin")), (200, None));
}

#[tokio::test(start_paused = true)]
async fn a_preflight_needs_no_key_and_allows_wanted_headers() {
    let (fleet, _folder, _) = keyed(&[PAGE]).await;
    let preflight_headers = [("access-control-request-method", "POST"), ("access-control-request-headers", "authorization,x-stainless-os")];
    for path in [CHAT, "/v1/models", "/v1/responses/resp_1", "/api/chat", "/nothing"] {
        let answer = ask(&fleet, Method::OPTIONS, path, None, &[("origin", PAGE), preflight_headers[0], preflight_headers[1]]).await;
        assert_eq!((answer.status.as_u16(), answer.text().as_str()), (204, ""), "{path}");
        assert_readable(&answer, PAGE, path);
        assert_eq!(answer.header("access-control-allow-headers"), Some("authorization,x-stainless-os"));
        assert!(answer.header("access-control-allow-methods").unwrap().split(", ").any(|method| method == "POST"));
        assert_eq!(answer.header("access-control-max-age"), Some("7200"));
    }
    let denied = ask(&fleet, Method::OPTIONS, CHAT, None, &[("origin", "https://evil.example"), preflight_headers[0]]).await;
    assert_eq!((denied.status.as_u16(), denied.header("access-control-allow-origin")), (403, None));
    assert!(denied.message().contains("router.allowed_origins"), "{}", denied.text());
    let no_preflight = ask(&fleet, Method::OPTIONS, CHAT, None, &[("origin", PAGE)]).await;
    assert_eq!(no_preflight.status, 401);
    assert_eq!(fleet.replica("n0/0").await.served, 0);
}

#[tokio::test(start_paused = true)]
async fn allowed_pages_can_read_even_parse_errors() {
    let fleet = Fleet::start(Setup::agents(1).router(|router| router.allowed_origins = vec!["*".into()])).await;
    assert_readable(&ask(&fleet, Method::POST, CHAT, Some(&chat(2)), &[("origin", PAGE)]).await, "*", "chat");
    assert_readable(&ask(&fleet, Method::POST, CHAT, None, &[("origin", "null")]).await, "*", "a bad request of a file");
    let refused = raw(fleet.routers[0].edge, format!("GET / HTTP/1.1\r\n{}\r\n", "X: y\r\n".repeat(200)).as_bytes()).await;
    assert!(refused.starts_with("HTTP/1.1 431 ") && refused.contains("\r\naccess-control-allow-origin: *\r\n"), "{refused}");
}

#[tokio::test(start_paused = true)]
async fn pages_cannot_read_local_answers_without_the_setting() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let answer = ask(&fleet, Method::GET, "/v1/models", None, &[("origin", PAGE)]).await;
    assert_eq!(
        (answer.status.as_u16(), answer.header("access-control-allow-origin"), values(&answer, "vary")),
        (200, None, vec!["Origin"])
    );
}

#[tokio::test(start_paused = true)]
async fn an_engines_origin_headers_are_not_duplicated() {
    const OTHER: &str = "https://other.example.org";
    let preflight_from = |origin| [("origin", origin), ("access-control-request-method", "POST")];
    for (engines, names) in [(r#"["*"]"#, "*"), (r#"["https://chat.example.org","https://other.example.org"]"#, OTHER)] {
        let setup = || Setup::agents(1).engine(&format!("--allowed-origins {engines}"));
        // The router decides, even about an origin that only engines allow.
        let fleet = Fleet::start(setup().router(|router| router.allowed_origins = vec![PAGE.into()])).await;
        for (method, body) in [(Method::POST, Some(chat(2))), (Method::POST, Some(chat_stream(2))), (Method::POST, None)] {
            let answer = ask(&fleet, method.clone(), CHAT, body.as_ref(), &[("origin", PAGE)]).await;
            assert_readable(&answer, PAGE, engines);
            let denied = ask(&fleet, method, CHAT, body.as_ref(), &[("origin", OTHER)]).await;
            assert_eq!((values(&denied, "access-control-allow-origin"), values(&denied, "vary")), (vec![], vec!["Origin"]), "{engines}");
        }
        let preflight = ask(&fleet, Method::OPTIONS, CHAT, None, &preflight_from(PAGE)).await;
        assert_eq!(preflight.status, 204);
        assert_readable(&preflight, PAGE, engines);

        // Without the setting the engine decides, and only about its own answers.
        let fleet = Fleet::start(setup()).await;
        for body in [Some(chat(2)), Some(chat_stream(2)), None] {
            let answer = ask(&fleet, Method::POST, CHAT, body.as_ref(), &[("origin", OTHER)]).await;
            assert_eq!(
                (values(&answer, "access-control-allow-origin"), values(&answer, "vary")),
                (vec![names], vec!["Origin"]),
                "{engines}"
            );
        }
        let preflight = ask(&fleet, Method::OPTIONS, CHAT, None, &preflight_from(OTHER)).await;
        assert_eq!((preflight.status.as_u16(), values(&preflight, "access-control-allow-origin")), (200, vec![names]), "{engines}");
        let models = ask(&fleet, Method::GET, "/v1/models", None, &[("origin", OTHER)]).await;
        assert_eq!(values(&models, "access-control-allow-origin"), Vec::<&str>::new());
    }
}
