//! A real router on the counted thread, and agents without engines on this one.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use bytes::Bytes;
use hostler_agent::lane::{IncomingRequest, RequestStream};
use hostler_agent::uplink::LANES;
use hostler_boot::{SamplingRule, Shutdown, TraceSettings};
use hostler_proto::agent::v1::Hello;
use hostler_proto::agent::v1::frame::Kind;
use hostler_proto::lane::{Header, ResponseHead};
use hostler_router::{Router, RouterConfig};
use hostler_scale::{AttachRequest, Attachment, Replica, attach};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use crate::counted::{CountedThread, flush};

/// Time longer than any case, so that no timer fires.
const FOR_EVER: Duration = Duration::from_secs(3600);

/// Most replicas of a node here; a router takes 256.
const NODE_REPLICAS: u32 = 250;

/// Router and agents; see the module.
#[derive(Debug)]
pub(crate) struct RouterFixture {
    pub(crate) router: CountedThread,
    pub(crate) edge: SocketAddr,
    /// Pages for operators.
    pub(crate) admin: SocketAddr,
    taken: mpsc::UnboundedReceiver<IncomingRequest>,
    pub(crate) attached: Vec<Attachment>,
    _folder: TempDir,
}

/// Settings of a router that listens on free ports, where time triggers nothing.
pub(crate) fn settings(folder: &TempDir) -> RouterConfig {
    let local = || "127.0.0.1:0".to_owned();
    RouterConfig {
        listen: local(),
        agents_listen: local(),
        admin_listen: local(),
        operators_socket: folder.path().join("o.sock"),
        cache_dir: folder.path().join("cache"),
        access_log_file: folder.path().join("access.log"),
        header_timeout: FOR_EVER,
        keep_alive: FOR_EVER,
        client_stall_timeout: FOR_EVER,
        lease: FOR_EVER,
        ..RouterConfig::default()
    }
}

/// Traces of this share of the requests, which are sent to nobody while requests are counted.
pub(crate) fn traces(ratio: f64) -> TraceSettings {
    let sampling = SamplingRule { follows_parent: true, ratio };
    TraceSettings { sampling, export_interval: FOR_EVER, ..TraceSettings::for_endpoint("http://127.0.0.1:9".into()) }
}

impl RouterFixture {
    pub(crate) async fn start(replicas: u32, traces: Option<TraceSettings>) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let config = RouterConfig { traces, ..settings(&folder) };
        let (tell, addresses) = tokio::sync::oneshot::channel();
        let router = CountedThread::start(move || async move {
            let router = Router::bind(config).await.expect("loopback has free ports");
            let _ = tell.send((router.edge_address(), router.admin_address(), router.agents_address()));
            router.run(Shutdown::new()).await.expect("it takes nobody's place");
        })?;
        let (edge, admin, agents) = addresses.await.context("the router did not start")?;
        let (took, taken) = mpsc::unbounded_channel();
        let mut attached = Vec::new();
        for (node, first) in (0..replicas).step_by(NODE_REPLICAS as usize).enumerate() {
            let hello = Hello { node: format!("guard-{node}"), life: 1, ..Hello::default() };
            let count = NODE_REPLICAS.min(replicas - first);
            let replicas = (0..count).map(|index| Replica { index, ..Replica::default() }.full_report()).collect();
            attached.push(attach(agents, AttachRequest { hello, replicas, lanes: LANES }, &took, Arc::default()).await?);
        }
        Ok(Self { router, edge, admin, taken, attached, _folder: folder })
    }

    pub(crate) async fn taken(&mut self) -> anyhow::Result<IncomingRequest> {
        self.taken.recv().await.context("the router closed its lanes")
    }

    pub(crate) async fn take(&mut self, count: u32) -> anyhow::Result<Vec<RequestStream>> {
        let mut serving = Vec::new();
        for _ in 0..count {
            serving.push(self.taken().await?.stream);
        }
        Ok(serving)
    }

    /// Runs an action whose effects the router then sees all at once.
    pub(crate) async fn at_once(&self, work: impl AsyncFnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
        let hold = self.router.pause().await;
        let done = work().await;
        flush().await;
        drop(hold);
        done
    }
}

/// A page of the router for operators, with its head.
pub(crate) async fn admin_page(admin: SocketAddr, path: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(admin).await?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

pub(crate) fn begin(serving: &RequestStream, content_type: &'static str, length: Option<usize>) {
    let header = |name: &'static str, value: String| Header { name: Bytes::from_static(name.as_bytes()), value: value.into() };
    let mut headers = vec![
        header("date", "Sun, 22 Nov 2026 05:00:00 GMT".into()),
        header("server", "uvicorn".into()),
        header("content-type", content_type.into()),
    ];
    headers.extend(length.map(|length| header("content-length", length.to_string())));
    serving.send_head(ResponseHead { status: 200, headers });
}

/// Sends a piece of an answer, which is small enough to need no credit.
pub(crate) fn piece(serving: &RequestStream, bytes: &'static str) {
    serving.send_frame(Kind::Body(Bytes::from_static(bytes.as_bytes())));
}
