//! Decides which web pages may use the edge: those of the origins in `router.allowed_origins`.
//!
//! A browser sends a page's origin with each request, and sends a preflight before any request that
//! a form could not send. It shows a page only answers that name the page's origin.

use http::header::{self, HeaderMap, HeaderValue};
use http::{Method, Uri};

/// How long browsers cache the answer to a preflight. Chromium's limit is two hours.
const PREFLIGHT_SECONDS: HeaderValue = HeaderValue::from_static("7200");

/// The methods of all APIs of the edge.
const METHODS: HeaderValue = HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE");

const ANY: HeaderValue = HeaderValue::from_static("*");

/// The origins whose pages may use the edge.
#[derive(Debug, Clone, Default)]
pub(crate) struct AllowedOrigins {
    allow_all: bool,
    /// In lower case, as browsers write them.
    exact: Vec<HeaderValue>,
}

/// An entry of the list is no origin.
#[derive(Debug, thiserror::Error)]
#[error(
    "router.allowed_origins: {0:?} is no origin: write `https://host` or `http://host:port`, without a path or a slash at the end, or `*` for all"
)]
pub struct InvalidOrigin(String);

/// Whether the page that sends a request may read the answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PageAccess {
    /// No page sends the request, or only engines know which pages may.
    Unasked,
    Denied,
    /// The origin that the answer has to name.
    Allowed(HeaderValue),
}

impl AllowedOrigins {
    /// Reads the setting.
    ///
    /// # Errors
    /// If an entry is no origin.
    pub(crate) fn new(origins: &[String]) -> Result<Self, InvalidOrigin> {
        let mut known = Self::default();
        for origin in origins {
            match parse_origin(&origin.to_ascii_lowercase()) {
                _ if origin == "*" => known.allow_all = true,
                Some(origin) => known.exact.push(origin),
                None => return Err(InvalidOrigin(origin.clone())),
            }
        }
        Ok(known)
    }

    /// Whether pages of every origin may read answers.
    pub(crate) fn allows_all(&self) -> bool {
        self.allow_all
    }

    /// Whether the page that sends a request with these headers may read the answer.
    pub(crate) fn check(&self, headers: &HeaderMap) -> PageAccess {
        if !self.allow_all && self.exact.is_empty() {
            return PageAccess::Unasked;
        }
        match headers.get(header::ORIGIN) {
            None => PageAccess::Unasked,
            Some(_) if self.allow_all => PageAccess::Allowed(ANY),
            Some(origin) if self.exact.contains(origin) => PageAccess::Allowed(origin.clone()),
            Some(_) => PageAccess::Denied,
        }
    }
}

/// Whether a browser asks with this request if its page may send another one.
pub(crate) fn is_preflight(method: &Method, headers: &HeaderMap) -> bool {
    *method == Method::OPTIONS && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

/// Adds permissions to the answer to a preflight: the page may send whatever it wants to.
pub(crate) fn allow_preflight(asked: &HeaderMap, answer: &mut HeaderMap) {
    answer.insert(header::ACCESS_CONTROL_ALLOW_METHODS, METHODS);
    if let Some(names) = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        answer.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
    }
    answer.insert(header::ACCESS_CONTROL_MAX_AGE, PREFLIGHT_SECONDS);
}

impl PageAccess {
    /// Marks an answer once, replacing its engine's statements about origins. A page may read all
    /// headers of the answer.
    pub(crate) fn mark(self, headers: &mut HeaderMap) {
        if self == Self::Unasked {
            return;
        }
        for engines in [header::ACCESS_CONTROL_ALLOW_ORIGIN, header::ACCESS_CONTROL_ALLOW_CREDENTIALS] {
            headers.remove(engines);
        }
        let names_origin = |vary: &HeaderValue| vary.as_bytes().to_ascii_lowercase().windows(6).any(|name| name == b"origin");
        if !headers.get_all(header::VARY).iter().any(names_origin) {
            headers.append(header::VARY, HeaderValue::from_static("Origin"));
        }
        if let Self::Allowed(origin) = self {
            headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
            headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, ANY);
        }
    }
}

/// An origin as browsers write it: a scheme, a host, and a port unless it is the scheme's own.
fn parse_origin(origin: &str) -> Option<HeaderValue> {
    let uri: Uri = origin.parse().ok()?;
    let (scheme, authority) = (uri.scheme_str()?, uri.authority()?);
    let is_usual = matches!((scheme, authority.port_u16()), ("http", Some(80)) | ("https", Some(443)));
    let is_whole = origin == format!("{scheme}://{authority}") && !authority.as_str().contains(['@', '*']);
    if is_usual || !is_whole { None } else { HeaderValue::from_str(origin).ok() }
}

#[cfg(test)]
mod tests {
    use http::header::HeaderName;

    use super::*;

    fn origins(listed: &[&str]) -> Result<AllowedOrigins, InvalidOrigin> {
        AllowedOrigins::new(&listed.iter().map(|origin| (*origin).to_owned()).collect::<Vec<_>>())
    }

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse::<HeaderName>().unwrap(), HeaderValue::from_static(value))).collect()
    }

    #[test]
    fn an_origin_is_a_scheme_host_and_port() {
        for fine in ["*", "https://a.example", "http://localhost:3000", "http://[::1]:3000", "HTTPS://A.example", "chrome-extension://abc"]
        {
            assert!(origins(&[fine]).is_ok(), "{fine}");
        }
        let odd = ["", "a.example", "https://a.example/", "https://a.example/page", "https://*.example", "https://a@b", "null", "https://"];
        for odd in odd.into_iter().chain(["https://a.example:443", "http://a.example:80", "https://ä.example", "https://a,https://b"]) {
            let refused = origins(&["https://fine.example", odd]).unwrap_err().to_string();
            assert!(refused.contains(&format!("{odd:?}")) && refused.contains("`https://host`"), "{refused}");
        }
    }

    #[test]
    fn a_page_may_read_answers_if_its_origin_is_listed() {
        let page = headers(&[("origin", "https://a.example")]);
        for (listed, expected) in [
            (&[][..], PageAccess::Unasked),
            (&["https://A.example"], PageAccess::Allowed(HeaderValue::from_static("https://a.example"))),
            (&["https://b.example", "*"], PageAccess::Allowed(ANY)),
            (&["http://a.example", "https://a.example:8443", "https://sub.a.example"], PageAccess::Denied),
        ] {
            let allowed = origins(listed).unwrap();
            assert_eq!(allowed.check(&page), expected, "{listed:?}");
            assert_eq!(allowed.check(&HeaderMap::new()), PageAccess::Unasked, "{listed:?}");
        }
    }

    #[test]
    fn an_answers_origin_headers_replace_the_engines() {
        let engines = || {
            headers(&[
                ("access-control-allow-origin", "*"),
                ("access-control-allow-origin", "https://b.example"),
                ("access-control-allow-credentials", "true"),
                ("vary", "Accept-Encoding, origin"),
            ])
        };
        let mut answer = engines();
        PageAccess::Allowed(HeaderValue::from_static("https://a.example")).mark(&mut answer);
        let marked = [("vary", "Accept-Encoding, origin"), ("access-control-allow-origin", "https://a.example")];
        assert_eq!(answer, headers(&[marked[0], marked[1], ("access-control-expose-headers", "*")]));
        let mut answer = engines();
        PageAccess::Denied.mark(&mut answer);
        assert_eq!(answer, headers(&[marked[0]]));
        let mut answer = engines();
        PageAccess::Unasked.mark(&mut answer);
        assert_eq!(answer, engines());
        let mut answer = headers(&[("vary", "Accept-Encoding")]);
        PageAccess::Denied.mark(&mut answer);
        assert_eq!(answer, headers(&[("vary", "Accept-Encoding"), ("vary", "Origin")]));
    }
}
