//! Headers across the router: all of them, as they were written, but for those that concern one connection only.

use hostler_proto::agent::v1::Header;
use http::header::{self, HeaderMap, HeaderName};

/// Headers of one connection (RFC 9110 §7.6.1), and those that are made anew for the next one.
fn is_own(name: &HeaderName) -> bool {
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

/// A client's headers for the engine. The body's length travels beside them.
pub(super) fn outgoing(headers: &HeaderMap) -> Vec<Header> {
    let listed: Vec<&str> =
        headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(',')).collect();
    let is_listed = |name: &HeaderName| listed.iter().any(|listed| listed.trim().eq_ignore_ascii_case(name.as_str()));
    headers
        .iter()
        .filter(|(name, _)| !is_own(name) && *name != header::CONTENT_LENGTH && !is_listed(name))
        .map(|(name, value)| Header::new(name, value))
        .collect()
}

/// An engine's headers for the client. What is no header at all is left out.
pub(super) fn incoming(headers: Vec<Header>) -> HeaderMap {
    let mut map = HeaderMap::with_capacity(headers.len() + 1);
    for (name, value) in headers.into_iter().filter_map(Header::parse) {
        if !is_own(&name) {
            map.append(name, value);
        }
    }
    map
}
