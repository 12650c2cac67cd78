//! File of requests, read whole once before anything is sent, and then line by line at the places
//! in its index.
//!
//! Only the index is kept.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::{Xxh3, xxh3_64, xxh3_128};

use crate::error::BatchError;
use crate::request_line::{self, MAX_BODY_BYTES};

/// Longest line: a body and its envelope.
const MAX_LINE_BYTES: usize = MAX_BODY_BYTES + (64 << 10);

/// Most problems that are reported.
///
/// Programs make the files, and they make the same mistake in every line.
const MAX_PROBLEMS: usize = 10;

/// A file in which every line is a request with a unique id.
#[derive(Debug)]
pub(crate) struct Input {
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
    pub(crate) fn check(path: &Path) -> Result<Self, BatchError> {
        let unreadable = |source| BatchError::File { verb: "read", path: path.to_owned(), source };
        let file = File::open(path).map_err(unreadable)?;
        let mut index = IndexBuilder::default();
        let mut reader = BufReader::with_capacity(1 << 20, &file);
        let mut line = Vec::new();
        while index.read_line(&mut reader, &mut line).map_err(unreadable)? {}
        if index.problem_count > 0 {
            return Err(BatchError::Input { path: path.to_owned(), problems: index.describe_problems() });
        }
        if index.requests.is_empty() {
            return Err(BatchError::Empty(path.to_owned()));
        }
        let (model_count, digest) = (index.models.len(), index.hasher.digest128());
        Ok(Self { path: path.to_owned(), file, requests: index.requests, model_count, digest })
    }

    pub(crate) fn len(&self) -> usize {
        self.requests.len()
    }

    /// Number of the model that a request asks for.
    pub(crate) fn model(&self, number: usize) -> usize {
        self.requests[number].model as usize
    }

    pub(crate) fn model_count(&self) -> usize {
        self.model_count
    }

    /// Digest that distinguishes this input from others.
    pub(crate) fn digest(&self) -> u128 {
        self.digest
    }

    /// Length of the line of a request, in bytes.
    pub(crate) fn line_length(&self, number: usize) -> usize {
        self.requests[number].length as usize
    }

    /// Reads the line of a request.
    ///
    /// # Errors
    /// When the line cannot be read, or has changed.
    pub(crate) fn read(&self, number: usize) -> Result<Vec<u8>, BatchError> {
        let request = &self.requests[number];
        let mut line = vec![0; request.length as usize];
        let changed = || BatchError::InputChanged { path: self.path.clone(), line: request.line };
        match self.file.read_exact_at(&mut line, request.offset) {
            Ok(()) if xxh3_64(&line) == request.checksum => Ok(line),
            Ok(()) => Err(changed()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(changed()),
            Err(source) => Err(BatchError::File { verb: "read", path: self.path.clone(), source }),
        }
    }
}

#[derive(Default)]
struct IndexBuilder {
    requests: Vec<IndexedRequest>,
    /// Line of each id, by its hash.
    ids: HashMap<u128, u32>,
    /// Number of each model.
    models: HashMap<String, u32>,
    hasher: Xxh3,
    offset: u64,
    line: u32,
    /// First problems found.
    problems: String,
    problem_count: usize,
}

impl IndexBuilder {
    /// Reads one line; `false` at the end of the file.
    fn read_line(&mut self, reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<bool> {
        line.clear();
        let read = reader.take(MAX_LINE_BYTES as u64 + 1).read_until(b'\n', line)?;
        if read == 0 {
            return Ok(false);
        }
        self.line += 1;
        self.hasher.update(line);
        if read > MAX_LINE_BYTES {
            self.add_problem("it has more than 64 MiB: is a line break missing?");
            // The following bytes would be the rest of this line.
            return Ok(false);
        }
        let content = line.trim_ascii_end();
        if !content.is_empty() {
            self.add(content);
        }
        self.offset += read as u64;
        Ok(true)
    }

    fn add(&mut self, content: &[u8]) {
        let request = match request_line::parse(content) {
            Ok(request) => request,
            Err(error) => return self.add_problem(&error.to_string()),
        };
        if let Some(earlier) = self.ids.insert(xxh3_128(request.custom_id.as_bytes()), self.line) {
            return self
                .add_problem(&format!("line {earlier} has its custom_id {:?}: give each request one of its own", request.custom_id));
        }
        let length = u32::try_from(content.len()).expect("a line has no more than MAX_LINE_BYTES");
        let model = self.number_model(&request.model);
        self.requests.push(IndexedRequest { offset: self.offset, checksum: xxh3_64(content), length, line: self.line, model });
    }

    fn number_model(&mut self, model: &str) -> u32 {
        if let Some(number) = self.models.get(model) {
            return *number;
        }
        // There are no more models than lines.
        let number = u32::try_from(self.models.len()).unwrap_or(u32::MAX);
        self.models.insert(model.to_owned(), number);
        number
    }

    fn add_problem(&mut self, problem: &str) {
        self.problem_count += 1;
        if self.problem_count <= MAX_PROBLEMS {
            let _ = writeln!(self.problems, "  line {}: {problem}", self.line);
        }
    }

    fn describe_problems(mut self) -> String {
        if let Some(more @ 1..) = self.problem_count.checked_sub(MAX_PROBLEMS) {
            let _ = write!(self.problems, "  and {more} more lines");
        }
        self.problems.trim_end().to_owned()
    }
}

#[cfg(test)]
mod tests;
