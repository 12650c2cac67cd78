//! Which of vLLM's HTTP front-ends an engine gets. The Rust one gives 1.6 times the tokens a second of the Python one where the front-end is
//! the limit (a model of 1.7 billion parameters, 512 streams, one H200), and lacks some of its flags and routes.
//!
//! What it lacks was found by running the binary of vLLM 0.32 with an engine on the CPU, and in the sources of 0.22 to 0.33. It has what the
//! agent and the routers need: the Unix socket, `/health`, `/v1/models`, `/tokenize` (since 0.24), `/metrics` (whole only: `name[]` is
//! answered 404), events about the cache, request ids in headers, cached tokens in the usage, adapters, sleep. It has no `/v1/responses`,
//! `/v1/messages`, embeddings or other pooling routes, and no limit of its queue. It turns some messages into other text than the Python one
//! does, which routers know.

use std::path::{Path, PathBuf};

use super::error::PlanError;
#[cfg(test)]
use super::model::Facts;
use super::model::Model;
use super::setup::Setup;
use crate::config::{FrontEnd, Profile};
use crate::engine::FrontEndInUse;
use crate::engine::command::Given;
use crate::engine::version::Version;

/// The first release that comes with it, where it comes for GPUs.
pub(super) const SHIPPED_SINCE: Version = Version::new(0, 22);

/// The first release whose Rust front-end has `/tokenize`, without which routers do not place by the exact prompt.
const TOKENIZE_SINCE: Version = Version::new(0, 24);

/// Flags with which it refuses to start, up to 0.33 at least, or which mean nothing to it.
const REFUSED: [&str; 44] = [
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

/// Flags with which it refuses to start before these releases, as far as releases were looked at: 0.24, 0.26 to 0.29, 0.32 and 0.33.
const REFUSED_BEFORE: [(&str, Version); 11] = [
    ("--limit-mm-per-prompt", Version::new(0, 27)),
    ("--generation-config", Version::new(0, 29)),
    ("--hf-overrides", Version::new(0, 32)),
    ("--lora-modules", Version::new(0, 32)),
    ("--stream-interval", Version::new(0, 32)),
    ("--exclude-tools-when-tool-choice-none", Version::new(0, 33)),
    ("--hf-config-path", Version::new(0, 33)),
    ("--return-tokens-as-token-ids", Version::new(0, 33)),
    ("--tokenizer", Version::new(0, 33)),
    ("--tokenizer-revision", Version::new(0, 33)),
    ("--trust-request-chat-template", Version::new(0, 33)),
];

/// The front-end of all engines of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chosen {
    /// Which.
    pub in_use: FrontEndInUse,
    /// Ends a sentence.
    pub because: String,
    /// Whether an engine where it does not start gets the Python one.
    pub may_fall_back: bool,
}

/// Decides. `binary` is the Rust front-end of the installed vLLM, if it has one.
///
/// # Errors
/// When the Rust one was asked for and is not there.
pub(super) fn choose(setting: FrontEnd, binary: Option<&Path>, setup: &Setup, model: &Model) -> Result<Chosen, PlanError> {
    let python = |because: &str| Chosen { in_use: FrontEndInUse::Python, because: because.to_owned(), may_fall_back: false };
    if setup.simulated {
        return Ok(python("the simulated engine has its own"));
    }
    let rust = |because: &str, may_fall_back| Chosen { in_use: FrontEndInUse::Rust, because: because.to_owned(), may_fall_back };
    let absent = || match setup.version {
        Some(version) => format!("the installed vLLM {version} comes without it"),
        None => "the version of vLLM is unknown".to_owned(),
    };
    match (setting, binary) {
        (FrontEnd::Python, _) => Ok(python("agent.front_end says so")),
        (FrontEnd::Rust, None) => Err(PlanError::NoRustFrontEnd { because: absent() }),
        (FrontEnd::Rust, Some(_)) => Ok(rust("agent.front_end says so", false)),
        (FrontEnd::Auto, None) => Ok(python(&format!("{}: the Rust one ships with vLLM for GPUs since 0.22", absent()))),
        (FrontEnd::Auto, Some(_)) => match against(setup, model) {
            Some(because) => Ok(python(&because)),
            None => Ok(rust(
                "it serves more tokens a second; it has no /v1/responses and no /v1/messages, for which use --front-end python",
                true,
            )),
        },
    }
}

/// Why the Rust front-end is not the better one here.
fn against(setup: &Setup, model: &Model) -> Option<String> {
    if !setup.since(TOKENIZE_SINCE) {
        return Some(format!("the Rust one has what routers need since vLLM {}.{}", TOKENIZE_SINCE.major, TOKENIZE_SINCE.minor));
    }
    if setup.profile == Profile::Conservative {
        return Some("the profile is conservative".to_owned());
    }
    let given = Given(&setup.arguments);
    let not_yet = REFUSED_BEFORE.iter().filter(|(_, since)| !setup.since(*since)).map(|(flag, _)| flag);
    if let Some(flag) = REFUSED.iter().chain(not_yet).find(|flag| given.has(flag)) {
        return Some(format!("the Rust one does not do {flag}"));
    }
    let other = model.facts().filter(|facts| !facts.generates())?;
    Some(format!("the Rust one serves text generation only, and {} is something else", other.architecture))
}

/// The Rust front-end that this process's environment names in place of the installed one.
#[must_use]
pub(super) fn named_binary(variable: Option<std::ffi::OsString>) -> Option<PathBuf> {
    let path = PathBuf::from(variable?);
    path.is_file().then_some(path)
}

#[cfg(test)]
mod tests;
