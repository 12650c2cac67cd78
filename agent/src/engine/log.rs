//! What one engine prints: its last lines kept in memory, to be shown with a failure. All of it goes to a rotated file, which the engine's keeper writes.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

/// Lines kept in memory. A failed start of vLLM prints up to 500, its cause first: each of its
/// processes adds the tracebacks of the one before.
const TAIL_LINES: usize = 1_000;

/// Bytes kept of one line in memory; the file has all of it.
const MAX_LINE_BYTES: usize = 2_000;

/// What vLLM prints when it is past its imports and starts to build the engine.
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
    /// Writes a line of the agent's own, which begins a new life.
    pub(crate) fn begin_life(&self, line: &str) {
        let mut tail = self.tail.lock();
        tail.note(line);
        tail.lines_of_life = 0;
    }

    pub(crate) fn note(&self, line: &str) {
        self.tail.lock().note(line);
    }

    /// Takes output as it comes, cut anywhere; calls `on_line` for each whole line, and for each
    /// state of a progress bar.
    pub(crate) fn push_output(&self, output: &[u8], on_line: &mut impl FnMut(&str)) {
        self.tail.lock().push_output(output, on_line);
    }

    /// The engine prints no more: what it printed last is a line.
    pub(crate) fn finish_line(&self) {
        self.tail.lock().finish_line();
    }

    /// The last lines, oldest first.
    pub(crate) fn last_lines(&self, count: usize) -> Vec<String> {
        self.tail.lock().last_lines(count)
    }

    /// The last lines of the present life, oldest first.
    pub(crate) fn last_lines_of_life(&self, count: usize) -> Vec<String> {
        let tail = self.tail.lock();
        tail.last_lines(count.min(tail.lines_of_life))
    }
}

#[derive(Debug, Default)]
struct LogTail {
    lines: VecDeque<String>,
    unfinished: Vec<u8>,
    /// What comes next replaces the unfinished line, as a progress bar does it.
    has_carriage_return: bool,
    lines_of_life: usize,
}

impl LogTail {
    /// Takes bytes as they come, cut anywhere.
    fn push_output(&mut self, bytes: &[u8], on_line: &mut impl FnMut(&str)) {
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r')) {
            self.push_after_return(&rest[..end], on_line);
            if rest[end] == b'\r' {
                self.has_carriage_return = true;
            } else if self.finish_line() {
                on_line(self.lines.back().expect("a line was just finished"));
            }
            rest = &rest[end + 1..];
        }
        self.push_after_return(rest, on_line);
    }

    /// What comes after a carriage return replaces what was before it, unless it was half of a
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

    fn note(&mut self, line: &str) {
        self.finish_line();
        self.append(line.as_bytes());
        self.finish_line();
    }

    fn append(&mut self, bytes: &[u8]) {
        let room = MAX_LINE_BYTES.saturating_sub(self.unfinished.len());
        self.unfinished.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    /// Ends the unfinished line; false if there was nothing in it.
    fn finish_line(&mut self) -> bool {
        self.has_carriage_return = false;
        if self.unfinished.is_empty() {
            return false;
        }
        let line = String::from_utf8_lossy(&self.unfinished).trim_end().to_owned();
        self.unfinished.clear();
        if self.lines.len() == TAIL_LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
        self.lines_of_life += 1;
        true
    }

    fn last_lines(&self, count: usize) -> Vec<String> {
        let skipped = self.lines.len().saturating_sub(count);
        self.lines.iter().skip(skipped).cloned().collect()
    }
}

#[cfg(test)]
mod tests;
