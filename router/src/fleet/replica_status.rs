//! State and load of a replica as its agent reports them: the router's own types, which `session`
//! parses from reports.

use std::sync::OnceLock;
use std::time::Duration;

use bytes::Bytes;
use hostler_placement::affinity::ChainGaps;
use hostler_placement::rates::LoadRates;
use hostler_prompt::Dialect;
use strum::IntoStaticStr;

use crate::prompt::{EncoderKey, FilesHash, TokenRules};
use crate::resume_tier::NotResumed;

/// An engine's stage of life.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum Phase {
    /// The engine's process has been started.
    #[default]
    Starting,
    /// The engine loads weights and prepares.
    Loading,
    /// The engine serves.
    Ready,
    /// The engine finishes its requests, then stops.
    Draining,
    /// The engine was stopped on purpose.
    Stopped,
    /// The engine died or never came up. The agent waits before the next attempt.
    Failed,
    /// The engine is kept out of service until an operator releases it.
    Quarantined,
    /// The engine has given its memory back until it is woken.
    Sleeping,
}

impl Phase {
    /// The word for people and scripts.
    #[must_use]
    pub(crate) fn as_str(self) -> &'static str {
        self.into()
    }
}

/// A model that an engine serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Model {
    /// The name that requests use.
    pub id: String,
    /// The engine's own entry of `/v1/models`.
    pub card: Bytes,
    /// The model is a LoRA adapter of another model.
    pub is_adapter: bool,
    /// The path whose last part `id` is. The name counts only while nothing else has it.
    pub alias_of: Option<String>,
}

impl Model {
    /// The model of an engine's entry, which names an adapter's parent.
    #[must_use]
    pub(crate) fn new(id: String, card: Bytes) -> Self {
        #[derive(serde::Deserialize)]
        struct Card {
            parent: Option<String>,
        }
        let is_adapter = serde_json::from_slice::<Card>(&card).is_ok_and(|card| card.parent.is_some());
        Self { id, card, is_adapter, alias_of: None }
    }
}

/// How an engine was started.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct EngineLaunch {
    /// The rules by which the engine's front-end prepares messages.
    pub dialect: Dialect,
    /// Whether somebody else runs the engine, so that its flags are not known.
    pub is_attached: bool,
    /// The engine's flags.
    pub flags: Vec<String>,
    /// The longest context that the engine takes, if known.
    pub max_context_tokens: Option<u64>,
    /// Client routes that the engine's front-end lacks, or has for routers alone, each with
    /// everything below it.
    pub missing_routes: Vec<String>,
    pub resume_checks: ResumeChecks,
}

/// Whether streams of an engine can be resumed, by kind, found out once: each request asks this of
/// each replica until one can.
#[derive(Debug, Clone, Default)]
pub(crate) struct ResumeChecks {
    pub chats: OnceLock<Result<(), NotResumed>>,
    pub completions: OnceLock<Result<(), NotResumed>>,
    pub replays: OnceLock<Result<(), NotResumed>>,
}

impl Eq for ResumeChecks {}

/// The checks follow from the flags, which are compared.
impl PartialEq for ResumeChecks {
    fn eq(&self, _other: &Self) -> bool {
        true
    }
}

impl EngineLaunch {
    pub(crate) fn has_flag(&self, name: &str) -> bool {
        self.flags.iter().any(|flag| is_flag(flag, name))
    }

    /// Most sequences that the engine takes at once; 0 if its flags do not say.
    pub(crate) fn sequence_limit(&self) -> u32 {
        let name = "--max-num-queued-reqs";
        let behind =
            self.flags.iter().find_map(|flag| flag.split_once('=').filter(|(flag, _)| is_flag(flag, name)).map(|(_, value)| value));
        let next = || self.flags.windows(2).find(|pair| is_flag(&pair[0], name)).map(|pair| pair[1].as_str());
        behind.or_else(next).and_then(|value| value.parse().ok()).unwrap_or_default()
    }

    /// Whether the engine refuses requests in which the model may call tools. Models of gpt-oss and
    /// those with Mistral's own tokenizer have a parser without a flag.
    pub(crate) fn refuses_tools(&self) -> bool {
        let is_parsed_unasked = |flag: &String| flag.contains("gpt-oss") || flag.contains("stral");
        !self.is_attached && !self.has_flag("--tool-call-parser") && !self.has_flag("--config") && !self.flags.iter().any(is_parsed_unasked)
    }
}

/// Whether an argument is the flag of this name, in either spelling, with or without its value or a
/// part of it (`--flag.part`).
pub(crate) fn is_flag(argument: &str, name: &str) -> bool {
    let flag = argument.split_once(['=', '.']).map_or(argument, |(flag, _)| flag).as_bytes();
    flag.len() == name.len() && flag.iter().map(|byte| if *byte == b'_' { b'-' } else { *byte }).eq(name.bytes())
}

/// The rarely changing state of a replica.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct ReplicaStatus {
    /// The engine's stage of life.
    pub phase: Phase,
    /// The reason for the phase, for people; for a failure what happened and what comes next.
    pub reason: String,
    /// Time until the replica takes requests, if it starts or will start again, and that can be
    /// told.
    pub start_left: Option<Duration>,
    /// Models that the replica serves, kept from its last life while it restarts.
    pub models: Vec<Model>,
    /// The files that turn a request into the tokens that the replica sees; `None` if its agent
    /// could not read them.
    pub files: Option<FilesHash>,
    /// Length of the files' bundle.
    pub files_bytes: u64,
    /// How the engine was started, once that is planned.
    pub launch: Option<EngineLaunch>,
    /// Path of the engine's socket on its node.
    pub engine_socket: String,
    /// Most tokens that the engine computes in one step; 0 when unknown.
    pub token_budget: u32,
    /// Most sequences that the engine takes at once, by its flags; 0 if they do not say.
    pub sequence_limit: u32,
    /// Speed of loading from the tiers behind the GPU's memory, if the engine has any.
    pub load_rates: LoadRates,
    /// Tokens per cached block; 0 before one was cached.
    pub block_tokens: u32,
    /// How the replica's cache is searched; `None` if its agent does not know exactly which blocks
    /// are cached.
    pub exact_cache: Option<ChainGaps>,
    /// Starts of the engine after the first one.
    pub restarts: u32,
    /// Lives of the engine that ended in a hang, since its agent started.
    pub hangs: u32,
    /// Used only while no other replica serves its model.
    pub is_standby: bool,
    /// A node with a part of the engine is not heard.
    pub has_silent_member: bool,
    /// How many problems cost the replica speed.
    pub findings: usize,
}

impl ReplicaStatus {
    /// The key of the encoder that turns a request into the replica's tokens, if its files are
    /// known.
    #[must_use]
    pub(crate) fn encoder_key(&self) -> Option<EncoderKey> {
        let TokenRules { files, dialect } = self.token_rules();
        files.map(|files| EncoderKey { files, dialect })
    }

    #[must_use]
    pub(crate) fn token_rules(&self) -> TokenRules {
        TokenRules { files: self.files, dialect: self.launch.as_ref().map_or_else(Dialect::default, |launch| launch.dialect) }
    }
}

/// The often changing state of a replica.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct ReplicaLoad {
    /// Requests of all routers in flight there.
    pub in_flight: u32,
    /// Requests of other routers in flight there.
    pub in_flight_elsewhere: u32,
    /// Requests taken since the agent started.
    pub served: u64,
    /// Prompt tokens of other routers' requests that are still to be computed.
    pub pending_tokens_elsewhere: u64,
    /// Prompt tokens of other routers' requests in flight.
    pub context_tokens_elsewhere: u64,
    /// The engine's own figures that placement computes with; zeros before it has reported.
    pub engine: EngineLoad,
}

/// The metrics of an engine that placement computes with. `AgentReport::engine` has them all.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct EngineLoad {
    /// Running requests.
    pub running: u32,
    /// Requests that wait in the engine.
    pub waiting: u32,
    /// Share of KV blocks in use, 0 to 1.
    pub kv_use: f64,
    /// Number of KV blocks.
    pub kv_blocks: u64,
    /// Tokens per block.
    pub block_tokens: u32,
}
