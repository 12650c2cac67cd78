//! The router's settings: one field each, documented here and nowhere else.

use std::path::PathBuf;
use std::time::Duration;

use hostler_boot::TraceSettings;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How the access log looks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AccessFormat {
    /// There is none.
    Off,
    /// One readable line a request: `name=value`.
    #[default]
    Text,
    /// One JSON object a request.
    Json,
}

/// Bounds how long a stolen certificate works. A node may be out of reach for the last third of it.
const CERTIFICATE_LIFETIME: Duration = Duration::from_secs(24 * 3600);

/// People read answers and pause, but a client that reads nothing for this long is gone.
const CLIENT_STALL_TIMEOUT: Duration = Duration::from_secs(5 * 60);

/// When the metrics page needs an admin key, where there are keys at all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum NeedKey {
    /// Where the listener is reached beyond loopback.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// The `[router]` section of the configuration.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RouterConfig {
    /// Address of the OpenAI-compatible edge. Beyond loopback, set `keys_file` or trust the
    /// network.
    pub listen: String,
    /// Address that agents dial; empty means `0.0.0.0:8001` with `tls_dir`, and `127.0.0.1:8001`
    /// without.
    pub agents_listen: String,
    /// Address of health and metrics pages. Operators' calls (`hostler ps`, `drain` and the like)
    /// are served here only to who shows an admin key.
    pub admin_listen: String,
    /// Unix socket for operators' calls without a key: only this router's user and root can
    /// connect. Empty means `router-PORT.sock`, where PORT is that of `admin_listen`, in
    /// `$XDG_RUNTIME_DIR/hostler`, or in `/tmp/hostler-UID` where that is not to be had.
    pub operators_socket: PathBuf,
    /// File with the keys of those who may send requests, as `hostler keys create` makes it; it is
    /// read again when it changes. Empty: there are no keys, and whoever reaches the edge may use
    /// the models.
    pub keys_file: PathBuf,
    /// Whether the metrics page needs an admin key, where there is a `keys_file`: `auto` when
    /// `admin_listen` is reached beyond loopback, `always`, or `never`. Every user of a host
    /// reaches its loopback.
    pub metrics_need_key: NeedKey,
    /// The edge's certificate, and those between it and its authority, in PEM; with `tls_key` it
    /// makes the edge speak TLS. It is read again when it changes.
    pub tls_cert: PathBuf,
    /// The key of `tls_cert`, in PEM.
    pub tls_key: PathBuf,
    /// Authorities of clients' certificates, in PEM. Where given, the edge takes only clients that
    /// have one.
    pub tls_client_ca: PathBuf,
    /// Folder of the fleet's authority, as `hostler init` makes it. Where given, agents join by a
    /// token and speak TLS; all routers of a fleet share it.
    pub tls_dir: PathBuf,
    /// How long a node's certificate holds; agents renew it at two thirds of that. A constant for
    /// users: only tests have other ones.
    #[serde(skip)]
    pub certificate_lifetime: Duration,
    /// Whether the edge and the agents' port may be reached from other hosts in plain text, and the
    /// agents' port by agents of other users of this host.
    pub allow_plain_text: bool,
    /// Origins of web pages that may use the edge, such as `https://chat.example.org`, or `*` for
    /// all: their preflights are answered before keys are asked for, and every answer says that the
    /// page may read it. Empty: the router's own answers are for no page, and of their own answers
    /// engines decide (vLLM's `--allowed-origins`).
    pub allowed_origins: Vec<String>,
    /// Largest request body in bytes; a larger one is refused with 413. Images in chats are a third
    /// larger there than as files.
    pub max_body_bytes: usize,
    /// Most memory in bytes for request bodies, over all clients, from their first byte until an
    /// answer begins and the body is sent, and for whole answers that the router translates, until
    /// they are read; further ones are refused with 429. Tenants share it as
    /// they share `max_queued`. Bodies of 64 KiB and more take no more than seven eighths of it,
    /// which has to be more than `max_body_bytes`, so that small ones find room. Raise it where
    /// many large ones (images, say) wait for engines at once.
    pub max_buffered_body_bytes: usize,
    /// Whether request bodies may come compressed (gzip or deflate); what they become is bounded by
    /// `max_body_bytes`, and by 200 times what was sent. Otherwise they are refused with 415:
    /// engines take none either.
    pub decompress_bodies: bool,
    /// How requests are logged when they have ended: `text` or `json`, one line each, or `off`.
    /// Lines have no prompts and no secrets.
    pub access_log: AccessFormat,
    /// Whether what engines have cached of one tenant's prompts is kept apart from others' prompts,
    /// so that nobody learns from the time that an answer takes what somebody else has asked.
    /// Tenants are those of `keys_file`. Prefixes that all share are then computed once per tenant.
    pub isolate_tenants: bool,
    /// The file with the secret for `isolate_tenants`, which the router makes where there is none;
    /// empty means `$XDG_STATE_HOME/hostler/router.secret`, or
    /// `~/.local/state/hostler/router.secret`. Routers of one fleet need the same one.
    pub secret_file: PathBuf,
    /// Hosts that engines may fetch images, sounds and videos from when a request has a URL of one:
    /// `example.org`, `*.example.org` or `*` for all. Requests with other URLs than these and
    /// `data:` are refused: engines stand inside the network, and would fetch anything there.
    pub media_hosts: Vec<String>,
    /// The file of the access log; empty means standard error, with the other logs. Where it is
    /// moved away it is opened anew within a second.
    pub access_log_file: PathBuf,
    /// Folder for requests and tokens by day, key, tenant and model, which `hostler usage` adds up;
    /// empty writes none. `hostler up` and the controller of a fleet of jobs have one.
    pub usage_dir: PathBuf,
    /// Where traces go. It is no setting: OpenTelemetry's environment variables say so.
    #[serde(skip)]
    pub traces: Option<TraceSettings>,
    /// Most requests in flight at once, those that callers of `Place` send themselves included;
    /// further ones are refused with 429. Where there are keys, one tenant of weight 1 gets four
    /// fifths of what the others leave.
    pub max_in_flight: usize,
    /// Most client connections at once; further ones wait to be accepted.
    pub max_connections: usize,
    /// How long a client may take to send its request's headers.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub header_timeout: Duration,
    /// How long a connection without a request is kept. A load balancer before the router should
    /// keep it for less.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub keep_alive: Duration,
    /// How long a client may take to send its request's body.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub body_timeout: Duration,
    /// How long an engine may take until the first byte of its answer, queueing and a whole
    /// non-streaming generation included.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub answer_timeout: Duration,
    /// How often the client of an event stream gets a comment (over Anthropic's API a `ping`) while
    /// its request waits or its engine is silent, so that no proxy takes the connection for dead.
    /// After the first one what goes wrong is told by an event, not by a status: docs/proxies.md. 0
    /// turns it off.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub stream_keepalive: Duration,
    /// Whether the stream of a chat or a completion whose engine is lost goes on from another one,
    /// where its parameters allow that (docs/streams.md). Engines are then asked for the tokens of
    /// such streams.
    pub resume_streams: bool,
    /// How long an answer that has begun may pause before it is given up.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub idle_timeout: Duration,
    /// How long a client may take nothing of what is sent to it before its connection is closed;
    /// over HTTP/2, nothing of one answer before that stream is reset. A constant for users: only
    /// tests have other ones.
    #[serde(skip)]
    pub client_stall_timeout: Duration,
    /// Most requests that may wait in the router for a replica that has no room yet; further ones
    /// are refused with 429. Lower it where clients would rather be refused at once than wait. One
    /// that has as many as four times what is free gets no more, so one that floods leaves places
    /// to others: alone it has at most four fifths of these.
    pub max_queued: usize,
    /// A request whose first token is predicted to come later than this is refused with 429 instead
    /// of waiting for a replica. Where there is no replica, requests wait for one that starts, that
    /// a controller expects, or whose agent was just lost, for no longer than this. So do streams
    /// that have lost their engine (docs/streams.md). Raise it for batch jobs that can wait, lower
    /// it for people who cannot.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub max_queue_wait: Duration,
    /// Prompts for a replica with 64 requests in flight and more wait in the router and are given
    /// to it together, so often. Steps that read prompts take longer than those that only generate,
    /// and not much longer for ten prompts than for one: small models on fast GPUs generate up to
    /// twice as much with 200 ms, for about 100 ms more to a first token (docs/gpus.md). 0 sends
    /// each as soon as there is room; at most 5 s.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub prefill_interval: Duration,
    /// Threads that turn prompts into tokens; 0 means half of the cores. More where prompts are
    /// long and new.
    pub tokenizer_threads: usize,
    /// Where models' tokenizers are kept between two lives of the router; empty means
    /// `$XDG_CACHE_HOME/hostler/router`, or `~/.cache/hostler/router`. They come from the agents.
    pub cache_dir: PathBuf,
    /// Folder of the files and batches of OpenAI's Batch API (docs/batch.md), for this user alone.
    /// Empty: there is no such API. `hostler up` sets it to `$XDG_STATE_HOME/hostler/batches`, or
    /// `~/.local/state/hostler/batches`, and a controller to `batches` in the fleet's folder.
    /// Routers may share it, where its file system has locks.
    pub batches_dir: PathBuf,
    /// Most requests of batches in flight at once. Give 256 for each replica, so that their batches
    /// are full.
    pub batches_in_flight: usize,
    /// Most requests of one batch in flight at once. Of a key with a limit of requests in flight, a
    /// batch takes half of that at most.
    pub batches_in_flight_each: usize,
    /// Most requests of a batch.
    pub batches_max_requests: usize,
    /// Largest file in bytes that may be uploaded for a batch.
    pub batches_max_file_bytes: u64,
    /// Most bytes of all files and batches together. When they are there, uploads are refused with
    /// 507, and batches wait.
    pub batches_max_bytes: u64,
    /// Most bytes of files and batches of one tenant, or of all together where there are no keys.
    /// Results are written in any case, and count for further uploads.
    pub batches_tenant_bytes: u64,
    /// Most files of one tenant. As many batches are remembered.
    pub batches_tenant_files: usize,
    /// Most unfinished batches of one tenant.
    pub batches_tenant_unfinished: usize,
    /// A request that was in flight when two engines crashed is refused for this long after the
    /// first of the two crashes; 0 turns that off. Agents remember crashes for ten minutes: a
    /// router that starts anew knows none that are older.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub crash_suspect_ttl: Duration,
    /// How long an agent may be silent before its replicas become suspect and are used last; at
    /// least 500 ms.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub lease: Duration,
    /// How many nodes may read models from one shared file system at once; others wait for their
    /// turn, and `hostler ps` says so. It holds for copies by `agent.stage` and for engines that
    /// read by themselves. 0 means any number.
    pub max_loads: u32,
    /// On shutdown, how long running requests may take to finish.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub drain_timeout: Duration,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:8000".into(),
            agents_listen: String::new(),
            admin_listen: "127.0.0.1:8002".into(),
            operators_socket: PathBuf::new(),
            keys_file: PathBuf::new(),
            metrics_need_key: NeedKey::Auto,
            tls_cert: PathBuf::new(),
            tls_key: PathBuf::new(),
            tls_client_ca: PathBuf::new(),
            tls_dir: PathBuf::new(),
            certificate_lifetime: CERTIFICATE_LIFETIME,
            allow_plain_text: false,
            allowed_origins: Vec::new(),
            max_body_bytes: 64 * 1024 * 1024,
            max_buffered_body_bytes: 1024 * 1024 * 1024,
            decompress_bodies: false,
            access_log: AccessFormat::Text,
            access_log_file: PathBuf::new(),
            usage_dir: PathBuf::new(),
            traces: None,
            isolate_tenants: false,
            secret_file: PathBuf::new(),
            media_hosts: Vec::new(),
            max_in_flight: 16_384,
            max_connections: 16_384,
            header_timeout: Duration::from_secs(10),
            keep_alive: Duration::from_secs(75),
            body_timeout: Duration::from_secs(60),
            answer_timeout: Duration::from_secs(30 * 60),
            stream_keepalive: Duration::from_secs(15),
            resume_streams: true,
            idle_timeout: Duration::from_secs(10 * 60),
            client_stall_timeout: CLIENT_STALL_TIMEOUT,
            max_queued: 10_000,
            max_queue_wait: Duration::from_secs(5 * 60),
            prefill_interval: Duration::ZERO,
            tokenizer_threads: 0,
            cache_dir: PathBuf::new(),
            batches_dir: PathBuf::new(),
            batches_in_flight: 1024,
            batches_in_flight_each: 256,
            batches_max_requests: 150_000,
            batches_max_file_bytes: 200 << 20,
            batches_max_bytes: 64 << 30,
            batches_tenant_bytes: 8 << 30,
            batches_tenant_files: 1000,
            batches_tenant_unfinished: 32,
            crash_suspect_ttl: Duration::from_secs(10 * 60),
            max_loads: 0,
            lease: Duration::from_secs(3),
            drain_timeout: Duration::from_secs(30),
        }
    }
}

impl RouterConfig {
    pub(crate) fn agents_address(&self) -> &str {
        match self.agents_listen.as_str() {
            "" if self.tls_dir.as_os_str().is_empty() => "127.0.0.1:8001",
            "" => "0.0.0.0:8001",
            address => address,
        }
    }

    /// The cache folder; empty if none can be derived from the environment.
    pub(crate) fn cache_folder(&self) -> PathBuf {
        if !self.cache_dir.as_os_str().is_empty() {
            return self.cache_dir.clone();
        }
        hostler_boot::home::cache_dir().map(|caches| caches.join("hostler/router")).unwrap_or_default()
    }

    pub(crate) fn secret_path(&self) -> Option<PathBuf> {
        let path = if self.secret_file.as_os_str().is_empty() { default_secret_path() } else { self.secret_file.clone() };
        self.isolate_tenants.then_some(path)
    }

    pub(crate) fn tokenizer_threads(&self) -> usize {
        match self.tokenizer_threads {
            0 => std::thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(2)),
            threads => threads,
        }
    }
}

#[cfg(test)]
mod tests;

/// The default path of the secret; empty if none can be derived from the environment.
fn default_secret_path() -> PathBuf {
    hostler_boot::home::state_dir().map(|state| state.join("hostler/router.secret")).unwrap_or_default()
}
