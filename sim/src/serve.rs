//! The simulated engine as a server: it binds, starts as slowly as configured, listens, and stops
//! like `vllm serve`.
//!
//! `serve` does all of that in one call.

use std::future::Future;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixListener, UnixSocket, UnixStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, error, info, warn};

use crate::adapters::Adapters;
use crate::api::{Api, unix_seconds};
use crate::args::EngineArgs;
use crate::engine::{EngineHandle, Stepping};
use crate::error::Error;
use crate::kv_events::{KvEventsConfig, Publisher};
use crate::model_shards::ModelShards;
use crate::nodes::{FarWorkers, run_headless};
use crate::response_store::ResponseStore;
use crate::routes;

/// Connections that may wait to be accepted; uvicorn's own number.
const BACKLOG: u32 = 2048;
/// Time limit for connections to send their last bytes after a stop.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);
/// Number of parts in which the weights appear to load.
const SHARDS: u32 = 4;
/// Longest path of a Unix socket on Linux.
const SOCKET_PATH_BYTES: usize = 107;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    Unix(PathBuf),
    /// A TCP address, with the port that the system chose if it was 0.
    Tcp(SocketAddr),
}

impl std::fmt::Display for Address {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(path) => write!(formatter, "unix:{}", path.display()),
            Self::Tcp(address) => write!(formatter, "http://{address}"),
        }
    }
}

/// A bound socket that refuses connections until it listens, as in a starting vLLM.
enum BoundSocket {
    Unix(UnixSocket),
    Tcp(TcpSocket),
}

enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

enum Connection {
    Unix(UnixStream),
    Tcp(TcpStream),
}

/// An engine that is bound and does not run yet.
pub struct Engine {
    api: Api,
    stepping: Stepping,
    bound: BoundSocket,
    address: Address,
    kv_events: Option<KvEventsConfig>,
}

/// Runs an engine until `shutdown` completes and the requests in flight have ended according to
/// `--shutdown-timeout`.
///
/// # Errors
///
/// When it cannot start, and `Error::Died` at once when a fault lets it die; the process should
/// exit then.
pub async fn serve(args: EngineArgs, shutdown: impl Future<Output = ()> + Send) -> Result<(), Error> {
    if args.headless {
        tokio::select! {
            ended = run_headless(&args) => return ended,
            () = shutdown => return Ok(()),
        }
    }
    Engine::bind(args)?.run(shutdown).await
}

impl Engine {
    /// Binds the address without listening; needs a Tokio runtime.
    ///
    /// # Errors
    ///
    /// When the address is taken (also by a socket file that an earlier run left) or
    /// an argument is wrong.
    pub fn bind(args: EngineArgs) -> Result<Self, Error> {
        let kv_events = KvEventsConfig::parse(args.kv_events_config.as_deref())?;
        check_sizes(&args)?;
        let (bound, address) = match &args.uds {
            Some(path) => bind_unix(path.clone())?,
            None => bind_tcp(&args.host, args.port)?,
        };
        let args = Arc::new(args);
        let (core, stepping) = EngineHandle::new(args.clone());
        let api = Api {
            args,
            core,
            adapters: Adapters::default(),
            stored: ResponseStore::default(),
            unseeded: AtomicU64::default(),
            deaths: Mutex::default(),
            created: unix_seconds(),
        };
        Ok(Self { api, stepping, bound, address, kv_events })
    }

    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Starts, serves until `shutdown` completes, and stops.
    ///
    /// # Errors
    ///
    /// Same as `serve`.
    pub async fn run(self, shutdown: impl Future<Output = ()> + Send) -> Result<(), Error> {
        let Self { api, mut stepping, bound, address, kv_events } = self;
        tokio::pin!(shutdown);
        stepping.far_workers = tokio::select! {
            started = start_up(&api.args) => started?,
            () = &mut shutdown => return Ok(()),
        };
        let server = Server::start(api, stepping, kv_events).await?;
        info!("Starting vLLM server on {address}");
        let listening = bound.listen(&address)?;
        info!("Application startup complete.");
        let death = server.death();
        tokio::select! {
            () = server.accept(&listening) => {}
            () = &mut shutdown => {}
            () = death => return server.die().await,
        }
        server.stop(listening).await;
        Ok(())
    }
}

/// Writes the log of a start, in vLLM's words and order, with its delay.
async fn start_up(args: &EngineArgs) -> Result<FarWorkers, Error> {
    let model = &args.model;
    let delay = Duration::from_millis(args.sim_start_ms);
    let longest = args.context_length();
    info!("  version {}  model   {model}", crate::VLLM_VERSION);
    info!("Using max model len {longest}");
    info!(
        "Initializing a V1 LLM engine (v{}) with config: model='{model}', max_seq_len={longest}, enforce_eager=False, enable_prefix_caching=True",
        crate::VLLM_VERSION
    );
    let far_workers = FarWorkers::gather(args).await?;
    info!("Starting to load model {model}...");
    let mut shards = ModelShards::list(args, SHARDS)?;
    for shard in 1..=SHARDS {
        tokio::time::sleep(delay / (2 * SHARDS)).await;
        shards.read_next().await?;
        info!("Loading safetensors checkpoint shards: {:3}% Completed | {shard}/{SHARDS}", 100 * shard / SHARDS);
    }
    if args.sim_fail_start {
        error!(
            "Traceback (most recent call last):\n  File \"vllm/v1/engine/core.py\", line 1, in run_engine_core\nRuntimeError: Engine core initialization failed. See root cause above."
        );
        return Err(Error::FailedStart);
    }
    info!("Loading weights took {:.2} seconds", delay.as_secs_f64() / 2.0);
    let tokens = args.cache_tokens();
    let hundredths = 100 * tokens / longest.max(1);
    let (requests, rest) = (hundredths / 100, hundredths % 100);
    info!("CPU KV cache size: {tokens} tokens, Maximum concurrency for {longest} tokens per request: {requests}.{rest:02}x");
    tokio::time::sleep(delay / 2).await;
    info!("init engine (profile, create kv cache, warmup model) took {:.2} seconds", delay.as_secs_f64());
    Ok(far_workers)
}

/// A running engine: its API and the tasks behind it.
struct Server {
    api: Arc<Api>,
    tasks: TaskTracker,
    connections: TaskTracker,
    /// Ends connections after the present answer.
    closing: CancellationToken,
    /// Ends everything now.
    killed: CancellationToken,
}

impl Server {
    async fn start(api: Api, mut stepping: Stepping, kv_events: Option<KvEventsConfig>) -> Result<Self, Error> {
        let server = Self {
            api: Arc::new(api),
            tasks: TaskTracker::new(),
            connections: TaskTracker::new(),
            closing: CancellationToken::new(),
            killed: CancellationToken::new(),
        };
        if let Some(config) = kv_events {
            stepping.publish_to(Publisher::start(config, &server.tasks, &server.killed).await?);
        }
        server.tasks.spawn(server.killed.clone().run_until_cancelled_owned(stepping.run()));
        Ok(server)
    }

    /// Resolves when a fault or `--sim-die-after-ms` ends the engine.
    fn death(&self) -> impl Future<Output = ()> + use<> {
        let death = self.api.core.faults.death().clone();
        let after = self.api.args.sim_die_after_ms.map(Duration::from_millis);
        async move {
            match after {
                Some(after) => drop(tokio::time::timeout(after, death.cancelled()).await),
                None => death.cancelled().await,
            }
        }
    }

    /// Serves every connection in a separate task; never returns.
    async fn accept(&self, listening: &Listener) {
        loop {
            match listening.accept().await {
                Ok(Connection::Unix(stream)) => self.serve_connection(stream),
                Ok(Connection::Tcp(stream)) => {
                    // Without this setting, small events wait for acknowledgements.
                    if let Err(error) = stream.set_nodelay(true) {
                        debug!(%error, "cannot set TCP_NODELAY");
                    }
                    self.serve_connection(stream);
                }
                Err(error) => {
                    // The usual cause is too many open files; closing connections will free some.
                    warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    fn serve_connection(&self, stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) {
        let (api, closing, killed) = (self.api.clone(), self.closing.clone(), self.killed.clone());
        let serving = async move {
            let api = &*api;
            let answer = service_fn(|request| routes::answer(api, request));
            let mut connection = std::pin::pin!(http1::Builder::new().serve_connection(TokioIo::new(stream), answer));
            let ended = tokio::select! {
                ended = connection.as_mut() => ended,
                () = closing.cancelled() => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            };
            if let Err(error) = ended {
                debug!(%error, "a connection broke");
            }
        };
        self.connections.spawn(killed.run_until_cancelled_owned(serving));
    }

    /// Stops like vLLM on SIGTERM.
    async fn stop(self, listening: Listener) {
        // A hung engine ends no stream, so the stop needs a bound.
        let grace = Duration::from_secs(self.api.args.shutdown_timeout) + FLUSH_TIMEOUT;
        tokio::select! {
            // A draining engine still accepts connections and reports that it is healthy.
            () = self.accept(&listening) => {}
            _ = tokio::time::timeout(grace, self.api.core.stop()) => {}
        }
        drop(listening);
        self.closing.cancel();
        self.connections.close();
        let _ = tokio::time::timeout(FLUSH_TIMEOUT, self.connections.wait()).await;
        self.end().await;
    }

    /// Dies like a process on SIGKILL: connections break wherever they are.
    async fn die(self) -> Result<(), Error> {
        error!("the engine dies as it was told to");
        self.end().await;
        Err(Error::Died)
    }

    async fn end(self) {
        self.killed.cancel();
        self.connections.close();
        self.tasks.close();
        self.connections.wait().await;
        self.tasks.wait().await;
    }
}

impl Drop for Server {
    /// Ends an engine dropped in this process as if it were killed.
    fn drop(&mut self) {
        self.killed.cancel();
    }
}

impl BoundSocket {
    fn listen(self, address: &Address) -> Result<Listener, Error> {
        let listening = match self {
            Self::Unix(socket) => socket.listen(BACKLOG).map(Listener::Unix),
            Self::Tcp(socket) => socket.listen(BACKLOG).map(Listener::Tcp),
        };
        listening.map_err(|source| bind_error(address.to_string(), source))
    }
}

impl Listener {
    async fn accept(&self) -> std::io::Result<Connection> {
        match self {
            Self::Unix(listener) => Ok(Connection::Unix(listener.accept().await?.0)),
            Self::Tcp(listener) => Ok(Connection::Tcp(listener.accept().await?.0)),
        }
    }
}

fn bind_unix(path: PathBuf) -> Result<(BoundSocket, Address), Error> {
    if path.as_os_str().len() > SOCKET_PATH_BYTES {
        return Err(Error::PathTooLong { path });
    }
    let failed = |source| bind_error(format!("unix:{}", path.display()), source);
    let socket = UnixSocket::new_stream().map_err(failed)?;
    socket.bind(&path).map_err(failed)?;
    Ok((BoundSocket::Unix(socket), Address::Unix(path)))
}

fn bind_tcp(host: &str, port: u16) -> Result<(BoundSocket, Address), Error> {
    let ip = match host {
        "localhost" => Ipv4Addr::LOCALHOST.into(),
        "" | "*" => Ipv6Addr::UNSPECIFIED.into(),
        host => host.parse().map_err(|_| Error::Argument { argument: "--host", reason: format!("`{host}` is not an IP address") })?,
    };
    let address = SocketAddr::new(ip, port);
    let failed = |source| bind_error(address.to_string(), source);
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
    let socket = socket.map_err(failed)?;
    socket.set_reuseaddr(true).map_err(failed)?;
    socket.bind(address).map_err(failed)?;
    let address = socket.local_addr().map_err(failed)?;
    Ok((BoundSocket::Tcp(socket), Address::Tcp(address)))
}

fn bind_error(address: String, source: std::io::Error) -> Error {
    match source.kind() {
        std::io::ErrorKind::AddrInUse => Error::AddressInUse { address },
        _ => Error::Bind { address, source },
    }
}

fn check_sizes(args: &EngineArgs) -> Result<(), Error> {
    let positive = [
        ("--block-size", args.block_size),
        ("--max-num-seqs", args.max_num_seqs),
        ("--max-num-batched-tokens", args.max_num_batched_tokens),
        ("--stream-interval", args.stream_interval),
    ];
    for (argument, value) in positive {
        if value == 0 {
            return Err(Error::Argument { argument, reason: "it must be at least 1".to_owned() });
        }
    }
    let (context, cache) = (args.context_length(), args.cache_tokens());
    if context == 0 || context > cache {
        return Err(Error::Argument {
            argument: "--max-model-len",
            reason: format!("{context} tokens do not fit the KV cache of {cache} tokens"),
        });
    }
    Ok(())
}
