//! Ten seconds of the fleet, of a replica or of a tenant.

use hostler_proto::fleet::v1::FirstTokens;
use serde::{Serialize, Serializer};
use strum::VariantNames;

use crate::outcome::{EndCounts, RefusalReason, Verdict};

/// Ten seconds of the fleet.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct FleetStep {
    /// The end of the step, in milliseconds since 1970.
    pub(crate) at: u64,
    /// Its length.
    pub(super) seconds: f32,
    /// Of all routers, as agents report them.
    pub(crate) tokens_per_second: f32,
    pub(crate) requests_per_second: f32,
    /// Requests that this router has seen end.
    #[serde(flatten, serialize_with = "write_ends")]
    pub(super) ends: EndCounts,
    /// Of this router, at the end of the step.
    pub(crate) in_flight: usize,
    pub(crate) queued: usize,
    /// Requests that run and wait in engines at the end of the step.
    pub(super) running: u32,
    pub(super) waiting: u32,
    /// Share of KV blocks in use, 0 to 1: the mean over replicas.
    pub(super) kv_use: Option<f32>,
    /// Of the streams that were sent in this step.
    pub(crate) first_tokens: Option<FirstTokens>,
    /// Seconds between two tokens of such a stream: the median, of those that are complete.
    pub(super) between_tokens: Option<f64>,
}

/// Ends by verdict and refusals by reason, each with the words that are not zero.
fn write_ends<S: Serializer>(ends: &EndCounts, to: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Ends {
        ended: serde_json::Map<String, serde_json::Value>,
        refused: serde_json::Map<String, serde_json::Value>,
    }
    let counted = |words: &[&str], counts: &[u64]| {
        let counted = words.iter().zip(counts).filter(|(_, count)| **count > 0);
        counted.map(|(word, count)| ((*word).to_owned(), (*count).into())).collect()
    };
    Ends { ended: counted(Verdict::VARIANTS, &ends.by_verdict()), refused: counted(RefusalReason::VARIANTS, &ends.refused) }.serialize(to)
}

/// What is read of a replica. The counters begin at 0 again with another engine or agent.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ReplicaReading {
    pub(crate) tokens: u64,
    pub(crate) served: u64,
    /// Answers of this router's requests that failed.
    pub(crate) failures: u64,
    pub(crate) running: u32,
    pub(crate) waiting: u32,
    pub(crate) kv_use: f64,
}

/// Ten seconds of a replica. Figures of people's charts, kept small: 28 bytes, a thousand times 360
/// of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct ReplicaStep {
    pub(crate) tokens_per_second: f32,
    pub(crate) requests_per_second: f32,
    failures: u16,
    running: u16,
    waiting: u16,
    kv_use: f32,
    /// The median of this router's streams; NaN, in JSON `null`, where there were none.
    pub(super) first_token: f32,
    pub(super) between_tokens: f32,
}

/// What is read of a tenant.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TenantReading {
    pub(crate) requests: u64,
    /// Requests that the tenant's own limits refused.
    pub(crate) refused: u64,
    pub(crate) prompt_tokens: u64,
    pub(crate) generation_tokens: u64,
    pub(crate) in_flight: u64,
}

/// Ten seconds of a tenant.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct TenantStep {
    requests_per_second: f32,
    refused_per_second: f32,
    prompt_tokens_per_second: f32,
    tokens_per_second: f32,
    in_flight: u32,
}

impl FleetStep {
    /// Adds the figures of the replicas.
    pub(super) fn sum(&mut self, replicas: &[ReplicaStep]) {
        for replica in replicas {
            self.tokens_per_second += replica.tokens_per_second;
            self.requests_per_second += replica.requests_per_second;
            self.running += u32::from(replica.running);
            self.waiting += u32::from(replica.waiting);
        }
        #[allow(clippy::cast_precision_loss, reason = "a mean that people read")]
        let mean = || replicas.iter().map(|replica| replica.kv_use).sum::<f32>() / replicas.len() as f32;
        self.kv_use = (!replicas.is_empty()).then(mean);
    }
}

impl ReplicaStep {
    #[allow(clippy::cast_possible_truncation, reason = "a share from 0 to 1")]
    pub(super) fn between(before: &ReplicaReading, now: &ReplicaReading, seconds: f32) -> Self {
        let small = |count: u64| u16::try_from(count).unwrap_or(u16::MAX);
        Self {
            tokens_per_second: per_second(before.tokens, now.tokens, seconds),
            requests_per_second: per_second(before.served, now.served, seconds),
            failures: small(growth(before.failures, now.failures)),
            running: small(now.running.into()),
            waiting: small(now.waiting.into()),
            kv_use: now.kv_use as f32,
            first_token: f32::NAN,
            between_tokens: f32::NAN,
        }
    }
}

impl TenantStep {
    pub(super) fn between(before: &TenantReading, now: &TenantReading, seconds: f32) -> Self {
        Self {
            requests_per_second: per_second(before.requests, now.requests, seconds),
            refused_per_second: per_second(before.refused, now.refused, seconds),
            prompt_tokens_per_second: per_second(before.prompt_tokens, now.prompt_tokens, seconds),
            tokens_per_second: per_second(before.generation_tokens, now.generation_tokens, seconds),
            in_flight: u32::try_from(now.in_flight).unwrap_or(u32::MAX),
        }
    }
}

/// How much a counter has grown, which may have begun at 0 again.
fn growth(before: u64, now: u64) -> u64 {
    if now >= before { now - before } else { now }
}

#[allow(clippy::cast_precision_loss, reason = "a rate that people read")]
fn per_second(before: u64, now: u64, seconds: f32) -> f32 {
    growth(before, now) as f32 / seconds
}
