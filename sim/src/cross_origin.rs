//! Answers that `--allowed-origins` lets web pages read, as in the middleware of vLLM's Python
//! front-end.

use std::str::FromStr;

use http::header::{self, HeaderMap, HeaderValue};

/// Origins whose pages may read answers, as a list in JSON; `*` among them is every origin.
#[derive(Clone, Debug)]
pub struct AllowedOrigins(Vec<String>);

impl FromStr for AllowedOrigins {
    type Err = serde_json::Error;

    fn from_str(list: &str) -> Result<Self, Self::Err> {
        serde_json::from_str(list).map(Self)
    }
}

impl AllowedOrigins {
    /// Allowed origin named in the answer to a request with these headers, if its page may read it.
    pub(crate) fn named(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(header::ORIGIN)?;
        let lists = |requested: &[u8]| self.0.iter().any(|listed| listed.as_bytes() == requested);
        if lists(b"*") { Some(HeaderValue::from_static("*")) } else { lists(origin.as_bytes()).then(|| origin.clone()) }
    }
}
