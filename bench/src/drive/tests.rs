//! Whole measurements, against simulated engines and against targets that misbehave.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use hostler_sim::{Engine, EngineArgs};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::*;
use crate::args::tests::parsed;
use crate::figures::Totals;

const PATIENCE: Duration = Duration::from_secs(30);

struct RunningEngine {
    socket: PathBuf,
    _directory: TempDir,
    _stop: DropGuard,
}

impl RunningEngine {
    async fn start(flags: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("engine.sock");
        let step = if flags.contains(&"--sim-step-ms") { &[][..] } else { &["--sim-step-ms", "2"] };
        let named = ["--served-model-name", "tiny", "--sim-start-ms", "0", "--uds", socket.to_str().unwrap()];
        let engine = Engine::bind(EngineArgs::from_flags(&[&named[..], step, flags].concat())).unwrap();
        let stop = CancellationToken::new();
        tokio::spawn(engine.run(stop.clone().cancelled_owned()));
        let ready = async {
            while UnixStream::connect(&socket).await.is_err() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(PATIENCE, ready).await.expect("the engine becomes ready");
        Self { socket, _directory: directory, _stop: stop.drop_guard() }
    }

    fn target(&self) -> String {
        format!("unix:{}", self.socket.display())
    }
}

async fn report(flags: &[&str]) -> Report {
    let args = parsed(flags);
    tokio::time::timeout(PATIENCE, run(&args, drop)).await.expect("the measurement ends").unwrap_or_else(|error| panic!("{error}"))
}

fn only_totals(report: &Report) -> &Totals {
    &report.targets[0].rounds[0].all
}

/// A server that gives every request the same answer, byte for byte, and closes a connection after
/// this many answers.
async fn saying(answer: String, answers_a_connection: usize) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = connections.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            counted.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(answer_with(stream, answer.clone(), answers_a_connection));
        }
    });
    (address, connections)
}

async fn answer_with(mut stream: TcpStream, answer: String, answers: usize) {
    for _ in 0..answers {
        let mut request = Vec::new();
        let mut piece = [0; 4096];
        // Requests of these tests have bodies that end with a brace, or none.
        while !(request.ends_with(b"}") || request.starts_with(b"GET") && request.ends_with(b"\r\n\r\n")) {
            match stream.read(&mut piece).await {
                Ok(read) if read > 0 => request.extend_from_slice(&piece[..read]),
                _ => return,
            }
        }
        if stream.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
    }
}

fn http(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

#[tokio::test]
async fn a_closed_loop_sends_and_counts_the_requests_asked_for() {
    let engine = RunningEngine::start(&[]).await;
    for api in ["chat", "completions"] {
        let target = engine.target();
        let flags = ["sustained", "--target", &target, "--requests", "20", "--concurrency", "4", "--warm-up", "0s", "--api", api];
        let report = report(&[&flags[..], &["--input-tokens", "40", "--output-tokens", "10", "--slo-e2e", "20s"]].concat()).await;
        assert_eq!(report.targets[0].model, "tiny");
        let all = only_totals(&report);
        assert_eq!((all.requests, all.complete, &all.failed), (20, 20, &[].into()));
        // Limits of answers are up to a tenth off.
        assert!((9.0..=11.0).contains(&(all.output_tokens_per_second / all.requests_per_second)), "{all:?}");
        assert!(all.prompt_tokens_per_second > all.output_tokens_per_second);
        assert_eq!(all.ttft_ms.count, 20);
        assert!(all.itl_ms.count >= 20 * 8 && all.itl_ms.p50 >= 1.0, "{:?}", all.itl_ms);
        assert!(all.e2e_ms.p50 > all.ttft_ms.p50 && all.ttft_ms.p50 >= 2.0);
        assert_eq!(all.met, Some(1.0));
        let fleet = report.targets[0].rounds[0].fleet.expect("the engine has metrics");
        assert!(fleet.kv_use_max.is_some(), "{fleet:?}");
    }
}

#[tokio::test]
async fn whole_answers_have_no_first_token() {
    let engine = RunningEngine::start(&[]).await;
    let target = engine.target();
    let report =
        report(&["sustained", "--target", &target, "--requests", "5", "--no-stream", "--warm-up", "0s", "--output-tokens", "5"]).await;
    let all = only_totals(&report);
    assert_eq!((all.complete, all.ttft_ms.count, all.e2e_ms.count), (5, 0, 5));
    assert!(all.output_tokens_per_second > 0.0);
}

#[tokio::test]
async fn an_open_loop_warms_up_and_counts_lateness() {
    let engine = RunningEngine::start(&[]).await;
    let target = engine.target();
    let mut phases = Vec::new();
    let flags = ["sustained", "--target", &target, "--rate", "100", "--duration", "1s", "--warm-up", "300ms"];
    let args = parsed(&[&flags[..], &["--input-tokens", "10", "--output-tokens", "3"]].concat());
    let report = tokio::time::timeout(PATIENCE, run(&args, |progress| phases.push(progress.phase))).await.unwrap().unwrap();
    let all = only_totals(&report);
    assert!((60..=140).contains(&all.complete) && all.complete == all.requests, "{all:?}");
    assert_eq!(all.late_ms.count, all.requests);
    assert_eq!(phases[0], Phase::WarmUp);
    assert_eq!(phases.last(), Some(&Phase::Round { number: 1, of: 1 }));
}

#[tokio::test]
async fn open_loop_latency_counts_from_the_due_time() {
    let engine = RunningEngine::start(&["--sim-step-ms", "10"]).await;
    let target = engine.target();
    let report = report(&[
        "burst",
        "--size",
        "4",
        "--every",
        "10s",
        "--target",
        &target,
        "--concurrency",
        "1",
        "--duration",
        "1s",
        "--warm-up",
        "0s",
        "--output-tokens",
        "10",
        "--input-tokens",
        "10",
    ])
    .await;
    let all = only_totals(&report);
    assert_eq!((all.requests, all.complete), (4, 4));
    assert!(all.late_ms.max >= 3.0 * 70.0, "the last waits for three others of 9 steps or more: {:?}", all.late_ms);
    assert!(all.ttft_ms.max >= all.late_ms.max, "and its time to the first token says so: {:?}", all.ttft_ms);
}

#[tokio::test]
async fn a_conversation_grows_by_what_was_answered() {
    let engine = RunningEngine::start(&[]).await;
    let target = engine.target();
    let flags = ["chat", "--turns", "3", "--think", "1ms", "--target", &target, "--requests", "3", "--concurrency", "1", "--warm-up", "0s"];
    let report = report(&[&flags[..], &["--input-tokens", "20", "--output-tokens", "20"]].concat()).await;
    let all = only_totals(&report);
    assert_eq!((all.requests, all.complete), (3, 3));
    let prompts = all.prompt_tokens_per_second * all.seconds;
    assert!(prompts >= 1.5 * 3.0 * 20.0, "three prompts of 20 tokens each, and what was said before: {prompts}");
}

#[tokio::test]
async fn targets_are_measured_in_forward_and_reverse_order() {
    let engines = [RunningEngine::start(&[]).await, RunningEngine::start(&[]).await];
    let [one, other] = engines.each_ref().map(RunningEngine::target);
    let flags = ["sustained", "--target", &one, "--target", &other, "--name", "one", "--name", "other", "--rounds", "2", "--requests", "4"];
    let args = parsed(&[&flags[..], &["--warm-up", "0s", "--output-tokens", "3"]].concat());
    let mut seen: Vec<String> = Vec::new();
    let report = tokio::time::timeout(PATIENCE, run(&args, |progress| seen.push(progress.target))).await.unwrap().unwrap();
    seen.dedup();
    assert_eq!(seen, ["one", "other", "one"]);
    for target in &report.targets {
        assert_eq!(target.rounds.iter().map(|figures| figures.all.complete).collect::<Vec<_>>(), [4, 4], "{}", target.name);
    }
}

#[tokio::test]
async fn a_sweep_ends_where_the_target_breaks_and_says_why() {
    let engine = RunningEngine::start(&["--sim-step-ms", "25"]).await;
    let target = engine.target();
    let flags = ["sweep", "--steps", "1,4", "--slo-ttft", "1ms", "--target", &target, "--duration", "300ms", "--warm-up", "0s"];
    let report = report(&[&flags[..], &["--output-tokens", "2", "--input-tokens", "10"]].concat()).await;
    let target = &report.targets[0];
    let why = target.broke.as_ref().expect("a step alone takes longer than the limit");
    assert!(why.starts_with("at 1 clients: ") && why.contains("above the limit of 1ms"), "{why}");
    assert_eq!(target.sweep.iter().map(|step| step.concurrency).collect::<Vec<_>>(), [1]);
}

#[tokio::test]
async fn failures_are_counted_by_kind() {
    let models = r#"{"data":[{"id":"m"}]}"#;
    let unfinished = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
    for (answer, kind) in [
        (http("429 Too Many Requests", "{}"), "status 429"),
        (http("200 OK", unfinished), "truncated"),
        (http("200 OK", "data: {\"error\":{}}\n\n"), "error event"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\ndata: {}\n\n".to_owned(), "broken"),
    ] {
        let (address, _) = saying(answer, 1).await;
        let target = format!("http://{address}");
        let flags = ["sustained", "--target", &target, "--model", "m", "--requests", "3", "--concurrency", "1", "--warm-up", "0s"];
        let report = report(&flags).await;
        assert_eq!(only_totals(&report).failed, [(kind.to_owned(), 3)].into(), "{kind}");
    }
    let (address, _) = saying(http("200 OK", models), usize::MAX).await;
    let target = format!("http://{address}");
    let report = report(&["sustained", "--target", &target, "--requests", "2", "--no-stream", "--warm-up", "0s"]).await;
    assert_eq!(report.targets[0].model, "m");
    assert_eq!(only_totals(&report).failed, [("truncated".to_owned(), 2)].into(), "it is no answer");
}

#[tokio::test]
async fn a_connection_closed_between_answers_is_replaced() {
    let answer = http(
        "200 OK",
        r#"{"choices":[{"message":{"content":"a"},"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":1}}"#,
    );
    for (answers, connections) in [(1, 3..=6), (usize::MAX, 1..=4)] {
        let (address, seen) = saying(answer.clone(), answers).await;
        let target = format!("http://{address}");
        let flags =
            ["sustained", "--target", &target, "--model", "m", "--requests", "3", "--concurrency", "1", "--warm-up", "0s", "--no-stream"];
        let report = report(&flags).await;
        assert_eq!(only_totals(&report).complete, 3, "{:?}", only_totals(&report));
        // One connection is for the models, and one for metrics.
        let seen = seen.load(Ordering::SeqCst);
        assert!(connections.contains(&seen), "{seen} connections for {answers} answers each");
    }
}

#[tokio::test]
async fn a_request_that_takes_too_long_has_failed() {
    let engine = RunningEngine::start(&["--sim-step-ms", "50"]).await;
    let target = engine.target();
    let flags =
        ["sustained", "--target", &target, "--requests", "2", "--warm-up", "0s", "--request-timeout", "200ms", "--output-tokens", "100"];
    let report = report(&flags).await;
    let all = only_totals(&report);
    assert_eq!(all.failed, [("too late".to_owned(), 2)].into());
    assert_eq!(all.ttft_ms.count, 2, "though their first token came");
}

#[tokio::test]
async fn a_cancelled_measurement_leaves_no_request_behind() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = format!("http://{}", listener.local_addr().unwrap());
    let flags = ["sustained", "--target", &target, "--model", "m", "--concurrency", "1", "--warm-up", "0s"];
    let args = parsed(&flags);
    let mut connection = None;
    let engine = async {
        while connection.is_none() {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = vec![0; 4096];
            let read = stream.read(&mut request).await.unwrap();
            if request[..read].starts_with(b"POST") {
                connection = Some(stream);
            } else {
                stream.write_all(http("404 Not Found", "{}").as_bytes()).await.unwrap();
            }
        }
    };
    tokio::select! {
        report = run(&args, drop) => panic!("nothing was answered, and yet it ended: {:?}", report.map(|report| report.scenario)),
        () = engine => {}
    }
    let read_on = connection.unwrap();
    let closed = async {
        while matches!(read_on.try_read(&mut [0; 4096]), Err(_) | Ok(1..)) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(PATIENCE, closed).await.expect("the connection is closed");
}

#[tokio::test]
async fn requests_that_never_began_count_as_failed() {
    let engine = RunningEngine::start(&["--sim-step-ms", "50"]).await;
    let target = engine.target();
    let report = report(&[
        "burst",
        "--size",
        "9",
        "--every",
        "10s",
        "--target",
        &target,
        "--concurrency",
        "1",
        "--duration",
        "100ms",
        "--warm-up",
        "0s",
        "--request-timeout",
        "300ms",
        "--output-tokens",
        "1000",
    ])
    .await;
    assert_eq!(only_totals(&report).failed, [("too late".to_owned(), 9)].into());
}

#[tokio::test]
async fn a_missing_target_is_named() {
    let error = run(&parsed(&["sustained", "--target", "unix:/nowhere/engine.sock"]), drop).await.unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }) && error.to_string().contains("unix:/nowhere/engine.sock"), "{error}");
    let (address, _) = saying(http("404 Not Found", "{}"), usize::MAX).await;
    let target = format!("http://{address}");
    let error = run(&parsed(&["sustained", "--target", &target]), drop).await.unwrap_err();
    assert!(error.to_string().contains("--model"), "{error}");
    let error = run(&parsed(&["sustained", "--target", &target, "--model", "m", "--metrics", &target]), drop).await.unwrap_err();
    assert!(matches!(error, Error::NoMetrics { .. }), "{error}");
}
