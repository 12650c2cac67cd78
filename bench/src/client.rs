//! One client: a connection that is kept open, and one request at a time on it. The connection is driven by the task that waits for the
//! answer and not by one of its own, so that an event costs one wake. Conversations of the `drive` and the `fleet`'s metrics go through it.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

use crate::events::{EventScanner, Reply, Usage};
use crate::sample::Outcome;
use crate::target::Place;

/// How long to wait for a connection.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest answer that is read in one piece; the pages of metrics of large fleets are some megabytes.
const LONGEST_ANSWER: usize = 64 << 20;

/// Why an exchange came to no answer.
#[derive(Debug, Error)]
pub(crate) enum ClientError {
    #[error(transparent)]
    Connect(std::io::Error),
    #[error("no connection within 10 s")]
    ConnectTimeout,
    #[error("no answer within {0:?}")]
    AnswerTimeout(Duration),
    #[error(transparent)]
    Http(#[from] hyper::Error),
    #[error("the answer cannot be read: {0}")]
    Body(Box<dyn std::error::Error + Send + Sync>),
    #[error("it answered {0}")]
    Status(StatusCode),
}

/// What is sent.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) method: Method,
    pub(crate) path: String,
    /// The whole value of `authorization`.
    pub(crate) key: Option<HeaderValue>,
    pub(crate) body: Bytes,
}

/// What is to be done with the answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reading {
    /// It comes as events.
    pub(crate) stream: bool,
    /// Its text is wanted, because the conversation goes on.
    pub(crate) keep_text: bool,
    /// It may take so long in all.
    pub(crate) most: Duration,
}

/// What became of a request. The times between events are in the client's `gaps`.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) outcome: Outcome,
    /// When the first event with text came.
    pub(crate) first: Option<Instant>,
    /// Events with text.
    pub(crate) events: u32,
    pub(crate) usage: Option<Usage>,
    pub(crate) text: String,
}

/// One client and its connection.
pub(crate) struct Client {
    place: Place,
    open: Option<Open>,
    /// Microseconds between each event with text and the next of the last answer; those that were read at once are 0 apart. Its memory
    /// serves one answer after the other.
    pub(crate) gaps: Vec<u32>,
}

/// A connection, until it ends.
type Connection = Pin<Box<dyn Future<Output = ()> + Send>>;

struct Open {
    sender: SendRequest<Full<Bytes>>,
    /// `None` when it has ended.
    connection: Option<Connection>,
    /// A request has been answered on it.
    used: bool,
}

impl Client {
    pub(crate) fn new(place: Place) -> Self {
        Self { place, open: None, gaps: Vec::new() }
    }

    /// Sends one request and reads its answer; `arrived` is told each number of events with text as they come, and whether they are the first.
    pub(crate) async fn ask(&mut self, call: Call, reading: Reading, arrived: impl Fn(u32, bool)) -> Answer {
        self.gaps.clear();
        let mut answer = Answer { outcome: Outcome::Broken, first: None, events: 0, usage: None, text: String::new() };
        let exchange = self.exchange(call, reading, &mut answer, arrived);
        match tokio::time::timeout(reading.most, exchange).await {
            Ok(outcome) => answer.outcome = outcome,
            Err(_) => answer.outcome = Outcome::TooLate,
        }
        // What else may still come on the connection would be taken for the answer to the next request.
        if !matches!(answer.outcome, Outcome::Complete | Outcome::Status(_)) {
            self.open = None;
        }
        answer
    }

    /// Gets a page within a time.
    pub(crate) async fn get(&mut self, path: &str, key: Option<HeaderValue>, most: Duration) -> Result<Bytes, ClientError> {
        let call = Call { method: Method::GET, path: path.to_owned(), key, body: Bytes::new() };
        let getting = async {
            let response = self.send(call).await?;
            let status = response.status();
            let body = self.whole(response.into_body()).await?;
            if status == StatusCode::OK { Ok(body) } else { Err(ClientError::Status(status)) }
        };
        let got = tokio::time::timeout(most, getting).await.unwrap_or(Err(ClientError::AnswerTimeout(most)));
        if !matches!(got, Ok(_) | Err(ClientError::Status(_))) {
            self.open = None;
        }
        got
    }

    async fn exchange(&mut self, call: Call, reading: Reading, answer: &mut Answer, arrived: impl Fn(u32, bool)) -> Outcome {
        let response = match self.send(call).await {
            Ok(response) => response,
            Err(ClientError::Connect(_) | ClientError::ConnectTimeout) => return Outcome::Unreachable,
            Err(_) => return Outcome::Broken,
        };
        let (head, body) = response.into_parts();
        if head.status == StatusCode::OK && reading.stream {
            return self.read_events(body, reading.keep_text, answer, arrived).await;
        }
        // An error is read to its end, too, so that the connection can be used again.
        let Ok(bytes) = self.whole(body).await else { return Outcome::Broken };
        if head.status != StatusCode::OK {
            return Outcome::Status(head.status.as_u16());
        }
        let Ok(reply) = serde_json::from_slice::<Reply>(&bytes) else { return Outcome::Broken };
        answer.usage = reply.usage;
        if reading.keep_text {
            reply.add_text(&mut answer.text);
        }
        reply.outcome()
    }

    /// Sends a request. When the target has just closed a connection that was kept open, which is its right, a new one is made.
    async fn send(&mut self, call: Call) -> Result<Response<Incoming>, ClientError> {
        let used = self.connect().await?;
        match self.try_send(&call).await {
            Err(error) if used && (error.is_canceled() || error.is_closed() || error.is_incomplete_message()) => {
                self.open = None;
                self.connect().await?;
                Ok(self.try_send(&call).await?)
            }
            sent => Ok(sent?),
        }
    }

    async fn try_send(&mut self, call: &Call) -> Result<Response<Incoming>, hyper::Error> {
        let host = match &self.place {
            Place::Tcp(authority) => authority.as_str(),
            Place::Unix(_) => "localhost",
        };
        let mut request = Request::new(Full::new(call.body.clone()));
        *request.method_mut() = call.method.clone();
        *request.uri_mut() = call.path.parse().unwrap_or_default();
        let headers = request.headers_mut();
        headers.insert(HOST, HeaderValue::from_str(host).unwrap_or(HeaderValue::from_static("localhost")));
        if call.method == Method::POST {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        if let Some(key) = &call.key {
            headers.insert(AUTHORIZATION, key.clone());
        }
        let open = self.open.as_mut().expect("it was connected by the caller");
        beside(&mut open.connection, open.sender.ready()).await?;
        let response = beside(&mut open.connection, open.sender.send_request(request)).await?;
        open.used = true;
        Ok(response)
    }

    /// Makes a connection unless there is one that seems to live; true for one that was used before.
    async fn connect(&mut self) -> Result<bool, ClientError> {
        if let Some(open) = &mut self.open {
            // Nobody has looked at it since the last answer.
            poll_fn(|context| {
                advance(&mut open.connection, context);
                Poll::Ready(())
            })
            .await;
            if open.connection.is_some() && !open.sender.is_closed() {
                return Ok(open.used);
            }
            self.open = None;
        }
        let opening = async {
            match &self.place {
                Place::Tcp(authority) => {
                    let stream = TcpStream::connect(authority).await.map_err(ClientError::Connect)?;
                    stream.set_nodelay(true).map_err(ClientError::Connect)?;
                    open(stream).await
                }
                Place::Unix(path) => open(UnixStream::connect(path).await.map_err(ClientError::Connect)?).await,
            }
        };
        let opened = tokio::time::timeout(CONNECT_TIMEOUT, opening).await;
        self.open = Some(opened.unwrap_or(Err(ClientError::ConnectTimeout))?);
        Ok(false)
    }

    async fn whole(&mut self, body: Incoming) -> Result<Bytes, ClientError> {
        let limited = Limited::new(body, LONGEST_ANSWER);
        let collected = match &mut self.open {
            Some(open) => beside(&mut open.connection, limited.collect()).await,
            None => limited.collect().await,
        };
        collected.map(http_body_util::Collected::to_bytes).map_err(ClientError::Body)
    }

    async fn read_events(&mut self, mut body: Incoming, keep_text: bool, answer: &mut Answer, arrived: impl Fn(u32, bool)) -> Outcome {
        let mut scanner = EventScanner::new(keep_text);
        let Some(open) = &mut self.open else { return Outcome::Broken };
        let mut last: Option<Instant> = None;
        let ended = loop {
            let frame = match frame(&mut body, &mut open.connection).await {
                None => break scanner.outcome(),
                Some(Ok(frame)) => frame,
                // A router breaks the connection after an error event; the event says more.
                Some(Err(_)) if scanner.outcome() == Outcome::ErrorEvent => break Outcome::ErrorEvent,
                Some(Err(_)) => break Outcome::Broken,
            };
            let Some(bytes) = frame.data_ref() else { continue };
            let Ok(events) = scanner.scan(bytes) else { break Outcome::Broken };
            if events == 0 {
                continue;
            }
            let now = Instant::now();
            match last {
                None => answer.first = Some(now),
                Some(last) => self.gaps.push(u32::try_from((now - last).as_micros()).unwrap_or(u32::MAX)),
            }
            self.gaps.extend(std::iter::repeat_n(0, events as usize - 1));
            arrived(events, last.is_none());
            last = Some(now);
            answer.events += events;
        };
        answer.usage = scanner.usage();
        answer.text = scanner.into_text();
        ended
    }
}

async fn open<S>(stream: S) -> Result<Open, ClientError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (sender, connection) = handshake(TokioIo::new(stream)).await?;
    // A failure shows in the request on the connection.
    let connection: Connection = Box::pin(async move { drop(connection.await) });
    Ok(Open { sender, connection: Some(connection), used: false })
}

/// Lets the connection read and write what it can.
fn advance(connection: &mut Option<Connection>, context: &mut Context<'_>) {
    if connection.as_mut().is_some_and(|connection| connection.as_mut().poll(context).is_ready()) {
        // Whoever still waits for something from it is told by its end.
        *connection = None;
    }
}

/// Waits for something that needs the connection to go on.
async fn beside<T>(connection: &mut Option<Connection>, future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    poll_fn(|context| {
        if let Poll::Ready(ready) = future.as_mut().poll(context) {
            return Poll::Ready(ready);
        }
        advance(connection, context);
        future.as_mut().poll(context)
    })
    .await
}

/// The next piece of a body: [`beside`], without a future of its own for each.
async fn frame(body: &mut Incoming, connection: &mut Option<Connection>) -> Option<Result<Frame<Bytes>, hyper::Error>> {
    poll_fn(|context| {
        if let Poll::Ready(frame) = Pin::new(&mut *body).poll_frame(context) {
            return Poll::Ready(frame);
        }
        advance(connection, context);
        Pin::new(&mut *body).poll_frame(context)
    })
    .await
}
