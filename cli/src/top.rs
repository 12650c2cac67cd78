//! `hostler top`: the fleet in the terminal, as it is now and as it changes.
//!
//! `model` is the state, `keys` changes it, and `draw` shows it; all three are pure. `run` is the
//! loop between them, the `terminal` and the router's answers (`calls`).

mod calls;
mod draw;
mod events;
mod keys;
mod meter;
mod model;
mod order;
mod run;
mod terminal;
#[cfg(test)]
mod tests;
mod text;

use std::time::Duration;

use clap::Args;

use crate::admin::{AdminArgs, RouterAddress};

/// Shortest interval. Asking more often than agents report would show nothing new.
const LEAST_INTERVAL: Duration = Duration::from_millis(100);

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// How often the router is asked; 100ms at least.
    #[arg(long, default_value = "1s", value_parser = parse_interval, value_name = "DURATION")]
    interval: Duration,
    #[command(flatten)]
    pub(crate) admin: AdminArgs,
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let interval = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if interval < LEAST_INTERVAL { Err("ask every 100ms at most".to_owned()) } else { Ok(interval) }
}

pub(crate) async fn top(args: &TopArgs) -> anyhow::Result<()> {
    terminal::check_terminal()?;
    let router = RouterAddress::find(&args.admin).await?;
    // A missing router is reported as by every other command; one that goes later is waited for.
    let client = router.connect().await?;
    run::run(&router, client, args.interval, terminal::has_color()).await
}
