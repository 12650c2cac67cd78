//! `hostler sim`: the simulated engine as a program of its own.

use clap::Subcommand;
use hostler_boot::Shutdown;
use hostler_boot::shutdown::SignalSource;
use hostler_boot::telemetry::LogConfig;
use hostler_sim::EngineArgs;

/// What is simulated.
#[derive(Debug, Subcommand)]
pub(crate) enum Sim {
    /// Behave like `vllm serve`, without a GPU or a model.
    Engine(EngineArgs),
}

pub(crate) async fn run(Sim::Engine(args): Sim) -> anyhow::Result<()> {
    hostler_boot::telemetry::init(&LogConfig::default())?;
    hostler_boot::raise_file_limit();
    let shutdown = Shutdown::new();
    let _signals = shutdown.install_signal_handlers(SignalSource::Agent)?;
    tokio::select! {
        served = hostler_sim::serve(args, shutdown.wait_drain()) => Ok(served?),
        () = shutdown.wait_stop() => Ok(()),
    }
}
