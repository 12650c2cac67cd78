//! The page's content as the JSON that its script reads: the fleet from operators' data
//! (`fleet.v1`), requests from the router's decisions. Times are in seconds, moments in
//! milliseconds since 1970.

use std::time::{Duration, SystemTime};

use hostler_proto::fleet::v1::{FirstTokens, FleetFinding, ListResponse, Node, Replica, RequestCounts};
use serde::Serialize;

use crate::event_log::millis_since_1970;
use crate::placement::PlacementDecision;

/// Most characters of a reason, an advice or the like that are shown.
const MAX_WORDS: usize = 600;

#[derive(Serialize)]
pub(super) struct Totals {
    in_flight: u32,
    queued: u32,
    first_tokens: Option<FirstTokens>,
    findings: Vec<FleetFinding>,
    /// Requests that have ended, by verdict.
    requests: RequestCounts,
}

/// A node, with its replicas as `hostler ps --json` has them.
#[derive(Serialize)]
pub(super) struct NodePicture<'a> {
    name: &'a str,
    attached: bool,
    agent_version: &'a str,
    job: Option<JobPicture<'a>>,
    replicas: &'a [Replica],
}

/// A job with moments for its times, which do not change from second to second.
#[derive(Serialize)]
struct JobPicture<'a> {
    scheduler: &'a str,
    id: &'a str,
    run: u32,
    ends_at: Option<u64>,
    leaves_at: Option<u64>,
}

impl From<&ListResponse> for Totals {
    fn from(listed: &ListResponse) -> Self {
        Self {
            in_flight: listed.in_flight,
            queued: listed.queued,
            first_tokens: listed.first_tokens,
            findings: listed.findings.clone(),
            requests: listed.requests.unwrap_or_default(),
        }
    }
}

impl<'a> NodePicture<'a> {
    pub(super) fn new(node: &'a Node, now: SystemTime) -> Self {
        let moment = |left: u64| whole_second(now + Duration::from_millis(left));
        let job = node.job.as_ref().map(|job| JobPicture {
            scheduler: &job.scheduler,
            id: &job.id,
            run: job.run,
            ends_at: job.ends_in_ms.map(moment),
            leaves_at: job.leaves_in_ms.map(moment),
        });
        Self { name: &node.name, attached: node.attached, agent_version: &node.agent_version, job, replicas: &node.replicas }
    }
}

/// Cuts what replicas say to what the page shows of it. An engine's flags are the longest part, and
/// it shows none.
pub(super) fn trim(listed: &mut ListResponse) {
    for replica in listed.nodes.iter_mut().flat_map(|node| &mut node.replicas) {
        replica.cache.iter_mut().for_each(|cache| cut(&mut cache.reason));
        let Some(state) = &mut replica.state else { continue };
        cut(&mut state.reason);
        state.launch.iter_mut().for_each(|launch| launch.arguments.clear());
        state.failure.iter_mut().flat_map(|failure| [&mut failure.cause, &mut failure.remedy]).for_each(cut);
        state.findings.iter_mut().flat_map(|finding| [&mut finding.evidence, &mut finding.advice]).for_each(cut);
    }
}

/// A request in the list of the latest ones.
#[derive(Serialize)]
pub(super) struct RequestPicture {
    pub(super) id: String,
    pub(super) attempt: u32,
    /// When the replica was chosen.
    at_ms: u64,
    path: String,
    model: String,
    replica: String,
    why: &'static str,
    level: &'static str,
    queue_seconds: f32,
    tokens: u32,
    predicted_first_token: f64,
    predicted_cached: u32,
    /// `null` until, or unless, it is known.
    first_token: Option<f64>,
    cached: Option<u32>,
    /// Tokens of the prompt, as the engine says: the router may have only estimated them.
    told_tokens: Option<u32>,
    status: Option<u16>,
    /// Empty until it is known.
    end: &'static str,
}

impl RequestPicture {
    pub(super) fn new(decision: &PlacementDecision) -> Self {
        let outcome = *decision.outcome.lock();
        let (replica, choice) = decision.choice();
        Self {
            id: format!("{:016x}", decision.id),
            attempt: decision.attempt,
            at_ms: millis_since_1970(decision.decided_at),
            path: decision.path.to_string(),
            model: shorten(decision.model.as_deref().unwrap_or_default()),
            replica: replica.to_owned(),
            why: decision.reason(),
            level: decision.level.as_str(),
            queue_seconds: decision.queued_seconds,
            tokens: decision.prompt_tokens,
            predicted_first_token: choice.terms.first_token(),
            predicted_cached: choice.candidate.matched,
            first_token: outcome.first_token_seconds,
            cached: outcome.cached_tokens,
            told_tokens: outcome.told_prompt_tokens,
            status: outcome.status,
            end: outcome.end.unwrap_or_default(),
        }
    }
}

fn shorten(words: &str) -> String {
    words.chars().take(MAX_WORDS).collect()
}

fn cut(words: &mut String) {
    if let Some((end, _)) = words.char_indices().nth(MAX_WORDS) {
        words.truncate(end);
    }
}

/// Rounded, so that a moment computed from two clocks stays the same from one second to the next.
fn whole_second(at: SystemTime) -> u64 {
    (millis_since_1970(at) + 500) / 1000 * 1000
}

#[cfg(test)]
mod tests;
