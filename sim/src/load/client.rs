//! One client: its connection, and one request at a time on it.

use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST};
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::events::EventScanner;
use super::report::{Outcome, Tally};
use super::{LoadArgs, Target};

/// How long to wait for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a connection could not be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error(transparent)]
    Http(#[from] hyper::Error),
    #[error("no answer within 10 s")]
    Timeout,
}

/// One client and its connection, which ends when the client is dropped.
pub(super) struct Client {
    target: Target,
    connection: Option<(SendRequest<Full<Bytes>>, AbortOnDropHandle<()>)>,
}

impl Client {
    pub(super) fn new(target: Target) -> Self {
        Self { target, connection: None }
    }

    /// Opens a connection.
    pub(super) async fn connect(&mut self) -> Result<(), ConnectError> {
        let opening = async {
            match &self.target {
                Target::Tcp(address) => {
                    let stream = TcpStream::connect(address).await?;
                    stream.set_nodelay(true)?;
                    open(stream).await
                }
                Target::Unix(path) => open(UnixStream::connect(path).await?).await,
            }
        };
        let opened = tokio::time::timeout(CONNECT_TIMEOUT, opening).await;
        self.connection = Some(opened.map_err(|_| ConnectError::Timeout)??);
        Ok(())
    }

    /// Sends one request and reads its answer, recording times as they come.
    pub(super) async fn send(&mut self, args: &LoadArgs, body: String, tally: &Mutex<Tally>) -> Outcome {
        if self.connection.as_ref().is_none_or(|(sender, _)| sender.is_closed()) && self.connect().await.is_err() {
            return Outcome::Unreachable;
        }
        let outcome = self.exchange(args, body, tally).await;
        if outcome == Outcome::Transport {
            self.connection = None;
        }
        outcome
    }

    async fn exchange(&mut self, args: &LoadArgs, body: String, tally: &Mutex<Tally>) -> Outcome {
        let Some((sender, _)) = &mut self.connection else { return Outcome::Unreachable };
        let host = match &args.target {
            Target::Tcp(address) => address.as_str(),
            Target::Unix(_) => "localhost",
        };
        let request = Request::post(args.path.as_str())
            .header(HOST, host)
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body)));
        let Ok(request) = request else { return Outcome::Transport };
        let start = Instant::now();
        if sender.ready().await.is_err() {
            return Outcome::Transport;
        }
        let Ok(response) = sender.send_request(request).await else { return Outcome::Transport };
        let (parts, body) = response.into_parts();
        if parts.status != StatusCode::OK {
            // Read to its end, so that the connection can be used again.
            return if body.collect().await.is_ok() { Outcome::Status } else { Outcome::Transport };
        }
        let outcome = if args.no_stream { read_whole(body).await } else { read_events(body, start, tally).await };
        if outcome == Outcome::Success {
            tally.lock().request_time(start.elapsed());
        }
        outcome
    }
}

async fn open<S>(stream: S) -> Result<(SendRequest<Full<Bytes>>, AbortOnDropHandle<()>), ConnectError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (sender, connection) = handshake(TokioIo::new(stream)).await?;
    let driver = tokio::spawn(async move {
        // A failure shows in the requests on the connection.
        let _ = connection.await;
    });
    Ok((sender, AbortOnDropHandle::new(driver)))
}

async fn read_whole(body: Incoming) -> Outcome {
    match body.collect().await {
        Ok(_) => Outcome::Success,
        Err(_) => Outcome::Transport,
    }
}

async fn read_events(mut body: Incoming, start: Instant, tally: &Mutex<Tally>) -> Outcome {
    let mut scanner = EventScanner::default();
    let mut last = start;
    while let Some(frame) = body.frame().await {
        // A router breaks the connection after an error event; the event says more.
        let Ok(frame) = frame else {
            return if scanner.outcome() == Outcome::ErrorEvent { Outcome::ErrorEvent } else { Outcome::Transport };
        };
        let Some(bytes) = frame.data_ref() else { continue };
        let events = scanner.scan(bytes);
        if events > 0 {
            let now = Instant::now();
            let mut tally = tally.lock();
            if last == start {
                tally.first_event(now - start, events);
            } else {
                tally.next_events(now - last, events);
            }
            last = now;
        }
    }
    scanner.outcome()
}
