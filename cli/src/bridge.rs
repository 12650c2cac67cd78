//! `hostler bridge`: what an agent starts in the place of an engine that runs already.

use std::path::PathBuf;

use clap::Args;
use hostler_agent::bridge::{self, AttachTarget, EngineKey};
use hostler_boot::Shutdown;
use hostler_boot::shutdown::SignalSource;
use hostler_boot::telemetry::LogConfig;
use tokio_util::sync::CancellationToken;

#[derive(Debug, Args)]
pub(crate) struct BridgeArgs {
    /// The engine: `http://HOST:PORT` or `unix:PATH`
    target: String,
    /// Socket to listen on
    #[arg(long)]
    uds: PathBuf,
    /// File with the engine's API key
    #[arg(long)]
    key_file: Option<PathBuf>,
}

pub(crate) async fn bridge(args: BridgeArgs) -> anyhow::Result<()> {
    hostler_boot::telemetry::init(&LogConfig::default())?;
    hostler_boot::raise_file_limit();
    let target = AttachTarget::parse(&args.target)?;
    let key = args.key_file.as_deref().map(EngineKey::read).transpose()?;
    let shutdown = Shutdown::new();
    let _signals = shutdown.install_signal_handlers(SignalSource::Agent)?;
    let stop = CancellationToken::new();
    let drained = shutdown.wait_drain();
    let serve = bridge::run(target, key, &args.uds, stop.clone());
    tokio::pin!(serve, drained);
    tokio::select! {
        served = &mut serve => return Ok(served?),
        () = shutdown.wait_stop() => return Ok(()),
        () = &mut drained => stop.cancel(),
    }
    tokio::select! {
        served = serve => Ok(served?),
        () = shutdown.wait_stop() => Ok(()),
    }
}
