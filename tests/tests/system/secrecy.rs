//! Secrecy of users' data: with every log at its most verbose, no prompt, no key and no join token
//! is found in anything that the programs write, print, show or are called with.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use hostler_proto::inference::v1::generate_request::Prompt;
use hostler_proto::inference::v1::inference_client::InferenceClient;
use hostler_proto::inference::v1::{GenerateRequest, Sampling};
use http::{Method, Request};
use http_body_util::Full;
use serde_json::{Value, json};
use tonic::transport::Endpoint as TonicEndpoint;

use crate::harness::{Admin, CHAT, Collector, Endpoint, MODEL, Program, Workplace, raw, signal_group, soon, until};

/// Text in every prompt, and in every other place where a client may put its secrets.
const CANARY: &str = "canary-7f3a91c2";

/// File of the join token, which is searched for everywhere else.
const TOKEN_FILE: &str = "join-token";

/// Label that is no secret. It has to be found, or nothing was searched.
const LABEL: &str = "label-5d20";

/// Credential of the sender at the collector of traces.
///
/// It is in the programs' environment, and nowhere else.
const PROOF: &str = "proof-91be";

/// A router and an agent of two engines, each at its most verbose.
struct System {
    workplace: Workplace,
    router: Program,
    agent: Program,
    edge: SocketAddr,
    admin: SocketAddr,
    operators: Admin,
    key: String,
    /// Token with which the agent has joined.
    token: String,
    collector: Collector,
}

impl System {
    async fn start() -> Self {
        let collector = Collector::start().await;
        let endpoint: &'static str = collector.endpoint().leak();
        let mut workplace = Workplace::new();
        workplace.environment = vec![
            ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint),
            ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer proof-91be"),
            ("OTEL_BSP_SCHEDULE_DELAY", "50"),
        ];
        let file = |name: &str| workplace.path().join(name).to_str().unwrap().to_owned();
        let made = workplace.run(&["keys", "create", "--tenant", "physics", "--file", &file("keys.toml")]).await;
        let key =
            made.stdout.split_whitespace().find(|word| word.starts_with("hk_")).unwrap_or_else(|| panic!("{}", made.stderr)).to_owned();
        let (fleet, joins) = (file("fleet"), file(TOKEN_FILE));
        let begun = workplace.run(&["init", "--dir", &fleet, "--out", &joins]).await;
        assert!(begun.success, "{}", begun.stderr);
        let token = fs::read_to_string(&joins).unwrap().trim().to_owned();
        let local = ["--listen", "127.0.0.1:0", "--agents-listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"];
        let (log, keys, secret) = (file("access.log"), file("keys.toml"), file("router.secret"));
        let settings =
            ["--access-log", "json", "--access-log-file", &log, "--keys-file", &keys, "--isolate-tenants", "--secret-file", &secret];
        let tls = ["--tls-dir", &fleet, "--max-body-bytes", "100000"];
        let talkative = ["--log-level", "trace"];
        let router = workplace.start("router", &[&["router"], &local[..], &settings, &talkative, &tls].concat());
        let agents = router.address("agents").await.to_string();
        let identity = file("identity");
        let joining = ["--join-token-file", &joins, "--identity-dir", &identity];
        let engines = ["--engine", "simulated", "--replicas", "2", "--node", "far"];
        let engine = ["--", "--sim-step-ms", "5", "--sim-start-ms", "50"];
        let agent = workplace.start("agent", &[&["agent", "--router", &agents], &engines[..], &joining, &talkative, &engine].concat());
        let (edge, admin, operators) = (router.address("edge").await, router.address("admin").await, router.admin().await);
        let system = Self { workplace, router, agent, edge, admin, operators, key, token, collector };
        system.until_ready(2).await;
        system
    }

    async fn until_ready(&self, count: usize) {
        until(&format!("{count} replicas ready"), async || {
            let replicas = self.operators.replicas().await.map_err(|status| status.to_string())?;
            let ready = replicas.iter().filter(|replica| replica.is_ready()).count();
            if ready == count { Ok(()) } else { Err(format!("{replicas:#?}\n{}", self.agent.stdout())) }
        })
        .await;
    }

    fn request(&self, method: Method, path: &str, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Request<Full<Bytes>> {
        let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
        let request = request.header("authorization", format!("Bearer {}", self.key));
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        request.body(Full::from(body.into())).unwrap()
    }

    /// Status of the answer to a request with the key. The text of a broken answer does not matter.
    async fn post(&self, path: &str, body: &Value) -> u16 {
        let request = self.request(Method::POST, path, &[("x-request-id", LABEL)], body.to_string());
        Endpoint::Tcp(self.edge).request(request).await.status.as_u16()
    }

    /// Every file below the workplace, and all output.
    async fn sinks(&self) -> Vec<(String, Vec<u8>)> {
        let mut sinks = Vec::new();
        files(self.workplace.path(), &mut sinks);
        for pid in self.workplace.processes() {
            sinks.push((format!("command line of {pid}"), fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default()));
            sinks.push((format!("environment of {pid}"), fs::read(format!("/proc/{pid}/environ")).unwrap_or_default()));
        }
        for page in ["/metrics", "/healthz", "/readyz"] {
            sinks.push((format!("the router's {page}"), Endpoint::Tcp(self.admin).get(page).await.body));
        }
        for words in [
            &["explain", "--last", "1000", "--json"][..],
            &["explain", LABEL],
            &["explain", "--last", "1000"],
            &["ps", "--json"],
            &["ps"],
            &["logs", "far/0", "-n", "1000"],
            &["logs", "far/1", "-n", "1000"],
            &["advise"],
        ] {
            let ended = self.workplace.run(&[words, &["--admin", self.operators.socket()]].concat()).await;
            sinks.push((format!("{words:?}"), format!("{}\n{}", ended.stdout, ended.stderr).into_bytes()));
        }
        sinks
    }
}

fn files(folder: &Path, found: &mut Vec<(String, Vec<u8>)>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path: PathBuf = entry.path();
        if path.is_dir() {
            files(&path, found);
        } else if path.is_file() && !path.ends_with(TOKEN_FILE) {
            found.push((path.display().to_string(), fs::read(&path).unwrap_or_default()));
        }
    }
}

/// Places where a text is found, with its surroundings.
fn found(sinks: &[(String, Vec<u8>)], text: &str) -> Vec<String> {
    let mut places = Vec::new();
    for (name, content) in sinks {
        let content = String::from_utf8_lossy(content);
        if let Some(line) = content.lines().find(|line| line.contains(text)) {
            places.push(format!("{name}: {}", line.chars().take(600).collect::<String>()));
        }
    }
    places
}

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

/// Prompt long enough to be placed by its tokens.
fn prompt() -> String {
    format!("{CANARY} tell me. ").repeat(80)
}

/// Sends a request of every API, whole and as a stream.
async fn ask_every_api(system: &System) {
    let (prompt, mut answered) = (prompt(), 0);
    for stream in [false, true] {
        for (path, body) in [
            (CHAT, json!({"model": MODEL, "messages": user(&prompt), "max_tokens": 3, "user": CANARY, "metadata": {"a": CANARY}})),
            ("/v1/completions", json!({"model": MODEL, "prompt": prompt, "max_tokens": 3, "stop": [CANARY], "cache_salt": CANARY})),
            ("/v1/responses", json!({"model": MODEL, "input": prompt, "instructions": prompt, "max_output_tokens": 16})),
            ("/v1/messages", json!({"model": MODEL, "system": prompt, "messages": user(&prompt), "max_tokens": 3})),
            ("/api/chat", json!({"model": MODEL, "messages": user(&prompt), "options": {"num_predict": 3}})),
            ("/api/generate", json!({"model": MODEL, "prompt": prompt, "options": {"num_predict": 3}})),
        ] {
            let mut body = body;
            body["stream"] = stream.into();
            answered += u32::from(system.post(path, &body).await == 200);
        }
    }
    for (path, body) in [
        ("/v1/embeddings", json!({"model": MODEL, "input": prompt})),
        ("/tokenize", json!({"model": MODEL, "prompt": prompt})),
        ("/v1/messages/count_tokens", json!({"model": MODEL, "messages": user(&prompt)})),
        ("/pooling", json!({"model": MODEL, "input": prompt})),
        ("/api/embed", json!({"model": MODEL, "input": prompt})),
    ] {
        answered += u32::from(system.post(path, &body).await == 200);
    }
    // The simulated engine has no route for some of these.
    assert!(answered >= 10, "{answered} were answered");
}

async fn ask_over_grpc(system: &System) {
    let endpoint = TonicEndpoint::from_shared(format!("http://{}", system.edge)).unwrap();
    let channel = soon("a connection", endpoint.connect()).await.unwrap();
    for (key, model) in [(system.key.as_str(), MODEL), (system.key.as_str(), "no-such-model"), ("hk_wrong_canary-7f3a91c2", MODEL)] {
        let bearer: tonic::metadata::MetadataValue<_> = format!("Bearer {key}").parse().unwrap();
        let mut client = InferenceClient::with_interceptor(channel.clone(), move |mut request: tonic::Request<()>| {
            request.metadata_mut().insert("authorization", bearer.clone());
            request.metadata_mut().insert("x-secret", CANARY.parse().unwrap());
            Ok(request)
        });
        let generation = GenerateRequest {
            model: model.into(),
            prompt: Some(Prompt::Text(prompt())),
            sampling: Some(Sampling { max_tokens: Some(3), ..Sampling::default() }),
            ..GenerateRequest::default()
        };
        let answer = soon("an answer over gRPC", client.generate(generation)).await;
        assert_eq!(answer.is_ok(), model == MODEL && key == system.key, "{answer:?}");
    }
}

/// Sends requests that are refused, each for a different reason, by the router or an engine.
async fn ask_wrongly(system: &System) {
    let edge = Endpoint::Tcp(system.edge);
    let chat = json!({"model": MODEL, "messages": user(CANARY), "max_tokens": 2});
    let mut refused = 0;
    for (path, body) in [
        (CHAT, json!({"model": "no-such-model", "messages": user(CANARY)})),
        (CHAT, json!({"model": MODEL, "messages": CANARY})),
        (CHAT, json!({"model": MODEL, "messages": user(CANARY), "temperature": CANARY})),
        (CHAT, json!({"model": MODEL, "messages": user(CANARY), "max_tokens": 100_000_000})),
        (CHAT, json!({"model": MODEL, "messages": user(CANARY), "cache_salt": [CANARY]})),
        (CHAT, json!({"model": MODEL, "messages": user(CANARY), "response_format": {"type": CANARY}})),
        (CHAT, json!({"model": MODEL, "messages": [{"content": [{"image_url": {"url": format!("http://x.org/{CANARY}")}}]}]})),
        (CHAT, json!({"model": MODEL, "messages": user(&prompt().repeat(100))})),
        ("/v1/responses", json!({"model": MODEL, "input": CANARY, "previous_response_id": "resp_x"})),
        ("/api/generate", json!({"model": MODEL, "prompt": CANARY, "options": CANARY})),
        ("/api/chat", json!({"model": MODEL, "messages": CANARY})),
        ("/v2/embed", json!({"model": MODEL, "texts": [CANARY]})),
        ("/no/such/route", json!({"prompt": CANARY})),
    ] {
        refused += u32::from((400..500).contains(&system.post(path, &body).await));
    }
    // The simulated engine accepts unknown fields.
    assert!(refused >= 10, "{refused} were refused");
    for (path, headers, body) in [
        (CHAT, &[("x-secret", CANARY), ("cookie", CANARY)][..], format!("{{\"messages\": \"{CANARY}")),
        (CHAT, &[("x-hostler-explain", "1")], format!("{{\"messages\": {CANARY}}}")),
        (CHAT, &[("x-api-key", CANARY)], chat.to_string()),
        (CHAT, &[("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"), ("tracestate", CANARY)], chat.to_string()),
        (CHAT, &[("content-encoding", "gzip")], CANARY.to_owned()),
        (&format!("{CHAT}?api_key={CANARY}"), &[("x-secret", CANARY)], chat.to_string()),
        (&format!("/v1/models?api_key={CANARY}"), &[], String::new()),
    ] {
        edge.request(system.request(Method::POST, path, headers, body)).await;
    }
    for authorization in
        [format!("Bearer {CANARY}"), format!("Basic {CANARY}"), format!("Bearer hk_aaaaaaaaaa_{CANARY}"), CANARY.to_owned()]
    {
        let request = Request::post(CHAT).header("authorization", &authorization).header("content-type", "application/json");
        let answer = edge.request(request.body(Full::from(chat.to_string())).unwrap()).await;
        assert_eq!(answer.status, 401, "{authorization}");
        let request = Request::get("/api/tags").header("x-api-key", &authorization).body(Full::default()).unwrap();
        assert_eq!(edge.request(request).await.status, 401, "{authorization}");
    }
    for head in [
        format!("POST {CHAT} HTTP/1.1\r\nAuthorization: Bearer {}\r\nX: {CANARY}\r\nConnection: close\r\n\r\n", system.key),
        format!("{CANARY} is no HTTP\r\n\r\n"),
        format!("POST {CHAT} HTTP/1.1\r\nHost: x\r\nX {CANARY}: y\r\n\r\n"),
        format!("POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\nX: {CANARY}\r\n\r\n{CANARY}"),
        format!("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n{CANARY}{CANARY}"),
    ] {
        raw(system.edge, head.as_bytes()).await;
    }
}

/// Lets engines die with the prompt until it is banned; other answers break or their clients leave.
async fn see_engines_die(system: &System) {
    let edge = Endpoint::Tcp(system.edge);
    // A stop string without a seed prevents resumption: other streams continue from another engine.
    let mut body = json!({"model": MODEL, "messages": user(&prompt()), "max_tokens": 10_000, "stream": true, "stop": "never said"});
    let mut left = edge.send(system.request(Method::POST, CHAT, &[], body.to_string())).await;
    left.events(2).await;
    drop(left);
    for restarts in 1..=2 {
        let mut stream = edge.send(system.request(Method::POST, CHAT, &[], body.to_string())).await;
        stream.events(2).await;
        let replicas = system.operators.replicas().await.unwrap();
        // End the engine as its own crash would: a killed engine would blame no request.
        signal_group(replicas.iter().find(|replica| replica.local_in_flight > 0).unwrap().pid, rustix::process::Signal::ABORT);
        stream.finish().await.assert_broken_stream();
        until("the engine's next life", async || {
            let replicas = system.operators.replicas().await.map_err(|status| status.to_string())?;
            let ready = replicas.iter().all(crate::harness::Seen::is_ready);
            let lives: u32 = replicas.iter().map(|replica| replica.restarts).sum();
            if ready && lives == restarts { Ok(()) } else { Err(format!("{replicas:#?}")) }
        })
        .await;
    }
    assert_eq!(system.post(CHAT, &body).await, 422);
    body["messages"] = user(&format!("{CANARY} again"));
    let stream = edge.send(system.request(Method::POST, CHAT, &[], body.to_string())).await;
    let replicas = system.operators.replicas().await.unwrap();
    for replica in &replicas {
        Endpoint::Unix(replica.socket.clone().into()).post("/sim/fault", &json!({"kind": "error_event"})).await;
    }
    stream.finish().await.assert_broken_stream();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_secret_appears_in_anything_written_or_shown() {
    let mut system = System::start().await;
    ask_every_api(&system).await;
    ask_over_grpc(&system).await;
    ask_wrongly(&system).await;
    see_engines_die(&system).await;
    until("the access log written", async || {
        let text = fs::read_to_string(system.workplace.path().join("access.log")).unwrap_or_default();
        if text.lines().any(|line| line.contains("\"cause\":\"engine_error\"")) { Ok(()) } else { Err(text) }
    })
    .await;
    let mut sinks = system.sinks().await;
    for program in [&mut system.agent, &mut system.router] {
        program.signal(rustix::process::Signal::TERM);
        assert!(program.ended().await.success(), "{}", program.stderr());
    }
    // Include the last output of the programs.
    files(system.workplace.path(), &mut sinks);
    sinks.push(("traces".to_owned(), system.collector.text().into_bytes()));

    // Check that the search covers something: logs at every level, lines of requests, and
    // decisions.
    let sizes = |name: &str| sinks.iter().filter(|(sink, _)| sink.ends_with(name)).map(|(_, content)| content.len()).max().unwrap_or(0);
    assert!(sizes("router.err") > 100_000 && sizes("agent.err") > 100_000, "{} {}", sizes("router.err"), sizes("agent.err"));
    assert!(!found(&sinks, "TRACE").is_empty() && sizes("access.log") > 5000);
    assert!(found(&sinks, LABEL).iter().any(|place| place.contains("access.log")), "{:?}", found(&sinks, LABEL));
    assert!(found(&sinks, LABEL).iter().any(|place| place.contains("explain")), "{:?}", found(&sinks, LABEL));

    assert!(found(&sinks, LABEL).iter().any(|place| place.starts_with("traces")), "{:?}", found(&sinks, LABEL));

    let secret = system.key.rsplit('_').next().unwrap();
    let encoded = "Y2FuYXJ5LTdmM2E5MWMy";
    // The secret stands between the token's id and the authority's fingerprint.
    let joined = system.token.split(['.', '#']).nth(1).unwrap();
    assert!(joined.len() >= 32, "{joined}");
    for text in [CANARY, secret, encoded, joined] {
        assert_eq!(found(&sinks, text), Vec::<String>::new());
    }
    assert!(found(&sinks, PROOF).iter().all(|place| place.starts_with("environment of")), "{:?}", found(&sinks, PROOF));
}
