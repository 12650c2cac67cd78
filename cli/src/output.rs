//! Lines and tables on standard output, for people and scripts. A reader that has gone away
//! (`| head`) is no error.

use std::io::Write;
use std::time::Duration;

/// Stands for a character that is not shown.
pub(crate) const HIDDEN: char = '·';

const ESCAPE: char = '\u{1b}';

/// Prints a line on standard output. Its text is cleaned, because log lines, names and reasons come
/// from engines, nodes and clients.
pub(crate) fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{}", clean(line));
}

/// Prints a line on standard error.
pub(crate) fn complain(line: &str) {
    let _ = writeln!(std::io::stderr(), "{}", clean(line));
}

/// A text without anything that a terminal would obey.
pub(crate) fn clean(text: &str) -> String {
    without_escapes(text, hide_control)
}

/// Removes everything that a terminal would obey from a text.
///
/// Sequences that set colours, as engines write them into their logs, leave nothing. `show`
/// replaces every other character.
pub(crate) fn without_escapes(text: &str, show: impl Fn(char) -> char) -> String {
    let mut letters = text.chars().peekable();
    let mut shown = String::with_capacity(text.len());
    while let Some(letter) = letters.next() {
        if letter == ESCAPE && letters.next_if_eq(&'[').is_some() {
            // A sequence ends with the first character from @ to ~; an invalid one ends it too.
            while letters.next_if(|next| (' '..'@').contains(next)).is_some() {}
            letters.next_if(|next| ('@'..='~').contains(next));
        } else {
            shown.push(show(letter));
        }
    }
    shown
}

fn hide_control(letter: char) -> char {
    if letter.is_control() && !matches!(letter, '\t' | '\n') { HIDDEN } else { letter }
}

/// An error and its causes on one line. A cause that the outer error repeats is left out, as
/// libraries often include it in both.
pub(crate) fn describe(error: &anyhow::Error) -> String {
    let mut causes: Vec<String> = Vec::new();
    for cause in error.chain().map(ToString::to_string) {
        if !causes.last().is_some_and(|outer| outer.contains(&cause)) {
            causes.push(cause);
        }
    }
    causes.join(": ")
}

/// A time for people, to the minute from ten minutes on.
pub(crate) fn time_in_words(seconds: u64) -> String {
    let exact = if seconds < 600 { seconds } else { seconds / 60 * 60 };
    humantime::format_duration(Duration::from_secs(exact)).to_string()
}

/// Alignment of a cell in its column: text left, numbers right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Left,
    Right,
}

/// Rows as lines, each column as wide as its widest cell. A column without any text is left out.
pub(crate) fn table<const COLUMNS: usize>(sides: [Side; COLUMNS], rows: &[[String; COLUMNS]]) -> Vec<String> {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; COLUMNS] = std::array::from_fn(width);
    let line = |row: &[String; COLUMNS]| {
        let cells = row.iter().zip(widths).zip(sides).filter(|((_, width), _)| *width > 0).map(|((cell, width), side)| match side {
            Side::Left => format!("{cell:width$}"),
            Side::Right => format!("{cell:>width$}"),
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn a_line_keeps_no_character_that_a_terminal_obeys() {
        let shown = |line: &str| without_escapes(line, hide_control);
        assert_eq!(shown("a\tb\nc é 模型 e\u{301}"), "a\tb\nc é 模型 e\u{301}");
        assert_eq!(shown("\u{1b}[31mred\u{1b}[0m, \u{1b}]0;title\u{7}\r\u{0}\u{8}\u{7f}"), "red, ·]0;title·····");
        assert_eq!(shown("\u{9b}2J\u{1b}[2J\u{1b}[\u{1b}[31m!\u{1b}["), "·2J!");
        let every: String = ('\u{0}'..'\u{a0}').collect();
        assert!(shown(&every).chars().all(|letter| !letter.is_control() || matches!(letter, '\t' | '\n')));
    }

    #[test]
    fn an_error_says_each_cause_once() {
        let error =
            anyhow!("Connection refused (os error 111)").context("tcp connect error").context("tcp connect error").context("no router");
        assert_eq!(describe(&error), "no router: tcp connect error: Connection refused (os error 111)");
        let error = anyhow!("not found").context("reading a.toml: not found");
        assert_eq!(describe(&error), "reading a.toml: not found");
    }
}
