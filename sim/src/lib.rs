//! A simulated vLLM engine.
//!
//! The engine answers on the wire like `vllm serve` 0.32 (HTTP, server-sent events, metrics, KV
//! events) without a GPU or a model, in steps of a settable length, so that demos, tests and
//! benchmarks need no hardware. It does not model a GPU's performance: its step time is a straight
//! line in its batch. `hostler sim engine` and the tests of the other crates call it.

mod adapters;
mod api;
mod args;
mod cross_origin;
mod engine;
mod error;
mod faults;
mod host_tier;
pub mod kv_events;
mod mailbox;
mod metrics;
mod model_shards;
mod nodes;
mod prefix_cache;
mod reply;
mod response_store;
mod routes;
mod scheduler;
mod serve;
mod sleep;
mod sse;
mod structured;
mod tokens;

#[cfg(test)]
mod tests;

pub use args::EngineArgs;
pub use cross_origin::AllowedOrigins;
pub use error::Error;
pub use serve::{Address, Engine, serve};

/// vLLM release whose wire behaviour the engine has.
pub const VLLM_VERSION: &str = "0.32.0";
