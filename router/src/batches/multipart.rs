//! The multipart form of an upload, read piece by piece: nothing of the file is kept. Pure.

use bytes::{Buf, Bytes, BytesMut};
use memchr::memmem::Finder;

/// Longest boundary (RFC 2046 §5.1.1).
const MAX_BOUNDARY_BYTES: usize = 70;

/// Most bytes of a part's header.
const MAX_HEADER_BYTES: usize = 8 * 1024;

/// Most parts. A form has a file and three fields.
const MAX_PARTS: usize = 16;

/// Room of a form for all but the file.
pub(crate) const FORM_BYTES: u64 = 64 * 1024;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FormEvent {
    /// A part begins, which is a file if it has the name of one.
    Part { name: String, filename: Option<String> },
    /// A piece of that part.
    Data(Bytes),
    /// That part has ended.
    PartEnd,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UploadFormError {
    #[error("a file is uploaded as a form: send `content-type: multipart/form-data; boundary=...`")]
    NoForm,
    #[error("the multipart form is broken: each part begins after a line with `--` and the boundary, with one header that has its name")]
    Broken,
    #[error("the multipart form has more than {MAX_PARTS} parts")]
    TooMany,
    #[error("the multipart form has ended too early: send it whole")]
    Incomplete,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FormState {
    /// Before the first boundary.
    Start,
    /// After a boundary, in front of a part or of the end.
    Boundary,
    Header,
    Body,
    End,
}

/// Reads a form as its bytes come.
#[derive(Debug)]
pub(crate) struct FormReader {
    state: FormState,
    unread: BytesMut,
    /// A line break, two hyphens and the boundary.
    delimiter: Finder<'static>,
    parts: usize,
}

impl FormReader {
    /// # Errors
    /// If the content type is not that of a form.
    pub(crate) fn new(content_type: &str) -> Result<Self, UploadFormError> {
        let boundary = find_boundary(content_type).ok_or(UploadFormError::NoForm)?;
        let delimiter = Finder::new(&format!("\r\n--{boundary}")).into_owned();
        // The first boundary stands at the beginning of a line that has none before it.
        Ok(Self { state: FormState::Start, unread: BytesMut::from("\r\n"), delimiter, parts: 0 })
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        if self.state != FormState::End {
            self.unread.extend_from_slice(bytes);
        }
    }

    /// The next event of what was pushed; `None` if that needs more.
    ///
    /// # Errors
    /// If this is no form.
    pub(crate) fn next(&mut self) -> Result<Option<FormEvent>, UploadFormError> {
        loop {
            match self.state {
                FormState::Start => {
                    // Some clients begin with an empty line.
                    let delimiter = self.delimiter.needle();
                    let skipped = usize::from(self.unread.starts_with(b"\r\n\r\n")) * 2;
                    let known = self.unread.len().saturating_sub(skipped).min(delimiter.len());
                    if self.unread.get(skipped..skipped + known) != Some(&delimiter[..known]) {
                        return Err(UploadFormError::Broken);
                    }
                    if known < delimiter.len() {
                        return Ok(None);
                    }
                    self.unread.advance(skipped + known);
                    self.state = FormState::Boundary;
                }
                FormState::Boundary => match self.unread.get(..2) {
                    None => return Ok(None),
                    Some(b"--") => {
                        self.unread.clear();
                        self.state = FormState::End;
                    }
                    Some(b"\r\n") => {
                        self.unread.advance(2);
                        self.parts += 1;
                        if self.parts > MAX_PARTS {
                            return Err(UploadFormError::TooMany);
                        }
                        self.state = FormState::Header;
                    }
                    Some(_) => return Err(UploadFormError::Broken),
                },
                FormState::Header => {
                    let Some(end) = memchr::memmem::find(&self.unread[..self.unread.len().min(MAX_HEADER_BYTES)], b"\r\n\r\n") else {
                        return if self.unread.len() < MAX_HEADER_BYTES { Ok(None) } else { Err(UploadFormError::Broken) };
                    };
                    let header = self.unread.split_to(end);
                    self.unread.advance(4);
                    self.state = FormState::Body;
                    return parse_part(&header).ok_or(UploadFormError::Broken).map(Some);
                }
                FormState::Body => {
                    if let Some(end) = self.delimiter.find(&self.unread) {
                        if end > 0 {
                            return Ok(Some(FormEvent::Data(self.unread.split_to(end).freeze())));
                        }
                        self.unread.advance(self.delimiter.needle().len());
                        self.state = FormState::Boundary;
                        return Ok(Some(FormEvent::PartEnd));
                    }
                    // A delimiter may have begun in the last bytes.
                    let sure = (self.unread.len() + 1).saturating_sub(self.delimiter.needle().len());
                    return Ok((sure > 0).then(|| FormEvent::Data(self.unread.split_to(sure).freeze())));
                }
                FormState::End => return Ok(None),
            }
        }
    }

    /// # Errors
    /// If the form is not whole.
    pub(crate) fn check_end(&self) -> Result<(), UploadFormError> {
        if self.state == FormState::End { Ok(()) } else { Err(UploadFormError::Incomplete) }
    }
}

fn find_boundary(content_type: &str) -> Option<&str> {
    let mut parameters = content_type.split(';');
    parameters.next().filter(|kind| kind.trim().eq_ignore_ascii_case("multipart/form-data"))?;
    let named = parameters.filter_map(|parameter| parameter.trim().split_once('='));
    let boundary = named.filter(|(name, _)| name.eq_ignore_ascii_case("boundary")).map(|(_, value)| value.trim_matches('"')).next()?;
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"'()+_,-./:=? ".contains(&byte);
    ((1..=MAX_BOUNDARY_BYTES).contains(&boundary.len()) && boundary.bytes().all(is_plain)).then_some(boundary)
}

/// The beginning of a part by its header.
fn parse_part(header: &[u8]) -> Option<FormEvent> {
    let header = std::str::from_utf8(header).ok()?;
    let mut values = header.split("\r\n").filter_map(|line| line.split_once(':'));
    let (_, disposition) = values.find(|(name, _)| name.trim().eq_ignore_ascii_case("content-disposition"))?;
    let name = find_parameter(disposition, "name")?;
    Some(FormEvent::Part { name, filename: find_parameter(disposition, "filename") })
}

/// A parameter of a header, without its quotes. Clients write `%22` or `\"` for a quote in it.
fn find_parameter(value: &str, name: &str) -> Option<String> {
    let mut rest = value;
    loop {
        rest = rest.split_once(';')?.1.trim_start();
        let (found, after) = rest.split_once('=')?;
        let (text, after) = match after.strip_prefix('"') {
            Some(quoted) => split_quoted(quoted)?,
            None => {
                let end = after.find(';').unwrap_or(after.len());
                (after[..end].trim_end().to_owned(), &after[end..])
            }
        };
        if found.trim().eq_ignore_ascii_case(name) {
            return Some(text);
        }
        rest = after;
    }
}

/// A quoted text up to its closing quote, and what follows.
fn split_quoted(quoted: &str) -> Option<(String, &str)> {
    let mut text = String::new();
    let mut characters = quoted.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((text, &quoted[at + 1..])),
            '\\' => text.push(characters.next()?.1),
            other => text.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests;
