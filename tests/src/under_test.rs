//! The `hostler` program as the system tests run it, also as the simulated engine of in-process agents.

fn main() -> std::process::ExitCode {
    hostler_cli::main()
}
