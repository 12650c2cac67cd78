//! Traces: a collector gets one for each request, whole and with the right parents, and nobody
//! notices its death or silence.

use std::time::Duration;

use tokio::time::Instant;

use hostler_boot::{SamplingRule, TraceSettings};
use hostler_proto::inference::v1::GenerateRequest;
use hostler_proto::inference::v1::generate_request::Prompt;
use hostler_proto::inference::v1::inference_client::InferenceClient;
use hostler_router::AccessFormat;
use http::Request;
use http_body_util::Full;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tonic::transport::Endpoint as TonicEndpoint;

use crate::harness::{Answer, CHAT, Collected, Collector, Fleet, MODEL, Scene, Setup, Workplace, chat, chat_stream, raw, soon, until};

/// A trace that a client has begun.
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const SPAN: &str = "00f067aa0ba902b7";

fn traced(setup: Setup, collector: &Collector) -> Setup {
    let settings = collector.settings();
    setup.router(|router| router.traces = Some(settings))
}

fn request(body: &Value, headers: &[(&str, &str)]) -> Request<Full<bytes::Bytes>> {
    let request = Request::post(CHAT).header("content-type", "application/json");
    let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    request.body(Full::from(body.to_string())).unwrap()
}

/// Names of a trace's spans, in the order in which they began, each with that of its parent.
fn tree(spans: &[Collected]) -> Vec<(String, String)> {
    let name = |id: &str| spans.iter().find(|span| span.id == id).map_or(id.to_owned(), |span| span.name.clone());
    let mut ordered: Vec<&Collected> = spans.iter().collect();
    ordered.sort_by_key(|span| span.times.0);
    ordered.into_iter().map(|span| (span.name.clone(), name(&span.parent))).collect()
}

fn branches<const N: usize>(expected: [(&str, &str); N]) -> Vec<(String, String)> {
    expected.into_iter().map(|(name, parent)| (name.to_owned(), parent.to_owned())).collect()
}

/// Spans of an answer's request, once all of `count` have come.
async fn spans_of(collector: &Collector, answer: &Answer, count: usize) -> Vec<Collected> {
    let id = answer.header("x-hostler-id").expect("an answer of an engine has our id");
    until(&format!("{count} spans"), async || {
        let spans = collector.trace(id).await;
        if spans.len() == count { Ok(spans) } else { Err(format!("{spans:#?}")) }
    })
    .await
}

fn named<'a>(spans: &'a [Collected], name: &str) -> Vec<&'a Collected> {
    let mut found: Vec<&Collected> = spans.iter().filter(|span| span.name == name).collect();
    found.sort_by_key(|span| span.times.0);
    found
}

#[tokio::test(start_paused = true)]
async fn a_stream_is_one_trace_with_its_engines_spans() {
    let collector = Collector::start().await;
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("access.log");
    let setup = traced(Setup::agents(1).engine("--enable-prompt-tokens-details"), &collector);
    let fleet = Fleet::start(setup.router(|router| (router.access_log, router.access_log_file) = (AccessFormat::Json, log.clone()))).await;
    fleet.until_exact().await;
    let mut body = chat_stream(5);
    body["stream_options"] = json!({"include_usage": true});
    let answer = fleet.edge().request(request(&body, &[("x-request-id", "job-7")])).await;
    answer.assert_whole_stream();
    let spans = spans_of(&collector, &answer, 4).await;
    let (root, call) = (format!("POST {CHAT}"), format!("chat {MODEL}"));
    let expected = [(&*root, ""), ("admission", &*root), ("placement", &*root), (&*call, &*root)];
    assert_eq!(tree(&spans), branches(expected), "{spans:#?}");
    let [request, placement, attempt] = [&spans[0], named(&spans, "placement")[0], named(&spans, &call)[0]];
    assert_eq!((request.kind, placement.kind, attempt.kind), (SpanKind::Server, SpanKind::Internal, SpanKind::Client));
    assert!(spans.iter().all(|span| span.error.is_none() && span.service == "hostler-router"), "{spans:#?}");
    assert!(spans.iter().all(|span| span.times.0 >= request.times.0 && span.times.1 <= request.times.1), "{spans:#?}");
    for (name, expected) in [
        ("http.request.method", json!("POST")),
        ("http.route", json!(CHAT)),
        ("http.response.status_code", json!(200)),
        ("gen_ai.operation.name", json!("chat")),
        ("gen_ai.request.model", json!(MODEL)),
        ("gen_ai.usage.output_tokens", json!(5)),
        ("gen_ai.usage.cache_read.input_tokens", json!(0)),
        ("hostler.client_id", json!("job-7")),
        ("hostler.outcome", json!("complete")),
        ("hostler.attempts", json!(1)),
        ("error.type", Value::Null),
    ] {
        assert_eq!(request.attribute(name), expected, "{name} in {request:#?}");
    }
    assert!(request.attribute("gen_ai.usage.input_tokens").as_u64().unwrap() > 0, "{request:#?}");
    assert_eq!(placement.attribute("hostler.replica"), "n0/0");
    assert_eq!(placement.attribute("hostler.placement.reason"), "only");
    assert_eq!(placement.attribute("hostler.placement.cache_level"), "load", "so short a prompt is not read");
    assert_eq!(placement.attribute("hostler.placement.candidates"), 1);
    assert_eq!(placement.attribute("hostler.placement.cached_tokens"), 0);
    assert!(placement.attribute("hostler.placement.uncached_tokens").as_u64().unwrap() > 0, "{placement:#?}");
    assert!(placement.attribute("hostler.placement.predicted_first_token_seconds").as_f64().unwrap() > 0.0, "{placement:#?}");
    assert_eq!(attempt.events, ["first_token"]);
    assert!(attempt.attribute("gen_ai.response.time_to_first_chunk").as_f64().unwrap() > 0.0, "{attempt:#?}");
    assert_eq!(answer.header("x-sim-traceparent"), Some(&*format!("00-{}-{}-01", request.trace, attempt.id)));
    let noted = format!("\"trace\":\"{}\"", request.trace);
    until("its line in the access log, with the trace that the router has begun", async || {
        let lines = std::fs::read_to_string(&log).unwrap();
        if lines.contains(&noted) { Ok(()) } else { Err(lines) }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_clients_trace_continues_through_the_router() {
    let collector = Collector::start().await;
    let fleet = Fleet::start(traced(Setup::agents(1), &collector)).await;
    let parent = |flags: &str| format!("00-{TRACE}-{SPAN}-{flags}");
    let dropped = fleet.edge().request(request(&chat(1), &[("traceparent", &parent("00"))])).await;
    assert_eq!(dropped.header("x-sim-traceparent"), Some(&*parent("00")), "passed on as it came");
    let kept = fleet.edge().request(request(&chat(1), &[("traceparent", &parent("01")), ("tracestate", "a=b")])).await;
    let spans = spans_of(&collector, &kept, 4).await;
    assert_eq!((&*spans[0].trace, &*spans[0].parent), (TRACE, SPAN));
    let attempt = named(&spans, &format!("chat {MODEL}"))[0];
    assert_eq!(kept.header("x-sim-traceparent"), Some(&*format!("00-{TRACE}-{}-01", attempt.id)));
    // Later spans have come in order, so a dropped one is not on its way.
    assert!(collector.spans().iter().all(|span| span.attribute("hostler.request.id") != dropped.header("x-hostler-id").unwrap()));
    // An invalid parent counts as none: another trace begins here.
    let wrong = fleet.edge().request(request(&chat(1), &[("traceparent", "00-1-2-03"), ("tracestate", "a=b")])).await;
    let spans = spans_of(&collector, &wrong, 4).await;
    assert_eq!(spans[0].parent, "");
    assert!(wrong.header("x-sim-traceparent").unwrap().starts_with(&format!("00-{}-", spans[0].trace)));
}

#[tokio::test(start_paused = true)]
async fn a_zero_sampling_ratio_traces_only_what_clients_sample() {
    let collector = Collector::start().await;
    let settings = TraceSettings { sampling: SamplingRule { follows_parent: true, ratio: 0.0 }, ..collector.settings() };
    let fleet = Fleet::start(Setup::agents(1).router(|router| router.traces = Some(settings))).await;
    let own = fleet.edge().request(request(&chat(1), &[])).await;
    assert_eq!((own.status.as_u16(), own.header("x-sim-traceparent")), (200, None));
    let clients = fleet.edge().request(request(&chat(1), &[("traceparent", &format!("00-{TRACE}-{SPAN}-01"))])).await;
    spans_of(&collector, &clients, 4).await;
    assert!(collector.spans().iter().all(|span| span.trace == TRACE), "{:#?}", collector.spans());
}

#[tokio::test(start_paused = true)]
async fn a_grpc_call_has_a_trace_like_any_other() {
    let collector = Collector::start().await;
    let fleet = Fleet::start(traced(Setup::agents(1), &collector)).await;
    let endpoint = TonicEndpoint::from_shared(format!("http://{}", fleet.routers[0].edge)).unwrap();
    let mut client = InferenceClient::new(soon("a connection", endpoint.connect()).await.unwrap());
    let generation =
        GenerateRequest { model: MODEL.into(), prompt: Some(Prompt::Text("Engines are".into())), ..GenerateRequest::default() };
    let mut call = tonic::Request::new(generation);
    call.metadata_mut().insert("traceparent", format!("00-{TRACE}-{SPAN}-01").parse().unwrap());
    let mut events = client.generate_stream(call).await.unwrap().into_inner();
    while soon("an event", events.message()).await.unwrap().is_some() {}
    let root = "POST /hostler.inference.v1.Inference/GenerateStream";
    let call = format!("text_completion {MODEL}");
    let spans = until("its spans", async || {
        let spans = collector.trace_where(root, |span| span.name == root).await;
        if spans.len() == 4 { Ok(spans) } else { Err(format!("{spans:#?}")) }
    })
    .await;
    assert_eq!(tree(&spans), branches([(root, SPAN), ("admission", root), ("placement", root), (&*call, root)]));
    assert_eq!(spans[0].attribute("gen_ai.operation.name"), "text_completion");
}

#[tokio::test(start_paused = true)]
async fn a_retry_is_another_attempt_in_the_same_trace() {
    let collector = Collector::start().await;
    // The first token of the first engine takes long.
    let mut fleet = Fleet::start(traced(Setup::agents(1).engine_of(0, "--sim-step-ms 20000"), &collector)).await;
    let edge = fleet.edge();
    let asking = tokio::spawn(async move { edge.post(CHAT, &chat_stream(3)).await });
    fleet.until_in_flight("n0/0", 1).await;
    let router = fleet.routers[0].agents.to_string();
    fleet.add_agent(vec![router]).await;
    until("the second engine", async || {
        let replicas = fleet.admin().replicas().await.unwrap();
        if replicas.iter().any(|replica| replica.id == "n1/0" && replica.is_ready()) { Ok(()) } else { Err(format!("{replicas:#?}")) }
    })
    .await;
    fleet.kill("n0/0").await;
    let answer = soon("the answer", asking).await.unwrap();
    answer.assert_whole_stream();
    let spans = spans_of(&collector, &answer, 6).await;
    let (root, call) = (format!("POST {CHAT}"), format!("chat {MODEL}"));
    let steps = [(&*root, ""), ("admission", &*root), ("placement", &*root), (&*call, &*root), ("placement", &*root), (&*call, &*root)];
    assert_eq!(tree(&spans), branches(steps), "{spans:#?}");
    let attempts = named(&spans, &call);
    let seen: Vec<_> = attempts.iter().map(|span| (span.attribute("hostler.replica"), span.error.clone(), span.events.len())).collect();
    assert_eq!(seen, [(json!("n0/0"), Some("engine_lost".into()), 0), (json!("n1/0"), None, 1)]);
    assert!(attempts[0].times.1 <= attempts[1].times.0, "{attempts:#?}");
    assert_eq!((spans[0].attribute("hostler.attempts"), &spans[0].error), (json!(2), &None));
    assert_eq!(answer.header("x-sim-traceparent"), Some(&*format!("00-{}-{}-01", spans[0].trace, attempts[1].id)));
}

#[tokio::test(start_paused = true)]
async fn a_resumed_streams_trace_shows_where_and_why() {
    let collector = Collector::start().await;
    let fleet = Fleet::start(traced(Setup::two_agents().engine("--sim-step-ms 10"), &collector)).await;
    let mut stream = fleet.edge().open(CHAT, &chat_stream(200)).await;
    stream.events(3).await;
    let at = if fleet.replica("n0/0").await.local_in_flight == 1 { "n0/0" } else { "n1/0" };
    fleet.kill(at).await;
    let answer = stream.finish().await;
    answer.assert_whole_stream();
    let spans = spans_of(&collector, &answer, 6).await;
    assert_eq!((&spans[0].events, spans[0].attribute("hostler.resumed")), (&vec!["resumption".to_owned()], json!(1)));
    // The rest is requested as a completion.
    let [lost, rest] = [named(&spans, &format!("chat {MODEL}"))[0], named(&spans, &format!("text_completion {MODEL}"))[0]];
    assert_eq!((lost.attribute("hostler.replica"), lost.error.as_deref(), lost.events.len()), (json!(at), Some("engine_lost"), 1));
    assert_eq!((rest.error.as_deref(), rest.events.len(), &rest.parent), (None, 1, &spans[0].id));
    assert!(lost.times.1 <= rest.times.0 && rest.times.1 <= spans[0].times.1, "{spans:#?}");
}

#[tokio::test(start_paused = true)]
async fn a_refused_request_has_a_trace_that_says_why() {
    let collector = Collector::start().await;
    let setup = traced(Setup::agents(1), &collector).router(|router| (router.max_in_flight, router.stream_keepalive) = (1, Duration::ZERO));
    let fleet = Fleet::start(setup).await;
    let mut running = fleet.edge().open(CHAT, &chat_stream(10_000)).await;
    running.events(2).await;
    let full = fleet.edge().post(CHAT, &chat(1)).await;
    assert_eq!(full.status, 429, "{}", full.text());
    let root = format!("POST {CHAT}");
    let spans = until("the trace of what was limited", async || {
        let spans = collector.trace_where("429", |span| span.attribute("http.response.status_code") == 429).await;
        if spans.len() == 2 { Ok(spans) } else { Err(format!("{spans:#?}")) }
    })
    .await;
    assert_eq!(tree(&spans), branches([(&*root, ""), ("admission", &*root)]));
    assert_eq!(
        (spans[0].attribute("error.type"), spans[0].attribute("hostler.outcome"), &spans[0].error),
        (json!("limited"), json!("refused"), &None)
    );
    assert_eq!(spans[1].error.as_deref(), Some("limited"));
    drop(running);
    fleet.until_idle().await;

    // The request is admitted, and there is no replica.
    let unknown = fleet.edge().post(CHAT, &json!({"model": "nobody\u{1b}[31m", "messages": []})).await;
    assert_eq!(unknown.status, 404, "{}", unknown.text());
    let spans = until("the trace of an unknown model", async || {
        let spans = collector.trace_where("404", |span| span.attribute("http.response.status_code") == 404).await;
        if spans.len() == 3 { Ok(spans) } else { Err(format!("{spans:#?}")) }
    })
    .await;
    assert_eq!(tree(&spans), branches([(&*root, ""), ("admission", &*root), ("placement", &*root)]));
    assert_eq!(named(&spans, "placement")[0].error.as_deref(), Some("unknown_model"));
    assert_eq!(spans[0].attribute("gen_ai.request.model"), "nobody\u{fffd}[31m");

    // A path that anybody may make up is not a name. Probes, and requests without a caller, have no
    // trace at all.
    fleet.edge().get("/healthz").await;
    let malformed = raw(fleet.routers[0].edge, b"GET /malformed HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\n").await;
    assert!(malformed.starts_with("HTTP/1.1 400 "), "{malformed}");
    assert_eq!(fleet.edge().get("/made/up?token=hidden").await.status, 404);
    let spans = collector.trace_where("a path", |span| span.attribute("url.path") == "/made/up").await;
    assert_eq!((spans.len(), &*spans[0].name, spans[0].attribute("error.type")), (1, "GET", json!("no_route")));
    for absent in ["hidden", "healthz", "malformed"] {
        assert!(!collector.text().contains(absent), "{absent}: {}", collector.text());
    }
}

/// Sends so many requests that their spans exceed the queue, and checks that each is answered.
async fn ask_often(fleet: &Fleet) -> Duration {
    let mut slowest = Duration::ZERO;
    for _ in 0..40 {
        let begun = Instant::now();
        assert_eq!(fleet.edge().post(CHAT, &chat(1)).await.status, 200);
        slowest = slowest.max(begun.elapsed());
    }
    slowest
}

#[tokio::test(start_paused = true)]
async fn a_hanging_collector_costs_only_spans_beyond_the_queue() {
    let collector = Collector::start().await;
    let mut settings = TraceSettings { max_waiting_spans: 40, ..collector.settings() };
    settings.collector.request_timeout = Duration::from_secs(20);
    let fleet = Fleet::start(Setup::agents(1).router(|router| router.traces = Some(settings))).await;
    fleet.edge().post(CHAT, &chat(1)).await;
    until("a trace", async || if collector.spans().is_empty() { Err("none".into()) } else { Ok(()) }).await;
    collector.hang();
    let slowest = ask_often(&fleet).await;
    assert!(slowest < Duration::from_secs(5), "no request waited for the collector: {slowest:?}");
    // There are four spans for each, and room for those of ten requests.
    until("thirty traces dropped", async || {
        let dropped = fleet.routers[0].metric("hostler_trace_spans_dropped_total").await;
        if dropped == 120.0 { Ok(()) } else { Err(format!("{dropped} spans")) }
    })
    .await;
    let begun = Instant::now();
    fleet.routers[0].shutdown.drain();
    until("the router's end", async || if fleet.routers[0].task.is_finished() { Ok(()) } else { Err("it runs".into()) }).await;
    assert!(begun.elapsed() < Duration::from_secs(10), "its end waits for a second at most: {:?}", begun.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_collector_is_reported_once_and_found_again() {
    // Nobody listens there until the test does.
    let address = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let mut place = Workplace::new();
    let endpoint: &'static str = format!("http://{address}").leak();
    place.environment = vec![
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint),
        ("OTEL_BSP_SCHEDULE_DELAY", "50"),
        ("OTEL_BLRP_SCHEDULE_DELAY", "50"),
        ("OTEL_BSP_EXPORT_TIMEOUT", "300"),
        ("OTEL_SERVICE_NAME", "front"),
    ];
    let mut up = place.up(1, &[]);
    up.line("ready").await;
    let (edge, admin) = (crate::harness::Endpoint::Tcp(up.address("edge").await), crate::harness::Endpoint::Tcp(up.address("admin").await));
    until("three batches lost", async || {
        assert_eq!(edge.post(CHAT, &chat(1)).await.status, 200);
        let dropped = admin.metric("hostler_trace_spans_dropped_total").await;
        if dropped >= 12.0 { Ok(()) } else { Err(format!("{dropped} spans")) }
    })
    .await;
    let lines = |text: &str| up.stderr().lines().filter(|line| line.contains(text)).count();
    assert_eq!(lines("traces do not reach the collector"), 1, "{}", up.stderr());
    // The line comes after a few attempts, which take two seconds.
    let has_event_line = async || if lines("events do not reach the collector") == 1 { Ok(()) } else { Err(up.stderr()) };
    until("the line of events", has_event_line).await;
    let collector = Collector::at(address).await;
    until("a trace", async || {
        edge.post(CHAT, &chat(1)).await;
        if collector.spans().iter().any(|span| span.service == "front") { Ok(()) } else { Err(up.stderr()) }
    })
    .await;
    until("the line that says so", async || if lines("traces reach the collector again") == 1 { Ok(()) } else { Err(up.stderr()) }).await;
    // The last spans arrive before the end.
    let last = edge.post(CHAT, &chat(1)).await;
    up.signal(Signal::TERM);
    assert!(up.ended().await.success(), "{}", up.stderr());
    collector.trace(last.header("x-hostler-id").unwrap()).await;
    let leaving = collector.event("drain_begun", |_| true).await;
    assert_eq!((leaving.severity.as_str(), leaving.service), ("INFO", json!("front")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_lives_are_collected_as_events_without_engine_output() {
    let collector = Collector::start().await;
    let mut scene = Scene::new().await;
    scene.place.environment = vec![("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint().leak()), ("OTEL_BLRP_SCHEDULE_DELAY", "50")];
    let _agent = scene.agent("agent", "1", &[]);
    let life = scene.ready(1).await.remove(0);
    let started = collector.event("engine_started", |_| true).await;
    assert_eq!((started.severity.as_str(), &started.body, &started.service), ("INFO", &json!("engine started"), &json!("hostler-agent")));
    assert_eq!((&started.attributes["hostler.engine"], &started.attributes["hostler.pid"]), (&json!(0), &json!(life.pid)));
    assert_eq!(started.host, json!(rustix::system::uname().nodename().to_str().unwrap()));
    collector.event("engine_ready", |event| event.attributes["hostler.seconds"].is_f64()).await;
    kill_process(Pid::from_raw(life.pid.cast_signed()).unwrap(), Signal::KILL).unwrap();
    let failed = collector.event("engine_failed", |_| true).await;
    assert_eq!((failed.severity.as_str(), &failed.attributes["hostler.kind"]), ("ERROR", &json!("killed")));
    let words = failed.body.as_str().unwrap();
    assert!(words.starts_with("the engine's first process was killed") && !collector.text().contains("Starting to load model"), "{words}");
    collector.event("engine_started", |event| event.attributes["hostler.pid"] != json!(life.pid)).await;
    assert!(collector.spans().is_empty(), "agents have no traces");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_are_not_sent_where_the_environment_disables_them() {
    let collector = Collector::start().await;
    let mut place = Workplace::new();
    let endpoint = collector.endpoint().leak();
    place.environment = vec![
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint),
        ("OTEL_LOGS_EXPORTER", "none"),
        ("OTEL_BSP_SCHEDULE_DELAY", "50"),
        ("OTEL_BLRP_SCHEDULE_DELAY", "50"),
    ];
    let mut up = place.up(1, &[]);
    up.line("ready").await;
    let answer = crate::harness::Endpoint::Tcp(up.address("edge").await).post(CHAT, &chat(1)).await;
    collector.trace(answer.header("x-hostler-id").unwrap()).await;
    up.signal(Signal::TERM);
    assert!(up.ended().await.success(), "{}", up.stderr());
    assert!(up.stderr().contains("drain_begun") && !collector.text().contains("drain_begun"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unusable_collector_environment_only_warns() {
    let mut place = Workplace::new();
    place.environment = vec![("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")];
    let up = place.up(1, &[]);
    up.line("ready").await;
    assert!(up.stderr().contains("no events are sent to a collector"), "{}", up.stderr());
    let warned = up.stderr();
    let warned = warned.lines().find(|line| line.contains("no traces are sent")).unwrap_or_else(|| panic!("{}", up.stderr()));
    assert!(warned.contains("OTEL_EXPORTER_OTLP_PROTOCOL is not `grpc`") && warned.contains("4317"), "{warned}");
}
