//! Whole batches, against targets that answer all requests alike.

use std::fs;
use std::path::PathBuf;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use super::*;

/// A target that answers every request with an empty object.
struct FakeTarget {
    url: String,
    /// Head and body of each request.
    heard: Arc<Mutex<Vec<String>>>,
    _answering: JoinSet<()>,
}

impl FakeTarget {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/gateway/v1", listener.local_addr().unwrap());
        let heard = Arc::new(Mutex::new(Vec::new()));
        let (hears, mut answering) = (heard.clone(), JoinSet::new());
        answering.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let hears = hears.clone();
                connections.spawn(async move {
                    let mut request = Vec::new();
                    while stream.read_buf(&mut request).await.unwrap() > 0 {
                        if request.ends_with(b"}") {
                            hears.lock().push(String::from_utf8(std::mem::take(&mut request)).unwrap());
                            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await.unwrap();
                        }
                    }
                });
            }
        });
        Self { url, heard, _answering: answering }
    }
}

struct Files {
    folder: TempDir,
    args: BatchArgs,
    target: Target,
}

impl Files {
    fn new(target: &FakeTarget, requests: &[Value]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("in"), requests.iter().map(|request| format!("{request}\n")).collect::<String>()).unwrap();
        let args = BatchArgs {
            input: at("in"),
            output: at("out"),
            key_file: None,
            concurrency: 2,
            deadline: Duration::from_secs(60),
            request_timeout: Duration::from_secs(60),
            grace: Duration::from_secs(60),
            quiet: true,
        };
        Self { folder, args, target: target.url.parse().unwrap() }
    }

    async fn run(&self, shutdown: &Shutdown) -> Result<Summary, BatchError> {
        let key = HeaderValue::from_static("Bearer secret");
        Batch::open(&self.args, self.target.clone())?.run(Some(key), shutdown, &mut ProgressWriter::new(true)).await
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

fn request(id: usize, url: &str, body: Value) -> Value {
    json!({"custom_id": id.to_string(), "method": "POST", "url": url, "body": body})
}

fn requests(count: usize) -> Vec<Value> {
    (0..count).map(|id| request(id, "/v1/completions", json!({"prompt": id}))).collect()
}

#[tokio::test]
async fn batch_requests_have_low_priority_unless_they_set_their_own() {
    let target = FakeTarget::start().await;
    let [plain, own] = [json!({"input": "a"}), json!({"input": "b", "priority": 3})];
    let files = Files::new(&target, &[request(0, "/v1/embeddings", plain), request(1, "/v1/embeddings", own)]);
    assert_eq!(files.run(&Shutdown::new()).await.unwrap(), Summary { requests: 2, failed: 0 });
    let heard = target.heard.lock().clone();
    assert_eq!(heard.len(), 2);
    for request in heard {
        assert!(request.starts_with("POST /gateway/v1/embeddings HTTP/1.1\r\n"), "{request}");
        assert!(request.contains("\r\nauthorization: Bearer secret\r\n"), "{request}");
        assert_eq!(request.contains("\r\nx-hostler-priority: 100\r\n"), !request.ends_with(r#"{"input":"b","priority":3}"#), "{request}");
    }
}

#[tokio::test]
async fn a_request_answered_before_is_not_sent_again() {
    let target = FakeTarget::start().await;
    let files = Files::new(&target, &requests(5));
    let mut journal = Journal::open(&files.at("out.partial"), &Input::check(&files.args.input, &InputBounds::default()).unwrap()).unwrap();
    journal.append(1, b"{\"kept\":1}", true).unwrap();
    journal.append(3, b"{\"kept\":3}", false).unwrap();
    drop(journal);
    assert_eq!(files.run(&Shutdown::new()).await.unwrap(), Summary { requests: 5, failed: 1 });
    assert_eq!(target.heard.lock().len(), 3);
    let output = fs::read_to_string(files.at("out")).unwrap();
    let lines: Vec<&str> = output.lines().collect();
    assert_eq!((lines.len(), lines[1], lines[3]), (5, "{\"kept\":1}", "{\"kept\":3}"));
    assert!(lines[4].contains("\"custom_id\":\"4\""), "{output}");
}

#[tokio::test]
async fn a_batch_killed_after_writing_its_output_ends() {
    let target = FakeTarget::start().await;
    let files = Files::new(&target, &requests(1));
    let mut journal = Journal::open(&files.at("out.partial"), &Input::check(&files.args.input, &InputBounds::default()).unwrap()).unwrap();
    journal.append(0, b"{}", false).unwrap();
    drop(journal);
    fs::write(files.at("out"), "{}\n").unwrap();
    assert_eq!(files.run(&Shutdown::new()).await.unwrap(), Summary { requests: 1, failed: 0 });
    assert!(target.heard.lock().is_empty() && !files.at("out.partial").exists());
}

#[tokio::test]
async fn an_existing_output_is_never_replaced() {
    let target = FakeTarget::start().await;
    let files = Files::new(&target, &requests(2));
    fs::write(files.at("out"), "mine").unwrap();
    assert!(matches!(files.run(&Shutdown::new()).await, Err(BatchError::OutputExists(_))));
    assert!(!files.at("out.partial").exists());
    drop(Journal::open(&files.at("out.partial"), &Input::check(&files.args.input, &InputBounds::default()).unwrap()).unwrap());
    assert!(matches!(files.run(&Shutdown::new()).await, Err(BatchError::OutputExists(_))));
    assert_eq!(fs::read_to_string(files.at("out")).unwrap(), "mine");
    assert!(target.heard.lock().is_empty());
}

#[tokio::test]
async fn a_draining_batch_starts_nothing_and_reports_its_progress() {
    let target = FakeTarget::start().await;
    let files = Files::new(&target, &requests(2));
    let shutdown = Shutdown::new();
    shutdown.drain();
    let ended = files.run(&shutdown).await;
    assert!(matches!(ended, Err(BatchError::Stopped { answered: 0, total: 2, .. })), "{ended:?}");
    assert!(target.heard.lock().is_empty() && !files.at("out").exists());
}
