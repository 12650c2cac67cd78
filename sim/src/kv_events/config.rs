//! The flag `--kv-events-config`: the object that vLLM takes, with its defaults.

use serde::Deserialize;

use crate::error::Error;

/// vLLM's `KVEventsConfig`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KvEventsConfig {
    pub(crate) enable_kv_cache_events: bool,
    /// Publisher `zmq` or `null`; `zmq` if events are enabled and it is absent.
    pub(crate) publisher: Option<String>,
    pub(crate) endpoint: String,
    pub(crate) replay_endpoint: Option<String>,
    pub(crate) topic: String,
    /// Batches kept for replay, one per step.
    pub(crate) buffer_steps: usize,
    /// Limit of the socket, accepted but unused: the pure-Rust socket has its own limit (100,000).
    pub(crate) hwm: usize,
    /// Batches that may wait to be sent; more are dropped.
    pub(crate) max_queue_size: usize,
}

impl Default for KvEventsConfig {
    fn default() -> Self {
        Self {
            enable_kv_cache_events: false,
            publisher: None,
            endpoint: "tcp://*:5557".to_owned(),
            replay_endpoint: None,
            topic: String::new(),
            buffer_steps: 10_000,
            hwm: 100_000,
            max_queue_size: 100_000,
        }
    }
}

impl KvEventsConfig {
    /// Parses the flag; `None` if events are disabled.
    ///
    /// # Errors
    /// When the flag is not such an object.
    pub fn parse(flag: Option<&str>) -> Result<Option<Self>, Error> {
        let Some(json) = flag else { return Ok(None) };
        let config: Self =
            serde_json::from_str(json).map_err(|error| Error::Argument { argument: "--kv-events-config", reason: error.to_string() })?;
        let sends = config.publisher.as_deref().is_none_or(|publisher| publisher == "zmq");
        Ok((config.enable_kv_cache_events && sends).then_some(config))
    }

    /// Whether the publisher binds its endpoint, by vLLM's rule. Otherwise it connects.
    pub(crate) fn binds(&self) -> bool {
        let endpoint = &self.endpoint;
        endpoint.contains('*') || endpoint.contains("::") || endpoint.starts_with("ipc://") || endpoint.starts_with("inproc://")
    }
}
