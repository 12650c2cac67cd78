//! One client: a connection that is kept open, with one request at a time on it.
//!
//! The connection has no task. The task that waits for the answer reads it from the socket, so an
//! event costs one wake. Conversations of the `drive`, the `fleet`'s metrics and the requests of
//! `hostler batch` use it.

mod open;

use std::io::Write;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hostler_http1::{Header, Stream};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use rustix::net::sockopt;
use thiserror::Error;
use tokio::net::{TcpStream, UnixStream};

use crate::events::{EventScanner, Reply, Usage};
use crate::sample::Outcome;
use crate::target::{Place, Target};
use open::Open;

pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Time in which a target shows that it closed a kept connection just as a request came: a round
/// trip.
///
/// A target that took longer had the request.
const CLOSE_DETECTION_TIME: Duration = Duration::from_secs(1);

/// Longest answer that is read in one piece; the pages of metrics of large fleets are some
/// megabytes.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// Idle time before the first keep-alive probe of a silent connection, followed by the interval of
/// probes and the number of unanswered ones after which it counts as lost.
///
/// An answer may take hours, and a host that dies sends nothing.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_PROBES: u32 = 6;

/// Why a request has no answer.
#[derive(Debug, Error)]
pub enum ClientError {
    #[error(transparent)]
    Connect(std::io::Error),
    #[error("https is spoken with your own fleet alone")]
    Secured,
    #[error("no connection within 10 s")]
    ConnectTimeout,
    #[error("no answer within {0:?}")]
    AnswerTimeout(Duration),
    #[error(transparent)]
    Http(#[from] hostler_http1::HttpError),
    #[error("the answer cannot be read: it is longer than 64 MiB")]
    TooLong,
    #[error("it answered {0}")]
    Status(StatusCode),
}

/// A request.
#[derive(Debug, Clone)]
pub struct Call {
    pub method: Method,
    pub path: String,
    /// Whole value of `authorization`.
    pub key: Option<HeaderValue>,
    /// Further headers.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    pub body: Bytes,
}

/// An answer that was read to its end.
#[derive(Debug, Clone)]
pub struct WholeAnswer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

/// How to read an answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReadOptions {
    /// Whether the answer comes as events.
    pub(crate) stream: bool,
    /// Whether to keep the text, because the conversation continues.
    pub(crate) keep_text: bool,
    /// Time limit for the whole request.
    pub(crate) timeout: Duration,
}

/// Result of a request. The times between events are in the client's `gaps`.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) outcome: Outcome,
    /// When the first event with text came.
    pub(crate) first: Option<Instant>,
    /// Number of events with text.
    pub(crate) events: u32,
    pub(crate) usage: Option<Usage>,
    pub(crate) text: String,
}

/// A connection to a target, made when it is needed.
pub struct Client {
    place: Place,
    /// The connection, if an answer has been read from it to its end.
    open: Option<Open>,
    /// Microseconds from each event with text to the next, of the last answer.
    ///
    /// Events that were read at once are 0 apart. The memory is reused for the next answer.
    pub(crate) gaps: Vec<u32>,
}

impl Client {
    pub(crate) fn new(place: Place) -> Self {
        Self { place, open: None, gaps: Vec::new() }
    }

    /// Creates a client of this target.
    #[must_use]
    pub fn to(target: &Target) -> Self {
        Self::new(target.place.clone())
    }

    /// Sends one request and reads its answer.
    ///
    /// Calls `arrived` with each number of events with text as they come, and whether they are the
    /// first.
    pub(crate) async fn ask(&mut self, call: Call, reading: ReadOptions, arrived: impl Fn(u32, bool)) -> Answer {
        self.gaps.clear();
        let mut answer = Answer { outcome: Outcome::Broken, first: None, events: 0, usage: None, text: String::new() };
        let exchange = self.exchange(call, reading, &mut answer, arrived);
        match tokio::time::timeout(reading.timeout, exchange).await {
            Ok(outcome) => answer.outcome = outcome,
            Err(_) => answer.outcome = Outcome::TooLate,
        }
        answer
    }

    pub(crate) async fn get(&mut self, path: &str, key: Option<HeaderValue>, most: Duration) -> Result<Bytes, ClientError> {
        let call = Call { method: Method::GET, path: path.to_owned(), key, headers: Vec::new(), body: Bytes::new() };
        let answer = self.fetch(&call, most).await?;
        if answer.status == StatusCode::OK { Ok(answer.body) } else { Err(ClientError::Status(answer.status)) }
    }

    /// Sends one request and reads its whole answer, whatever its status is.
    ///
    /// # Errors
    /// When there is no whole answer within `most`.
    pub async fn fetch(&mut self, call: &Call, most: Duration) -> Result<WholeAnswer, ClientError> {
        let fetching = async {
            let (status, headers, mut open) = self.send(call, copy_headers).await?;
            let body = whole(&mut open).await?.into();
            self.open = Some(open);
            Ok(WholeAnswer { status, headers, body })
        };
        tokio::time::timeout(most, fetching).await.unwrap_or(Err(ClientError::AnswerTimeout(most)))
    }

    async fn exchange(&mut self, call: Call, reading: ReadOptions, answer: &mut Answer, arrived: impl Fn(u32, bool)) -> Outcome {
        let (status, (), mut open) = match self.send(&call, |_| ()).await {
            Ok(answered) => answered,
            Err(ClientError::Connect(_) | ClientError::ConnectTimeout) => return Outcome::Unreachable,
            Err(_) => return Outcome::Broken,
        };
        if status == StatusCode::OK && reading.stream {
            let outcome = self.read_events(&mut open, reading.keep_text, answer, arrived).await;
            // After any other outcome, late bytes would be mistaken for the answer to the next
            // request.
            self.open = Some(open).filter(|_| outcome == Outcome::Complete);
            return outcome;
        }
        // Read errors to their end, too, so that the connection can be used again.
        let Ok(bytes) = whole(&mut open).await else { return Outcome::Broken };
        if status != StatusCode::OK {
            self.open = Some(open);
            return Outcome::Status(status.as_u16());
        }
        let Ok(reply) = serde_json::from_slice::<Reply>(&bytes) else { return Outcome::Broken };
        answer.usage = reply.usage;
        if reading.keep_text {
            reply.add_text(&mut answer.text);
        }
        self.open = Some(open);
        reply.outcome()
    }

    /// Sends a request.
    ///
    /// A target may close a kept connection at any time; then a new one is made. `keep` selects the
    /// selected headers of the answer.
    async fn send<H>(&mut self, call: &Call, keep: impl Fn(&[Header<'_>]) -> H) -> Result<(StatusCode, H, Open), ClientError> {
        let head = self.head(call);
        if let Some(mut open) = self.open.take()
            && open.is_free()
        {
            let sent_at = Instant::now();
            match open.ask(head.clone(), call.body.clone(), &keep).await {
                Err(_) if open.is_silent() && sent_at.elapsed() < CLOSE_DETECTION_TIME => {}
                result => {
                    let (status, kept) = result?;
                    return Ok((status, kept, open));
                }
            }
        }
        let mut open = tokio::time::timeout(CONNECT_TIMEOUT, connect(&self.place)).await.unwrap_or(Err(ClientError::ConnectTimeout))?;
        let (status, kept) = open.ask(head, call.body.clone(), &keep).await?;
        Ok((status, kept, open))
    }

    /// Head of a request. The types of its parts prove that they contain no line breaks.
    fn head(&self, call: &Call) -> Bytes {
        let host = match &self.place {
            Place::Tcp(authority) | Place::Secured(authority) => HeaderValue::from_str(authority).ok(),
            Place::Unix(_) => None,
        };
        let path = call.path.parse().unwrap_or(PathAndQuery::from_static("/"));
        let mut head = Vec::with_capacity(256);
        let mut add = |parts: &[&[u8]]| parts.iter().for_each(|part| head.extend_from_slice(part));
        add(&[call.method.as_str().as_bytes(), b" ", path.as_str().as_bytes(), b" HTTP/1.1\r\nhost: "]);
        add(&[host.as_ref().map_or(b"localhost", HeaderValue::as_bytes), b"\r\n"]);
        if let Some(key) = &call.key {
            add(&[b"authorization: ", key.as_bytes(), b"\r\n"]);
        }
        for (name, value) in &call.headers {
            add(&[name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"]);
        }
        if call.method == Method::POST {
            let _ = write!(head, "content-type: application/json\r\ncontent-length: {}\r\n", call.body.len());
        }
        head.extend_from_slice(b"\r\n");
        head.into()
    }

    async fn read_events(&mut self, open: &mut Open, keep_text: bool, answer: &mut Answer, arrived: impl Fn(u32, bool)) -> Outcome {
        let mut scanner = EventScanner::new(keep_text);
        let mut last: Option<Instant> = None;
        let ended = loop {
            let events = match open.piece(|bytes| scanner.scan(bytes)).await {
                Ok(Some(Ok(events))) => events,
                Ok(None) => break scanner.outcome(),
                // A router breaks the connection after an error event; the event says more.
                Err(_) if scanner.outcome() == Outcome::ErrorEvent => break Outcome::ErrorEvent,
                Ok(Some(Err(_))) | Err(_) => break Outcome::Broken,
            };
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

async fn connect(place: &Place) -> Result<Open, ClientError> {
    let stream = match place {
        Place::Tcp(authority) => {
            let stream = TcpStream::connect(authority).await.map_err(ClientError::Connect)?;
            configure(&stream).map_err(ClientError::Connect)?;
            Stream::Tcp(stream)
        }
        Place::Unix(path) => Stream::Unix(UnixStream::connect(path).await.map_err(ClientError::Connect)?),
        Place::Secured(_) => return Err(ClientError::Secured),
    };
    Ok(Open::new(stream))
}

/// Configures a socket to send small messages at once, and to notice a host that has died.
fn configure(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?;
    Ok(sockopt::set_socket_keepalive(stream, true)?)
}

fn copy_headers(headers: &[Header<'_>]) -> HeaderMap {
    let parse = |header: &Header<'_>| Some((HeaderName::try_from(header.name).ok()?, HeaderValue::from_bytes(header.value).ok()?));
    headers.iter().filter_map(parse).collect()
}

async fn whole(open: &mut Open) -> Result<Vec<u8>, ClientError> {
    let mut body = Vec::new();
    while let Some(()) = open.piece(|bytes| body.extend_from_slice(bytes)).await? {
        if body.len() > MAX_ANSWER_BYTES {
            return Err(ClientError::TooLong);
        }
    }
    Ok(body)
}

#[cfg(test)]
mod tests;
