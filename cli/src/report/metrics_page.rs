//! Fetches a router's metrics page from where operators reach it.

use std::time::Duration;

use anyhow::{Context, ensure};
use http::{Request, header};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_util::task::AbortOnDropHandle;

use crate::admin::{AdminArgs, AdminEndpoint, admin_key};
use crate::fleet_connection::open_admin;

const PAGE_TIMEOUT: Duration = Duration::from_secs(10);

/// Most bytes of the page. A thousand replicas take 3 MB.
const LONGEST_PAGE: usize = 64 << 20;

/// # Errors
/// When the router cannot be reached, or does not show the page.
pub(super) async fn fetch_metrics(args: &AdminArgs) -> anyhow::Result<String> {
    let way = AdminEndpoint::find(args).await?;
    // The page is refused to requests on loopback that name another host.
    let mut request = Request::get("/metrics").header(header::HOST, "localhost");
    if let Some(key) = admin_key(args, &way)? {
        request = request.header(header::AUTHORIZATION, format!("Bearer {}", key.reveal()));
    }
    let request = request.body(Empty::new())?;
    let page = async {
        match &way {
            AdminEndpoint::Socket(path) => fetch(UnixStream::connect(path).await?, request).await,
            AdminEndpoint::Fleet(folder) => fetch(open_admin(folder, b"http/1.1").await?, request).await,
            AdminEndpoint::Address(address) => fetch(TcpStream::connect(address).await?, request).await,
        }
    };
    tokio::time::timeout(PAGE_TIMEOUT, page).await.with_context(|| format!("the page did not come within {} s", PAGE_TIMEOUT.as_secs()))?
}

async fn fetch(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, request: Request<Empty<Bytes>>) -> anyhow::Result<String> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let _connection = AbortOnDropHandle::new(tokio::spawn(connection));
    let answer = sender.send_request(request).await?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), LONGEST_PAGE).collect().await;
    let body = body.map_err(|error| anyhow::anyhow!(error))?.to_bytes();
    let text = String::from_utf8_lossy(&body).into_owned();
    ensure!(status.is_success(), "{status}: {text}");
    Ok(text)
}
