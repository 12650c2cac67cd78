//! What `--allowed-origins` lets web pages read, as the middleware of vLLM's Python front-end does it.

use std::str::FromStr;

use http::header::{self, HeaderMap, HeaderValue};
use http::{Method, StatusCode};

use crate::reply::{Reply, whole};

/// The origins whose pages may read answers, as a list in JSON; `*` among them is every origin.
#[derive(Clone, Debug)]
pub struct AllowedOrigins(Vec<String>);

impl FromStr for AllowedOrigins {
    type Err = serde_json::Error;

    fn from_str(list: &str) -> Result<Self, Self::Err> {
        serde_json::from_str(list).map(Self)
    }
}

impl AllowedOrigins {
    /// What the answer to a request with these headers names, if its page may read it.
    fn named(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(header::ORIGIN)?;
        let lists = |wanted: &[u8]| self.0.iter().any(|listed| listed.as_bytes() == wanted);
        if lists(b"*") { Some(HeaderValue::from_static("*")) } else { lists(origin.as_bytes()).then(|| origin.clone()) }
    }

    /// The answer to a preflight, which goes to no route.
    pub(crate) fn answer_preflight(&self, method: &Method, headers: &HeaderMap) -> Option<Reply> {
        let asked = headers.get(header::ACCESS_CONTROL_REQUEST_METHOD).filter(|_| *method == Method::OPTIONS)?;
        let mut reply = match self.named(headers) {
            Some(_) => whole(StatusCode::OK, "text/plain; charset=utf-8", "OK"),
            None => whole(StatusCode::BAD_REQUEST, "text/plain; charset=utf-8", "Disallowed CORS origin"),
        };
        let told = reply.headers_mut();
        told.insert(header::ACCESS_CONTROL_ALLOW_METHODS, asked.clone());
        told.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
        if let Some(names) = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
            told.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
        }
        Some(reply)
    }

    /// The header that lets the page of a request read its answer.
    pub(crate) fn header(&self, headers: &HeaderMap) -> Option<(header::HeaderName, HeaderValue)> {
        Some((header::ACCESS_CONTROL_ALLOW_ORIGIN, self.named(headers)?))
    }
}
