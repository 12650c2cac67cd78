//! `hostler agent`.

use hostler_agent::{Agent, AgentConfig};
use hostler_boot::{Settings, Shutdown};

pub(crate) async fn agent(settings: &Settings) -> anyhow::Result<()> {
    let config: AgentConfig = settings.section("agent")?;
    hostler_boot::raise_file_limit();
    let shutdown = Shutdown::new();
    let _signals = shutdown.install_signal_handlers(hostler_agent::signal_source(&config))?;
    prepare_and_run(config, shutdown).await
}

/// Prepares and runs an agent, also that of `hostler up`.
pub(crate) async fn prepare_and_run(config: AgentConfig, shutdown: Shutdown) -> anyhow::Result<()> {
    let agent = tokio::select! {
        agent = Agent::prepare(config) => agent?,
        // No engine has been started yet.
        () = shutdown.wait_drain() => return Ok(()),
    };
    Ok(agent.run(shutdown).await?)
}
