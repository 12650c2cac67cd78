//! Headers across the router: all of them, as they were written, but for those that concern one connection only.

use hostler_proto::lane::Header;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use xxhash_rust::xxh3::xxh3_64;

use super::invocation::ADAPTER_HEADER;
use super::peek::is_plain_priority;
use crate::keys::is_credential;
use crate::placement::PlacementDecision;

/// With the value 1 on a request: the answer says why it comes from where it comes.
pub(crate) const EXPLAIN_HEADER: HeaderName = HeaderName::from_static("x-hostler-explain");

/// On an answer: the router's own number of the request, for `hostler explain`.
const ID_HEADER: HeaderName = HeaderName::from_static("x-hostler-id");

/// On an answer: why it comes from where it comes.
const REASON_HEADER: HeaderName = HeaderName::from_static("x-hostler-reason");

/// On an answer: whether a proxy may gather it.
const BUFFERING_HEADER: HeaderName = HeaderName::from_static("x-accel-buffering");

/// On a request: its turn among those that wait, like the body's `priority` and before it.
const PRIORITY_HEADER: HeaderName = HeaderName::from_static("x-hostler-priority");

/// The same to vLLM, which reads it before the body's `priority`.
const VLLM_PRIORITY_HEADER: &str = "x-vllm-priority";

/// Headers of the whole way by which it is decided, here and in engines, what a request is and may do.
const DECISIVE_HEADERS: [&str; 5] = ["content-type", "content-length", "content-encoding", ADAPTER_HEADER, VLLM_PRIORITY_HEADER];

/// Headers of one connection (RFC 9110 §7.6.1), and those that are made anew for the next one.
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

/// The names that `Connection` lists, whose headers go no further.
fn connection_options(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let values = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim)
}

/// Whether `Connection` would take a header away from the engine by which the router decides.
pub(crate) fn hides_decisive_headers(headers: &HeaderMap) -> bool {
    connection_options(headers).any(|listed| DECISIVE_HEADERS.iter().any(|decisive| listed.eq_ignore_ascii_case(decisive)))
}

/// Whether a header stands before the body or nowhere: it frames or routes the request, or says what it is or who sends it (RFC 9110 §6.5.1).
pub(crate) fn is_forbidden_in_trailers(name: &HeaderName) -> bool {
    is_hop_by_hop(name) || is_credential(name) || DECISIVE_HEADERS.contains(&name.as_str())
}

/// A client's headers for the engine. The body's length travels beside them, and its compression is undone. With `credentials` the
/// client's key is among them: where we know keys, it is ours, and no engine's business.
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

/// An engine's headers for the client. What is no header at all is left out.
pub(crate) fn headers_for_client(headers: Vec<Header>) -> HeaderMap {
    let mut map = HeaderMap::with_capacity(headers.len() + 2);
    for (name, value) in headers.into_iter().filter_map(Header::parse) {
        if !is_hop_by_hop(&name) {
            map.append(name, value);
        }
    }
    map
}

/// The turn that a client asks for by header.
pub(crate) fn priority(headers: &HeaderMap) -> Option<i32> {
    headers.get(PRIORITY_HEADER)?.to_str().ok()?.trim().parse().ok()
}

/// Whether engines may be told by header to take a request before others.
pub(crate) fn asks_engine_priority(headers: &HeaderMap) -> bool {
    headers.get_all(VLLM_PRIORITY_HEADER).iter().any(|priority| !is_plain_priority(priority.as_bytes()))
}

/// Who a request shares the fleet's attention with: whoever has its key. Only where there are no keys its user counts, which is but what the
/// client says.
pub(crate) fn tenant_hash(headers: &HeaderMap, user: Option<&str>) -> u64 {
    match (headers.get(header::AUTHORIZATION), user) {
        (Some(key), _) => xxh3_64(key.as_bytes()),
        (None, Some(user)) => xxh3_64(user.as_bytes()),
        (None, None) => 0,
    }
}

/// Has proxies pass each event of a stream on as it comes: nginx gathers them otherwise.
pub(crate) fn disable_buffering(headers: &mut HeaderMap) {
    headers.insert(BUFFERING_HEADER, HeaderValue::from_static("no"));
}

/// Tells the client how to ask about its request.
pub(crate) fn add_id(headers: &mut HeaderMap, id: u64) {
    if let Ok(id) = HeaderValue::from_str(&format!("{id:016x}")) {
        headers.insert(ID_HEADER, id);
    }
}

/// Tells the client how to ask about its request, and the reason of its placement where it wants that at once.
pub(crate) fn add_placement_headers(headers: &mut HeaderMap, reason: &PlacementDecision, wanted: bool) {
    add_id(headers, reason.id);
    if wanted && let Ok(line) = HeaderValue::from_str(&reason.to_string()) {
        headers.insert(REASON_HEADER, line);
    }
}
