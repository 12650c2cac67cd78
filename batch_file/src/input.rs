//! File of requests, read whole once before anything is sent, and then line by line at the places
//! in its index.
//!
//! Only the index is kept.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::{Xxh3, xxh3_64, xxh3_128};

use crate::error::FileError;
use crate::request_line::{self, LineError, MAX_BODY_BYTES, RequestLine};

/// Room of a line for all but the body.
const ENVELOPE_BYTES: usize = 64 << 10;

/// Most problems that are reported.
///
/// Programs make the files, and they make the same mistake in every line.
const MAX_PROBLEMS: usize = 10;

/// What a file of requests may have.
#[derive(Debug, Clone)]
pub struct InputBounds {
    pub requests: usize,
    /// Bytes of a request's body, at most 64 MiB.
    pub body_bytes: usize,
    /// The URL that every request has; `None` if each may have its own.
    pub endpoint: Option<String>,
}

impl Default for InputBounds {
    fn default() -> Self {
        Self { requests: usize::MAX, body_bytes: MAX_BODY_BYTES, endpoint: None }
    }
}

/// What is wrong with a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LineProblem {
    /// Line number from 1.
    pub line: u32,
    /// The problem in a word.
    pub code: &'static str,
    /// The part of the line that is wrong.
    pub param: Option<&'static str>,
    pub message: String,
}

/// What is wrong with a file: its first problems, and the number of all.
#[derive(Debug, Default)]
pub struct InputProblems {
    pub first: Vec<LineProblem>,
    pub count: usize,
}

impl fmt::Display for InputProblems {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, problem) in self.first.iter().enumerate() {
            write!(out, "{}  line {}: {}", if number > 0 { "\n" } else { "" }, problem.line, problem.message)?;
        }
        match self.count - self.first.len() {
            0 => Ok(()),
            more => write!(out, "\n  and {more} more lines"),
        }
    }
}

/// A file in which every line is a request with a unique id.
#[derive(Debug)]
pub struct Input {
    path: PathBuf,
    file: File,
    requests: Vec<IndexedRequest>,
    model_count: usize,
    digest: u128,
}

/// Place of a request in the file.
#[derive(Debug)]
struct IndexedRequest {
    offset: u64,
    /// Checksum of the line's content.
    checksum: u64,
    length: u32,
    /// Line number from 1; empty lines count.
    line: u32,
    /// Number of the model, in order of appearance.
    model: u32,
}

impl Input {
    /// Reads the file and finds all errors in it.
    ///
    /// # Errors
    /// With the numbers of lines that are not requests.
    pub fn check(path: &Path, bounds: &InputBounds) -> Result<Self, FileError> {
        let unreadable = |source| FileError::File { verb: "read", path: path.to_owned(), source };
        let file = File::open(path).map_err(unreadable)?;
        let mut index = IndexBuilder::new(bounds);
        let mut reader = BufReader::with_capacity(1 << 20, &file);
        let mut line = Vec::new();
        while index.read_line(&mut reader, &mut line).map_err(unreadable)? {}
        if index.problems.count > 0 {
            return Err(FileError::Input { path: path.to_owned(), problems: index.problems });
        }
        if index.requests.is_empty() {
            return Err(FileError::Empty(path.to_owned()));
        }
        let (model_count, digest) = (index.models.len(), index.hasher.digest128());
        Ok(Self { path: path.to_owned(), file, requests: index.requests, model_count, digest })
    }

    #[must_use]
    pub fn requests(&self) -> usize {
        self.requests.len()
    }

    /// Number of the model that a request asks for.
    #[must_use]
    pub fn model(&self, number: usize) -> usize {
        self.requests[number].model as usize
    }

    #[must_use]
    pub fn model_count(&self) -> usize {
        self.model_count
    }

    /// Digest that distinguishes this input from others.
    #[must_use]
    pub fn digest(&self) -> u128 {
        self.digest
    }

    /// Length of the line of a request, in bytes.
    #[must_use]
    pub fn line_length(&self, number: usize) -> usize {
        self.requests[number].length as usize
    }

    /// Reads the line of a request.
    ///
    /// # Errors
    /// When the line cannot be read, or has changed.
    pub fn read(&self, number: usize) -> Result<Vec<u8>, FileError> {
        let request = &self.requests[number];
        let mut line = vec![0; request.length as usize];
        let changed = || FileError::InputChanged { path: self.path.clone(), line: request.line };
        match self.file.read_exact_at(&mut line, request.offset) {
            Ok(()) if xxh3_64(&line) == request.checksum => Ok(line),
            Ok(()) => Err(changed()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(changed()),
            Err(source) => Err(FileError::File { verb: "read", path: self.path.clone(), source }),
        }
    }
}

struct IndexBuilder<'a> {
    bounds: &'a InputBounds,
    requests: Vec<IndexedRequest>,
    /// Line of each id, by its hash.
    ids: HashMap<u128, u32>,
    /// Number of each model, by the hash of its name.
    models: HashMap<u128, u32>,
    hasher: Xxh3,
    offset: u64,
    line: u32,
    problems: InputProblems,
}

impl<'a> IndexBuilder<'a> {
    fn new(bounds: &'a InputBounds) -> Self {
        Self {
            bounds,
            requests: Vec::new(),
            ids: HashMap::new(),
            models: HashMap::new(),
            hasher: Xxh3::new(),
            offset: 0,
            line: 0,
            problems: InputProblems::default(),
        }
    }

    /// Reads one line; `false` at the end of the file.
    fn read_line(&mut self, reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<bool> {
        line.clear();
        let longest = self.bounds.body_bytes + ENVELOPE_BYTES;
        let read = reader.take(longest as u64 + 1).read_until(b'\n', line)?;
        if read == 0 {
            return Ok(false);
        }
        self.line += 1;
        self.hasher.update(line);
        if read > longest {
            let message = format!("it has more than {} MiB: is a line break missing?", self.bounds.body_bytes >> 20);
            self.add_problem(LineProblem { line: self.line, code: "line_too_long", param: None, message });
            // The following bytes would be the rest of this line.
            return Ok(false);
        }
        let content = line.trim_ascii_end();
        if !content.is_empty() {
            if self.requests.len() == self.bounds.requests {
                let message = format!("a batch has at most {} requests: make several of it", self.bounds.requests);
                self.add_problem(LineProblem { line: self.line, code: "too_many_requests", param: None, message });
                return Ok(false);
            }
            self.add(content);
        }
        self.offset += read as u64;
        Ok(true)
    }

    fn add(&mut self, content: &[u8]) {
        let request = match request_line::parse(content).and_then(|request| self.check_bounds(request)) {
            Ok(request) => request,
            Err(error) => {
                let problem = LineProblem { line: self.line, code: error.code(), param: error.param(), message: error.to_string() };
                return self.add_problem(problem);
            }
        };
        if let Some(earlier) = self.ids.insert(xxh3_128(request.custom_id.as_bytes()), self.line) {
            let id = request_line::cut(&request.custom_id);
            let message = format!("line {earlier} has its custom_id {id:?}: give each request one of its own");
            return self.add_problem(LineProblem { line: self.line, code: "duplicate_custom_id", param: Some("custom_id"), message });
        }
        let length = u32::try_from(content.len()).expect("a line has little more than 64 MiB");
        let model = self.number_model(&request.model);
        self.requests.push(IndexedRequest { offset: self.offset, checksum: xxh3_64(content), length, line: self.line, model });
    }

    fn check_bounds<'b>(&self, request: RequestLine<'b>) -> Result<RequestLine<'b>, LineError> {
        if request.body.len() > self.bounds.body_bytes {
            return Err(LineError::BodyTooLong(self.bounds.body_bytes));
        }
        match &self.bounds.endpoint {
            Some(endpoint) if endpoint.strip_prefix("/v1") != Some(&request.route) => {
                Err(LineError::OtherUrl { url: format!("/v1{}", request_line::cut(&request.route)), endpoint: endpoint.clone() })
            }
            _ => Ok(request),
        }
    }

    fn number_model(&mut self, model: &str) -> u32 {
        // There are no more models than lines.
        let next = u32::try_from(self.models.len()).unwrap_or(u32::MAX);
        *self.models.entry(xxh3_128(model.as_bytes())).or_insert(next)
    }

    fn add_problem(&mut self, problem: LineProblem) {
        self.problems.count += 1;
        if self.problems.first.len() < MAX_PROBLEMS {
            self.problems.first.push(problem);
        }
    }
}

#[cfg(test)]
mod tests;
