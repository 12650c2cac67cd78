//! `hostler sim`: the simulated engine as a program of its own, and the load generator.

use clap::{Args, Subcommand};
use hostler_boot::Shutdown;
use hostler_boot::telemetry::LogConfig;
use hostler_sim::{EngineArgs, LoadArgs};

use crate::output::say;

/// Which of the two.
#[derive(Debug, Subcommand)]
#[allow(clippy::large_enum_variant, reason = "made once a process")]
pub(crate) enum Sim {
    /// Behave like `vllm serve`, without a GPU or a model.
    Engine(EngineArgs),
    /// Send requests to an OpenAI-compatible endpoint and count what comes back.
    Load(LoadCommand),
}

/// A load, and how to show what it measured.
#[derive(Debug, Args)]
pub(crate) struct LoadCommand {
    #[command(flatten)]
    load: LoadArgs,
    /// JSON, for scripts.
    #[arg(long)]
    json: bool,
}

/// Runs it until it is done, or a signal comes.
pub(crate) async fn run(sim: Sim) -> anyhow::Result<()> {
    hostler_boot::telemetry::init(&LogConfig::default())?;
    hostler_boot::raise_file_limit();
    let shutdown = Shutdown::new();
    let _signals = shutdown.install_signal_handlers()?;
    match sim {
        Sim::Engine(args) => tokio::select! {
            served = hostler_sim::serve(args, shutdown.wait_drain()) => served?,
            () = shutdown.wait_stop() => {}
        },
        Sim::Load(LoadCommand { load, json }) => {
            let report = tokio::select! {
                report = hostler_sim::run_load(load) => report?,
                () = shutdown.wait_drain() => return Ok(()),
            };
            say(&if json { serde_json::to_string_pretty(&report)? } else { report.to_string() });
        }
    }
    Ok(())
}
