//! vLLM's two HTTP front-ends, and the features that the Rust one lacks.
//!
//! These were found by running the binary of vLLM 0.32 with an engine on the CPU, and in the
//! sources of 0.22 to 0.33. The Rust front-end has everything that the agent and the routers need:
//! the Unix socket, `/health`, `/v1/models`, `/tokenize` (since 0.24), `/metrics` (whole only:
//! `name[]` is answered 404), events about the cache, request ids in headers, cached tokens in the
//! usage, adapters, sleep. It has no `/v1/responses`, `/v1/messages`, `/invocations`, embeddings or
//! other pooling routes, and no limit of its queue. It turns some messages into other text than the
//! Python one does, which routers know.

use super::version::VllmVersion;

/// HTTP front-end of an engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FrontEndInUse {
    /// Python front-end, which every release has, and the simulated engine, too.
    #[default]
    Python,
    Rust,
}

/// Flags with which the Rust front-end refuses to start, up to 0.33 at least, or which mean nothing
/// to it.
pub(crate) const RUST_UNSUPPORTED_FLAGS: [&str; 44] = [
    "--aggregate-engine-logging",
    "--allowed-local-media-path",
    "--allowed-media-domains",
    "--api-server-count",
    "--collect-detailed-traces",
    "--config",
    "--default-mm-loras",
    "--enable-force-include-usage",
    "--enable-log-deltas",
    "--enable-log-outputs",
    "--enable-prompt-embeds",
    "--enable-tower-connector-lora",
    "--fingerprint-mode",
    "--fingerprint-value",
    "--hf-token",
    "--io-processor-plugin",
    "--kv-sharing-fast-prefill",
    "--log-config-file",
    "--log-error-stack",
    "--max-log-len",
    "--max-num-queued-reqs",
    "--max-num-queued-tokens",
    "--media-io-kwargs",
    "--middleware",
    "--mm-hasher-algorithm",
    "--mm-ipc-gpu-memory-gb",
    "--mm-processor-cache-gb",
    "--mm-processor-cache-type",
    "--mm-processor-device",
    "--mm-processor-kwargs",
    "--mm-tensor-ipc",
    "--otlp-traces-endpoint",
    "--override-generation-config",
    "--reasoning-parser-plugin",
    "--response-role",
    "--root-path",
    "--runner",
    "--convert",
    "--skip-tokenizer-init",
    "--task",
    "--tokens-only",
    "--tool-parser-plugin",
    "--tool-server",
    "--uvicorn-log-level",
];

/// Flags with which the Rust front-end refuses to start before these releases.
///
/// Releases 0.24, 0.26 to 0.29, 0.32 and 0.33 were examined.
pub(crate) const RUST_FLAGS_SINCE: [(&str, VllmVersion); 11] = [
    ("--limit-mm-per-prompt", VllmVersion::new(0, 27)),
    ("--generation-config", VllmVersion::new(0, 29)),
    ("--hf-overrides", VllmVersion::new(0, 32)),
    ("--lora-modules", VllmVersion::new(0, 32)),
    ("--stream-interval", VllmVersion::new(0, 32)),
    ("--exclude-tools-when-tool-choice-none", VllmVersion::new(0, 33)),
    ("--hf-config-path", VllmVersion::new(0, 33)),
    ("--return-tokens-as-token-ids", VllmVersion::new(0, 33)),
    ("--tokenizer", VllmVersion::new(0, 33)),
    ("--tokenizer-revision", VllmVersion::new(0, 33)),
    ("--trust-request-chat-template", VllmVersion::new(0, 33)),
];
