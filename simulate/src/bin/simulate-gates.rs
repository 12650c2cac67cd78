//! The gates as a separate program for `make simulate-gates`.
//!
//! It compiles in a fraction of the time that `hostler` takes.

use std::io::{Write, stderr, stdout};
use std::path::PathBuf;
use std::process::ExitCode;

use hostler_simulate::{Progress, gates};

fn main() -> ExitCode {
    let trace = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("traces/mooncake_conversation_first6000.jsonl");
    // A closed output is not an error: the exit code holds.
    match gates(&trace, Progress::Shown) {
        Ok(verdict) => {
            let _ = stdout().write_all(verdict.text.as_bytes());
            if verdict.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            let _ = writeln!(stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}
