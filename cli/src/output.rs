//! Lines for people and scripts on standard output. A reader that has gone away (`| head`) is no error.

use std::io::Write;

/// One line on standard output.
pub(crate) fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// One line on standard error.
pub(crate) fn complain(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
