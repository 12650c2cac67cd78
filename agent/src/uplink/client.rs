//! The pooled HTTP/1.1 client over an engine's Unix socket that users' requests take.

use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hostler_proto::lane::Broken;
use http::Uri;
use http_body::{Body, Frame, SizeHint};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};
use tower::Service;

use super::lane::RequestBody;

/// How long connections stay open without a request. The engine is told to keep them an hour.
const POOL_IDLE: Duration = Duration::from_secs(300);

/// How long a connection may wait for a place in the engine's accept queue (vLLM's is 2,048 long).
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);

/// How long to wait before the queue is tried again.
const CONNECT_PAUSE: Duration = Duration::from_millis(2);

/// The client of one engine.
pub(super) type EngineClient = Client<Connector, SizedBody>;

/// A client for the engine that listens at `socket`, now or later.
pub(super) fn client(socket: PathBuf) -> EngineClient {
    Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).pool_idle_timeout(POOL_IDLE).build(Connector { socket })
}

/// Connects to one socket, whatever the URI says.
#[derive(Debug, Clone)]
pub(super) struct Connector {
    socket: PathBuf,
}

impl Service<Uri> for Connector {
    type Response = TokioIo<UnixStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<TokioIo<UnixStream>>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let socket = self.socket.clone();
        Box::pin(async move {
            let deadline = Instant::now() + CONNECT_DEADLINE;
            loop {
                match UnixStream::connect(&socket).await {
                    // A full accept queue refuses at once on a Unix socket.
                    Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => sleep(CONNECT_PAUSE).await,
                    connected => return connected.map(TokioIo::new),
                }
            }
        })
    }
}

/// A request's body with the length that the router announced, so that the engine gets a Content-Length.
#[derive(Debug)]
pub(super) struct SizedBody {
    pub(super) body: RequestBody,
    pub(super) left: u64,
    /// Told, by being dropped, that all of the body has been taken.
    pub(super) complete: Option<oneshot::Sender<()>>,
}

impl Body for SizedBody {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let sized = self.get_mut();
        sized.body.poll_bytes(context).map(|piece| match piece {
            Ok(Some(bytes)) => {
                sized.left = sized.left.saturating_sub(bytes.len() as u64);
                if sized.left == 0 {
                    sized.complete = None;
                }
                Some(Ok(Frame::data(bytes)))
            }
            Ok(None) => None,
            Err(broken) => Some(Err(broken)),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}
