//! Search for the exception that stopped an engine in its output. vLLM's processes fail one after
//! another, and the last lines only say that an earlier one failed.
//!
//! An exception that was caught and logged on the way stopped nothing.

/// Lines about an engine's end, from the first process that gave up, without vLLM's prefixes.
#[derive(Debug, Clone, Copy)]
pub(super) struct FinalLines<'a> {
    lines: &'a [String],
    /// Whether a process gave up: it printed a message that says so, or an uncaught traceback.
    has_given_up: bool,
}

/// Messages that a vLLM process prints when it gives up, before the traceback.
const GIVE_UP_MARKERS: [&str; 5] = [
    "WorkerProc failed to start",
    "WorkerProc hit an exception",
    "EngineCore failed to start",
    "EngineCore encountered a fatal error",
    "EngineCore encountered an issue",
];

/// Messages of a process that itself cannot go on.
///
/// Other processes repeat the rest of `GIVE_UP_MARKERS` when they find it dead.
const FATAL_MARKERS: [&str; 2] = ["WorkerProc hit an exception", "EngineCore encountered a fatal error"];

/// Whether this line says that a process of an engine cannot go on.
pub(super) fn is_fatal(line: &str) -> bool {
    FATAL_MARKERS.iter().any(|words| line.contains(words))
}

/// Exceptions that only report the failure of another process.
const SECONDARY_EXCEPTIONS: [&str; 7] = [
    "See root cause above",
    "stack trace above for the root cause",
    "See stack trace",
    "WorkerProc initialization failed",
    "EngineDeadError",
    "EngineCore encountered an issue",
    "WorkerProc hit an exception",
];

/// Lines examined if no process printed that it gave up.
///
/// An abort prints a few; older lines are not about the end.
const MAX_ENDING_LINES: usize = 60;

impl<'a> FinalLines<'a> {
    /// Finds the ending in the lines of one life, oldest first.
    ///
    /// If the engine served, tracebacks may be about requests.
    pub(super) fn from_lines(lines: &'a [String], served: bool) -> Self {
        let first = lines.iter().position(|line| GIVE_UP_MARKERS.iter().any(|words| line.contains(words)));
        // Take the first uncaught one: later ones come from processes that wait for it.
        let uncaught = || lines.iter().position(|line| !served && is_uncaught_traceback(line));
        let begin = first.or_else(uncaught);
        let from = begin.unwrap_or_else(|| lines.len().saturating_sub(MAX_ENDING_LINES));
        Self { lines: &lines[from..], has_given_up: begin.is_some() }
    }

    /// Messages from there on, without warnings, which are not about the end.
    pub(super) fn messages(self) -> impl Iterator<Item = &'a str> {
        self.lines.iter().filter(|line| !is_below_error(line)).map(|line| message(line))
    }

    /// Whether a process gave up. Otherwise an exception may be about a request.
    pub(super) fn has_given_up(self) -> bool {
        self.has_given_up
    }

    /// The exception of the first process that gave up, with its name.
    ///
    /// In a chain it is the last one, which says most about the cause.
    pub(super) fn exception(self) -> Option<&'a str> {
        let first = self.lines.iter().position(|line| is_root(message(line)))?;
        let process = process(&self.lines[first]);
        let same = self.lines[first..].iter().take_while(|line| self::process(line) == process || is_below_error(line));
        same.map(|line| message(line)).filter(|message| is_root(message)).last()
    }
}

/// Strips vLLM's prefix `(Process pid=1) ERROR 01-31 12:00:00 [file.py:1] ` from a line.
pub(super) fn message(line: &str) -> &str {
    let after_process = without_process(line);
    let after_place = after_process.split_once(".py:").and_then(|(_, rest)| rest.split_once("] ")).map_or(after_process, |(_, rest)| rest);
    after_place.trim_end()
}

fn without_process(line: &str) -> &str {
    line.strip_prefix('(').and_then(|rest| rest.split_once(") ")).map_or(line, |(_, rest)| rest)
}

/// Process of a line: `Worker pid=3` of `(Worker pid=3) ERROR …`.
fn process(line: &str) -> Option<&str> {
    Some(line.strip_prefix('(')?.split_once(") ")?.0)
}

fn is_below_error(line: &str) -> bool {
    let line = without_process(line);
    ["INFO ", "WARNING ", "DEBUG ", "INFO:", "[W", "W1"].iter().any(|level| line.starts_with(level))
}

/// Whether this is Python's own first line of an uncaught traceback.
///
/// A logged one has a level, a date and a place before it.
fn is_uncaught_traceback(line: &str) -> bool {
    without_process(line).starts_with("Traceback (most recent call last)")
}

fn is_root(message: &str) -> bool {
    is_exception(message) && !SECONDARY_EXCEPTIONS.iter().any(|words| message.contains(words))
}

/// Whether a message is an exception, such as `ValueError: …` or `torch.OutOfMemoryError: …`.
///
/// Python ends a traceback with it at the beginning of a line.
fn is_exception(message: &str) -> bool {
    message.split_once(": ").is_some_and(|(name, text)| {
        let is_name = name.chars().all(|letter| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '_'));
        is_name && !text.is_empty() && ["Error", "Exception"].iter().any(|ending| name.ends_with(ending))
    })
}

#[cfg(test)]
mod tests;
