//! Tests of the whole engine over its socket, and the harness for them.

mod lifecycle;
mod operate;
mod strictness;
mod structured;
mod wire;

use std::path::PathBuf;
use std::time::Duration;

use http::StatusCode;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::{Engine, EngineArgs, Error};

const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) fn fixture(name: &str) -> Vec<u8> {
    let path = format!("{}/../tests/fixtures/vllm/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(&path).unwrap_or_else(|error| panic!("cannot read {path}: {error}"))
}

pub(crate) fn fixture_text(name: &str) -> String {
    String::from_utf8(fixture(name)).unwrap()
}

/// An engine on a socket in its own directory.
pub(crate) struct RunningEngine {
    pub(crate) socket: PathBuf,
    pub(crate) shutdown: CancellationToken,
    pub(crate) ended: JoinHandle<Result<(), Error>>,
    pub(crate) directory: TempDir,
}

impl RunningEngine {
    /// Starts an engine with fast steps and waits until it is ready.
    pub(crate) async fn start(flags: &[&str]) -> Self {
        let engine = Self::launch(flags);
        let ready = async {
            while UnixStream::connect(&engine.socket).await.is_err() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(PATIENCE, ready).await.expect("the engine becomes ready");
        engine
    }

    pub(crate) fn launch(flags: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("engine.sock");
        let args = EngineArgs::from_flags(&engine_flags(&socket, flags));
        let shutdown = CancellationToken::new();
        let stop = shutdown.clone().cancelled_owned();
        let engine = Engine::bind(args).expect("the engine binds");
        let ended = tokio::spawn(engine.run(stop));
        Self { socket, shutdown, ended, directory }
    }

    /// Sends a request on a separate connection and reads the answer to its end.
    pub(crate) async fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> Answer {
        let mut stream = self.open(method, path, headers, body).await;
        let mut bytes = Vec::new();
        let reading = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut bytes));
        reading.await.expect("the answer ends").unwrap();
        Answer::parse(&bytes)
    }

    pub(crate) async fn post(&self, path: &str, body: &str) -> Answer {
        self.send("POST", path, "", body).await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send("GET", path, "", "").await
    }

    /// Sends a request and leaves the answer unread.
    pub(crate) async fn open(&self, method: &str, path: &str, headers: &str, body: &str) -> UnixStream {
        let mut stream = UnixStream::connect(&self.socket).await.unwrap();
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n{headers}\r\n{body}"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }

    /// Value of a metric without further labels.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        let answer = self.get(&format!("/metrics/?name[]={name}")).await;
        let text = String::from_utf8(answer.body).unwrap();
        let line = text.lines().find(|line| !line.starts_with('#')).expect("the metric exists");
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    }

    /// Waits until a gauge has a value.
    pub(crate) async fn wait_for_metric(&self, name: &str, value: f64) {
        self.wait_for(name, &format!("becomes {value}"), |seen| (seen - value).abs() < f64::EPSILON).await;
    }

    /// Waits until a counter has reached a value, which it may pass between two reads.
    pub(crate) async fn wait_for_count(&self, name: &str, least: f64) {
        self.wait_for(name, &format!("reaches {least}"), |seen| seen >= least).await;
    }

    async fn wait_for(&self, name: &str, what: &str, holds: impl Fn(f64) -> bool) {
        let waiting = async {
            while !holds(self.metric(name).await) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(PATIENCE, waiting).await.unwrap_or_else(|_| panic!("{name} {what}"));
    }

    pub(crate) async fn stop(self) -> Result<(), Error> {
        self.shutdown.cancel();
        tokio::time::timeout(PATIENCE, self.ended).await.expect("the engine ends").unwrap()
    }
}

/// Flags of a fast engine on `socket`; later ones take precedence.
fn engine_flags(socket: &std::path::Path, flags: &[&str]) -> Vec<String> {
    let mut all: Vec<String> = ["--served-model-name", "tiny", "--uds"].map(str::to_owned).to_vec();
    all.push(socket.to_str().unwrap().to_owned());
    for (flag, value) in [("--sim-step-ms", "2"), ("--sim-start-ms", "0"), ("--max-model-len", "4096")] {
        if !flags.contains(&flag) {
            all.extend([flag.to_owned(), value.to_owned()]);
        }
    }
    // As an agent's plan gives them.
    all.extend(["--enable-auto-tool-choice", "--tool-call-parser", "hermes"].map(str::to_owned));
    all.extend(flags.iter().map(|flag| (*flag).to_owned()));
    all
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    /// Names and values, sorted, without the date.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// HTTP chunks, if the body came in chunks.
    pub(crate) chunks: Vec<String>,
    /// Whether the body has its declared end.
    pub(crate) complete: bool,
}

impl Answer {
    pub(crate) fn parse(bytes: &[u8]) -> Self {
        let head_end = bytes.windows(4).position(|window| window == b"\r\n\r\n").expect("a whole head");
        let head = std::str::from_utf8(&bytes[..head_end]).unwrap();
        let mut lines = head.split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let mut headers: Vec<(String, String)> = lines
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .filter(|(name, _)| name != "date")
            .collect();
        headers.sort();
        let mut answer = Self { status, headers, body: Vec::new(), chunks: Vec::new(), complete: true };
        let rest = &bytes[head_end + 4..];
        if answer.header("transfer-encoding") == Some("chunked") {
            answer.read_chunks(rest);
        } else {
            answer.body = rest.to_vec();
        }
        answer
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).expect("a JSON body")
    }

    fn read_chunks(&mut self, mut rest: &[u8]) {
        self.complete = false;
        while let Some(end) = rest.windows(2).position(|window| window == b"\r\n") {
            let size = std::str::from_utf8(&rest[..end]).unwrap();
            let size = usize::from_str_radix(size, 16).unwrap();
            if size == 0 {
                self.complete = true;
                return;
            }
            let Some(chunk) = rest.get(end + 2..end + 2 + size) else { return };
            self.body.extend_from_slice(chunk);
            self.chunks.push(String::from_utf8(chunk.to_vec()).unwrap());
            rest = rest.get(end + 4 + size..).unwrap_or_default();
        }
    }
}
