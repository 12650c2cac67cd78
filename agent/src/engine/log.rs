//! Output of one engine: its last lines stay in memory, to be shown with a failure.
//!
//! The engine's keeper writes all of it to a rotated file.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

/// Lines kept in memory.
///
/// A failed start of vLLM prints up to 500, its cause first: each process adds the tracebacks of
/// the one before.
const TAIL_LINES: usize = 1_000;

/// Bytes of one line kept in memory; the file has the whole line.
const MAX_LINE_BYTES: usize = 2_000;

/// Messages of vLLM after its imports, when it starts to build the engine.
const LOADING_MARKERS: [&str; 2] = ["Initializing a V1 LLM engine", "Starting to load model"];

pub(crate) fn is_loading_marker(line: &str) -> bool {
    LOADING_MARKERS.iter().any(|sign| line.contains(sign))
}

/// The log of one engine over all its lives. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct EngineLog {
    tail: Arc<Mutex<LogTail>>,
}

impl EngineLog {
    /// Writes a line of the agent itself, which begins a new life.
    pub(crate) fn begin_life(&self, line: &str) {
        let mut tail = self.tail.lock();
        tail.note(line, HEAD);
        tail.lines_of_life = 0;
    }

    pub(crate) fn note(&self, line: &str) {
        self.tail.lock().note(line, HEAD);
    }

    /// Takes a whole line of another node's part of the engine.
    pub(crate) fn note_of(&self, member: u32, line: &str) {
        self.tail.lock().note(line, member);
    }

    /// Takes output in arbitrary pieces, and calls `on_line` for each whole line and each state of
    /// a progress bar.
    pub(crate) fn push_output(&self, output: &[u8], on_line: &mut impl FnMut(&str)) {
        self.tail.lock().push_output(output, on_line);
    }

    /// Ends the unfinished line, because the engine prints no more.
    pub(crate) fn finish_line(&self) {
        self.tail.lock().finish_line();
    }

    /// Last lines, oldest first, and how many there have been; of one node if `member` names it.
    pub(crate) fn last_lines(&self, count: usize, member: Option<u32>) -> (Vec<String>, u64) {
        let tail = self.tail.lock();
        match member {
            Some(member) => (tail.last_lines_of(member, count), tail.lines_ever.get(&member).copied().unwrap_or(0)),
            None => (tail.last_lines(count), tail.lines_ever.values().sum()),
        }
    }

    /// Last lines of the present life, oldest first.
    pub(crate) fn last_lines_of_life(&self, count: usize) -> Vec<String> {
        let tail = self.tail.lock();
        tail.last_lines(count.min(tail.lines_of_life))
    }
}

/// Number of the node whose agent keeps the log.
const HEAD: u32 = 0;

#[derive(Debug)]
struct LogLine {
    text: String,
    /// Number of the node that has printed it.
    member: u32,
}

#[derive(Debug, Default)]
struct LogTail {
    lines: VecDeque<LogLine>,
    unfinished: Vec<u8>,
    /// The next output replaces the unfinished line, as in a progress bar.
    has_carriage_return: bool,
    lines_of_life: usize,
    /// By the node that has printed them.
    lines_ever: BTreeMap<u32, u64>,
}

impl LogTail {
    /// Takes output in arbitrary pieces.
    fn push_output(&mut self, bytes: &[u8], on_line: &mut impl FnMut(&str)) {
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r')) {
            self.push_after_return(&rest[..end], on_line);
            if rest[end] == b'\r' {
                self.has_carriage_return = true;
            } else if self.finish_line() {
                on_line(&self.lines.back().expect("a line was just finished").text);
            }
            rest = &rest[end + 1..];
        }
        self.push_after_return(rest, on_line);
    }

    /// Output after a carriage return replaces the line before it, unless the return was half of a
    /// Windows line end.
    fn push_after_return(&mut self, bytes: &[u8], on_line: &mut impl FnMut(&str)) {
        if self.has_carriage_return && !bytes.is_empty() {
            self.has_carriage_return = false;
            if !self.unfinished.is_empty() {
                on_line(String::from_utf8_lossy(&self.unfinished).trim_end());
            }
            self.unfinished.clear();
        }
        self.append(bytes);
    }

    fn note(&mut self, line: &str, member: u32) {
        self.finish_line();
        self.append(line.as_bytes());
        self.finish_line_of(member);
    }

    fn append(&mut self, bytes: &[u8]) {
        let room = MAX_LINE_BYTES.saturating_sub(self.unfinished.len());
        self.unfinished.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    /// Ends the unfinished line; `false` if it was empty.
    fn finish_line(&mut self) -> bool {
        self.finish_line_of(HEAD)
    }

    fn finish_line_of(&mut self, member: u32) -> bool {
        self.has_carriage_return = false;
        if self.unfinished.is_empty() {
            return false;
        }
        let text = String::from_utf8_lossy(&self.unfinished).trim_end().to_owned();
        self.unfinished.clear();
        if self.lines.len() == TAIL_LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(LogLine { text, member });
        self.lines_of_life += 1;
        *self.lines_ever.entry(member).or_default() += 1;
        true
    }

    fn last_lines(&self, count: usize) -> Vec<String> {
        let skipped = self.lines.len().saturating_sub(count);
        self.lines.iter().skip(skipped).map(|line| line.text.clone()).collect()
    }

    fn last_lines_of(&self, member: u32, count: usize) -> Vec<String> {
        let newest_first = self.lines.iter().rev().filter(|line| line.member == member).take(count);
        let mut lines: Vec<String> = newest_first.map(|line| line.text.clone()).collect();
        lines.reverse();
        lines
    }
}

#[cfg(test)]
mod tests;
