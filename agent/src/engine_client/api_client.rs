//! Client for an engine's health, models, metrics and control routes.
//!
//! Answers are read whole, each with a deadline and a cap. Users' requests take another path.

use std::io;
use std::path::Path;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::StatusCode;

use hostler_proto::lane::{Header, ROUTER_SERVER};

use super::{CONNECT_TIMEOUT, EngineClient, OutgoingRequest, RequestError};

/// Most bytes read of one reply. vLLM's whole metrics page is 66 KB.
const MAX_BODY_BYTES: usize = 8 * 1024 * 1024;

#[derive(Debug)]
pub(crate) struct ApiReply {
    /// Status code, whatever it is.
    pub(crate) status: StatusCode,
    pub(crate) body: Bytes,
    /// Whether a router made the answer, which its `server` header says.
    pub(crate) is_from_router: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    #[error("cannot connect: {0}")]
    Connect(#[source] io::Error),
    #[error("no answer within {} s", .0.as_secs_f32())]
    Timeout(Duration),
    #[error("the connection broke: {0}")]
    Broken(String),
}

impl From<RequestError> for FetchError {
    fn from(error: RequestError) -> Self {
        match error {
            // The engine's accept queue is full: a process listens, but takes too long.
            RequestError::Connect(error) if error.kind() == io::ErrorKind::WouldBlock => Self::Timeout(CONNECT_TIMEOUT),
            RequestError::Connect(error) => Self::Connect(error),
            error => Self::Broken(error.to_string()),
        }
    }
}

/// Client of one engine's API. Reads share one connection; after any error the client connects
/// anew.
#[derive(Debug)]
pub(crate) struct ApiClient {
    client: EngineClient,
}

impl ApiClient {
    pub(crate) fn new(socket: &Path) -> Self {
        Self { client: EngineClient::new(socket.to_owned()) }
    }

    /// Reads one page, connecting first if necessary, all within `deadline`.
    pub(crate) async fn get(&mut self, path: &str, deadline: Duration) -> Result<ApiReply, FetchError> {
        let request = OutgoingRequest::get(path).ok_or_else(|| invalid_path(path))?;
        tokio::time::timeout(deadline, exchange(&self.client, request)).await.map_err(|_| FetchError::Timeout(deadline))?
    }

    /// Posts a JSON body, which may be empty, all within `deadline`.
    ///
    /// A post has its own connection and is never sent twice: the engine may have obeyed although
    /// its answer is lost.
    pub(crate) async fn post(&self, path: &str, json: impl Into<Bytes>, deadline: Duration) -> Result<ApiReply, FetchError> {
        let request = OutgoingRequest::post_json(path, json.into()).ok_or_else(|| invalid_path(path))?;
        let own = EngineClient::new(self.client.socket.clone());
        tokio::time::timeout(deadline, exchange(&own, request)).await.map_err(|_| FetchError::Timeout(deadline))?
    }
}

async fn exchange(client: &EngineClient, request: OutgoingRequest) -> Result<ApiReply, FetchError> {
    let (head, mut answer) = client.request(request, || {}).await?;
    let status = StatusCode::from_u16(head.status).ok();
    let status = status.ok_or_else(|| FetchError::Broken(format!("{} is no status of HTTP", head.status)))?;
    let is_router = |header: &Header| header.name.eq_ignore_ascii_case(b"server") && header.value == ROUTER_SERVER.as_bytes();
    let is_from_router = head.headers.iter().any(is_router);
    let mut body = BytesMut::new();
    while let Some(piece) = answer.next_chunk().await {
        let piece = piece?;
        if body.len() + piece.len() > MAX_BODY_BYTES {
            return Err(FetchError::Broken(format!("the answer has more than {} MiB", MAX_BODY_BYTES >> 20)));
        }
        body.extend_from_slice(&piece);
    }
    answer.recycle();
    Ok(ApiReply { status, body: body.freeze(), is_from_router })
}

fn invalid_path(path: &str) -> FetchError {
    FetchError::Broken(format!("{path} is no path of HTTP"))
}

#[cfg(test)]
pub(crate) mod tests;
