//! Recorded traces in the format in which Mooncake's authors published theirs: one JSON object a
//! line, with an id for each 512 tokens of the prompt instead of its text.
//!
//! Equal ids are equal content after an equal beginning. The simulator turns them into blocks,
//! `hostler bench` into words.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use thiserror::Error;

/// Tokens that an id stands for.
pub const ID_TOKENS: u32 = 512;

/// Longer prompts than this count as mistakes in the file.
const MAX_TOKENS: u32 = 10_000_000;

/// A longer line counts as a mistake; the longest prompt has 20,000 ids.
const MAX_LINE_BYTES: u64 = 1 << 20;

#[derive(Debug, Error)]
pub enum TraceError {
    #[error("this workload needs a trace: name one with --trace FILE (the project has one in simulate/traces)")]
    Missing,
    #[error("cannot read {file}: {source}")]
    File { file: PathBuf, source: std::io::Error },
    #[error(
        "{file}, line {line}: {what}; expected {{\"timestamp\": ms, \"input_length\": tokens, \"output_length\": tokens, \"hash_ids\": [id, …]}}"
    )]
    Line { file: PathBuf, line: usize, what: String },
    #[error("{0} holds no request; give a trace of one JSON object a line")]
    Empty(PathBuf),
    #[error("{file} holds more than {most} requests; give a part of it")]
    TooMany { file: PathBuf, most: usize },
}

/// One request, as it was recorded.
#[derive(Debug, Deserialize)]
pub struct TraceRequest {
    /// Arrival time in milliseconds.
    pub timestamp: f64,
    #[serde(rename = "input_length")]
    pub input: u32,
    #[serde(rename = "output_length")]
    pub output: u32,
    /// Content of the prompt: an id per 512 tokens; the last one may stand for fewer.
    #[serde(rename = "hash_ids")]
    pub ids: Box<[u64]>,
}

impl TraceRequest {
    /// Ids of the prompt, each with the number of its tokens in this prompt.
    pub fn blocks(&self) -> impl Iterator<Item = (u64, u32)> {
        let mut left = self.input;
        self.ids.iter().map(move |id| {
            let tokens = left.min(ID_TOKENS);
            left -= tokens;
            (*id, tokens)
        })
    }
}

/// Reads the requests of a file, in its order, lazily.
///
/// # Errors
/// When the file cannot be opened. An item is an error if a line cannot be read or is not in the
/// format.
pub fn read_requests(file: &Path) -> Result<impl Iterator<Item = Result<TraceRequest, TraceError>>, TraceError> {
    let unreadable = {
        let file = file.to_owned();
        move |source| TraceError::File { file: file.clone(), source }
    };
    let mut reader = BufReader::new(File::open(file).map_err(&unreadable)?);
    let (file, mut number, mut line) = (file.to_owned(), 0, Vec::new());
    Ok(std::iter::from_fn(move || {
        loop {
            line.clear();
            number += 1;
            match reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line) {
                Err(error) => return Some(Err(unreadable(error))),
                Ok(0) => return None,
                Ok(_) if line.trim_ascii().is_empty() => {}
                Ok(_) => return Some(parse_line(&line).map_err(|what| TraceError::Line { file: file.clone(), line: number, what })),
            }
        }
    }))
}

fn parse_line(line: &[u8]) -> Result<TraceRequest, String> {
    if line.len() as u64 == MAX_LINE_BYTES {
        return Err(format!("longer than {MAX_LINE_BYTES} bytes"));
    }
    let request: TraceRequest = serde_json::from_slice(line).map_err(|error| error.to_string().replace("at line 1 column", "at column"))?;
    let covered = request.ids.len() as u64 * u64::from(ID_TOKENS);
    if request.input == 0 || request.output == 0 {
        Err("a prompt and an answer have at least one token".into())
    } else if request.input > MAX_TOKENS || request.output > MAX_TOKENS {
        Err(format!("more than {MAX_TOKENS} tokens"))
    } else if covered < u64::from(request.input) || covered >= u64::from(request.input) + u64::from(ID_TOKENS) {
        Err(format!("{} ids of {ID_TOKENS} tokens do not fit a prompt of {} tokens", request.ids.len(), request.input))
    } else if !request.timestamp.is_finite() || request.timestamp < 0.0 {
        Err("the timestamp is not a number from zero up".into())
    } else {
        Ok(request)
    }
}
