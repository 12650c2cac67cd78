//! What a replica is and how busy it is, as its agent says: the router's own types for it, which `session` parses from reports.

use std::time::Duration;

use bytes::Bytes;
use hostler_placement::affinity::ChainGaps;
use hostler_prompt::Dialect;

use crate::prompt::{EncoderKey, FilesHash};

/// Where an engine is in its life.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Its process has been started.
    #[default]
    Starting,
    /// It loads weights and prepares.
    Loading,
    /// It serves.
    Ready,
    /// It finishes what it runs, then stops.
    Draining,
    /// It was stopped on purpose.
    Stopped,
    /// It died or never came up; the agent waits before the next attempt.
    Failed,
    /// Kept out of service until an operator releases it.
    Quarantined,
    /// It has given its memory back until it is woken.
    Sleeping,
}

impl Phase {
    /// The word for people and scripts.
    #[must_use]
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Loading => "loading",
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
            Self::Quarantined => "quarantined",
            Self::Sleeping => "sleeping",
        }
    }
}

/// A model that an engine serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Model {
    /// What requests name.
    pub id: String,
    /// The engine's own entry of `/v1/models`.
    pub card: Bytes,
    /// It is a LoRA adapter of another model.
    pub is_adapter: bool,
}

impl Model {
    /// The model of an engine's entry, which names the parent of an adapter.
    #[must_use]
    pub(crate) fn new(id: String, card: Bytes) -> Self {
        #[derive(serde::Deserialize)]
        struct Card {
            parent: Option<String>,
        }
        let is_adapter = serde_json::from_slice::<Card>(&card).is_ok_and(|card| card.parent.is_some());
        Self { id, card, is_adapter }
    }
}

/// How an engine was started.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct EngineLaunch {
    /// The rules by which its front-end prepares messages.
    pub dialect: Dialect,
    /// Its flags.
    pub flags: Vec<String>,
    /// The longest context that it takes, where that is known.
    pub max_context_tokens: Option<u64>,
    /// Routes for clients that its front-end does not have, each with all below it.
    pub missing_routes: Vec<String>,
}

/// What seldom changes of a replica.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct ReplicaStatus {
    /// Where its engine is in its life.
    pub phase: Phase,
    /// Why, for people; for a failure what happened and what comes next.
    pub reason: String,
    /// Until it takes requests, where it starts, or is to start again, and that can be told.
    pub start_left: Option<Duration>,
    /// Models it serves; kept from its last life while it restarts.
    pub models: Vec<Model>,
    /// Which files turn a request into the tokens that it sees; `None` when its agent could not read them.
    pub files: Option<FilesHash>,
    /// Length of their bundle.
    pub files_bytes: u64,
    /// How its engine was started, once that is planned.
    pub launch: Option<EngineLaunch>,
    /// Path of its engine's socket on its node.
    pub engine_socket: String,
    /// Tokens that its engine computes in one step at most; 0 when unknown.
    pub token_budget: u32,
    /// Tokens that a cached block holds; 0 before one was cached.
    pub block_tokens: u32,
    /// How its cache is searched; `None` where its agent does not know exactly which blocks are cached.
    pub exact_cache: Option<ChainGaps>,
    /// Starts of its engine after the first one.
    pub restarts: u32,
    /// Lives of its engine that ended in a hang, since its agent started.
    pub hangs: u32,
    /// How many things cost it speed.
    pub findings: usize,
}

impl ReplicaStatus {
    /// What turns a request into the tokens that it sees, if its files are known.
    #[must_use]
    pub(crate) fn encoder_key(&self) -> Option<EncoderKey> {
        let dialect = self.launch.as_ref().map_or_else(Dialect::default, |launch| launch.dialect);
        self.files.map(|files| EncoderKey { files, dialect })
    }
}

/// What often changes of a replica.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct ReplicaLoad {
    /// Requests of all routers in flight there.
    pub in_flight: u32,
    /// Those of other routers.
    pub in_flight_elsewhere: u32,
    /// Requests taken since its agent started.
    pub served: u64,
    /// Prompt tokens that requests of other routers still have computed.
    pub pending_tokens_elsewhere: u64,
    /// Prompt tokens of requests of other routers in flight.
    pub context_tokens_elsewhere: u64,
    /// What its engine says; zeros before it has.
    pub engine: EngineLoad,
}

/// An engine's own metrics.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct EngineLoad {
    /// Requests that it runs.
    pub running: u32,
    /// Requests that wait in it.
    pub waiting: u32,
    /// Share of its KV blocks in use, 0 to 1.
    pub kv_use: f64,
    /// Its KV blocks.
    pub kv_blocks: u64,
    /// Tokens that a block holds.
    pub block_tokens: u32,
    /// Prompt tokens that it has processed.
    pub prompt_tokens: u64,
    /// Tokens that it has generated.
    pub generation_tokens: u64,
    /// Requests that it has preempted.
    pub preemptions: u64,
    /// Tokens looked up in its prefix cache.
    pub prefix_queries: u64,
    /// Tokens found there.
    pub prefix_hits: u64,
}
