//! The configuration file: read within bounds, with the line of each key.

use std::fs::{self, File};
use std::io::{Error, ErrorKind, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use toml::de::{DeTable, DeValue};
use toml::{Spanned, Table, Value};

use super::ConfigError;

/// Largest file. Every key at its default, with its meaning, takes 60 kB.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Most characters of the parser's words, which quote the line that they are about.
const MAX_SYNTAX_WORDS: usize = 600;

/// A key of the file, and the line on which it stands, counted from 1.
pub(super) struct FileKey {
    pub(super) name: String,
    pub(super) line: usize,
}

/// A section as the file has it.
pub(super) struct FileSection {
    pub(super) key: FileKey,
    /// `None` if the file gives a value where a section belongs.
    pub(super) entries: Option<Vec<(FileKey, Value)>>,
}

/// The sections of a file, in the order of its lines.
pub(super) fn read(path: &Path) -> Result<Vec<FileSection>, ConfigError> {
    let text = read_text(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    let syntax = |error: toml::de::Error| ConfigError::Syntax { path: path.to_owned(), message: syntax_words(&error) };
    let mut values: Table = text.parse().map_err(syntax)?;
    let places = DeTable::parse(&text).map_err(syntax)?.into_inner();
    let lines = Lines::of(&text);
    let mut sections: Vec<FileSection> = Vec::new();
    for (name, place) in &places {
        let (key, Some(value)) = (lines.key(name), values.remove(&**name.get_ref())) else { continue };
        let entries = match (value, place.get_ref()) {
            (Value::Table(mut table), DeValue::Table(places)) => {
                let entry = |name: &Spanned<_>| Some((lines.key(name), table.remove(&**name.get_ref())?));
                let mut entries: Vec<_> = places.keys().filter_map(entry).collect();
                entries.sort_by_key(|(key, _)| key.line);
                Some(entries)
            }
            _ => None,
        };
        sections.push(FileSection { key, entries });
    }
    sections.sort_by_key(|section| section.key.line);
    Ok(sections)
}

/// A pipe may give nothing for ever, and what is no file of settings may have no end.
fn read_text(path: &Path) -> std::io::Result<String> {
    let kind = fs::metadata(path)?.file_type();
    if kind.is_fifo() || kind.is_socket() {
        return Err(Error::new(ErrorKind::InvalidInput, "it is a pipe or a socket: write the settings into a file"));
    }
    let mut text = String::new();
    File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(Error::new(ErrorKind::FileTooLarge, format!("it is larger than {} KiB", MAX_FILE_BYTES / 1024)));
    }
    Ok(text)
}

fn syntax_words(error: &toml::de::Error) -> String {
    let words = error.to_string();
    if words.chars().count() <= MAX_SYNTAX_WORDS {
        return words.trim().to_owned();
    }
    let place = words.lines().next().unwrap_or_default();
    format!("{place}: {}", error.message()).chars().take(MAX_SYNTAX_WORDS).collect()
}

/// Where the lines of a text end.
struct Lines(Vec<usize>);

impl Lines {
    fn of(text: &str) -> Self {
        Self(text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at).collect())
    }

    fn key(&self, name: &Spanned<toml::de::DeString<'_>>) -> FileKey {
        let line = self.0.partition_point(|end| *end < name.span().start) + 1;
        FileKey { name: name.get_ref().to_string(), line }
    }
}
