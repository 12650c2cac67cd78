//! The router's settings: one field each, documented here and nowhere else.

use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The `[router]` section of the configuration.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RouterConfig {
    /// Address of the OpenAI-compatible edge. It has no keys yet: beyond loopback, only on a network you trust.
    pub listen: String,
    /// Address that agents dial. Plain text: only on a network you trust.
    pub agents_listen: String,
    /// Address of health, metrics and operators' pages; whoever reaches it may drain replicas.
    pub admin_listen: String,
    /// Largest request body in bytes; a larger one is refused with 413.
    pub max_body_bytes: usize,
    /// Most requests in flight at once; further ones are refused with 429.
    pub max_in_flight: usize,
    /// Most client connections at once; further ones wait to be accepted.
    pub max_connections: usize,
    /// How long a client may take to send its request's headers.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub header_timeout: Duration,
    /// How long a connection without a request is kept. A load balancer before the router should keep it for less.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub keep_alive: Duration,
    /// How long a client may take to send its request's body.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub body_timeout: Duration,
    /// How long an engine may take until the first byte of its answer, queueing and a whole non-streaming generation included.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub answer_timeout: Duration,
    /// How long an answer that has begun may pause before it is given up.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub idle_timeout: Duration,
    /// How long a client may take nothing of what is sent to it before its connection is closed.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub client_stall_timeout: Duration,
    /// Most requests that may wait in the router for a replica that has no room yet; further ones are refused with 429. Lower it where clients
    /// would rather be refused at once than wait.
    pub max_held: usize,
    /// A request whose first token is predicted to come later than this is refused with 429 instead of being held. Raise it for batch
    /// jobs that can wait, lower it for people who cannot.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub longest_wait: Duration,
    /// Threads that turn prompts into tokens; 0 means half of the cores. More where prompts are long and new.
    pub tokenizer_threads: usize,
    /// Where models' tokenizers are kept between two lives of the router; empty means `$XDG_CACHE_HOME/hostler/router`, or
    /// `~/.cache/hostler/router`. They come from the agents.
    pub cache_dir: PathBuf,
    /// A request that was in flight when two engines died is refused for this long after the first of the two deaths; 0 turns that off.
    /// Agents remember deaths for ten minutes: a router that starts anew knows none that are older.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub poison_for: Duration,
    /// How long an agent may be silent before its replicas become suspect and are used last; at least 500 ms.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub lease: Duration,
    /// On shutdown, how long running requests may take to finish.
    #[serde(with = "hostler_boot::duration")]
    #[schemars(with = "String")]
    pub drain_timeout: Duration,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:8000".into(),
            agents_listen: "0.0.0.0:8001".into(),
            admin_listen: "127.0.0.1:8002".into(),
            max_body_bytes: 16 * 1024 * 1024,
            max_in_flight: 16_384,
            max_connections: 16_384,
            header_timeout: Duration::from_secs(10),
            keep_alive: Duration::from_secs(75),
            body_timeout: Duration::from_secs(60),
            answer_timeout: Duration::from_secs(30 * 60),
            idle_timeout: Duration::from_secs(10 * 60),
            client_stall_timeout: Duration::from_secs(5 * 60),
            max_held: 10_000,
            longest_wait: Duration::from_secs(5 * 60),
            tokenizer_threads: 0,
            cache_dir: PathBuf::new(),
            poison_for: Duration::from_secs(10 * 60),
            lease: Duration::from_secs(3),
            drain_timeout: Duration::from_secs(30),
        }
    }
}

impl RouterConfig {
    /// Where tokenizers are kept; empty where no folder can be thought of.
    pub(crate) fn cache_folder(&self) -> PathBuf {
        if !self.cache_dir.as_os_str().is_empty() {
            return self.cache_dir.clone();
        }
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let caches = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
        caches.map(|caches| caches.join("hostler/router")).unwrap_or_default()
    }

    /// Threads that turn prompts into tokens.
    pub(crate) fn tokenizer_threads(&self) -> usize {
        match self.tokenizer_threads {
            0 => std::thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(2)),
            threads => threads,
        }
    }
}
