//! A small HTTP/1.1 client over a Unix socket for health, models, metrics and the engine's control routes: one kept connection, a deadline and a cap on every reply. Requests of users do not come this way.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio_util::task::AbortOnDropHandle;

/// The most that is read of one reply. vLLM's whole metrics page is 66 KB.
const MAX_BODY_BYTES: usize = 8 * 1024 * 1024;

/// What the engine answered.
#[derive(Debug)]
pub(crate) struct Reply {
    /// The status, whatever it is.
    pub(crate) status: StatusCode,
    /// The whole body.
    pub(crate) body: Bytes,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// Nobody listens at the socket.
    #[error("cannot connect: {0}")]
    Connect(#[source] io::Error),
    /// The deadline passed.
    #[error("no answer within {} s", .0.as_secs_f32())]
    Timeout(Duration),
    /// The connection or the reply broke.
    #[error("the connection broke: {0}")]
    Broken(String),
}

/// A client of one engine. After any error it connects anew.
#[derive(Debug)]
pub(crate) struct ApiClient {
    socket: PathBuf,
    connection: Option<Connection>,
}

#[derive(Debug)]
struct Connection {
    sender: SendRequest<Full<Bytes>>,
    /// Moves the bytes; ends with the connection.
    _mover: AbortOnDropHandle<()>,
}

impl ApiClient {
    /// A client that has not connected yet.
    pub(crate) fn new(socket: &Path) -> Self {
        Self { socket: socket.to_owned(), connection: None }
    }

    /// Reads one page, connecting first if need be, all within `deadline`.
    pub(crate) async fn get(&mut self, path: &str, deadline: Duration) -> Result<Reply, FetchError> {
        let kept = self.connection.take();
        let exchange = async {
            if let Some(mut connection) = kept {
                // The engine may just have closed an idle connection, which says nothing about its health.
                if let Ok(reply) = connection.ask(get(path)?).await {
                    return Ok((connection, reply));
                }
            }
            let mut connection = self.connect().await?;
            let reply = connection.ask(get(path)?).await?;
            Ok((connection, reply))
        };
        let (connection, reply) = tokio::time::timeout(deadline, exchange).await.map_err(|_| FetchError::Timeout(deadline))??;
        self.connection = Some(connection);
        Ok(reply)
    }

    /// Posts a JSON body, which may be empty, all within `deadline`. It has a connection of its own and is never sent twice: the engine may
    /// have obeyed although its answer is lost.
    pub(crate) async fn post(&self, path: &str, json: impl Into<Bytes>, deadline: Duration) -> Result<Reply, FetchError> {
        let request = Request::post(path).header(header::CONTENT_TYPE, "application/json").body(Full::new(json.into())).map_err(broken)?;
        let exchange = async { self.connect().await?.ask(request).await };
        tokio::time::timeout(deadline, exchange).await.map_err(|_| FetchError::Timeout(deadline))?
    }

    async fn connect(&self) -> Result<Connection, FetchError> {
        let stream = UnixStream::connect(&self.socket).await.map_err(FetchError::Connect)?;
        let (sender, mover) = http1::handshake(TokioIo::new(stream)).await.map_err(|error| FetchError::Broken(error.to_string()))?;
        let mover = tokio::spawn(async move {
            // Whoever waits for the reply gets the same error.
            let _ = mover.await;
        });
        Ok(Connection { sender, _mover: AbortOnDropHandle::new(mover) })
    }
}

impl Connection {
    async fn ask(&mut self, mut request: Request<Full<Bytes>>) -> Result<Reply, FetchError> {
        request.headers_mut().insert(header::HOST, HeaderValue::from_static("localhost"));
        self.sender.ready().await.map_err(broken)?;
        let response = self.sender.send_request(request).await.map_err(broken)?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, MAX_BODY_BYTES).collect().await.map_err(broken)?.to_bytes();
        Ok(Reply { status: head.status, body })
    }
}

fn get(path: &str) -> Result<Request<Full<Bytes>>, FetchError> {
    Request::get(path).body(Full::default()).map_err(broken)
}

fn broken(error: impl std::fmt::Display) -> FetchError {
    FetchError::Broken(error.to_string())
}

#[cfg(test)]
pub(crate) mod tests;
