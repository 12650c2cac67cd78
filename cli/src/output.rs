//! Lines and tables for people and scripts on standard output. A reader that has gone away (`| head`) is no error.

use std::io::Write;

/// One line on standard output.
pub(crate) fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// One line on standard error.
pub(crate) fn complain(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// An error and its causes on one line. What a cause repeats of the one around it is left out, as libraries often say it in both.
pub(crate) fn describe(error: &anyhow::Error) -> String {
    let mut told: Vec<String> = Vec::new();
    for cause in error.chain().map(ToString::to_string) {
        if !told.last().is_some_and(|outer| outer.contains(&cause)) {
            told.push(cause);
        }
    }
    told.join(": ")
}

/// The side of its column on which a cell stands: text left, numbers right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Left,
    Right,
}

/// The rows as lines, each column as wide as its widest cell. A column without any text is left
/// out.
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
    fn an_error_says_each_cause_once() {
        let error =
            anyhow!("Connection refused (os error 111)").context("tcp connect error").context("tcp connect error").context("no router");
        assert_eq!(describe(&error), "no router: tcp connect error: Connection refused (os error 111)");
        let error = anyhow!("not found").context("reading a.toml: not found");
        assert_eq!(describe(&error), "reading a.toml: not found");
    }
}
