//! The client against sockets that answer, close, hang and send too much.
//!
//! The scripted socket here also serves the tests of the probes.

use std::path::PathBuf;
use std::sync::Arc;

use futures_util::future::poll_immediate;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixSocket, UnixStream};
use tokio_util::task::AbortOnDropHandle;

use super::*;

/// Behaviour of a scripted engine: given the path, it returns the status and the body, or nothing
/// to hang.
pub(crate) type Script = dyn FnMut(&str) -> Option<(u16, String)> + Send;

/// An engine that answers by a script, with one thread per connection, until dropped.
pub(crate) struct Scripted {
    pub(crate) socket: PathBuf,
    pub(crate) requests: Arc<Mutex<Vec<String>>>,
    _directory: Option<tempfile::TempDir>,
    _server: AbortOnDropHandle<()>,
}

impl Scripted {
    pub(crate) fn start(script: Box<Script>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut scripted = Self::at(&directory.path().join("s"), script);
        scripted._directory = Some(directory);
        scripted
    }

    /// Answers at a socket in a directory that the caller owns.
    pub(crate) fn at(socket: &Path, script: Box<Script>) -> Self {
        let listener = UnixListener::bind(socket).unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let script = Arc::new(Mutex::new(script));
        let paths = Arc::clone(&requests);
        let server = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(talk(stream, Arc::clone(&script), Arc::clone(&paths)));
            }
        });
        Self { socket: socket.to_owned(), requests, _directory: None, _server: AbortOnDropHandle::new(server) }
    }
}

async fn talk(mut stream: UnixStream, script: Arc<Mutex<Box<Script>>>, requests: Arc<Mutex<Vec<String>>>) {
    let mut received = Vec::new();
    loop {
        while !is_whole(&received) {
            if stream.read_buf(&mut received).await.unwrap_or(0) == 0 {
                return;
            }
        }
        let request = String::from_utf8(std::mem::take(&mut received)).unwrap();
        let path = request.split(' ').nth(1).unwrap().to_owned();
        let answer = (script.lock())(&path);
        requests.lock().push(path);
        let Some((status, body)) = answer else {
            return std::future::pending().await;
        };
        let length = body.len();
        let reply = format!("HTTP/1.1 {status} X\r\ncontent-length: {length}\r\n\r\n{body}");
        if stream.write_all(reply.as_bytes()).await.is_err() {
            return;
        }
    }
}

/// Whether a request has arrived with its whole body.
fn is_whole(received: &[u8]) -> bool {
    let text = String::from_utf8_lossy(received).to_ascii_lowercase();
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).map_or(0, |length| length.parse().unwrap());
    body.len() >= length
}

const LONG: Duration = Duration::from_secs(20);

/// An engine that has stopped accepting, and whose accept queue is full.
pub(crate) struct FullQueue {
    pub(crate) socket: PathBuf,
    _waiting: Vec<UnixStream>,
    _listener: UnixListener,
    _directory: tempfile::TempDir,
}

impl FullQueue {
    pub(crate) async fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let socket = UnixSocket::new_stream().unwrap();
        socket.bind(&path).unwrap();
        let listener = socket.listen(1).unwrap();
        let mut waiting = Vec::new();
        while let Ok(stream) = UnixStream::connect(&path).await {
            waiting.push(stream);
        }
        Self { socket: path, _waiting: waiting, _listener: listener, _directory: directory }
    }
}

#[tokio::test]
async fn replies_of_any_status_come_back_over_one_connection() {
    let mut statuses = [200, 503, 404].into_iter();
    let engine = Scripted::start(Box::new(move |path| statuses.next().map(|status| (status, format!("at {path}")))));
    let mut client = ApiClient::new(&engine.socket);
    for expected in [200, 503, 404] {
        let reply = client.get("/metrics/?name[]=a:b", LONG).await.unwrap();
        assert_eq!(reply.status.as_u16(), expected);
        assert_eq!(reply.body, "at /metrics/?name[]=a:b");
    }
    assert_eq!(client.client.idle.lock().len(), 1);
}

#[tokio::test]
async fn a_hanging_engine_costs_exactly_the_deadline() {
    let engine = Scripted::start(Box::new(|_| None));
    let mut client = ApiClient::new(&engine.socket);
    let error = client.get("/health", Duration::from_millis(50)).await.unwrap_err();
    assert!(matches!(error, FetchError::Timeout(_)), "{error}");
    assert!(client.client.idle.lock().is_empty());
}

#[tokio::test]
async fn an_engine_that_does_not_listen_is_a_connect_error() {
    let directory = tempfile::tempdir().unwrap();
    let mut client = ApiClient::new(&directory.path().join("s"));
    let error = client.get("/health", LONG).await.unwrap_err();
    assert!(matches!(error, FetchError::Connect(_)), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_full_accept_queue_is_a_timeout() {
    let engine = FullQueue::start().await;
    let mut client = ApiClient::new(&engine.socket);
    for (deadline, waited) in [(Duration::from_secs(5), Duration::from_secs(5)), (LONG, CONNECT_TIMEOUT)] {
        let error = client.get("/health", deadline).await.unwrap_err();
        assert!(matches!(error, FetchError::Timeout(passed) if passed == waited), "{error}");
    }
}

#[tokio::test]
async fn a_closed_connection_is_replaced_without_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let listener = UnixListener::bind(&socket).unwrap();
    let server = tokio::spawn(async move {
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0_u8; 1024];
            assert!(stream.read(&mut request).await.unwrap() > 0);
            let reply = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
            stream.write_all(reply).await.unwrap();
        }
    });
    let mut client = ApiClient::new(&socket);
    for _ in 0..2 {
        assert_eq!(client.get("/health", LONG).await.unwrap().body, "ok");
    }
    server.await.unwrap();
}

const WHOLE: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

/// An engine that the test plays, and a client of it.
struct Played {
    listener: UnixListener,
    client: ApiClient,
    _directory: tempfile::TempDir,
}

impl Played {
    /// Fixture with the engine's end of a connection that the client has kept.
    async fn with_kept_connection() -> (Self, UnixStream) {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let mut client = ApiClient::new(&socket);
        let (reply, stream) = tokio::join!(client.get("/health", LONG), async {
            let mut stream = listener.accept().await.unwrap().0;
            reply_once(&mut stream, WHOLE).await;
            stream
        });
        assert_eq!(reply.unwrap().body, "ok");
        (Self { listener, client, _directory: directory }, stream)
    }

    async fn is_asked_again(&self) -> bool {
        poll_immediate(self.listener.accept()).await.is_some()
    }
}

/// Reads a request and sends this reply.
async fn reply_once(stream: &mut UnixStream, reply: &str) {
    assert!(stream.read(&mut [0_u8; 1024]).await.unwrap() > 0);
    stream.write_all(reply.as_bytes()).await.unwrap();
}

#[tokio::test]
async fn a_request_is_resent_when_a_kept_connection_ends_unanswered() {
    let (mut played, mut kept) = Played::with_kept_connection().await;
    let (reply, ()) = tokio::join!(played.client.get("/health", LONG), async {
        reply_once(&mut kept, "").await;
        drop(kept);
        let mut stream = played.listener.accept().await.unwrap().0;
        reply_once(&mut stream, WHOLE).await;
    });
    assert_eq!(reply.unwrap().body, "ok");
}

#[tokio::test]
async fn a_request_on_a_new_connection_is_sent_only_once() {
    let (mut played, kept) = Played::with_kept_connection().await;
    drop(kept);
    let (reply, ()) = tokio::join!(played.client.get("/health", LONG), async {
        let mut stream = played.listener.accept().await.unwrap().0;
        reply_once(&mut stream, "").await;
    });
    assert!(!played.is_asked_again().await);
    assert!(matches!(reply, Err(FetchError::Broken(_))), "{reply:?}");
}

#[tokio::test]
async fn a_request_is_not_resent_after_part_of_its_answer() {
    let (mut played, mut kept) = Played::with_kept_connection().await;
    let (reply, ()) = tokio::join!(played.client.get("/health", LONG), async {
        reply_once(&mut kept, "HTTP/1.1 2").await;
        drop(kept);
    });
    assert!(!played.is_asked_again().await);
    assert!(matches!(reply, Err(FetchError::Broken(_))), "{reply:?}");
}

#[tokio::test]
async fn a_reply_over_the_cap_is_an_error() {
    let engine = Scripted::start(Box::new(|_| Some((200, "x".repeat(MAX_BODY_BYTES + 1)))));
    let mut client = ApiClient::new(&engine.socket);
    let error = client.get("/metrics", LONG).await.unwrap_err();
    assert!(matches!(error, FetchError::Broken(_)), "{error}");
}
