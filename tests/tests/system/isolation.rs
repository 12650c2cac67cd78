//! Isolation of tenants' caches: no prompt is found cached because another tenant has sent it, and
//! the router does not expect it.

use std::path::Path;

use http::Request;
use http_body_util::Full;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::{Answer, CHAT, Fleet, MODEL, Setup, hostler};

/// Tenant whose keys are admins'.
const ADMINS: &str = "ops";

/// Makes a key and returns its text.
async fn key(file: &Path, tenant: &str) -> String {
    let role = if tenant == ADMINS { "admin" } else { "use" };
    let made = hostler(&["keys", "create", "--tenant", tenant, "--role", role, "--file", file.to_str().unwrap()]).await;
    assert!(made.success, "{}", made.stderr);
    made.stdout.split_whitespace().find(|word| word.starts_with("hk_")).unwrap().to_owned()
}

/// Two agents, and keys of these tenants.
async fn fleet(apart: bool, tenants: &[&str]) -> (Fleet, Vec<String>, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys.toml");
    let mut keys = Vec::new();
    for tenant in tenants {
        keys.push(key(&file, tenant).await);
    }
    let secret_file = folder.path().join("secret");
    let fleet = Fleet::start(Setup::two_agents().engine("--enable-prompt-tokens-details").router(|router| {
        router.isolate_tenants = apart;
        router.secret_file = secret_file;
        if !tenants.is_empty() {
            router.keys_file = file;
        }
    }))
    .await;
    (fleet, keys, folder)
}

/// Tokens of a prompt that were cached according to the engine, and the number that the router had
/// expected, at which level, and where.
#[derive(Debug, PartialEq)]
struct Cached {
    by_engine: u64,
    expected: u64,
    level: String,
    replica: String,
}

async fn ask(fleet: &Fleet, key: &str, path: &str, body: &Value) -> Answer {
    let request = Request::post(path).header("content-type", "application/json").header("x-hostler-explain", "1");
    let request = if key.is_empty() { request } else { request.header("authorization", format!("Bearer {key}")) };
    fleet.edge().request(request.body(Full::from(body.to_string())).unwrap()).await
}

fn cached_by_engine(answer: &Answer) -> u64 {
    let usage = &answer.json()["usage"];
    let details = ["prompt_tokens_details", "input_tokens_details"].map(|name| usage[name]["cached_tokens"].as_u64());
    details.into_iter().flatten().next().unwrap_or(0)
}

async fn cached(fleet: &Fleet, key: &str, path: &str, body: &Value) -> Cached {
    let answer = ask(fleet, key, path, body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let reason = answer.header("x-hostler-reason").unwrap();
    let word = |name: &str| reason.split(' ').find_map(|part| part.strip_prefix(name)?.strip_prefix('=')).unwrap().to_owned();
    Cached {
        by_engine: cached_by_engine(&answer),
        expected: word("matched").parse().unwrap(),
        level: word("level"),
        replica: word("replica"),
    }
}

fn text(name: &str) -> String {
    (0..300).map(|number| format!("{name}{number} ")).collect()
}

fn talk(name: &str) -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": text(name)}], "max_tokens": 2})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_finds_only_its_own_prompts_cached() {
    for (path, body) in [
        (CHAT, talk("chat")),
        ("/v1/completions", json!({"model": MODEL, "prompt": text("completion"), "max_tokens": 2})),
        ("/v1/responses", json!({"model": MODEL, "input": text("response"), "max_output_tokens": 16})),
    ] {
        // Blocks of another prompt would be mistaken for this one's.
        let (fleet, keys, _folder) = fleet(true, &["alpha", "alpha", "beta"]).await;
        fleet.until_exact().await;
        let first = cached(&fleet, &keys[0], path, &body).await;
        assert_eq!((first.by_engine, first.expected), (0, 0), "{path}: {first:?}");
        if first.level == "exact" {
            fleet.until_cached(&first.replica, "the prompt", |blocks| blocks > 50).await;
        }
        let other_key = cached(&fleet, &keys[1], path, &body).await;
        assert!(other_key.by_engine > 1000 && other_key.expected > 500, "{path}: {other_key:?}");
        if first.level == "exact" {
            assert!(other_key.expected.abs_diff(other_key.by_engine) <= 64, "{path}: {other_key:?}");
        }
        assert_eq!(other_key.replica, first.replica, "{path}");
        // Ask both engines: each prompt is the first wherever it goes.
        for turn in 0..2 {
            let mut beta = body.clone();
            beta["max_tokens"] = (2 + turn).into();
            beta["cache_salt"] = if turn == 0 { Value::Null } else { "alpha".into() };
            let other_tenant = cached(&fleet, &keys[2], path, &beta).await;
            assert_eq!((other_tenant.by_engine, other_tenant.expected), (0, 0), "{path}: {other_tenant:?}");
        }
        let again = cached(&fleet, &keys[2], path, &body).await;
        assert!(again.by_engine > 1000, "{path}: {again:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_placed_by_text_are_isolated_too() {
    let (fleet, keys, _folder) = fleet(true, &["alpha", "beta"]).await;
    // Only the engine may apply a template from the request.
    let mut body = talk("text");
    body["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}".into();
    let first = cached(&fleet, &keys[0], CHAT, &body).await;
    assert_eq!(first.level, "text");
    let again = cached(&fleet, &keys[0], CHAT, &body).await;
    assert!(again.expected > 100 && again.replica == first.replica, "{again:?}");
    let other = cached(&fleet, &keys[1], CHAT, &body).await;
    assert_eq!((other.by_engine, other.expected), (0, 0), "{other:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tenants_share_the_cache_unless_isolation_is_on() {
    let (shared, keys, _folder) = fleet(false, &["alpha", "beta"]).await;
    ask(&shared, &keys[0], CHAT, &talk("shared")).await;
    let other = ask(&shared, &keys[1], CHAT, &talk("shared")).await;
    assert!(cached_by_engine(&other) > 1000, "{}", other.text());
    let (keyless, _, _folder) = fleet(true, &[]).await;
    cached(&keyless, "", CHAT, &talk("keyless")).await;
    let again = cached(&keyless, "", CHAT, &talk("keyless")).await;
    assert!(again.by_engine > 1000, "{again:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_admins_are_told_what_other_tenants_have_cached() {
    let (fleet, keys, _folder) = self::fleet(false, &["alpha", "beta", ADMINS]).await;
    fleet.until_exact().await;
    let first = ask(&fleet, &keys[0], CHAT, &talk("secret")).await;
    assert_eq!(first.status, 200, "{}", first.text());
    for (key, sees) in keys.iter().zip([false, false, true]) {
        for path in [CHAT, "/api/chat"] {
            let mut body = talk("secret");
            body["stream"] = false.into();
            let answer = ask(&fleet, key, path, &body).await;
            let reason = answer.header("x-hostler-reason").unwrap();
            let names: Vec<&str> = reason.split(' ').map(|word| word.split_once('=').unwrap().0).collect();
            assert!(names.contains(&"replica") && names.contains(&"of"), "{reason}");
            for name in ["matched", "why", "ttft", "cost"] {
                assert_eq!(names.contains(&name), sees, "{path} {reason}");
            }
        }
    }
    let (alone, keys, _folder) = self::fleet(false, &["alpha", "alpha"]).await;
    let own = ask(&alone, &keys[1], CHAT, &talk("own")).await;
    assert!(own.header("x-hostler-reason").unwrap().contains(" matched="), "one tenant's caches are its own");
}

#[tokio::test(start_paused = true)]
async fn two_routers_with_one_secret_agree_about_salts() {
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("secret");
    let setup = Setup::two_agents().routers(2).engine("--enable-prompt-tokens-details").router(|router| {
        router.isolate_tenants = true;
        router.secret_file = secret;
    });
    let fleet = Fleet::start(setup).await;
    fleet.until_exact().await;
    let body = talk("both");
    let first = cached(&fleet, "", CHAT, &body).await;
    fleet.until_cached(&first.replica, "the prompt", |blocks| blocks > 50).await;
    let answer = fleet.routers[1].edge().post(CHAT, &body).await;
    assert!(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 1000, "{}", answer.text());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_cannot_be_isolated_reaches_no_engine() {
    let (fleet, keys, _folder) = fleet(true, &["alpha"]).await;
    let odd = ask(&fleet, &keys[0], CHAT, &json!({"model": MODEL, "messages": [], "cache_salt": 7})).await;
    assert_eq!((odd.status.as_u16(), odd.message()), (400, "cache_salt is a string that is not empty".into()));
    let plain = Request::post(CHAT).header("content-type", "text/plain").header("authorization", format!("Bearer {}", keys[0]));
    let plain = fleet.edge().request(plain.body(Full::from(talk("plain").to_string())).unwrap()).await;
    assert!(plain.status == 400 && plain.message().contains("application/json"), "{}", plain.text());
    let salted = ask(&fleet, &keys[0], "/v2/embed", &json!({"model": MODEL, "texts": ["x"]})).await;
    assert!(salted.status == 400 && salted.message().contains("use /v1/embeddings"), "{}", salted.text());
    assert_eq!(fleet.replica("n0/0").await.served + fleet.replica("n1/0").await.served, 0);
}

#[tokio::test(start_paused = true)]
async fn an_engine_fetches_media_only_from_listed_hosts() {
    let fleet = Fleet::start(Setup::agents(1).router(|router| router.media_hosts = vec!["*.example.org".into()])).await;
    let with = |url: &str| {
        let part = json!({"type": "image_url", "image_url": {"url": url}});
        json!({"model": MODEL, "messages": [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}], "max_tokens": 1})
    };
    for url in ["http://169.254.169.254/latest/meta-data/", "https://example.org@10.0.0.1/", "file:///etc/passwd"] {
        let answer = fleet.edge().post(CHAT, &with(url)).await;
        assert_eq!(answer.status, 400, "{url}: {}", answer.text());
    }
    assert_eq!(fleet.replica("n0/0").await.served, 0);
    for url in ["https://cdn.example.org/a.png", "data:image/png;base64,iVBORw0KGgo="] {
        // The engine's reaction does not matter.
        assert!(fleet.edge().post(CHAT, &with(url)).await.header("x-hostler-id").is_some(), "{url}");
    }
}
