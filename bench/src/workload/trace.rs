//! A recorded trace in the format that Mooncake's authors published theirs in: one JSON object a line, with an id for each 512 tokens of
//! the prompt instead of its text. Equal ids become equal words, so what prompts had in common they have in common again.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use thiserror::Error;

use super::draw::{Draw, Purpose};
use super::text;

/// Tokens that an id stands for.
const BLOCK_TOKENS: u32 = 512;

/// Longer prompts than this are mistakes; it is 40 MB of words.
const MOST_TOKENS: u32 = 10_000_000;

/// A line longer than this is a mistake: the longest prompt has 20,000 ids.
const MOST_LINE_BYTES: u64 = 1 << 20;

/// More requests than this would take gigabytes of memory; the published traces have some ten thousand.
const MOST_REQUESTS: usize = 2_000_000;

/// Why a trace cannot be used.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error("cannot read {file}: {source}")]
    File {
        /// The file.
        file: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A line does not say what it should.
    #[error(
        "{file}, line {line}: {what}; expected {{\"timestamp\": ms, \"input_length\": tokens, \"output_length\": tokens, \"hash_ids\": [id, …]}}"
    )]
    Line {
        /// The file.
        file: PathBuf,
        /// Which line, from 1.
        line: usize,
        /// What is wrong with it.
        what: String,
    },
    /// There is nothing in it.
    #[error("{0} holds no request; give a trace of one JSON object a line")]
    Empty(PathBuf),
    /// There is too much in it.
    #[error("{0} holds more than {most} requests; give a part of it", most = MOST_REQUESTS)]
    TooMany(PathBuf),
}

/// What was recorded, in the order in which it came; clones share it.
#[derive(Debug, Clone)]
pub(super) struct Trace(Arc<[Request]>);

/// One line of it.
#[derive(Debug, Deserialize)]
pub(super) struct Request {
    /// When it came, in milliseconds.
    pub(super) timestamp: f64,
    #[serde(rename = "input_length")]
    input: u32,
    /// Tokens of the answer.
    #[serde(rename = "output_length")]
    pub(super) output: u32,
    #[serde(rename = "hash_ids")]
    ids: Box<[u64]>,
}

impl Trace {
    /// The trace in a file. Requests are put in the order of their times, and the first one's time becomes the beginning.
    ///
    /// # Errors
    /// When it cannot be read or is not in the format.
    pub(super) fn read(file: &Path) -> Result<Self, TraceError> {
        let unreadable = |source| TraceError::File { file: file.to_owned(), source };
        let mut reader = BufReader::new(File::open(file).map_err(unreadable)?);
        let mut requests: Vec<Request> = Vec::new();
        let mut line = Vec::new();
        for number in 1.. {
            line.clear();
            if reader.by_ref().take(MOST_LINE_BYTES).read_until(b'\n', &mut line).map_err(unreadable)? == 0 {
                break;
            }
            if line.trim_ascii().is_empty() {
                continue;
            }
            if requests.len() == MOST_REQUESTS {
                return Err(TraceError::TooMany(file.to_owned()));
            }
            requests.push(parse(&line).map_err(|what| TraceError::Line { file: file.to_owned(), line: number, what })?);
        }
        requests.sort_by(|one, other| one.timestamp.total_cmp(&other.timestamp));
        let Some(first) = requests.first().map(|request| request.timestamp) else { return Err(TraceError::Empty(file.to_owned())) };
        for request in &mut requests {
            request.timestamp -= first;
        }
        Ok(Self(requests.into()))
    }

    /// The request of this number, if there are so many.
    pub(super) fn request(&self, number: u64) -> Option<&Request> {
        self.0.get(usize::try_from(number).ok()?)
    }
}

impl Request {
    /// Its prompt: the words of each block, the last one cut where the prompt ends.
    pub(super) fn text(&self, seed: u64) -> Arc<str> {
        let mut prompt = String::with_capacity((self.input as usize + 1) * text::BYTES_PER_TOKEN);
        let mut left = self.input;
        for id in &self.ids {
            let tokens = left.min(BLOCK_TOKENS);
            text::write(&mut prompt, &mut Draw::new(seed, Purpose::Block, *id), tokens);
            left -= tokens;
        }
        prompt.pop();
        prompt.into()
    }
}

fn parse(line: &[u8]) -> Result<Request, String> {
    if line.len() as u64 == MOST_LINE_BYTES {
        return Err(format!("longer than {MOST_LINE_BYTES} bytes"));
    }
    let request: Request = serde_json::from_slice(line).map_err(|error| error.to_string().replace("at line 1 column", "at column"))?;
    let covered = request.ids.len() as u64 * u64::from(BLOCK_TOKENS);
    if request.input == 0 || request.output == 0 {
        Err("a prompt and an answer have at least one token".into())
    } else if request.input > MOST_TOKENS || request.output > MOST_TOKENS {
        Err(format!("more than {MOST_TOKENS} tokens"))
    } else if covered < u64::from(request.input) || covered >= u64::from(request.input) + u64::from(BLOCK_TOKENS) {
        Err(format!("{} ids of {BLOCK_TOKENS} tokens do not fit a prompt of {} tokens", request.ids.len(), request.input))
    } else if !request.timestamp.is_finite() || request.timestamp < 0.0 {
        Err("the timestamp is not a number from zero up".into())
    } else {
        Ok(request)
    }
}
