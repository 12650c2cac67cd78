//! A client that reports everything: it sends a request, reads the answer at its own pace or
//! leaves, and records the bytes and the end.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST, RETRY_AFTER};
use http::{Method, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio_util::task::AbortOnDropHandle;

use crate::questions::SentRequest;

/// Reading pace of a client.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Pace {
    /// Time after which the client leaves.
    pub(crate) leaves: Option<Duration>,
    /// Pause before each piece.
    pub(crate) pause: Duration,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum AnswerEnd {
    /// The answer is complete by the rules of HTTP.
    Clean,
    /// The connection or the stream broke, or there was none.
    Broken(String),
    /// The client left first.
    Left,
    /// The answer did not end within the client's patience.
    #[default]
    Late,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct ObservedAnswer {
    /// Status of the answer; `None` if no answer has begun.
    pub(crate) status: Option<u16>,
    pub(crate) may_retry: bool,
    pub(crate) body: Vec<u8>,
    pub(crate) ended: AnswerEnd,
    /// Time from sending to the first event with text, or to the whole of a plain answer.
    pub(crate) first_token: Option<Duration>,
}

enum Connection {
    One(http1::SendRequest<Full<Bytes>>, #[expect(dead_code, reason = "the connection lives as long")] AbortOnDropHandle<()>),
    Two(http2::SendRequest<Full<Bytes>>, #[expect(dead_code, reason = "the connection lives as long")] AbortOnDropHandle<()>),
}

pub(crate) struct Client {
    address: SocketAddr,
    /// Whether the client uses HTTP/2.
    two: bool,
    connection: Option<Connection>,
}

impl Client {
    pub(crate) fn new(address: SocketAddr, two: bool) -> Self {
        Self { address, two, connection: None }
    }

    pub(crate) async fn ask(&mut self, question: &SentRequest, pace: Pace, patience: Duration) -> ObservedAnswer {
        let mut seen = ObservedAnswer::default();
        let most = pace.leaves.unwrap_or(patience);
        let request = self.request(Method::POST, question.path, question.body.clone());
        let ended = tokio::time::timeout(most, self.exchange(request, pace, &mut seen)).await;
        seen.ended = match ended {
            Ok(Ok(())) => AnswerEnd::Clean,
            Ok(Err(why)) => AnswerEnd::Broken(why),
            Err(_) if pace.leaves.is_some() => AnswerEnd::Left,
            Err(_) => AnswerEnd::Late,
        };
        if seen.ended != AnswerEnd::Clean {
            self.connection = None;
        }
        seen
    }

    pub(crate) async fn get(&mut self, path: &str, patience: Duration) -> Option<String> {
        let mut seen = ObservedAnswer::default();
        let request = self.request(Method::GET, path, String::new());
        let got = tokio::time::timeout(patience, self.exchange(request, Pace::default(), &mut seen)).await;
        if !matches!(got, Ok(Ok(()))) {
            self.connection = None;
        }
        (matches!(got, Ok(Ok(()))) && seen.status == Some(200)).then(|| String::from_utf8_lossy(&seen.body).into_owned())
    }

    pub(crate) fn hang_up(&mut self) {
        self.connection = None;
    }

    fn request(&self, method: Method, path: &str, body: String) -> Request<Full<Bytes>> {
        let authority = self.address.to_string();
        let uri = if self.two { format!("http://{authority}{path}") } else { path.to_owned() };
        let request = Request::builder().method(method).uri(uri).header(CONTENT_TYPE, "application/json");
        let request = if self.two { request } else { request.header(HOST, authority) };
        request.body(Full::from(body)).expect("paths are written in code")
    }

    async fn exchange(&mut self, request: Request<Full<Bytes>>, pace: Pace, seen: &mut ObservedAnswer) -> Result<(), String> {
        let begun = Instant::now();
        let answer = self.send(request).await?;
        let streams = answer.headers().get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
        seen.status = Some(answer.status().as_u16());
        seen.may_retry = answer.headers().contains_key(RETRY_AFTER);
        let mut body = answer.into_body();
        loop {
            if !pace.pause.is_zero() {
                tokio::time::sleep(pace.pause).await;
            }
            match body.frame().await {
                Some(Ok(frame)) => {
                    seen.body.extend_from_slice(frame.data_ref().map_or(&[], |bytes| bytes));
                    // The first event of a chat has only a role.
                    if streams && seen.first_token.is_none() && has_text(&seen.body) {
                        seen.first_token = Some(begun.elapsed());
                    }
                }
                Some(Err(error)) => return Err(error.to_string()),
                None => {
                    seen.first_token = seen.first_token.or(Some(begun.elapsed()));
                    return Ok(());
                }
            }
        }
    }

    async fn send(&mut self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, String> {
        let free = match &mut self.connection {
            Some(Connection::One(sender, _)) => sender.ready().await.is_ok(),
            Some(Connection::Two(sender, _)) => sender.ready().await.is_ok(),
            None => false,
        };
        if !free {
            self.connection = Some(self.connect().await?);
        }
        match &mut self.connection {
            Some(Connection::One(sender, _)) => sender.send_request(request).await.map_err(words),
            Some(Connection::Two(sender, _)) => sender.send_request(request).await.map_err(words),
            None => Err("no connection".into()),
        }
    }

    async fn connect(&self) -> Result<Connection, String> {
        let stream = TcpStream::connect(self.address).await.map_err(words)?;
        stream.set_nodelay(true).map_err(words)?;
        let stream = TokioIo::new(stream);
        // A break shows in the requests on the connection.
        Ok(if self.two {
            let (sender, driver) =
                http2::Builder::new(TokioExecutor::new()).timer(TokioTimer::new()).handshake(stream).await.map_err(words)?;
            Connection::Two(sender, AbortOnDropHandle::new(tokio::spawn(async { drop(driver.await) })))
        } else {
            let (sender, driver) = http1::handshake(stream).await.map_err(words)?;
            Connection::One(sender, AbortOnDropHandle::new(tokio::spawn(async { drop(driver.await) })))
        })
    }
}

/// Whether an event with text has come, of either API.
fn has_text(body: &[u8]) -> bool {
    let text = String::from_utf8_lossy(body);
    ["\"content\":\"", "\"text\":\""]
        .iter()
        .any(|field| text.match_indices(field).any(|(at, _)| !text[at + field.len()..].starts_with('"')))
}

fn words(error: impl std::fmt::Display) -> String {
    error.to_string()
}
