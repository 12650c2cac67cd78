//! Forwards headers as they were written, except those that concern only one connection.

use hostler_proto::lane::Header;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use xxhash_rust::xxh3::xxh3_64;

use super::invocation::ADAPTER_HEADER;
use super::peek::is_plain_priority;
use crate::keys::is_credential;
use crate::placement::PlacementDecision;

/// Request header. With the value 1, the answer says why this replica was chosen.
const EXPLAIN_HEADER: HeaderName = HeaderName::from_static("x-hostler-explain");

/// Answer header: the router's own number of the request, for `hostler explain`.
pub(crate) const ID_HEADER: HeaderName = HeaderName::from_static("x-hostler-id");

/// Answer header: why this replica was chosen.
const REASON_HEADER: HeaderName = HeaderName::from_static("x-hostler-reason");

/// Answer header: whether a proxy may buffer the answer.
const BUFFERING_HEADER: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Request header: its priority in the queue, which overrides the body's `priority`.
pub(crate) const PRIORITY_HEADER: HeaderName = HeaderName::from_static("x-hostler-priority");

/// Priority header of vLLM, which prefers it to the body's `priority`.
const VLLM_PRIORITY_HEADER: &str = "x-vllm-priority";

/// End-to-end headers that decide, here and in engines, what a request is and may do.
const DECISIVE_HEADERS: [&str; 5] = ["content-type", "content-length", "content-encoding", ADAPTER_HEADER, VLLM_PRIORITY_HEADER];

/// Whether a header concerns one connection (RFC 9110 §7.6.1), or is written anew for the next one.
fn is_hop_by_hop(name: &HeaderName) -> bool {
    matches!(
        *name,
        header::CONNECTION
            | header::HOST
            | header::EXPECT
            | header::PROXY_AUTHENTICATE
            | header::PROXY_AUTHORIZATION
            | header::TE
            | header::TRAILER
            | header::TRANSFER_ENCODING
            | header::UPGRADE
    ) || matches!(name.as_str(), "keep-alive" | "proxy-connection")
}

/// The names that `Connection` lists; headers of these names are not forwarded.
fn connection_options(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let values = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim)
}

/// Whether `Connection` would remove a header that the router decides by.
pub(crate) fn hides_decisive_headers(headers: &HeaderMap) -> bool {
    connection_options(headers).any(|listed| DECISIVE_HEADERS.iter().any(|decisive| listed.eq_ignore_ascii_case(decisive)))
}

/// Whether a header belongs before the body or nowhere. Such a header frames or routes the request,
/// or says what it is or who sends it (RFC 9110 §6.5.1).
pub(crate) fn is_forbidden_in_trailers(name: &HeaderName) -> bool {
    is_hop_by_hop(name) || is_credential(name) || DECISIVE_HEADERS.contains(&name.as_str())
}

/// A client's headers for the engine, without the body's length and compression. The client's key
/// is included only with `credentials`: if the router has keys, the key is for the router alone.
pub(crate) fn headers_for_engine(headers: &HeaderMap, credentials: bool) -> Vec<Header> {
    let listed: Vec<&str> = connection_options(headers).collect();
    let is_listed = |name: &HeaderName| listed.iter().any(|listed| listed.eq_ignore_ascii_case(name.as_str()));
    headers
        .iter()
        .filter(|(name, _)| {
            !is_hop_by_hop(name) && *name != header::CONTENT_LENGTH && *name != header::CONTENT_ENCODING && !is_listed(name)
        })
        .filter(|(name, _)| credentials || !is_credential(name))
        .map(|(name, value)| Header::new(name, value))
        .collect()
}

/// An engine's headers for the client, without invalid ones.
pub(crate) fn headers_for_client(headers: Vec<Header>) -> HeaderMap {
    let mut map = HeaderMap::with_capacity(headers.len() + 2);
    for (name, value) in headers.into_iter().filter_map(Header::parse) {
        if !is_hop_by_hop(&name) {
            map.append(name, value);
        }
    }
    map
}

/// How much an answer explains of its placement, besides the request's id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Explanation {
    None,
    /// Nothing that reveals what is cached.
    WithoutCaches,
    Whole,
}

pub(super) fn asks_explanation(headers: &HeaderMap) -> bool {
    headers.get(EXPLAIN_HEADER).is_some_and(|value| value == "1")
}

pub(crate) fn priority(headers: &HeaderMap) -> Option<i32> {
    headers.get(PRIORITY_HEADER)?.to_str().ok()?.trim().parse().ok()
}

/// Whether a client's header asks engines to take the request before others.
pub(crate) fn asks_engine_priority(headers: &HeaderMap) -> bool {
    headers.get_all(VLLM_PRIORITY_HEADER).iter().any(|priority| !is_plain_priority(priority.as_bytes()))
}

/// The hash by which requests share turns: that of the key, or without keys that of the user that
/// the client names.
pub(crate) fn tenant_hash(headers: &HeaderMap, user: Option<&str>) -> u64 {
    match (headers.get(header::AUTHORIZATION), user) {
        (Some(key), _) => xxh3_64(key.as_bytes()),
        (None, Some(user)) => xxh3_64(user.as_bytes()),
        (None, None) => 0,
    }
}

/// Makes proxies pass on each event of a stream as it comes. nginx would buffer events.
pub(crate) fn disable_buffering(headers: &mut HeaderMap) {
    headers.insert(BUFFERING_HEADER, HeaderValue::from_static("no"));
}

/// Tells the client how to ask about its request.
pub(crate) fn add_id(headers: &mut HeaderMap, id: u64) {
    if let Ok(id) = HeaderValue::from_str(&format!("{id:016x}")) {
        headers.insert(ID_HEADER, id);
    }
}

/// Adds the request's id, and the reason of its placement as far as `explanation` allows.
pub(crate) fn add_placement_headers(headers: &mut HeaderMap, reason: &PlacementDecision, explanation: Explanation) {
    add_id(headers, reason.id);
    let line = match explanation {
        Explanation::None => return,
        Explanation::WithoutCaches => reason.line(false),
        Explanation::Whole => reason.line(true),
    };
    if let Ok(line) = HeaderValue::from_str(&line) {
        headers.insert(REASON_HEADER, line);
    }
}
