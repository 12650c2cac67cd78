//! The few fields of a multipart form that the router needs: audio requests name their model in one.
//!
//! A form is read as strictly as its senders write: two readers must not see two models in it. What is not as every client writes it is
//! refused where a part could be meant for us, and left to the engine otherwise.

use memchr::memmem;

use super::peek::Peek;

/// Fields in front of the file are short; a longer value is none of ours.
const VALUE_BYTES: usize = 1024;

/// A boundary has at most 70 characters (RFC 2046 §5.1.1).
const BOUNDARY_BYTES: usize = 70;

/// Why a form is not understood.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Odd {
    /// Its parts cannot be told apart.
    #[error("the multipart form names no boundary: send `content-type: multipart/form-data; boundary=...`")]
    NoBoundary,
    /// A part does not say plainly which field it is.
    #[error("a part of the multipart form has no plain name: write `content-disposition: form-data; name=\"...\"`")]
    NoName,
    /// A field that decides where the request goes is there twice.
    #[error("the multipart form has the field `{0}` twice")]
    Twice(&'static str),
}

/// Reads a form of this content type.
pub(super) fn peek<'a>(content_type: &str, body: &'a [u8]) -> Result<Peek<'a>, Odd> {
    let boundary = boundary(content_type).ok_or(Odd::NoBoundary)?;
    let mut peek = Peek::default();
    for part in Parts::new(body, boundary) {
        let Some((head, value)) = split(part) else { continue };
        let text = || std::str::from_utf8(value).ok().filter(|text| text.len() <= VALUE_BYTES).map(str::to_owned);
        match &*name(head).ok_or(Odd::NoName)? {
            b"model" if peek.model.is_some() => return Err(Odd::Twice("model")),
            b"model" => peek.model = text(),
            b"stream" => {
                peek.stream = text().is_some_and(|text| matches!(&*text.to_ascii_lowercase(), "true" | "1" | "yes" | "on" | "t" | "y"));
            }
            _ => {}
        }
    }
    Ok(peek)
}

/// The boundary that a content type names.
fn boundary(content_type: &str) -> Option<&str> {
    let named = content_type.split(';').skip(1).find_map(|parameter| {
        let (name, value) = parameter.split_once('=')?;
        name.trim().eq_ignore_ascii_case("boundary").then(|| value.trim().trim_matches('"'))
    })?;
    (!named.is_empty() && named.len() <= BOUNDARY_BYTES).then_some(named)
}

/// The parts of a body, without their boundaries.
struct Parts<'a> {
    rest: &'a [u8],
    delimiter: Vec<u8>,
}

impl<'a> Parts<'a> {
    fn new(body: &'a [u8], boundary: &str) -> Self {
        let delimiter = format!("\r\n--{boundary}").into_bytes();
        // The first one has no line before it.
        let rest = match body.strip_prefix(&delimiter[2..]) {
            Some(rest) => rest,
            None => memmem::find(body, &delimiter).map_or(&[][..], |at| &body[at + delimiter.len()..]),
        };
        Self { rest, delimiter }
    }
}

impl<'a> Iterator for Parts<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let part = self.rest.strip_prefix(b"\r\n")?;
        // One that does not end is the engine's to refuse, but its name counts.
        let end = memmem::find(part, &self.delimiter);
        self.rest = end.map_or(&[][..], |end| &part[end + self.delimiter.len()..]);
        Some(&part[..end.unwrap_or(part.len())])
    }
}

/// The headers of a part and what follows them.
fn split(part: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = memmem::find(part, b"\r\n\r\n")?;
    Some((&part[..end], &part[end + 4..]))
}

/// The field that a part is for: a quoted name without escapes, and nothing else that could be one.
fn name(head: &[u8]) -> Option<Vec<u8>> {
    let mut dispositions = head.split(|byte| *byte == b'\n').filter_map(|line| {
        let colon = memchr::memchr(b':', line)?;
        line[..colon].trim_ascii().eq_ignore_ascii_case(b"content-disposition").then(|| line[colon + 1..].to_ascii_lowercase())
    });
    let (Some(disposition), None) = (dispositions.next(), dispositions.next()) else { return None };
    let mut found = None;
    let mut rest = after(&disposition, b';');
    while !rest.trim_ascii().is_empty() {
        let equals = memchr::memchr(b'=', rest)?;
        let (key, value) = (rest[..equals].trim_ascii(), rest[equals + 1..].trim_ascii_start());
        let quoted = value.strip_prefix(b"\"");
        let end =
            quoted.map_or_else(|| memchr::memchr(b';', value).or(Some(value.len())), |quoted| quoted_end(quoted).map(|end| end + 2))?;
        match (key, quoted) {
            (b"name", Some(quoted)) if found.is_none() && !quoted[..end - 2].contains(&b'\\') => found = Some(quoted[..end - 2].to_vec()),
            // Encoded, in several parts, without quotes, or a second time.
            (key, _) if key.starts_with(b"name") => return None,
            _ => {}
        }
        let left = value[end..].trim_ascii_start();
        if !left.is_empty() && !left.starts_with(b";") {
            return None;
        }
        rest = after(left, b';');
    }
    found
}

/// What follows the first such byte.
fn after(bytes: &[u8], byte: u8) -> &[u8] {
    memchr::memchr(byte, bytes).map_or(&[], |at| &bytes[at + 1..])
}

/// Where a quoted text ends; a file's name may have escapes.
fn quoted_end(quoted: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        at += memchr::memchr2(b'"', b'\\', quoted.get(at..)?)?;
        if quoted[at] == b'"' {
            return Some(at);
        }
        at += 2;
    }
}

#[cfg(test)]
mod tests;
