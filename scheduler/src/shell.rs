//! Words and texts as a shell takes them unchanged.

use shlex::Quoter;

/// The words of a command line, each quoted where it has to be.
pub(crate) fn quote(words: &[String]) -> String {
    let quoter = Quoter::new().allow_nul(true);
    quoter.join(words.iter().map(String::as_str)).expect("a NUL is the only character that it refuses, and was allowed")
}

/// A script that a login shell of bash runs: the lines of its setup, and a command.
pub(crate) fn login_script(setup: &[String], command: &str) -> String {
    let lines = ["#!/bin/bash -l"].into_iter().chain(setup.iter().map(String::as_str)).chain([command]);
    lines.map(|line| format!("{line}\n")).collect()
}

/// A text as the standard input of the command before it.
pub(crate) fn here_document(text: &str) -> String {
    let mut end = "END_OF_JOB".to_owned();
    while text.lines().any(|line| line == end) {
        end.push('_');
    }
    let newline = if text.ends_with('\n') { "" } else { "\n" };
    format!(" <<'{end}'\n{text}{newline}{end}")
}

#[cfg(test)]
mod tests;
