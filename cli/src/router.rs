//! `hostler router`.

use hostler_boot::{Settings, Shutdown};
use hostler_router::{Router, RouterConfig};

use crate::output::say;

/// Runs a router until it has drained.
pub(crate) async fn router(settings: &Settings) -> anyhow::Result<()> {
    let config: RouterConfig = settings.section("router")?;
    hostler_boot::raise_file_limit();
    let router = Router::bind(config).await?;
    let shutdown = Shutdown::new();
    shutdown.on_signals()?;
    announce(&router);
    router.run(shutdown).await;
    Ok(())
}

/// The addresses for scripts, and what is open for operators.
pub(crate) fn announce(router: &Router) {
    let (edge, agents, admin) = (router.edge_address(), router.agents_address(), router.admin_address());
    for (setting, address, what) in [
        ("router.listen", edge, "anyone who reaches it may use the models"),
        ("router.agents_listen", agents, "any agent that reaches it may join, in plain text"),
        ("router.admin_listen", admin, "anyone who reaches it may drain replicas"),
    ] {
        if !address.ip().is_loopback() {
            tracing::warn!(setting, %address, "open beyond this host: {what}");
        }
    }
    say(&format!("edge    http://{edge}/v1"));
    say(&format!("agents  {agents}"));
    say(&format!("admin   http://{admin}"));
}
