//! `hostler router`.

use hostler_boot::{Settings, Shutdown};
use hostler_router::{Exposure, Router};

use crate::AdjustRouter;
use crate::output::say;

/// Runs a router until it has drained.
pub(crate) async fn router(settings: &Settings, adjust: AdjustRouter) -> anyhow::Result<()> {
    let mut config = settings.section("router")?;
    adjust(&mut config);
    hostler_boot::raise_file_limit();
    let router = Router::bind(config).await?;
    let shutdown = Shutdown::new();
    let _signals = shutdown.install_signal_handlers()?;
    announce(&router);
    router.run(shutdown).await;
    Ok(())
}

/// Prints the addresses for scripts, and what is open for operators.
pub(crate) fn announce(router: &Router) {
    let (edge, agents, admin) = (router.edge_address(), router.agents_address(), router.admin_address());
    for opening in router.exposures() {
        let Exposure { setting, address, description } = opening;
        if opening.is_remote() {
            tracing::warn!(setting, %address, "open beyond this host: {description}");
        } else {
            tracing::info!(setting, %address, "open within this host: {description}");
        }
    }
    say(&format!("edge    {}://{edge}/v1", router.edge_scheme()));
    say(&format!("agents  {agents}"));
    say(&format!("admin   http://{admin}"));
    if let Some(socket) = router.operators_socket() {
        say(&format!("socket  {}", socket.display()));
    }
}
