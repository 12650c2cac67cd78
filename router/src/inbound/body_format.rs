//! The format of a request's body by its content type, as engines read it. `check_head` has checked
//! that there is at most one type, in characters that all readers decode alike.

use http::header::{self, HeaderMap};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BodyFormat<'a> {
    /// JSON, under any content type that some engine accepts for it: `application/json`, one that
    /// ends in `+json`, or none.
    Json,
    /// A multipart form, with its whole content type.
    Form(&'a str),
    Other,
}

impl<'a> BodyFormat<'a> {
    pub(super) fn from_headers(headers: &'a HeaderMap) -> Self {
        Self::from_content_type(headers.get(header::CONTENT_TYPE).map_or("", |value| value.to_str().unwrap_or_default()))
    }

    pub(super) fn from_content_type(content_type: &'a str) -> Self {
        let content_type = content_type.trim_ascii();
        let begins = |name: &str| content_type.get(..name.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(name));
        if begins("application/json") || content_type.is_empty() {
            return Self::Json;
        }
        if begins("multipart/form-data") {
            return Self::Form(content_type);
        }
        let kind = content_type.split(';').next().unwrap_or_default().trim_ascii_end().as_bytes();
        let ending = kind.len().checked_sub(b"+json".len()).map(|at| &kind[at..]);
        if ending.is_some_and(|ending| ending.eq_ignore_ascii_case(b"+json")) { Self::Json } else { Self::Other }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_that_an_engine_reads_as_json_counts() {
        for json in [
            "application/json",
            "Application/JSON; charset=utf-8",
            "application/json ;x",
            "application/vnd.api+JSON ; a=b",
            "",
            "\tapplication/json ",
            " a/x+json ",
        ] {
            assert_eq!(BodyFormat::from_content_type(json), BodyFormat::Json, "{json}");
        }
        let form = "Multipart/Form-Data; boundary=b";
        assert_eq!(BodyFormat::from_content_type(form), BodyFormat::Form(form));
        assert_eq!(
            BodyFormat::from_content_type(" multipart/form-data; boundary=b\t"),
            BodyFormat::Form("multipart/form-data; boundary=b")
        );
        for other in ["text/plain", "application/octet-stream", "application/x-www-form-urlencoded", "text/plain; x=+json", "json", "ü"] {
            assert_eq!(BodyFormat::from_content_type(other), BodyFormat::Other, "{other}");
        }
    }
}
