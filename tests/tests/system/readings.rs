//! Ambiguous requests, which the router and an engine would read differently: by their form's
//! parts, by their path, by the route that carries others, by their priority.
//!
//! Each is refused, or both read it in one way.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use bytes::Bytes;
use hostler_router::keys::{KeyEntry, KeyLimits, Role, Secret, change};
use http::Request;
use http_body_util::Full;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::{Answer, CHAT, Fleet, MODEL, Setup, chat, chat_stream, until};

const AUDIO: &str = "/v1/audio/transcriptions";
const FORM: &str = "multipart/form-data; boundary=b";
const ADAPTER: &str = "x-amzn-sagemaker-adapter-identifier";

/// Answer of a simulated engine to a route that it does not have, which shows that the request
/// reached one.
const REACHED: &str = r#"{"detail":"Not Found"}"#;

struct Ring(TempDir);

impl Ring {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn file(&self) -> PathBuf {
        self.0.path().join("keys.toml")
    }

    /// A key with this shape.
    fn key(&self, shape: impl FnOnce(&mut KeyEntry)) -> String {
        let secret = Secret::random().unwrap();
        let mut entry = KeyEntry::new(&secret, "tenant", SystemTime::now());
        shape(&mut entry);
        change(&self.file(), true, |entries| {
            entries.push(entry);
            Ok(())
        })
        .unwrap();
        secret.reveal().to_owned()
    }

    async fn fleet(&self, setup: Setup) -> Fleet {
        let file = self.file();
        Fleet::start(setup.router(|router| router.keys_file = file)).await
    }
}

async fn ask(fleet: &Fleet, key: &str, path: &str, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Answer {
    let request = headers.iter().fold(Request::post(path), |request, (name, value)| request.header(*name, *value));
    let request = if key.is_empty() { request } else { request.header("authorization", format!("Bearer {key}")) };
    fleet.edge().request(request.body(Full::from(body.into())).unwrap()).await
}

const JSON: (&str, &str) = ("content-type", "application/json");

fn part(head: &str, value: &str) -> String {
    format!("--b\r\n{head}\r\n\r\n{value}\r\n")
}

fn field(name: &str, value: &str) -> String {
    part(&format!("Content-Disposition: form-data; name=\"{name}\""), value)
}

#[tokio::test(start_paused = true)]
async fn a_restricted_key_cannot_use_ambiguous_forms() {
    let ring = Ring::new();
    let key = ring.key(|entry| entry.models = Some(vec![MODEL.to_owned()]));
    let fleet = ring.fleet(Setup::agents(1)).await;
    let send = async |form: &str, body: String| ask(&fleet, &key, AUDIO, &[("content-type", form)], body).await;
    let (own, other) = (field("model", MODEL), field("model", "other"));
    let sound = part("Content-Disposition: form-data; name=\"file\"; filename=\"a; name.wav\"", "RIFF");
    let whole = |parts: &[&str]| parts.concat() + "--b--\r\n";
    // Some clients end with an empty line.
    for sound_one in [whole(&[&own, &sound]), whole(&[&sound, &own]), whole(&[&own, &sound]) + "\r\n"] {
        assert_eq!(send(FORM, sound_one).await.text(), REACHED);
    }
    // python-multipart finds no model, or another one, in each of these.
    for (form, body) in [
        (FORM, whole(&[&field("MODEL", MODEL), &sound])),
        (FORM, whole(&[&own, &sound]).replace("name=\"model\"", "NAME=\"model\"")),
        ("multipart/form-data; boundary=b; boundary=c", whole(&[&own]) + &whole(&[&other]).replace("--b", "--c")),
        ("multipart/form-data; boundary=b; boundary*=utf-8''c", whole(&[&own])),
        ("multipart/form-data; charset=cp037; boundary=b", whole(&[&own])),
        (FORM, own.clone() + &other.replacen("--b\r\n", "--b \r\n", 1) + "--b--\r\n"),
        (FORM, format!("\n{other}") + &whole(&[&own])),
        (FORM, sound.clone() + &own),
        (
            FORM,
            whole(&[&own, &part("Content-Disposition: form-data; name=\"x\"\r\nContent-Disposition: form-data; name=\"model\"", "other")]),
        ),
        (FORM, whole(&[&own, &part("Content-Disposition: form-data; name=\"x\"; filename=\"\\\\\"; name=\"model\"; z=\"", "other")])),
    ] {
        let answer = send(form, body.clone()).await;
        assert!(matches!(answer.status.as_u16(), 400 | 403) && answer.text() != REACHED, "{form}\n{body}\n{}", answer.text());
    }
    let twice = send(FORM, whole(&[&own, &other])).await;
    assert!(twice.status == 400 && twice.message().contains("`model` twice"), "{}", twice.text());
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_path_that_engines_would_read_differently_is_refused() {
    let fleet = Fleet::start(Setup::agents(1).engine("--served-model-name simulated large/v2")).await;
    for path in [
        "/v1/chat/%63ompletions",
        "/v1/chat%2Fcompletions",
        "/v1/chat/completions%2f",
        "/%69nvocations",
        "/v1/%72esponses/resp_1",
        "/v1/responses/%2e%2e/completions",
        "/v1/chat/%2563ompletions",
        "/v1/chat/%zz",
        "/v1/chat/%6",
        "/v1/../metrics",
        "/v1/./completions",
        "/..%2fmetrics",
        "/v1/load%5Flora_adapter",
        "/v1/load_lora_adapter%0A",
        "/v1/chat/completions%0a",
        "/invocations%0a",
    ] {
        let answer = ask(&fleet, "", path, &[JSON], chat(1).to_string()).await;
        assert_eq!(answer.status, 400, "{path}: {}", answer.text());
        assert!(answer.message().starts_with("a path"), "{path}: {}", answer.text());
    }
    // A path that names no route may be escaped, and so may a model's name, which the router
    // decodes itself.
    assert_eq!(ask(&fleet, "", "/v1/nothing/%C3%BC%20x?a=%2F", &[JSON], "{}").await.text(), REACHED);
    assert_eq!(fleet.edge().get("/v1/models/large%2Fv2").await.json()["id"], "large/v2");
}

#[tokio::test(start_paused = true)]
async fn the_connection_header_cannot_remove_a_deciding_header() {
    let ring = Ring::new();
    let poet = ring.key(|entry| entry.models = Some(vec!["poet".to_owned()]));
    let fleet = ring.fleet(Setup::agents(1).engine("--served-model-name plain poet")).await;
    let (mut body, mut fetching) = (invocation(2), chat_stream(1));
    (body["model"], body["stream"]) = ("poet".into(), false.into());
    fetching["model"] = "poet".into();
    fetching["messages"][0]["content"] = json!([{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]);
    // Without the header an engine uses its own model.
    for listed in [ADAPTER, "close, X-Amzn-SageMaker-Adapter-Identifier"] {
        let refused = ask(&fleet, &poet, "/invocations", &[JSON, (ADAPTER, "poet"), ("connection", listed)], body.to_string()).await;
        assert!(refused.status == 400 && refused.message().contains("Connection"), "{listed}: {}", refused.text());
    }
    // Without a content type an engine reads JSON.
    let text = ("content-type", "application/octet-stream");
    let refused = ask(&fleet, &poet, CHAT, &[text, ("connection", "content-type")], fetching.to_string()).await;
    assert!(refused.status == 400 && refused.message().contains("Connection"), "{}", refused.text());
    for listed in ["close", "keep-alive", "TE, close"] {
        let answer = ask(&fleet, &poet, "/invocations", &[JSON, (ADAPTER, "poet"), ("connection", listed)], body.to_string()).await;
        assert_eq!(answer.status, 200, "{listed}: {}", answer.text());
    }
}

#[tokio::test(start_paused = true)]
async fn an_odd_form_of_an_unrestricted_key_is_passed_on() {
    let ring = Ring::new();
    let (all, one) = (ring.key(|_| ()), ring.key(|entry| entry.models = Some(vec![MODEL.to_owned()])));
    let fleet = ring.fleet(Setup::agents(1)).await;
    let odd = format!("words\r\n{}--b--\r\n", field("model", MODEL));
    assert_eq!(ask(&fleet, &all, AUDIO, &[("content-type", FORM)], odd.clone()).await.text(), REACHED);
    assert_eq!(ask(&fleet, &one, AUDIO, &[("content-type", FORM)], odd).await.status, 400);
    // More depends on the content of a JSON body.
    assert_eq!(ask(&fleet, &all, CHAT, &[JSON], "{").await.status, 400);
}

#[tokio::test(start_paused = true)]
async fn an_invocation_that_generates_nothing_reserves_no_output() {
    let ring = Ring::new();
    let key = ring.key(|entry| entry.limits = KeyLimits { output_per_day: Some(100), ..KeyLimits::default() });
    let fleet = ring.fleet(Setup::agents(1)).await;
    let send = async |body: Value| ask(&fleet, &key, "/invocations", &[JSON], body.to_string()).await.status;
    // A completion would exceed a day's budget.
    assert_ne!(send(json!({"input": "Tell me about engines.", "max_tokens": 200})).await, 429);
    for completion in ["prompt", "prompt_embeds"] {
        assert_eq!(send(json!({completion: "Tell me about engines.", "max_tokens": 200})).await, 429, "{completion}");
    }
}

/// A chat whose answer may have this many tokens, as `/invocations` carries it.
fn invocation(tokens: usize) -> Value {
    json!({"messages": [{"role": "user", "content": "Tell me about engines."}], "max_tokens": tokens, "stream": true})
}

#[tokio::test(start_paused = true)]
async fn an_invocation_reserves_and_fails_as_its_content_does() {
    let ring = Ring::new();
    let key = ring.key(|entry| entry.limits = KeyLimits { output_per_day: Some(300), ..KeyLimits::default() });
    let fleet = ring.fleet(Setup::agents(1).engine("--sim-step-ms 20")).await;
    let request = || {
        let request = Request::post("/invocations").header("authorization", format!("Bearer {key}")).header(JSON.0, JSON.1);
        request.body(Full::from(invocation(200).to_string())).unwrap()
    };
    let mut running = fleet.edge().send(request()).await;
    running.events(2).await;
    let second = fleet.edge().request(request()).await;
    assert_eq!(second.status, 429, "the first has reserved its tokens: {}", second.text());
    fleet.fault("n0/0", "error_event").await;
    running.finish().await.assert_broken_stream();
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn an_invocation_is_placed_by_its_tokens_and_salted() {
    let folder = TempDir::new().unwrap();
    let secret = folder.path().join("secret");
    let fleet = Fleet::start(Setup::two_agents().router(|router| {
        router.isolate_tenants = true;
        router.secret_file = secret;
    }))
    .await;
    fleet.until_exact().await;
    let text: String = (0..300).map(|number| format!("word{number} ")).collect();
    let explain = ("x-hostler-explain", "1");
    for body in [json!({"messages": [{"role": "user", "content": text}], "max_tokens": 2}), json!({"prompt": text, "max_tokens": 2})] {
        let answer = ask(&fleet, "", "/invocations", &[JSON, explain], body.to_string()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let reason = answer.header("x-hostler-reason").unwrap();
        assert!(reason.contains("level=exact"), "{reason}");
        until("the same prompt is found in a cache", async || {
            let again = ask(&fleet, "", "/invocations", &[JSON, explain], body.to_string()).await;
            let reason = again.header("x-hostler-reason").unwrap().to_owned();
            let matched = reason.split(' ').find_map(|word| word.strip_prefix("matched=")).unwrap();
            if matched.parse::<u64>().unwrap() > 500 { Ok(()) } else { Err(reason) }
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_invocations_model_is_the_one_that_engines_use() {
    let ring = Ring::new();
    let (all, poet) = (ring.key(|_| ()), ring.key(|entry| entry.models = Some(vec!["poet".to_owned()])));
    let setup = Setup::two_agents().engine_of(0, "--served-model-name plain").engine_of(1, "--served-model-name other poet");
    let fleet = ring.fleet(setup).await;
    let named = |model: &str| {
        let mut body = invocation(2);
        (body["model"], body["stream"]) = (model.into(), false.into());
        body.to_string()
    };
    // Engines ignore the body's model and use their default.
    let unnamed = ask(&fleet, &poet, "/invocations", &[JSON], named("poet")).await;
    assert!(unnamed.status == 403 && unnamed.message().contains(ADAPTER), "{}", unnamed.text());
    for other in ["other", "plain"] {
        let refused = ask(&fleet, &poet, "/invocations", &[JSON, (ADAPTER, other)], named("poet")).await;
        assert!(refused.status == 403 && refused.message().contains(&format!("`{other}`")), "{}", refused.text());
    }
    assert_eq!(ask(&fleet, &poet, "/invocations", &[JSON, (ADAPTER, "poet")], named("plain")).await.status, 403);
    assert_eq!(ask(&fleet, &all, "/invocations", &[JSON, (ADAPTER, "poet"), (ADAPTER, "plain")], named("")).await.status, 400);
    assert_eq!(ask(&fleet, &poet, "/invocations", &[JSON, (ADAPTER, "poet")], named("poet")).await.status, 200);
    // The request goes to an engine of the model that the header names, whatever the body says.
    // Without a header it goes to one that the body names.
    for (headers, body, replica) in [
        (&[JSON, ("x-hostler-explain", "1"), (ADAPTER, "poet")][..], "plain", "n1/0"),
        (&[JSON, ("x-hostler-explain", "1"), (ADAPTER, "plain")], "other", "n0/0"),
        (&[JSON, ("x-hostler-explain", "1")], "poet", "n1/0"),
        (&[JSON, ("x-hostler-explain", "1")], "plain", "n0/0"),
    ] {
        let answer = ask(&fleet, &all, "/invocations", headers, named(body)).await;
        let reason = answer.header("x-hostler-reason").unwrap();
        assert!(answer.status == 200 && reason.contains(&format!("replica={replica} ")), "{headers:?} {body}: {reason} {}", answer.text());
    }
}

#[tokio::test(start_paused = true)]
async fn only_admins_may_outrank_others_at_the_engines() {
    let ring = Ring::new();
    let (user, admin) = (ring.key(|_| ()), ring.key(|entry| entry.role = Role::Admin));
    let fleet = ring.fleet(Setup::agents(1)).await;
    let with = |priority: &str| chat(1).to_string().replacen('{', &format!("{{\"priority\":{priority},"), 1);
    let plain = chat(1).to_string();
    for urgent in ["-1", "-9223372036854775808", "-3000000000", "\"-1\"", "-1.0", "-1e0", "1,\"priority\":-1", "-1,\"priority\":1"] {
        for content_type in ["application/json", "application/json; charset=utf-8", "application/vnd.api+json"] {
            let refused = ask(&fleet, &user, CHAT, &[("content-type", content_type)], with(urgent)).await;
            assert!(refused.status == 403 && refused.message().contains("priority"), "{urgent} {content_type}: {}", refused.text());
        }
        assert_ne!(ask(&fleet, &admin, CHAT, &[JSON], with(urgent)).await.status, 403, "{urgent}");
    }
    // vLLM reads this one before the body's.
    for urgent in ["-1", "+-1", " -1", "-1_0", "high"] {
        let refused = ask(&fleet, &user, CHAT, &[JSON, ("x-vllm-priority", urgent)], plain.clone()).await;
        assert!(refused.status == 403 && refused.message().contains("priority"), "{urgent}: {}", refused.text());
    }
    assert_eq!(ask(&fleet, &admin, CHAT, &[JSON, ("x-vllm-priority", "-1")], plain.clone()).await.status, 200);
    for patient in ["0", "7", "null"] {
        assert_eq!(ask(&fleet, &user, CHAT, &[JSON], with(patient)).await.status, 200, "{patient}");
    }
    assert_eq!(ask(&fleet, &user, CHAT, &[JSON, ("x-vllm-priority", "3"), ("x-hostler-priority", "-5")], plain.clone()).await.status, 200);
    // Two content types, or one in letters that Python and others read differently, are JSON to one
    // reader only.
    for odd in [&[JSON, ("content-type", "text/plain")][..], &[("content-type", "application/json; charset=\u{e9}")]] {
        assert_eq!(ask(&fleet, &user, CHAT, odd, with("-1")).await.status, 400);
    }
    let keyless = Fleet::start(Setup::agents(1)).await;
    assert_eq!(ask(&keyless, "", CHAT, &[JSON, ("x-vllm-priority", "-2")], with("-1")).await.status, 200);
}

#[tokio::test(start_paused = true)]
async fn a_form_with_prompt_text_is_refused_where_tenants_isolate() {
    let folder = TempDir::new().unwrap();
    let secret: &Path = &folder.path().join("secret");
    let apart = |apart: bool| {
        Setup::agents(1).router(|router| {
            router.isolate_tenants = apart;
            router.secret_file = secret.to_owned();
        })
    };
    let (isolated, shared) = (Fleet::start(apart(true)).await, Fleet::start(apart(false)).await);
    let sound = field("model", MODEL) + &part("Content-Disposition: form-data; name=\"file\"; filename=\"a.wav\"", "RIFF");
    let form = |extra: &str| format!("{sound}{extra}--b--\r\n");
    let languages = field("language", "en") + &field("to_language", "de");
    let settings = field("temperature", "0.2") + &languages + &field("prompt", "") + &field("timestamp_granularities[]", "word");
    assert_eq!(ask(&isolated, "", AUDIO, &[("content-type", FORM)], form(&settings)).await.text(), REACHED);
    for words in ["prompt", "hotwords", "context"] {
        let body = form(&field(words, "As I said yesterday"));
        let refused = ask(&isolated, "", AUDIO, &[("content-type", FORM)], body.clone()).await;
        assert!(refused.status == 400 && refused.message().contains(&format!("`{words}`")), "{words}: {}", refused.text());
        assert_eq!(ask(&shared, "", AUDIO, &[("content-type", FORM)], body).await.text(), REACHED);
    }
}

#[tokio::test(start_paused = true)]
async fn audio_bytes_that_look_like_a_url_are_accepted() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let noise = "RIFF\u{1}url\" \"source\" \\u0075rl {\"image_url\": \"http://169.254.169.254/\"} uuid";
    let body = field("model", MODEL) + &part("Content-Disposition: form-data; name=\"file\"; filename=\"a.wav\"", noise) + "--b--\r\n";
    let answer = ask(&fleet, "", AUDIO, &[("content-type", FORM)], body).await;
    assert_eq!(answer.text(), REACHED);
    // A body that is not a form is searched, whatever content type may make an engine read it as
    // JSON.
    let mut fetching = chat_stream(1);
    fetching["messages"][0]["content"] = json!([{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]);
    for content_type in ["application/json", "Application/JSON;x=y", "application/problem+json", "application/x-www-form-urlencoded"] {
        let refused = ask(&fleet, "", CHAT, &[("content-type", content_type)], fetching.to_string()).await;
        assert!(refused.status == 400 && refused.message().contains("router.media_hosts"), "{content_type}: {}", refused.text());
    }
}
