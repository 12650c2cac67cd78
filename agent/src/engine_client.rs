//! Path of users' requests to one engine: HTTP/1.1 over its Unix socket.
//!
//! A connection has no task and no buffer. The task that waits for an answer reads the socket, so
//! an event costs one wake, and memory only while it exists (decision 11). A connection is kept for
//! the next request once an answer has been read to its end.

mod answer;
pub(crate) mod api_client;
mod outgoing;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::time::Duration;

use hostler_http1::{Connection, Stream};
use hostler_proto::lane::{ResponseHead, StreamFault};
use parking_lot::Mutex;
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep};

pub(crate) use answer::EngineResponse;
pub(crate) use api_client::{ApiClient, ApiReply, FetchError};
pub(crate) use outgoing::OutgoingRequest;

/// How long connections stay open without a request. The engine's own limit is set to an hour.
const MAX_IDLE_TIME: Duration = Duration::from_secs(300);

/// How often connections are closed that have been idle for too long, or that the engine has
/// closed.
const PRUNE_INTERVAL: Duration = Duration::from_secs(30);

/// Most connections that are kept: about as many as an engine answers at a time.
const MAX_IDLE_CONNECTIONS: usize = 1024;

/// Time limit for a place in the engine's accept queue (vLLM's is 2,048 long).
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Pause before the queue is tried again.
const CONNECT_RETRY_DELAY: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(crate) struct EngineClient {
    socket: PathBuf,
    /// Idle connections, with the last one used at the back.
    idle: Mutex<VecDeque<IdleConnection>>,
}

#[derive(Debug)]
struct IdleConnection {
    connection: Connection,
    since: Instant,
}

/// Why there is no answer, or no more of it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    #[error("cannot connect")]
    Connect(#[source] io::Error),
    /// The connection broke, or the bytes are no answer.
    #[error(transparent)]
    Answer(#[from] hostler_http1::HttpError),
    /// The router broke off the request.
    #[error(transparent)]
    Request(#[from] StreamFault),
}

impl EngineClient {
    pub(crate) fn new(socket: PathBuf) -> Self {
        Self { socket, idle: Mutex::default() }
    }

    /// Sends a request and waits until its answer begins.
    ///
    /// `sent` is called, perhaps more than once, when the whole request has left. Dropping this
    /// future, or the answer, closes the connection, and the engine aborts.
    pub(crate) async fn request(
        &self,
        mut outgoing: OutgoingRequest,
        mut sent: impl FnMut(),
    ) -> Result<(ResponseHead, EngineResponse<'_>), RequestError> {
        loop {
            let (mut connection, is_kept) = self.connection().await?;
            let bytes_before = connection.bytes_read();
            match outgoing.send_and_await_head(&mut connection, &mut sent).await {
                Ok((head, body)) => return Ok((head, EngineResponse::new(self, connection, outgoing, body))),
                Err(error @ RequestError::Request(_)) => return Err(error),
                // The engine closed the idle connection, which says nothing about this request.
                Err(_) if is_kept && outgoing.rewind(connection.bytes_read() > bytes_before) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Closes connections that were idle too long or that the engine has closed, for as long as it
    /// is polled.
    pub(crate) async fn prune_idle(&self) -> Infallible {
        loop {
            sleep(PRUNE_INTERVAL).await;
            let now = Instant::now();
            self.idle.lock().retain_mut(|idle| now.saturating_duration_since(idle.since) < MAX_IDLE_TIME && idle.connection.is_idle());
        }
    }

    /// Returns a connection, and whether it was kept rather than opened.
    async fn connection(&self) -> Result<(Connection, bool), RequestError> {
        let begun = Instant::now();
        loop {
            while let Some(mut kept) = self.take_idle() {
                if kept.is_idle() {
                    return Ok((kept, true));
                }
            }
            match UnixStream::connect(&self.socket).await {
                Ok(stream) => return Ok((Connection::new(Stream::Unix(stream)), false)),
                // On a Unix socket, a full accept queue refuses at once.
                Err(error) if error.kind() == ErrorKind::WouldBlock && begun.elapsed() < CONNECT_TIMEOUT => {
                    sleep(CONNECT_RETRY_DELAY).await;
                }
                Err(error) => return Err(RequestError::Connect(error)),
            }
        }
    }

    fn take_idle(&self) -> Option<Connection> {
        self.idle.lock().pop_back().map(|idle| idle.connection)
    }

    /// Keeps a connection that expects no more bytes, unless some did arrive.
    fn put_back(&self, mut connection: Connection) {
        if !connection.is_idle() {
            return;
        }
        connection.release_buffer();
        let mut idle = self.idle.lock();
        idle.push_back(IdleConnection { connection, since: Instant::now() });
        let surplus = if idle.len() > MAX_IDLE_CONNECTIONS { idle.pop_front() } else { None };
        // Close the surplus connection without the lock.
        drop(idle);
        drop(surplus);
    }
}

#[cfg(test)]
mod tests;
