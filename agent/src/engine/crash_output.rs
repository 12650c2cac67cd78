//! Finds the exception that stopped an engine among what it printed. vLLM's processes fail one after another, the last lines only say
//! that an earlier one did, and an exception that somebody caught and logged on the way stopped nobody.

/// The lines about an engine's end, beginning with the first process that gave up, without vLLM's
/// prefixes.
#[derive(Debug, Clone, Copy)]
pub(super) struct FinalLines<'a> {
    lines: &'a [String],
    /// A process gave up: it said so, or it printed an uncaught traceback.
    has_given_up: bool,
}

/// What a process of vLLM prints when it gives up, before the traceback.
const GIVE_UP_MARKERS: [&str; 5] = [
    "WorkerProc failed to start",
    "WorkerProc hit an exception",
    "EngineCore failed to start",
    "EngineCore encountered a fatal error",
    "EngineCore encountered an issue",
];

/// What a process prints that cannot go on, in its own words; others repeat the rest of
/// `GIVE_UP_MARKERS` when they find it dead.
const FATAL_MARKERS: [&str; 2] = ["WorkerProc hit an exception", "EngineCore encountered a fatal error"];

/// Whether a process of an engine says with this line that it cannot go on.
pub(super) fn is_fatal(line: &str) -> bool {
    FATAL_MARKERS.iter().any(|words| line.contains(words))
}

/// Exceptions that only say that another process failed.
const SECONDARY_EXCEPTIONS: [&str; 7] = [
    "See root cause above",
    "stack trace above for the root cause",
    "See stack trace",
    "WorkerProc initialization failed",
    "EngineDeadError",
    "EngineCore encountered an issue",
    "WorkerProc hit an exception",
];

/// Lines examined where no process said that it gave up. An abort prints a few; older lines are not
/// about the end.
const MAX_ENDING_LINES: usize = 60;

impl<'a> FinalLines<'a> {
    /// The ending among the lines of one life, oldest first. Of an engine that served, tracebacks
    /// may be about requests.
    pub(super) fn from_lines(lines: &'a [String], served: bool) -> Self {
        let first = lines.iter().position(|line| GIVE_UP_MARKERS.iter().any(|words| line.contains(words)));
        // The first uncaught one: with several, those after it come from processes that wait for
        // it.
        let uncaught = || lines.iter().position(|line| !served && is_uncaught_traceback(line));
        let begin = first.or_else(uncaught);
        let from = begin.unwrap_or_else(|| lines.len().saturating_sub(MAX_ENDING_LINES));
        Self { lines: &lines[from..], has_given_up: begin.is_some() }
    }

    /// What was printed from there on; warnings are not about the end.
    pub(super) fn messages(self) -> impl Iterator<Item = &'a str> {
        self.lines.iter().filter(|line| !is_below_error(line)).map(|line| message(line))
    }

    /// Whether a process gave up. Without that, an exception may be about a request.
    pub(super) fn has_given_up(self) -> bool {
        self.has_given_up
    }

    /// The exception of the first process that gave up, with its name. Of several in a chain it is
    /// the last, which says most about what was wanted.
    pub(super) fn exception(self) -> Option<&'a str> {
        let first = self.lines.iter().position(|line| is_root(message(line)))?;
        let process = process(&self.lines[first]);
        let same = self.lines[first..].iter().take_while(|line| self::process(line) == process || is_below_error(line));
        same.map(|line| message(line)).filter(|message| is_root(message)).last()
    }
}

/// A line without vLLM's prefix `(Process pid=1) ERROR 01-31 12:00:00 [file.py:1] `.
pub(super) fn message(line: &str) -> &str {
    let after_process = without_process(line);
    let after_place = after_process.split_once(".py:").and_then(|(_, rest)| rest.split_once("] ")).map_or(after_process, |(_, rest)| rest);
    after_place.trim_end()
}

fn without_process(line: &str) -> &str {
    line.strip_prefix('(').and_then(|rest| rest.split_once(") ")).map_or(line, |(_, rest)| rest)
}

/// `Worker pid=3` of `(Worker pid=3) ERROR …`.
fn process(line: &str) -> Option<&str> {
    Some(line.strip_prefix('(')?.split_once(") ")?.0)
}

fn is_below_error(line: &str) -> bool {
    let line = without_process(line);
    ["INFO ", "WARNING ", "DEBUG ", "INFO:", "[W", "W1"].iter().any(|level| line.starts_with(level))
}

/// Python's own first line of an uncaught traceback; a logged one has a level, a date and a place
/// before it.
fn is_uncaught_traceback(line: &str) -> bool {
    without_process(line).starts_with("Traceback (most recent call last)")
}

fn is_root(message: &str) -> bool {
    is_exception(message) && !SECONDARY_EXCEPTIONS.iter().any(|words| message.contains(words))
}

/// `ValueError: …`, `torch.OutOfMemoryError: …`: at the beginning of the line, as Python ends a
/// traceback.
fn is_exception(message: &str) -> bool {
    message.split_once(": ").is_some_and(|(name, text)| {
        let is_name = name.chars().all(|letter| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '_'));
        is_name && !text.is_empty() && ["Error", "Exception"].iter().any(|ending| name.ends_with(ending))
    })
}

#[cfg(test)]
mod tests;
