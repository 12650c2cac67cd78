//! Quotes words and texts so that a shell takes them unchanged.

use shlex::Quoter;

/// Joins words to a command line, quoting each if needed.
pub(crate) fn quote(words: &[String]) -> String {
    let quoter = Quoter::new().allow_nul(true);
    quoter.join(words.iter().map(String::as_str)).expect("a NUL is the only character that it refuses, and was allowed")
}

/// Script for a login bash: setup lines and a command.
pub(crate) fn login_script(setup: &[String], command: &str) -> String {
    let lines = ["#!/bin/bash -l"].into_iter().chain(setup.iter().map(String::as_str)).chain([command]);
    lines.map(|line| format!("{line}\n")).collect()
}

/// Here-document that is the standard input of the command before it.
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
