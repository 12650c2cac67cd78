//! The format of a request's body by its content type, as engines read it. `check_head` has checked
//! that there is at most one type, in characters that all readers decode alike.

use http::header::{self, HeaderMap};
use memchr::memchr2;

/// Most values of a JSON body. vLLM's Python front-end has one thread for all its streams, and
/// reads a million numbers in 0.1 s; a prompt of token ids has one value for each.
const MAX_VALUES: usize = 2 * 1024 * 1024;

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

    /// Checks that an engine can read the body without halting its other streams.
    ///
    /// # Errors
    /// What to do, if the body has more values than that.
    pub(super) fn check_value_count(self, body: &[u8]) -> Result<(), String> {
        let has_too_many = || {
            let mut separators = Separators(body);
            separators.by_ref().take(MAX_VALUES + 1).count() > MAX_VALUES
        };
        if self != Self::Json || body.len() <= MAX_VALUES || !has_too_many() {
            return Ok(());
        }
        Err(format!(
            "the body has more than {MAX_VALUES} values (numbers, strings, fields): the engine would stand still while it reads them; \
             send them in several requests, or a prompt as text"
        ))
    }
}

/// Beginnings of values: the commas, colons and brackets of a JSON text outside its strings.
struct Separators<'a>(&'a [u8]);

impl Iterator for Separators<'_> {
    type Item = ();

    fn next(&mut self) -> Option<()> {
        loop {
            let (first, rest) = self.0.split_first()?;
            self.0 = rest;
            match first {
                b',' | b':' | b'[' | b'{' => return Some(()),
                b'"' => self.skip_string(),
                _ => {}
            }
        }
    }
}

impl Separators<'_> {
    fn skip_string(&mut self) {
        while let Some(at) = memchr2(b'"', b'\\', self.0) {
            let is_end = self.0[at] == b'"';
            self.0 = self.0.get(at + if is_end { 1 } else { 2 }..).unwrap_or_default();
            if is_end {
                return;
            }
        }
        self.0 = &[];
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

    #[test]
    fn a_body_has_a_bounded_number_of_values() {
        let of = |values: usize| format!(r#"{{"prompt":[{}0]}}"#, "0,".repeat(values));
        let check = |body: &str| BodyFormat::Json.check_value_count(body.as_bytes());
        assert_eq!(check(&of(MAX_VALUES - 4)), Ok(()));
        assert!(check(&of(MAX_VALUES)).unwrap_err().contains("as text"));
        assert_eq!(BodyFormat::Other.check_value_count(of(MAX_VALUES).as_bytes()), Ok(()), "a file");
        let text = format!(r#"{{"prompt":"{}","b":"\\\"{}"}}"#, ",".repeat(MAX_VALUES), ":".repeat(MAX_VALUES));
        assert_eq!(check(&text), Ok(()), "a text");
    }
}
