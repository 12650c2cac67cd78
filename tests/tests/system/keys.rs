//! Keys from the command line to the edge: access, the requests that a key allows, changes of keys
//! while requests run, and operators.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::harness::{Answer, CHAT, Ended, Endpoint, Fleet, MODEL, Setup, Workplace, chat, chat_stream, hostler, until};

/// Key file of a test, changed as operators change it.
struct KeyFile {
    folder: TempDir,
}

impl KeyFile {
    fn new() -> Self {
        Self { folder: TempDir::new().unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("keys.toml")
    }

    async fn run(&self, arguments: &[&str]) -> Ended {
        let path = self.path();
        let ended = hostler(&[&["keys"], arguments, &["--file", path.to_str().unwrap()]].concat()).await;
        assert!(ended.success, "{arguments:?}: {}", ended.stderr);
        ended
    }

    /// Makes a key with these arguments.
    async fn create(&self, arguments: &[&str]) -> Key {
        let ended = self.run(&[&["create"], arguments].concat()).await;
        let key = Key(ended.stdout.trim().to_owned());
        assert_eq!(ended.stdout.lines().count(), 1, "standard output is the key and nothing else: {}", ended.stdout);
        assert!(!ended.stderr.contains(&key.0) && ended.stderr.contains(key.id()), "{}", ended.stderr);
        key
    }
}

#[derive(Debug, Clone, PartialEq)]
struct Key(String);

impl Key {
    fn id(&self) -> &str {
        self.0.split('_').nth(1).unwrap()
    }

    fn secret(&self) -> &str {
        self.0.split('_').nth(2).unwrap()
    }

    fn bearer(&self) -> (&'static str, String) {
        ("authorization", format!("Bearer {}", self.0))
    }

    async fn ask(&self, edge: &Endpoint, body: &Value) -> Answer {
        edge.request(post(CHAT, body, &[self.bearer()])).await
    }
}

fn post(path: &str, body: &Value, headers: &[(&str, String)]) -> Request<Full<Bytes>> {
    let request = Request::post(path).header("content-type", "application/json");
    let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, value));
    request.body(Full::from(body.to_string())).unwrap()
}

fn get(path: &str, headers: &[(&str, String)]) -> Request<Full<Bytes>> {
    headers.iter().fold(Request::get(path), |request, (name, value)| request.header(*name, value)).body(Full::default()).unwrap()
}

/// A fleet whose edge requires the keys of this file.
async fn fleet(keys: &KeyFile, setup: Setup) -> Fleet {
    let path = keys.path();
    Fleet::start(setup.router(|router| router.keys_file = path)).await
}

/// Waits until requests with this key get this status.
async fn until_status(key: &Key, edge: &Endpoint, status: u16) -> Answer {
    until(&format!("status {status}"), async || {
        let answer = key.ask(edge, &chat(1)).await;
        if answer.status == status { Ok(answer) } else { Err(answer.text()) }
    })
    .await
}

#[track_caller]
fn assert_unauthenticated(answer: &Answer, words: &str) {
    let body = answer.json();
    assert_eq!(answer.status, 401, "{body}");
    assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
    let message = body["error"]["message"].as_str().unwrap();
    assert!(message.contains(words), "{message}");
    assert_eq!(body, json!({"error": {"message": message, "type": "invalid_request_error", "param": null, "code": "invalid_api_key"}}));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_requests_with_a_valid_key_are_answered() {
    let keys = KeyFile::new();
    let (valid, ended) = (keys.create(&["--name", "alice"]).await, keys.create(&["--expires", "0s"]).await);
    let fleet = fleet(&keys, Setup::agents(1)).await;
    let edge = fleet.edge();

    assert_eq!(valid.ask(&edge, &chat(2)).await.status, 200);
    let anthropic = edge.request(post(CHAT, &chat(2), &[("x-api-key", valid.0.clone())])).await;
    assert_eq!(anthropic.status, 200, "{}", anthropic.text());
    assert_eq!(edge.request(get("/v1/models", &[("Authorization", format!("bearer {}", valid.0))])).await.status, 200);

    assert_unauthenticated(&edge.post(CHAT, &chat(2)).await, "wants a key");
    assert_unauthenticated(&ended.ask(&edge, &chat(2)).await, &format!("the key {} has expired", ended.id()));
    let guess = Key(valid.0.replace(valid.secret(), ended.secret()));
    assert_unauthenticated(&guess.ask(&edge, &chat(2)).await, "not known");
    for path in ["/v1/models", "/v1/models/simulated", "/version", "/nothing", "/load"] {
        assert_unauthenticated(&edge.get(path).await, "wants a key");
    }
    let ollamas = edge.get("/api/tags").await;
    assert!(ollamas.status == 401 && ollamas.json()["error"].as_str().unwrap().contains("wants a key"), "{}", ollamas.text());
    for probe in ["/health", "/ping", "/healthz", "/readyz", "/livez"] {
        assert_eq!(edge.get(probe).await.status, 200, "load balancers have no key: {probe}");
    }
    let (document, page) = (edge.get("/openapi.json").await, edge.get("/docs").await);
    assert_eq!((document.status.as_u16(), &document.json()["security"]), (200, &json!([{"key": []}])));
    assert!(page.status == 200 && page.text().contains("authorization: Bearer"), "{}", page.text());
    assert_eq!(fleet.routers[0].metric("hostler_refused_total").await, 9.0);
    let page = Endpoint::Tcp(fleet.routers[0].admin).get("/metrics").await.text();
    assert!(page.contains("reason=\"no_key\"} 7\n") && page.contains("reason=\"wrong_key\"} 2\n"), "{page}");
    fleet.until_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_is_replaced_under_load_without_failed_requests() {
    let keys = KeyFile::new();
    let old = keys.create(&["--name", "team"]).await;
    let fleet = fleet(&keys, Setup::two_agents()).await;
    let (current, key) = watch::channel(old.clone());
    let (served, stop) = (Arc::new(AtomicUsize::new(0)), tokio_util::sync::CancellationToken::new());
    let mut load = JoinSet::new();
    for _ in 0..8 {
        let (edge, key, served, stop) = (fleet.edge(), key.clone(), served.clone(), stop.clone());
        load.spawn(async move {
            while !stop.is_cancelled() {
                let key = key.borrow().clone();
                key.ask(&edge, &chat_stream(5)).await.assert_whole_stream();
                served.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let some_more = async || {
        let before = served.load(Ordering::Relaxed);
        until("further answers", async || if served.load(Ordering::Relaxed) > before + 50 { Ok(()) } else { Err(format!("{served:?}")) })
            .await;
    };
    some_more().await;
    let new = keys.create(&["--name", "team"]).await;
    until_status(&new, &fleet.edge(), 200).await;
    // Both keys are valid for now, and each client switches in its own time.
    keys.run(&["revoke", old.id(), "--after", "1h"]).await;
    some_more().await;
    current.send_replace(new.clone());
    some_more().await;
    keys.run(&["revoke", old.id()]).await;
    assert_unauthenticated(&until_status(&old, &fleet.edge(), 401).await, &format!("the key {} was revoked", old.id()));
    some_more().await;
    stop.cancel();
    while let Some(ended) = load.join_next().await {
        ended.unwrap();
    }
    let served = served.load(Ordering::Relaxed);
    println!("{served} requests served while the key was replaced, none failed");
    let page: Value = serde_json::from_str(&keys.run(&["list", "--json"]).await.stdout).unwrap();
    let states: Vec<&str> = page["keys"].as_array().unwrap().iter().map(|key| key["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["revoked", "valid"]);
    assert_eq!(page["keys"][0]["tenant"], page["keys"][1]["tenant"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_request_outlives_its_revoked_key() {
    let keys = KeyFile::new();
    let key = keys.create(&[]).await;
    let fleet = fleet(&keys, Setup::agents(1)).await;
    let mut stream = fleet.edge().send(post(CHAT, &chat_stream(600), &[key.bearer()])).await;
    stream.events(2).await;
    keys.run(&["revoke", key.id()]).await;
    until_status(&key, &fleet.edge(), 401).await;
    stream.finish().await.assert_whole_stream();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_key_file_leaves_the_keys_as_they_were() {
    let keys = KeyFile::new();
    let first = keys.create(&[]).await;
    let fleet = fleet(&keys, Setup::agents(1)).await;
    let good = std::fs::read(keys.path()).unwrap();
    let failures = async |count: f64| {
        until("a failed reading", async || {
            let page = Endpoint::Tcp(fleet.routers[0].admin).get("/metrics").await.text();
            let line = page.lines().find(|line| line.starts_with("hostler_key_file_reads_total{outcome=\"failed\"}")).unwrap();
            if line.ends_with(&format!(" {count}")) { Ok(()) } else { Err(line.to_owned()) }
        })
        .await;
    };
    std::fs::write(keys.path(), "[[key]]\nid = \"half a k").unwrap();
    failures(1.0).await;
    assert_eq!(first.ask(&fleet.edge(), &chat(1)).await.status, 200);
    std::fs::set_permissions(keys.path(), std::fs::Permissions::from_mode(0o644)).unwrap();
    failures(2.0).await;
    std::fs::remove_file(keys.path()).unwrap();
    failures(3.0).await;
    assert_eq!(first.ask(&fleet.edge(), &chat(1)).await.status, 200);
    assert_unauthenticated(&fleet.edge().post(CHAT, &chat(1)).await, "wants a key");

    std::fs::write(keys.path(), good).unwrap();
    std::fs::set_permissions(keys.path(), std::fs::Permissions::from_mode(0o600)).unwrap();
    let second = keys.create(&[]).await;
    until_status(&second, &fleet.edge(), 200).await;
    assert_eq!(first.ask(&fleet.edge(), &chat(1)).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_for_some_models_sees_and_uses_no_others() {
    let keys = KeyFile::new();
    let (all, poet) = (keys.create(&[]).await, keys.create(&["--model", "poet", "--model", "later"]).await);
    let fleet = fleet(&keys, Setup::agents(1).engine("--enable-lora --served-model-name simulated nickname")).await;
    let edge = fleet.edge();
    fleet.admin().lora("", "poet", "/tmp").await.unwrap();
    fleet.admin().lora("", "critic", "/tmp").await.unwrap();
    let models = async |key: &Key| {
        let list = edge.request(get("/v1/models", &[key.bearer()])).await.json();
        list["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    until("all models", async || {
        let models = models(&all).await;
        if models == ["critic", "nickname", "poet", MODEL] { Ok(()) } else { Err(format!("{models:?}")) }
    })
    .await;
    assert_eq!(models(&poet).await, ["poet"]);
    let one = async |key: &Key, model: &str| edge.request(get(&format!("/v1/models/{model}"), &[key.bearer()])).await;
    assert_eq!((one(&poet, "poet").await.status.as_u16(), one(&all, "critic").await.status.as_u16()), (200, 200));
    let hidden = one(&poet, "critic").await;
    assert!(hidden.status == 404 && !hidden.text().contains("nickname"), "{}", hidden.text());

    let of = |model: &str| {
        let mut body = chat(2);
        body["model"] = model.into();
        body
    };
    assert_eq!(poet.ask(&edge, &of("poet")).await.status, 200);
    for model in [MODEL, "nickname", "critic", "", "nobody"] {
        let refused = poet.ask(&edge, &of(model)).await;
        assert_eq!(refused.status, 403, "{model}: {}", refused.text());
    }
    let later = poet.ask(&edge, &of("later")).await;
    assert!(later.status == 404 && later.text().contains("poet") && !later.text().contains("nickname"), "{}", later.text());
    // An engine would use its default model.
    let mut unnamed = chat(2);
    unnamed.as_object_mut().unwrap().remove("model");
    let refused = poet.ask(&edge, &unnamed).await;
    assert!(refused.status == 403 && refused.text().contains("say which"), "{}", refused.text());
    let bare = Request::post(CHAT).header("authorization", poet.bearer().1).header("content-type", "text/plain");
    assert_eq!(edge.request(bare.body(Full::from(of(MODEL).to_string())).unwrap()).await.status, 403);
    assert_eq!(all.ask(&edge, &unnamed).await.status, 200);
}

/// Listens between the agent and an engine, and keeps the bytes that the engine receives.
fn listen_in(socket: &Path) -> watch::Receiver<Vec<u8>> {
    let behind = socket.with_extension("behind");
    std::fs::rename(socket, &behind).unwrap();
    let listener = UnixListener::bind(socket).unwrap();
    let (kept, heard) = watch::channel(Vec::new());
    let kept = Arc::new(kept);
    tokio::spawn(async move {
        while let Ok((agent, _)) = listener.accept().await {
            let (mut from_agent, mut to_agent) = agent.into_split();
            let (mut from_engine, mut to_engine) = UnixStream::connect(&behind).await.unwrap().into_split();
            let kept = kept.clone();
            tokio::spawn(async move {
                let mut buffer = vec![0; 64 * 1024];
                while let Ok(count @ 1..) = from_agent.read(&mut buffer).await {
                    kept.send_modify(|kept| kept.extend_from_slice(&buffer[..count]));
                    let _ = to_engine.write_all(&buffer[..count]).await;
                }
            });
            tokio::spawn(async move { tokio::io::copy(&mut from_engine, &mut to_agent).await });
        }
    });
    heard
}

/// Bytes that an engine of this fleet receives when a client shows a key.
async fn heard_by_an_engine(fleet: &Fleet, key: &Key) -> String {
    let heard = listen_in(Path::new(&fleet.replica("n0/0").await.socket));
    // These streams hold all connections that the agent has kept. A request that comes now needs
    // another one.
    let mut streams = Vec::new();
    for _ in 0..6 {
        let mut stream = fleet.edge().send(post(CHAT, &chat_stream(5000), &[key.bearer()])).await;
        stream.events(1).await;
        streams.push(stream);
    }
    until("a request on a connection of its own", async || {
        let answer =
            fleet.edge().request(post(CHAT, &chat(1), &[key.bearer(), ("x-api-key", key.0.clone()), ("x-canary", "kept".into())])).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let heard = String::from_utf8_lossy(&heard.borrow()).into_owned();
        if heard.contains("x-canary: kept") { Ok(heard) } else { Err(heard) }
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clients_key_reaches_engines_only_without_router_keys() {
    let keys = KeyFile::new();
    let key = keys.create(&[]).await;
    let heard = heard_by_an_engine(&fleet(&keys, Setup::agents(1)).await, &key).await;
    assert!(!heard.contains(key.secret()) && !heard.to_lowercase().contains("x-api-key"), "{heard}");
    let heard = heard_by_an_engine(&Fleet::start(Setup::agents(1)).await, &key).await;
    assert!(heard.contains(&format!("authorization: Bearer {}", key.0)) && heard.contains("x-api-key"), "{heard}");
}

/// Creates a file of mode 0600 with this text.
fn private(workplace: &Workplace, name: &str, text: &str) -> String {
    let path = workplace.file(name, text);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    path
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn remote_operators_need_an_admin_key_that_is_never_logged() {
    let keys = KeyFile::new();
    let (admin, user) = (keys.create(&["--role", "admin"]).await, keys.create(&[]).await);
    let mut workplace = Workplace::new();
    let (admin_file, user_file) = (private(&workplace, "admin.key", &format!("{}\n", admin.0)), private(&workplace, "user.key", &user.0));
    // A shell may have exported the key for everything that it starts.
    workplace.environment.push(("HOSTLER_ADMIN_KEY", admin.0.clone().leak()));
    let keys_path = keys.path();
    let flags =
        ["--listen", "127.0.0.1:0", "--admin-listen", "0.0.0.0:0", "--keys-file", keys_path.to_str().unwrap(), "--log-level", "debug"];
    let up =
        workplace.start("up", &[&["up", "--engine", "simulated", "--replicas", "1"][..], &flags, &["--", "--sim-start-ms", "50"]].concat());
    // `hostler up` found its replicas ready. For that it asks the guarded listener, with its own
    // key.
    assert!(up.line("curl").await.contains("-H \"authorization: Bearer $OPENAI_API_KEY\""));
    let (edge, listener) = (Endpoint::Tcp(up.address("edge").await), up.address("admin").await);
    assert_eq!(admin.ask(&edge, &chat(1)).await.status, 200, "an admin may also send requests");

    let ask = async |extra: &[&str]| workplace.run(&[&["ps", "--admin", &format!("127.0.0.1:{}", listener.port())], extra].concat()).await;
    let with_file = ask(&["--admin-key-file", &admin_file]).await;
    assert!(with_file.success && with_file.stdout.contains(" ready "), "{}", with_file.stderr);
    assert!(ask(&[]).await.success, "from HOSTLER_ADMIN_KEY");
    let wrong_role = ask(&["--admin-key-file", &user_file]).await;
    assert!(
        !wrong_role.success && wrong_role.stderr.contains(&format!("the key {} is for sending requests", user.id())),
        "{}",
        wrong_role.stderr
    );
    std::fs::set_permissions(&user_file, std::fs::Permissions::from_mode(0o640)).unwrap();
    let open_file = ask(&["--admin-key-file", &user_file]).await;
    assert!(!open_file.success && open_file.stderr.contains("chmod 600"), "{}", open_file.stderr);

    let without = hostler(&["ps", "--admin", &format!("127.0.0.1:{}", listener.port())]).await;
    assert!(!without.success && without.stderr.contains("--admin-key-file"), "{}", without.stderr);
    let pages = Endpoint::Tcp(listener);
    assert_eq!((pages.get("/livez").await.status.as_u16(), pages.get("/readyz").await.status.as_u16()), (200, 200));
    assert_eq!(pages.get("/metrics").await.status, 401);
    assert_eq!(pages.request(get("/metrics", &[admin.bearer()])).await.status, 200);
    assert_eq!(pages.request(get("/metrics", &[user.bearer()])).await.status, 403);

    let log = up.stdout() + &up.stderr();
    assert!(log.contains("open beyond this host: no TLS: admin keys and the page's sessions travel in plain text"), "{log}");
    assert!(!log.contains("no keys: whoever"), "{log}");
    for key in [&admin, &user] {
        assert!(!log.contains(key.secret()), "{log}");
    }
    let engines = workplace.processes().into_iter().filter(|pid| {
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        assert!(!line.contains(admin.secret()), "{line}");
        line.contains("--sim-start-ms") && !line.contains("keeper") && *pid != up.pid()
    });
    let engines: Vec<u32> = engines.collect();
    assert!(!engines.is_empty(), "{:?}", workplace.processes());
    for pid in engines {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        assert!(!String::from_utf8_lossy(&environment).contains(admin.secret()), "process {pid}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_key_goes_into_a_private_file() {
    let workplace = Workplace::new();
    let path = |name: &str| workplace.path().join(name).to_str().unwrap().to_owned();
    let (keys, out) = (path("keys.toml"), path("me.key"));
    let create = ["keys", "create", "--file", &keys];
    let kept = || std::fs::read_to_string(&keys).unwrap().matches("[[key]]").count();

    let made = workplace.run(&[&create[..], &["--out", &out]].concat()).await;
    assert!(made.success && made.stdout.is_empty() && made.stderr.contains(&out), "{}{}", made.stdout, made.stderr);
    assert_eq!(std::fs::metadata(&out).unwrap().permissions().mode() & 0o777, 0o600);
    let key = std::fs::read_to_string(&out).unwrap();
    assert!(key.starts_with("hk_") && key.ends_with('\n') && !made.stderr.contains(key.trim()), "{key}");

    // No key is made if it could not be handed out.
    let refused = workplace.run(&[&create[..], &["--out", &out]].concat()).await;
    assert!(!refused.success && refused.stderr.contains("--force") && refused.stdout.is_empty(), "{}", refused.stderr);
    assert_eq!((std::fs::read_to_string(&out).unwrap(), kept()), (key.clone(), 1));
    std::fs::set_permissions(&out, std::fs::Permissions::from_mode(0o644)).unwrap();
    assert!(workplace.run(&[&create[..], &["--out", &out, "--force"]].concat()).await.success);
    assert_eq!(std::fs::metadata(&out).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(std::fs::read_to_string(&out).unwrap() != key && kept() == 2);
    // Without a key, no file is made for it.
    let (broken, unused) = (private(&workplace, "broken.toml", "key = 5"), path("unused.key"));
    assert!(!workplace.run(&["keys", "create", "--file", &broken, "--out", &unused]).await.success && !Path::new(&unused).exists());

    // One output file has the mode that a shell gives it for `> FILE` under the usual mask, the
    // other the right one.
    for (name, mode, is_warned) in [("open", 0o644, true), ("private", 0o600, false)] {
        for (command, secret) in [(&create[..], "hk_"), (&["init", "--dir", &path(name)], "")] {
            std::fs::write(path(&format!("{name}.out")), "").unwrap();
            std::fs::set_permissions(path(&format!("{name}.out")), std::fs::Permissions::from_mode(mode)).unwrap();
            let mut making = workplace.start(name, command);
            assert!(making.ended().await.success(), "{}", making.stderr());
            assert!(making.stdout().starts_with(secret) && making.stdout().lines().count() == 1, "{}", making.stdout());
            assert_eq!(making.stderr().contains("standard output is a file that others can read"), is_warned, "{}", making.stderr());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_with_unreadable_keys_does_not_start() {
    let workplace = Workplace::new();
    let (open, broken) = (workplace.file("open.toml", ""), private(&workplace, "broken.toml", "key = 5"));
    let listens = ["router", "--listen", "127.0.0.1:0", "--agents-listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"];
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o644)).unwrap();
    for (file, words) in
        [("/nowhere/keys.toml", "hostler keys create --file /nowhere/keys.toml"), (&open, "chmod 600"), (&broken, "invalid type")]
    {
        let ended = workplace.run(&[&listens[..], &["--keys-file", file]].concat()).await;
        assert!(!ended.success && ended.stderr.contains(words) && ended.stderr.contains("router.keys_file"), "{file}: {}", ended.stderr);
    }
    let ended = workplace.run(&[&listens[..], &["--metrics-need-key", "always"]].concat()).await;
    assert!(!ended.success && ended.stderr.contains("set router.keys_file"), "{}", ended.stderr);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_configured_key_file_is_changed_and_exposures_are_reported() {
    let workplace = Workplace::new();
    let file = workplace.file("own.toml", "");
    std::fs::remove_file(&file).unwrap();
    let config = workplace.file("hostler.toml", &format!("[router]\nkeys_file = {file:?}\nlisten = \"0.0.0.0:0\"\nallow_plain_text = true\nagents_listen = \"127.0.0.1:0\"\nadmin_listen = \"127.0.0.1:0\"\n"));
    let made = workplace.run(&["--config", &config, "keys", "create", "--name", "bob", "--in-flight", "3"]).await;
    assert!(made.success && !made.stderr.contains("--keys-file"), "{}", made.stderr);
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let key = Key(made.stdout.trim().to_owned());
    let kept = std::fs::read_to_string(&file).unwrap();
    assert!(kept.contains(key.id()) && !kept.contains(key.secret()), "{kept}");
    let list = workplace.run(&["--config", &config, "keys", "list"]).await;
    assert!(list.stdout.contains("bob") && list.stdout.contains("in-flight=3"), "{}", list.stdout);

    // Without a configuration there is a default file, and the hint to tell the router about it.
    let elsewhere = workplace.run(&["keys", "create"]).await;
    assert!(
        elsewhere.success && elsewhere.stderr.contains("--keys-file") && elsewhere.stderr.contains(".config/hostler/keys.toml"),
        "{}",
        elsewhere.stderr
    );
    let whole = workplace.run(&["--config", &config, "keys", "revoke", &key.0]).await;
    assert!(!whole.success && whole.stderr.contains("name it by its id") && !whole.stderr.contains(key.secret()), "{}", whole.stderr);

    let router = workplace.start("router", &["--config", &config, "router"]);
    router.line("admin").await;
    let log = router.stderr();
    for words in ["open beyond this host: no TLS: prompts", "open within this host: no TLS: whoever reaches it may join"] {
        assert_eq!(log.matches(words).count(), 1, "{words}: {log}");
    }
    assert!(!log.contains("no keys"), "{log}");
    tokio::time::timeout(Duration::from_secs(10), Endpoint::Tcp(router.address("admin").await).get("/livez")).await.unwrap();
}
