//! The `hostler` program as tests run it, also as the simulated engine of in-process agents.
//!
//! In addition to `hostler`, an environment variable sets how long clients may stall, because
//! `tests/hardening` cannot wait for 5 min each time.

use std::time::Duration;

fn main() -> std::process::ExitCode {
    hostler_cli::main_with(|router| {
        if let Ok(text) = std::env::var("HOSTLER_TEST_CLIENT_STALL_MS") {
            let milliseconds = text.parse().expect("HOSTLER_TEST_CLIENT_STALL_MS is a number");
            router.client_stall_timeout = Duration::from_millis(milliseconds);
        }
    })
}
