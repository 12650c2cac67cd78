//! `hostler batch` from the command line: killed, stopped, waiting for its fleet, and refused.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::harness::{Fleet, MODEL, Program, Setup, Workplace, chat, until};

/// Tokens of the answer to a request: as many as its number says.
fn tokens(number: usize) -> usize {
    number % 7 + 1
}

fn request(number: usize) -> Value {
    json!({"custom_id": format!("request-{number}"), "method": "POST", "url": "/v1/chat/completions", "body": chat(tokens(number))})
}

/// A cheap request, whose prompt is tokens already.
fn cheap_request(number: usize) -> Value {
    let body = json!({"model": MODEL, "prompt": [number, 1, 2], "max_tokens": tokens(number)});
    json!({"custom_id": format!("request-{number}"), "method": "POST", "url": "/v1/completions", "body": body})
}

struct Batch {
    workplace: Workplace,
    input: String,
    output: PathBuf,
    target: String,
}

impl Batch {
    fn new(target: &str, requests: impl IntoIterator<Item = Value>) -> Self {
        let workplace = Workplace::new();
        let lines: String = requests.into_iter().map(|request| format!("{request}\n")).collect();
        let (input, output) = (workplace.file("in.jsonl", &lines), workplace.path().join("out.jsonl"));
        Self { workplace, input, output, target: target.to_owned() }
    }

    fn of_fleet(fleet: &Fleet, requests: impl IntoIterator<Item = Value>) -> Self {
        Self::new(&format!("http://{}/v1", fleet.routers[0].edge), requests)
    }

    fn start(&self, name: &str, further: &[&str]) -> Program {
        let files = ["batch", &self.input, self.output.to_str().unwrap(), "--target", &self.target];
        self.workplace.start(name, &[&files[..], further].concat())
    }

    /// Lines of the journal after its first, or of the output.
    fn journaled(&self) -> usize {
        if self.output.exists() {
            return self.lines().len();
        }
        let journal = fs::read(self.workplace.path().join("out.jsonl.partial")).unwrap_or_default();
        journal.iter().filter(|byte| **byte == b'\n').count().saturating_sub(1)
    }

    async fn until_journaled(&self, count: usize) {
        until(&format!("{count} answers"), async || if self.journaled() >= count { Ok(()) } else { Err(self.journaled().to_string()) })
            .await;
    }

    fn lines(&self) -> Vec<Value> {
        read_lines(&self.output)
    }
}

fn read_lines(path: &Path) -> Vec<Value> {
    fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_killed_three_times_answers_each_request_once() {
    let fleet = Fleet::start(Setup::agents(2)).await;
    let batch = Batch::of_fleet(&fleet, (0..1_000).map(cheap_request));
    let seed = fastrand::u64(..);
    eprintln!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut before = 0;
    for life in 0..3 {
        let mut killed = batch.start(&format!("life{life}"), &["--concurrency", "16"]);
        batch.until_journaled(before + random.usize(1..250)).await;
        if life == 1 {
            fleet.kill("n0/0").await;
            batch.until_journaled(batch.journaled() + 1).await;
        }
        killed.signal(Signal::KILL);
        assert!(!killed.ended().await.success() && !batch.output.exists(), "{}", killed.stderr());
        before = batch.journaled();
    }
    let mut last = batch.start("last", &["--concurrency", "16"]);
    for count in (before..=1_000).step_by(50) {
        batch.until_journaled(count).await;
    }
    assert_eq!(last.ended().await.code(), Some(0), "{}", last.stderr());
    // The last line may have been torn.
    let resumed = |answered: usize| last.stderr().contains(&format!("{answered} of 1000 requests were answered before"));
    assert!(resumed(before) || resumed(before - 1), "{before}: {}", last.stderr());

    let lines = batch.lines();
    assert_eq!(lines.len(), 1_000);
    for (number, line) in lines.iter().enumerate() {
        assert_eq!((&line["custom_id"], &line["error"]), (&json!(format!("request-{number}")), &Value::Null));
        let response = &line["response"];
        assert_eq!(response["status_code"], 200, "{line}");
        assert_eq!(response["body"]["usage"]["completion_tokens"], tokens(number), "{line}");
        assert_eq!(response["request_id"].as_str().map(str::len), Some(16), "{line}");
    }
    let left: Vec<_> = fs::read_dir(batch.workplace.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| name == "out.jsonl.partial" || name == "out.jsonl.whole"), "{left:?}");
    fleet.until_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_line_is_named_before_anything_is_sent() {
    let target = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    target.set_nonblocking(true).unwrap();
    let mut stream = request(1);
    stream["body"]["stream"] = true.into();
    let batch = Batch::new(&format!("http://{}", target.local_addr().unwrap()), [request(0), stream, request(0)]);
    let mut refused = batch.start("batch", &[]);
    assert_eq!(refused.ended().await.code(), Some(1));
    let message = refused.stderr();
    assert!(message.contains("line 2: its body asks for a stream") && message.contains("line 3: line 1 has its custom_id"), "{message}");
    assert_eq!(target.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "nothing connected");
    assert!(!batch.output.exists() && batch.journaled() == 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_requests_have_output_lines_and_an_exit_code() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let mut unknown = request(1);
    unknown["body"]["model"] = "nobody".into();
    let batch = Batch::of_fleet(&fleet, [request(0), unknown, request(2)]);
    let mut ended = batch.start("batch", &[]);
    assert_eq!(ended.ended().await.code(), Some(3), "{}", ended.stderr());
    assert!(ended.stderr().contains("1 of 3 requests failed"), "{}", ended.stderr());
    let statuses: Vec<Value> = batch.lines().iter().map(|line| line["response"]["status_code"].clone()).collect();
    assert_eq!(statuses, [200, 404, 200]);
    assert!(batch.lines()[1]["response"]["body"]["error"]["message"].as_str().unwrap().contains("nobody"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_output_has_one_writer_and_a_signal_drains_it() {
    let fleet = Fleet::start(Setup::agents(1).engine("--sim-step-ms 30")).await;
    let batch = Batch::of_fleet(&fleet, (0..500).map(cheap_request));
    let mut first = batch.start("first", &["--concurrency", "4", "--grace", "20s"]);
    batch.until_journaled(1).await;
    let mut second = batch.start("second", &[]);
    assert_eq!(second.ended().await.code(), Some(1));
    assert!(second.stderr().contains("another process writes"), "{}", second.stderr());
    first.signal(Signal::TERM);
    assert_eq!(first.ended().await.code(), Some(4));
    assert!(first.stderr().contains("stopping: answers on their way have 20s"), "{}", first.stderr());
    let answered = batch.journaled();
    let message = format!("stopped with {answered} of 500 requests answered");
    assert!(first.stderr().contains(&message) && first.stderr().contains("the same command goes on"), "{message}: {}", first.stderr());
    assert!(!batch.output.exists());
    let completed = fleet.routers[0].metric("hostler_in_flight").await;
    assert_eq!(completed, 0.0, "no answer was given up");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_waits_for_its_target_and_says_so() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let place = Workplace::new();
    let socket = place.path().join("engine.sock");
    let batch = Batch::new(&format!("unix:{}", socket.display()), (0..5).map(cheap_request));
    let mut waiting = batch.start("batch", &[]);
    until("the batch waits", async || {
        let message = waiting.stderr();
        if message.contains("5 retry later: No such file") { Ok(()) } else { Err(message) }
    })
    .await;
    std::os::unix::fs::symlink(fleet.replica("n0/0").await.socket, &socket).unwrap();
    assert_eq!(waiting.ended().await.code(), Some(0), "{}", waiting.stderr());
    assert!(batch.lines().iter().all(|line| line["response"]["body"]["model"] == MODEL));
}
