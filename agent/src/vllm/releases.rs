//! Features by release of vLLM, and the release assumed if none is installed.
//!
//! Start here when a new release comes out.

use super::version::VllmVersion;

/// First release whose encoding of KV events the agent can read.
pub(crate) const CACHE_EVENTS_SINCE: VllmVersion = VllmVersion::new(0, 11);

/// Release since which, at the latest, vLLM's only engine sends spans (vllm#20372).
pub(crate) const TRACES_SINCE: VllmVersion = VllmVersion::new(0, 11);

/// Before this release `--async-scheduling` does not support structured outputs and is called
/// experimental.
pub(crate) const ASYNC_SINCE: VllmVersion = VllmVersion::new(0, 12);

/// Since this release the engine itself decides about asynchronous scheduling.
pub(crate) const ASYNC_AUTO_SINCE: VllmVersion = VllmVersion::new(0, 14);

/// First release that plans ahead for a pipeline (vllm#32359); earlier ones do not start if asked
/// to. In 0.32 the V1 model runner turns it off by itself (vllm#45014), and the V2 one does not.
pub(crate) const ASYNC_STAGES_SINCE: VllmVersion = VllmVersion::new(0, 15);

/// First release with `--stream-interval`.
pub(crate) const STREAM_INTERVAL_SINCE: VllmVersion = VllmVersion::new(0, 12);

/// First release with `--performance-mode`.
pub(crate) const PERFORMANCE_MODE_SINCE: VllmVersion = VllmVersion::new(0, 17);

/// First release whose copies in the host's memory were measured, and say what is in them.
pub(crate) const HOST_CACHE_SINCE: VllmVersion = VllmVersion::new(0, 24);

/// First release whose files with KV blocks were measured. Engines of it find each other's.
pub(crate) const FILE_CACHE_SINCE: VllmVersion = VllmVersion::new(0, 33);

/// First release with `--shutdown-timeout`.
pub(crate) const SHUTDOWN_TIMEOUT_SINCE: VllmVersion = VllmVersion::new(0, 18);

/// Since this release vLLM counts CUDA graphs as memory that it uses, and uses 0.92 of a GPU by
/// default instead of 0.9.
pub(crate) const GRAPHS_COUNTED_SINCE: VllmVersion = VllmVersion::new(0, 20);

/// Before this release an engine that sends KV events keeps whole contexts in layers with a window.
pub(crate) const WINDOWS_WITH_EVENTS_SINCE: VllmVersion = VllmVersion::new(0, 20);

/// First release that ships the Rust front-end, in its builds for GPUs.
pub(crate) const RUST_FRONT_END_SINCE: VllmVersion = VllmVersion::new(0, 22);

/// First release whose Rust front-end has `/tokenize`, without which routers do not place by the
/// exact prompt.
pub(crate) const RUST_TOKENIZE_SINCE: VllmVersion = VllmVersion::new(0, 24);

/// Since this release `CUDA_VISIBLE_DEVICES` may hold a UUID; earlier ones read every entry as a
/// number and crash.
pub(crate) const GPU_UUID_SINCE: VllmVersion = VllmVersion::new(0, 24);

/// Since this release GPUs of 160 GiB and more have larger steps by default.
pub(crate) const LARGE_STEPS_SINCE: VllmVersion = VllmVersion::new(0, 28);

/// First release with `--max-num-queued-reqs`.
///
/// The Rust front-end refuses to start with it, up to 0.33 at least.
pub(crate) const QUEUE_LIMIT_SINCE: VllmVersion = VllmVersion::new(0, 29);

/// First release with `--enable-scale-out`, which turns on the routes that render prompts, in the
/// Python front-end (vllm#55176). The Rust one has no such routes, up to 0.32 at least.
pub(crate) const SCALE_OUT_SINCE: VllmVersion = VllmVersion::new(0, 30);

/// Release assumed if none is installed: the newest whose flags were examined.
pub(crate) const NEWEST_KNOWN: VllmVersion = VllmVersion::new(0, 33);
