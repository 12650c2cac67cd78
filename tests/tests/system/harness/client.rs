//! A client that reports everything: one HTTP/1.1 request a connection, over TCP or a Unix socket,
//! and the answer with the way it ended.

use std::net::SocketAddr;
use std::path::PathBuf;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST, HeaderMap};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::handshake;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::Channel;

use super::wait::soon;

/// Channel for gRPC over an existing connection, which has TLS.
pub(crate) async fn channel(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Channel {
    let mut stream = Some(TokioIo::new(stream));
    let connector = tower::service_fn(move |_| {
        let stream = stream.take();
        async move { stream.ok_or(std::io::Error::other("only one connection")) }
    });
    tonic::transport::Endpoint::from_static("http://tls.test").connect_with_connector(connector).await.unwrap()
}

#[derive(Debug, Clone)]
pub(crate) enum Endpoint {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
    /// How the body ended; `Err` if the connection broke before it was complete.
    pub(crate) ended: Result<(), String>,
}

/// An answer that has begun. Dropping it closes the connection.
#[derive(Debug)]
pub(crate) struct Answering {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    /// Bytes read so far.
    pub(crate) read: Vec<u8>,
    body: Incoming,
    _connection: AbortOnDropHandle<()>,
}

impl Endpoint {
    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.request(Request::get(path).body(Full::default()).unwrap()).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        self.request(json_request(path, body)).await
    }

    pub(crate) async fn request(&self, request: Request<Full<Bytes>>) -> Answer {
        self.send(request).await.finish().await
    }

    /// Sends a JSON request and returns its answer as soon as that begins.
    pub(crate) async fn open(&self, path: &str, body: &Value) -> Answering {
        self.send(json_request(path, body)).await
    }

    /// Sends a request and returns its answer as soon as that begins.
    pub(crate) async fn send(&self, request: Request<Full<Bytes>>) -> Answering {
        let what = format!("{} {} to {self:?}", request.method(), request.uri());
        match soon(&what, self.try_send(request)).await {
            Ok(answering) => answering,
            Err(error) => panic!("{what}: {error}"),
        }
    }

    /// Like `send`, for a request that may get no answer at all.
    pub(crate) async fn try_send(&self, request: Request<Full<Bytes>>) -> Result<Answering, String> {
        match self {
            Self::Tcp(address) => exchange(TcpStream::connect(address).await.map_err(words)?, request).await,
            Self::Unix(path) => exchange(UnixStream::connect(path).await.map_err(words)?, request).await,
        }
    }

    /// Sum of a metric over its labels; 0 if the page does not have it.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        let page = self.get("/metrics").await;
        assert_eq!(page.status, 200, "{}", page.text());
        let text = page.text();
        let samples = text.lines().filter(|line| line.split(['{', ' ']).next() == Some(name));
        samples.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    }
}

pub(crate) fn json_request(path: &str, body: &Value) -> Request<Full<Bytes>> {
    let body = Full::from(body.to_string());
    Request::builder().method(Method::POST).uri(path).header(CONTENT_TYPE, "application/json").body(body).unwrap()
}

/// Sends a request on any connection, and returns its answer as soon as that begins.
pub(crate) async fn exchange<S>(stream: S, mut request: Request<Full<Bytes>>) -> Result<Answering, String>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (mut sender, connection) = handshake(TokioIo::new(stream)).await.map_err(words)?;
    // The body's reader notices a break itself.
    let connection = AbortOnDropHandle::new(tokio::spawn(async { drop(connection.await) }));
    request.headers_mut().entry(HOST).or_insert("localhost".parse().unwrap());
    let (head, body) = sender.send_request(request).await.map_err(words)?.into_parts();
    Ok(Answering { status: head.status, headers: head.headers, read: Vec::new(), body, _connection: connection })
}

fn words(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl Answering {
    /// Reads one more piece; `false` at the end.
    pub(crate) async fn piece(&mut self) -> Result<bool, String> {
        match self.body.frame().await {
            Some(Ok(frame)) => {
                self.read.extend_from_slice(frame.data_ref().map_or(&[], |bytes| bytes));
                Ok(true)
            }
            Some(Err(error)) => Err(error.to_string()),
            None => Ok(false),
        }
    }

    /// Reads until at least `count` complete events have come.
    pub(crate) async fn events(&mut self, count: usize) {
        soon("more events", async {
            while String::from_utf8_lossy(&self.read).matches("\n\n").count() < count {
                assert_eq!(self.piece().await, Ok(true), "the answer ended early: {}", String::from_utf8_lossy(&self.read));
            }
        })
        .await;
    }

    pub(crate) async fn finish(mut self) -> Answer {
        let ended = soon("the rest of an answer", async {
            loop {
                match self.piece().await {
                    Ok(true) => {}
                    Ok(false) => return Ok(()),
                    Err(error) => return Err(error),
                }
            }
        });
        let ended = ended.await;
        Answer { status: self.status, headers: self.headers, body: self.read, ended }
    }
}

impl Answer {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// Message of an error in OpenAI's form.
    pub(crate) fn message(&self) -> String {
        let error = &self.json()["error"];
        assert_eq!(error["code"], self.status.as_u16(), "{error}");
        error["message"].as_str().unwrap_or_else(|| panic!("no message: {error}")).to_owned()
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    pub(crate) fn events(&self) -> Vec<String> {
        let text = self.text();
        let data = text.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
        data.map(str::to_owned).collect()
    }

    /// Fails unless this is a whole OpenAI stream.
    pub(crate) fn assert_whole_stream(&self) {
        let text = self.text();
        assert_eq!((self.status, &self.ended), (StatusCode::OK, &Ok(())), "{text}");
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        assert!(!text.contains("\"error\""), "{text}");
    }

    /// Fails unless this is a stream that was broken off: its last event is its only error, and
    /// nothing says that it is complete.
    pub(crate) fn assert_broken_stream(&self) {
        let text = self.text();
        assert_eq!(self.status, StatusCode::OK);
        assert!(self.ended.is_err(), "the answer ended cleanly: {text}");
        assert!(!text.contains("[DONE]"), "{text}");
        assert!(text.ends_with("\n\n"), "half an event at the end: {text}");
        let events = self.events();
        let errors: Vec<&String> = events.iter().filter(|event| event.starts_with("{\"error\"")).collect();
        assert_eq!(errors.len(), 1, "{text}");
        assert_eq!(events.last(), Some(errors[0]), "{text}");
        let error: Value = serde_json::from_str(errors[0]).unwrap();
        assert!(error["error"]["message"].is_string() && error["error"]["code"].is_u64(), "{error}");
        assert!(!text.contains("\"finish_reason\":\"abort\""), "{text}");
    }
}

/// Sends `bytes` unchanged and reads until the other side closes.
pub(crate) async fn raw(address: SocketAddr, bytes: &[u8]) -> String {
    soon("the end of a raw exchange", async {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        let mut answer = Vec::new();
        // A reset after the answer counts as its end.
        let _ = stream.read_to_end(&mut answer).await;
        String::from_utf8_lossy(&answer).into_owned()
    })
    .await
}
