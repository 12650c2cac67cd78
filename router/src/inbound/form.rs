//! Reads the few fields of a multipart form that the router needs. Audio requests name their model
//! in one.
//!
//! A form is read strictly, because two readers must not see two models in it. Engines' readers
//! differ in where a part begins and ends, in what its header says and in which of two fields
//! counts. So anything that not every client writes makes the whole form odd. An odd form is
//! refused if permissions depend on the model, and left to the engine otherwise.

use memchr::memmem::Finder;

use super::peek::Peek;

/// Longest value that the router needs. Fields in front of the file are short.
const MAX_VALUE_BYTES: usize = 1024;

/// Longest boundary (RFC 2046 §5.1.1).
const MAX_BOUNDARY_BYTES: usize = 70;

/// Most fields, and most files, that Starlette accepts.
const MAX_PARTS: usize = 1000;

/// The fields of vLLM 0.32 that cannot be used to guess another tenant's prompt: a sound, a number,
/// or a choice from a list. The languages are such choices, although their names may be part of a
/// prompt.
const SAFE_FIELDS: [&str; 23] = [
    "file",
    "model",
    "language",
    "to_language",
    "response_format",
    "timestamp_granularities[]",
    "stream",
    "stream_include_usage",
    "stream_continuous_usage_stats",
    "use_beam_search",
    "n",
    "length_penalty",
    "include_stop_str_in_output",
    "temperature",
    "watermarking",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "repetition_penalty",
    "presence_penalty",
    "max_completion_tokens",
];

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum FormError {
    #[error(
        "the multipart form has no plain boundary: send `content-type: multipart/form-data; boundary=...` with one boundary of at most \
         70 letters, digits and hyphens, and with no other parameter than `charset=utf-8`"
    )]
    Boundary,
    /// Readers may differ in where a part ends.
    #[error(
        "the multipart form is not whole: it begins with `--` and its boundary and ends with `--`, its boundary and `--`, each part ends \
         with a line of its own with `--` and the boundary, and nowhere else it has them"
    )]
    Incomplete,
    #[error("a part of the multipart form has no plain name: write one header `content-disposition: form-data; name=\"...\"`")]
    NoName,
    #[error("the field `model` of the multipart form is a short text in UTF-8, without a file's name and without any encoding")]
    ModelNotText,
    #[error("the multipart form has more than {MAX_PARTS} parts")]
    TooMany,
    #[error("the multipart form has the field `{0}` twice")]
    DuplicateField(&'static str),
}

pub(super) fn peek(content_type: &str, body: &[u8]) -> Result<Peek, FormError> {
    let mut peek = Peek::default();
    for (before, part) in FormParts::new(body, parse_boundary(content_type).ok_or(FormError::Boundary)?)?.enumerate() {
        if before == MAX_PARTS {
            return Err(FormError::TooMany);
        }
        let (name, part) = part.and_then(FormPart::parse)?;
        match name {
            b"model" if peek.model.is_some() => return Err(FormError::DuplicateField("model")),
            b"model" => peek.model = Some(part.text().ok_or(FormError::ModelNotText)?.to_owned()),
            b"stream" => {
                let is = |word: &&str| part.value.eq_ignore_ascii_case(word.as_bytes());
                peek.is_stream = ["true", "1", "yes", "on", "t", "y"].iter().any(is);
            }
            // An unknown field may be part of the prompt in a later vLLM.
            name if peek.prompt_field.is_none()
                && !part.value.is_empty()
                && !SAFE_FIELDS.iter().any(|setting| setting.as_bytes() == name) =>
            {
                peek.prompt_field = Some(String::from_utf8_lossy(name).into_owned());
            }
            _ => {}
        }
    }
    Ok(peek)
}

/// The boundary in a content type, if it is unambiguous.
///
/// Parameters may be repeated, quoted with escapes, or encoded (RFC 2231). The character set is
/// that of the fields' names.
fn parse_boundary(content_type: &str) -> Option<&str> {
    let mut parameters = content_type.split(';');
    parameters.next().filter(|kind| kind.trim_ascii_end().eq_ignore_ascii_case("multipart/form-data"))?;
    let mut boundary = None;
    for parameter in parameters {
        let (name, value) = parameter.trim_ascii().split_once('=')?;
        let value = value.strip_prefix('"').map_or(Some(value), |quoted| quoted.strip_suffix('"'))?;
        match name.to_ascii_lowercase().as_str() {
            "boundary" if boundary.is_none() => boundary = Some(value),
            "charset" if value.eq_ignore_ascii_case("utf-8") => {}
            _ => return None,
        }
    }
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"'()+_,-./:=?".contains(&byte);
    boundary.filter(|boundary| (1..=MAX_BOUNDARY_BYTES).contains(&boundary.len()) && boundary.bytes().all(is_plain))
}

/// The parts of a body, without their boundaries.
struct FormParts<'a> {
    rest: &'a [u8],
    /// Two hyphens and the boundary.
    delimiter: Finder<'static>,
    is_over: bool,
}

impl<'a> FormParts<'a> {
    fn new(body: &'a [u8], boundary: &str) -> Result<Self, FormError> {
        let delimiter = Finder::new(&format!("--{boundary}")).into_owned();
        // Some clients begin with an empty line.
        let rest = body.strip_prefix(b"\r\n").unwrap_or(body).strip_prefix(delimiter.needle()).ok_or(FormError::Incomplete)?;
        Ok(Self { rest, delimiter, is_over: false })
    }
}

impl<'a> Iterator for FormParts<'a> {
    type Item = Result<&'a [u8], FormError>;

    fn next(&mut self) -> Option<Self::Item> {
        // Some clients end with an empty line. Readers skip line ends there, and some skip other
        // text too.
        let is_end = |end: &[u8]| end.chunks(2).all(|line_end| line_end == b"\r\n");
        if self.is_over || self.rest.strip_prefix(b"--").is_some_and(is_end) {
            return None;
        }
        let part = self.rest.strip_prefix(b"\r\n").and_then(|part| {
            let end = self.delimiter.find(part)?;
            self.rest = &part[end + self.delimiter.needle().len()..];
            part[..end].strip_suffix(b"\r\n")
        });
        self.is_over = part.is_none();
        Some(part.ok_or(FormError::Incomplete))
    }
}

struct FormPart<'a> {
    is_file: bool,
    content_type: Option<&'a [u8]>,
    encoding: Option<&'a [u8]>,
    value: &'a [u8],
}

impl<'a> FormPart<'a> {
    /// Splits a part into its value and the field that it belongs to.
    fn parse(part: &'a [u8]) -> Result<(&'a [u8], Self), FormError> {
        let mut named = None;
        let (mut content_type, mut encoding) = (None, None);
        let mut rest = part;
        loop {
            let end = memchr::memchr(b'\r', rest).ok_or(FormError::NoName)?;
            let line = &rest[..end];
            rest = rest[end..].strip_prefix(b"\r\n").ok_or(FormError::NoName)?;
            if line.is_empty() {
                break;
            }
            let (name, value) = parse_header(line).ok_or(FormError::NoName)?;
            let slot = match &*name.to_ascii_lowercase() {
                b"content-disposition" => &mut named,
                b"content-type" => &mut content_type,
                b"content-transfer-encoding" => &mut encoding,
                _ => continue,
            };
            if slot.replace(value).is_some() {
                return Err(FormError::NoName);
            }
        }
        let (name, is_file) = named.and_then(parse_disposition).ok_or(FormError::NoName)?;
        Ok((name, Self { is_file, content_type, encoding, value: rest }))
    }

    /// The value as text, if every reader decodes it alike.
    fn text(&self) -> Option<&'a str> {
        let text = std::str::from_utf8(self.value).ok().filter(|text| text.len() <= MAX_VALUE_BYTES)?;
        // Some readers undo a transfer encoding, others do not. Some use the character set that the
        // part names.
        let is_plain = self
            .encoding
            .is_none_or(|encoding| [&b"7bit"[..], b"8bit", b"binary"].iter().any(|plain| encoding.eq_ignore_ascii_case(plain)));
        let sets: &[&[u8]] = if text.is_ascii() { &[b"utf-8", b"us-ascii", b"iso-8859-1"] } else { &[b"utf-8"] };
        let mut parameters = self.content_type.unwrap_or_default().split(|byte| *byte == b';').skip(1);
        let is_utf8 = parameters.all(|parameter| {
            let set = parameter.trim_ascii().to_ascii_lowercase();
            set.strip_prefix(b"charset=")
                .is_some_and(|set| sets.contains(&set.strip_prefix(b"\"").and_then(|set| set.strip_suffix(b"\"")).unwrap_or(set)))
        });
        (!self.is_file && is_plain && is_utf8).then_some(text)
    }
}

/// A header's name and value. `None` if the line is no header, or one that some readers join with
/// its neighbours.
fn parse_header(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let colon = memchr::memchr(b':', line)?;
    let (name, value) = (&line[..colon], &line[colon + 1..]);
    let is_name = !name.is_empty() && name.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'-');
    let is_value = value.iter().all(|byte| *byte == b'\t' || !byte.is_ascii_control());
    (is_name && is_value).then(|| (name, value.trim_ascii()))
}

/// The field that a disposition names, and whether it is a file.
///
/// The name must come first, as all clients write it. The rest is split at every semicolon, even
/// within quotes, because readers differ in where quotes end: no other name may be anywhere.
fn parse_disposition(value: &[u8]) -> Option<(&[u8], bool)> {
    let mut parameters = value.split(|byte| *byte == b';');
    parameters.next().filter(|kind| kind.trim_ascii_end().eq_ignore_ascii_case(b"form-data"))?;
    let name = parameters.next()?.trim_ascii().strip_prefix(b"name=")?;
    let name = name.strip_prefix(b"\"").map_or(Some(name), |quoted| quoted.strip_suffix(b"\""))?;
    let is_plain = |byte: &u8| byte.is_ascii_graphic() && !b"\"\\%=".contains(byte);
    if name.is_empty() || !name.iter().all(is_plain) {
        return None;
    }
    let mut is_file = false;
    for parameter in parameters {
        let key = parameter.split(|byte| matches!(byte, b'=' | b'*')).next().unwrap_or_default().trim_ascii().to_ascii_lowercase();
        if key == b"name" {
            return None;
        }
        is_file |= key == b"filename";
    }
    Some((name, is_file))
}

#[cfg(test)]
mod tests;
