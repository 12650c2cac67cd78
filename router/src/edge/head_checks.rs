//! Refuses heads that the HTTP library accepts although two readers may see them differently.
//!
//! The checks concern a request's target, end, path, body and headers. RFC 9112 and 9113 require
//! most of these refusals.

use http::header::{self, HeaderMap, HeaderValue};
use http::uri::Authority;
use http::{Method, Request, Version};

use crate::inbound::headers::hides_decisive_headers;

pub(super) fn check_head<B>(request: &Request<B>) -> Result<(), &'static str> {
    check_host(request)?;
    check_path(request.method(), request.uri().path())?;
    check_values(request.headers())?;
    check_type(request.headers())?;
    check_connection(request.headers())?;
    check_coding(request.headers())
}

/// Checks that the router and engines compare the same path.
///
/// Engines undo percent encoding once before they look for a route, so escapes must not hide a
/// route's name. Blanks and letters beyond ASCII may be escaped, because they cannot be written
/// otherwise. A line feed at a path's end is refused: Starlette treats the path like the one
/// without it.
fn check_path(method: &Method, path: &str) -> Result<(), &'static str> {
    if memchr::memchr2(b'%', b'.', path.as_bytes()).is_none() {
        return Ok(());
    }
    if path.split('/').any(|segment| matches!(segment, "." | "..")) {
        return Err("a path has no segments `.` and `..`: write where it leads");
    }
    // Model names contain slashes, which clients escape. The router looks these models up itself.
    let is_model = *method == Method::GET && path.starts_with("/v1/models/");
    for escaped in path.split('%').skip(1) {
        let digits = escaped.as_bytes().get(..2).filter(|digits| digits.iter().all(u8::is_ascii_hexdigit));
        match digits.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()) {
            Some(byte) if byte.is_ascii_control() => return Err("a path has no control characters, also not in percent encoding"),
            Some(b' ' | 0x80..) => {}
            _ if is_model => {}
            None => return Err("a path has two hexadecimal digits after each `%`"),
            Some(b'%') => return Err("a path has no `%` but those that begin an escape: no route has one, so leave out `%25`"),
            Some(_) => {
                return Err("a path has ASCII letters, digits and signs as they are: only blanks and other letters are percent-encoded");
            }
        }
    }
    Ok(())
}

/// Checks that no value has blanks around it. HTTP/2 forbids them (RFC 9113 §8.2.1). An engine gets
/// every value over HTTP/1.1, so it would not see the blanks and would read another value than the
/// router.
fn check_values(headers: &HeaderMap) -> Result<(), &'static str> {
    let is_blank = |byte: Option<&u8>| matches!(byte, Some(b' ' | b'\t'));
    let is_padded = |value: &HeaderValue| is_blank(value.as_bytes().first()) || is_blank(value.as_bytes().last());
    if headers.values().any(is_padded) { Err("a header's value has no blanks before or behind it") } else { Ok(()) }
}

/// Checks that `Connection` removes no header that counts: the router would otherwise decide by a
/// header that the engine never gets.
fn check_connection(headers: &HeaderMap) -> Result<(), &'static str> {
    if hides_decisive_headers(headers) {
        return Err("the Connection header lists headers of the connection only, not those that say what the request is");
    }
    Ok(())
}

/// Checks for at most one content type, in characters that all readers decode alike.
fn check_type(headers: &HeaderMap) -> Result<(), &'static str> {
    let mut types = headers.get_all(header::CONTENT_TYPE).iter();
    match (types.next(), types.next()) {
        (Some(_), Some(_)) => Err("a request has one Content-Type header, not several"),
        (Some(only), None) if only.to_str().is_err() => Err("the Content-Type header has characters beyond ASCII"),
        _ => Ok(()),
    }
}

/// Checks for one host, the same in both places. HTTP/2 has it in `:authority`, in `Host` or in
/// both.
fn check_host<B>(request: &Request<B>) -> Result<(), &'static str> {
    let target = request.uri().authority();
    let mut hosts = request.headers().get_all(header::HOST).iter();
    let host = match (hosts.next(), hosts.next()) {
        (_, Some(_)) => return Err("a request has one Host header, not several"),
        (None, None) if request.version() == Version::HTTP_11 => return Err("an HTTP/1.1 request needs a Host header"),
        (None, None) if request.version() == Version::HTTP_2 && target.is_none() => return Err("an HTTP/2 request needs an :authority"),
        (None, None) => return Ok(()),
        (Some(host), None) => host,
    };
    // Clients without a name for the server send an empty one.
    let named = if host.is_empty() { None } else { Some(authority(host).ok_or("the Host header is no host")?) };
    match (named, target) {
        (Some(named), Some(target)) if named != *target => Err("the request's target and its Host header name different hosts"),
        _ => Ok(()),
    }
}

/// A host and perhaps a port, without user information.
fn authority(host: &HeaderValue) -> Option<Authority> {
    Authority::try_from(host.as_bytes()).ok().filter(|authority| !authority.as_str().contains('@'))
}

/// Checks that `Transfer-Encoding` is `chunked` alone: the HTTP library looks only at its last
/// coding, others may look at the first.
fn check_coding(headers: &HeaderMap) -> Result<(), &'static str> {
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, None) => Ok(()),
        (Some(coding), None) if coding.as_bytes().eq_ignore_ascii_case(b"chunked") => Ok(()),
        _ => Err("the only Transfer-Encoding is `chunked`, given once"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(version: Version, target: &str, headers: &[(&'static str, &str)]) -> Request<()> {
        let builder = Request::builder().version(version).uri(target);
        headers.iter().fold(builder, |builder, (name, value)| builder.header(*name, *value)).body(()).unwrap()
    }

    #[test]
    fn a_request_must_name_exactly_one_host() {
        for (version, target, headers, fine) in [
            (Version::HTTP_11, "/", &[("host", "a:1")][..], true),
            (Version::HTTP_11, "/", &[("host", "[::1]:1")], true),
            (Version::HTTP_11, "/", &[("host", "")], true),
            (Version::HTTP_11, "/", &[], false),
            (Version::HTTP_11, "/", &[("host", "a"), ("host", "a")], false),
            (Version::HTTP_11, "/", &[("host", "a b")], false),
            (Version::HTTP_11, "/", &[("host", "a, b")], false),
            (Version::HTTP_11, "/", &[("host", "a@b")], false),
            (Version::HTTP_11, "/", &[("host", "a/b")], false),
            (Version::HTTP_11, "http://a/", &[("host", "A")], true),
            (Version::HTTP_11, "http://b/", &[("host", "a")], false),
            (Version::HTTP_10, "/", &[], true),
            (Version::HTTP_10, "/", &[("host", "a"), ("host", "b")], false),
            (Version::HTTP_2, "http://a/", &[], true),
            (Version::HTTP_2, "http://a/", &[("host", "a")], true),
            (Version::HTTP_2, "http://a/", &[("host", "b")], false),
            (Version::HTTP_2, "/", &[("host", "a")], true),
            (Version::HTTP_2, "/", &[], false),
        ] {
            assert_eq!(check_head(&request(version, target, headers)).is_ok(), fine, "{version:?} {target} {headers:?}");
        }
    }

    #[test]
    fn only_paths_that_engines_see_unchanged_are_accepted() {
        for (method, path, fine) in [
            (Method::POST, "/v1/chat/completions", true),
            (Method::POST, "/v1/chat/%63ompletions", false),
            (Method::POST, "/v1/chat%2fcompletions", false),
            (Method::POST, "/v1/chat%2Fcompletions", false),
            (Method::POST, "/v1/chat/completions%2F", false),
            (Method::POST, "/v1/audio/transcriptions%2e", false),
            (Method::POST, "/v1/load%5Flora%5Fadapter", false),
            (Method::POST, "/v1/a%2Db%7E", false),
            (Method::POST, "/v1/chat/%2563ompletions", false),
            (Method::POST, "/v1/%", false),
            (Method::POST, "/v1/%6", false),
            (Method::POST, "/v1/%6/", false),
            (Method::POST, "/v1/%+1", false),
            (Method::POST, "/v1/%C3%BC%20", true),
            (Method::POST, "/v1/a%3fb", false),
            (Method::POST, "/v1/a%22b", false),
            // Starlette's routes end before a last line feed.
            (Method::POST, "/v1/load_lora_adapter%0A", false),
            (Method::POST, "/v1/chat/completions%0a", false),
            (Method::POST, "/v1/responses/resp_1%0A", false),
            (Method::POST, "/invocations%0D", false),
            (Method::POST, "/invocations%00", false),
            (Method::POST, "/invocations%7F", false),
            (Method::POST, "/invocations%09", false),
            (Method::POST, "/v1/a.b/c..d/.e", true),
            (Method::POST, "/v1/./a", false),
            (Method::POST, "/v1/..", false),
            // No such route exists, as in engines.
            (Method::GET, "//v1/models", true),
            (Method::GET, "/v1/models/org%2Fmodel-1%2e5", true),
            (Method::GET, "/v1/models/..", false),
            (Method::GET, "/v1/models/org%2Fmodel%0A", false),
            (Method::GET, "/v1/models/org%2Fmodel%7f", false),
            (Method::HEAD, "/v1/models/org%2Fmodel", false),
            (Method::GET, "/v1/%6dodels/org", false),
            (Method::OPTIONS, "*", true),
        ] {
            assert_eq!(check_path(&method, path).is_ok(), fine, "{method} {path}");
        }
    }

    #[test]
    fn a_bad_path_is_refused_with_the_reason() {
        let said = |path| check_path(&Method::POST, path).unwrap_err();
        for (path, word) in [("/v1/%2563", "no `%`"), ("/v1/a%0A", "control"), ("/v1/%61", "as they are"), ("/v1/%6", "two hexadecimal")] {
            assert!(said(path).starts_with("a path") && said(path).contains(word), "{path}: {}", said(path));
        }
    }

    #[test]
    fn the_connection_header_may_not_name_a_deciding_header() {
        for (connection, fine) in [
            (&[][..], true),
            (&["close"], true),
            (&["keep-alive, Upgrade, HTTP2-Settings", "TE"], true),
            (&["Proxy-Connection, x-hop, transfer-encoding, trailer"], true),
            (&["close, x-content-type-options"], true),
            (&["content-type"], false),
            (&["Content-Type"], false),
            (&["close", "keep-alive ,\tCONTENT-TYPE "], false),
            (&["x-amzn-sagemaker-adapter-identifier"], false),
            (&["X-VLLM-Priority"], false),
            (&["close,content-length"], false),
            (&["content-encoding"], false),
        ] {
            let mut headers = vec![("host", "a")];
            headers.extend(connection.iter().map(|names| ("connection", *names)));
            assert_eq!(check_head(&request(Version::HTTP_11, "/", &headers)).is_ok(), fine, "{connection:?}");
        }
    }

    /// HTTP/1.1 values come without blanks; HTTP/2 values come as they were sent (RFC 9113 §8.2.1).
    #[test]
    fn header_values_may_not_have_surrounding_blanks() {
        for (name, value, fine) in [
            ("content-type", "application/json; charset=utf-8", true),
            ("x-empty", "", true),
            ("content-type", " application/json", false),
            ("content-type", "\tapplication/json", false),
            ("content-type", "application/json ", false),
            ("x-vllm-priority", "1\t", false),
            ("x-amzn-sagemaker-adapter-identifier", " m", false),
            ("x-other", " ", false),
        ] {
            let said = check_head(&request(Version::HTTP_2, "http://a/", &[(name, value)]));
            assert_eq!(said.is_ok(), fine, "{name}: {value:?}");
        }
    }

    #[test]
    fn a_body_must_have_a_single_content_type() {
        for (types, fine) in [
            (&["application/json"][..], true),
            (&[], true),
            (&["application/json", "application/json"], false),
            (&["text/plain", "application/json"], false),
            (&["application/json; charset=\u{e9}"], false),
        ] {
            let mut headers = vec![("host", "a")];
            headers.extend(types.iter().map(|kind| ("content-type", *kind)));
            assert_eq!(check_head(&request(Version::HTTP_11, "/", &headers)).is_ok(), fine, "{types:?}");
        }
    }

    #[test]
    fn the_only_transfer_coding_is_chunked() {
        for (codings, fine) in [
            (&["Chunked"][..], true),
            (&[], true),
            (&["gzip, chunked"], false),
            (&["chunked, chunked"], false),
            (&["chunked", "chunked"], false),
            (&["identity", "chunked"], false),
            (&["xchunked"], false),
        ] {
            let mut headers = vec![("host", "a")];
            headers.extend(codings.iter().map(|coding| ("transfer-encoding", *coding)));
            assert_eq!(check_head(&request(Version::HTTP_11, "/", &headers)).is_ok(), fine, "{codings:?}");
        }
    }
}
