//! Traces in the format of Mooncake: one JSON object a line, with an id for each 512 tokens of the prompt instead of its text. Equal ids
//! are equal content after an equal beginning.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use rustc_hash::FxHashMap;
use serde::Deserialize;
use thiserror::Error;

use super::{Arrival, Start};
use crate::request::{Request, Segment, keys};

/// Tokens that an id stands for.
const ID_TOKENS: u32 = 512;

/// Longer prompts than this are mistakes.
const MOST_TOKENS: u32 = 10_000_000;

/// A line longer than this is a mistake; the longest prompt has 20,000 ids.
const MOST_LINE_BYTES: usize = 1 << 20;

/// Why a trace cannot be used.
#[derive(Debug, Error)]
pub enum TraceError {
    /// No file was named.
    #[error("this workload needs a trace: name one with --trace FILE (the project has one in simulate/traces)")]
    Missing,
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
    #[error("{0} holds no request")]
    Empty(PathBuf),
}

#[derive(Debug, Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// The first `most` requests, `rate` times as fast as they were.
pub(super) fn read(file: &Path, rate: f64, most: usize) -> Result<Vec<Arrival>, TraceError> {
    let unreadable = |source| TraceError::File { file: file.to_owned(), source };
    let reader = BufReader::new(File::open(file).map_err(unreadable)?);
    let mut sessions = Sessions::default();
    let mut arrivals = Vec::new();
    for (index, text) in reader.lines().enumerate() {
        if arrivals.len() >= most {
            break;
        }
        let text = text.map_err(unreadable)?;
        if text.trim().is_empty() {
            continue;
        }
        let line = parse(&text).map_err(|what| TraceError::Line { file: file.to_owned(), line: index + 1, what })?;
        let number = arrivals.len() as u64;
        let mut left = line.input_length;
        let mut segments: Vec<Segment> = Vec::with_capacity(line.hash_ids.len() + 1);
        for &id in &line.hash_ids {
            let tokens = left.min(ID_TOKENS);
            segments.push(Segment { name: id, tokens });
            left -= tokens;
        }
        // Answers are not in the trace's ids: no later prompt has them.
        segments.push(Segment { name: u64::MAX - number, tokens: line.output_length });
        let session = sessions.of(number, &line.hash_ids);
        let request = Request { keys: keys(&segments), prompt: line.input_length, output: line.output_length, session };
        arrivals.push(Arrival { request, start: Start::At(line.timestamp / 1000.0 / rate) });
    }
    if arrivals.is_empty() { Err(TraceError::Empty(file.to_owned())) } else { Ok(arrivals) }
}

fn parse(text: &str) -> Result<Line, String> {
    if text.len() > MOST_LINE_BYTES {
        return Err(format!("longer than {MOST_LINE_BYTES} bytes"));
    }
    let line: Line = serde_json::from_str(text).map_err(|error| error.to_string().replace("at line 1 column", "at column"))?;
    let covered = (line.hash_ids.len() as u64) * u64::from(ID_TOKENS);
    if line.input_length == 0 || line.output_length == 0 {
        Err("a prompt and an answer have at least one token".into())
    } else if line.input_length > MOST_TOKENS || line.output_length > MOST_TOKENS {
        Err(format!("more than {MOST_TOKENS} tokens"))
    } else if covered < u64::from(line.input_length) || covered >= u64::from(line.input_length) + u64::from(ID_TOKENS) {
        Err(format!("{} ids of {ID_TOKENS} tokens do not fit a prompt of {} tokens", line.hash_ids.len(), line.input_length))
    } else if !line.timestamp.is_finite() || line.timestamp < 0.0 {
        Err("the timestamp is not a number from zero up".into())
    } else {
        Ok(line)
    }
}

/// Which conversation a request continues. Traces do not say, but a prompt that begins as an earlier one did, beyond the first 512 tokens
/// that all prompts of an application share, is its continuation.
#[derive(Debug, Default)]
struct Sessions {
    first: FxHashMap<u64, u64>,
}

impl Sessions {
    fn of(&mut self, number: u64, ids: &[u64]) -> u64 {
        let known = ids.iter().skip(1).rev().find_map(|id| self.first.get(id).copied());
        let session = known.unwrap_or(number);
        for id in ids {
            self.first.entry(*id).or_insert(session);
        }
        session
    }
}
