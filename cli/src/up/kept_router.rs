//! The router of a `hostler up`. Where another process has taken its place and ends, while the
//! engines of this one live, it takes the place back.

use std::path::Path;
use std::time::Duration;

use hostler_boot::Shutdown;
use hostler_router::{Router, RouterConfig, RouterPlace};
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tokio::time::sleep;

/// How often the other router is looked for, and how often in a row it must be missed.
const LOOK_INTERVAL: Duration = Duration::from_millis(300);
const MISSED_MOST: u32 = 3;

/// Pause after a failed attempt to take the place back.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Runs the router that was bound with these settings, until the shutdown drains.
///
/// # Errors
/// If it does not get the place of the router that it is to replace.
pub(super) async fn keep_router(router: Router, config: RouterConfig, shutdown: Shutdown) -> anyhow::Result<()> {
    let config = at_its_addresses(config, &router);
    let mut place = router.place();
    let mut runs = JoinSet::new();
    runs.spawn(router.run(shutdown.clone()));
    loop {
        tokio::select! {
            Some(ended) = runs.join_next() => {
                ended??;
                if runs.is_empty() && !place.is_replaced() {
                    return Ok(());
                }
            }
            () = until_missed(&place, &config.operators_socket) => {
                let Some(router) = take_back(&config, &shutdown).await else { return Ok(()) };
                tracing::warn!(event = "place_taken_back", "the process that had taken this one's place has ended: this one serves again");
                place = router.place();
                // The run before may still finish requests.
                runs.spawn(router.run(shutdown.clone()));
            }
            () = shutdown.wait_drain(), if runs.is_empty() => return Ok(()),
        }
    }
}

/// The settings with the addresses that the router has, whoever chose them.
fn at_its_addresses(config: RouterConfig, router: &Router) -> RouterConfig {
    RouterConfig {
        listen: router.edge_address().to_string(),
        agents_listen: router.agents_address().to_string(),
        admin_listen: router.admin_address().to_string(),
        operators_socket: router.operators_socket().map(Path::to_owned).unwrap_or_default(),
        ..config
    }
}

/// Waits until another router has taken the place and is there no longer.
async fn until_missed(place: &RouterPlace, socket: &Path) {
    let mut missed = 0;
    while missed < MISSED_MOST {
        sleep(LOOK_INTERVAL).await;
        let is_missed = place.is_replaced() && UnixStream::connect(socket).await.is_err();
        missed = if is_missed { missed + 1 } else { 0 };
    }
}

/// A router at the same addresses; `None` if this process is to leave meanwhile.
async fn take_back(config: &RouterConfig, shutdown: &Shutdown) -> Option<Router> {
    loop {
        match Router::bind_replaceable(config.clone()).await {
            Ok(router) => return Some(router),
            Err(error) => tracing::warn!(%error, "the place of the router that has ended is not to be had yet"),
        }
        tokio::select! {
            () = sleep(RETRY_INTERVAL) => {}
            () = shutdown.wait_drain() => return None,
        }
    }
}
