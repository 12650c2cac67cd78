//! `hostler restart`, `release`, `sleep` and `wake`: orders of operators to a router.

use std::time::Duration;

use clap::Args;
use hostler_proto::fleet::v1::{SleepRequest, TargetRequest};

use crate::admin::{AdminArgs, connect, connect_for_long_call, status_error};
use crate::output::say;
use crate::rolling::{self, Rolling};

#[derive(Debug, Args)]
pub(crate) struct TargetArgs {
    /// A node, or a replica as `node/index`.
    target: String,
    #[command(flatten)]
    pub(crate) admin: AdminArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RestartArgs {
    /// A node, or a replica as `node/index`; with --rolling also `all`, which is then the default.
    #[arg(required_unless_present = "rolling")]
    target: Option<String>,
    /// One replica after another, each when the one before it serves again, so that no request
    /// fails.
    #[arg(long)]
    rolling: bool,
    /// Even where nobody serves a model meanwhile.
    #[arg(long)]
    force: bool,
    /// How long each replica may take to serve again.
    #[arg(long, requires = "rolling", default_value = "30m", value_parser = humantime::parse_duration, value_name = "DURATION")]
    wait: Duration,
    #[command(flatten)]
    pub(crate) admin: AdminArgs,
}

#[derive(Debug, Args)]
pub(crate) struct SleepArgs {
    /// A node, or a replica as `node/index`.
    target: String,
    /// 1 keeps the weights in host memory and wakes in seconds; 2 forgets them, and waking reads
    /// them again.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=2))]
    level: u32,
    #[command(flatten)]
    pub(crate) admin: AdminArgs,
}

pub(crate) async fn restart(args: &RestartArgs) -> anyhow::Result<()> {
    let target = args.target.as_deref().unwrap_or("all");
    if args.rolling {
        let rolling = Rolling { target, force: args.force, wait: args.wait, admin: &args.admin };
        return rolling::restart(&rolling).await;
    }
    let mut fleet = connect(&args.admin).await?;
    if !args.force {
        rolling::check_models_stay_served(&mut fleet, target).await?;
    }
    let restarted = fleet.restart(TargetRequest { target: target.to_owned() }).await.map_err(status_error)?.into_inner();
    say(&format!("restarting {}", restarted.replicas.join(", ")));
    Ok(())
}

pub(crate) async fn release(args: &TargetArgs) -> anyhow::Result<()> {
    let request = TargetRequest { target: args.target.clone() };
    let released = connect(&args.admin).await?.release(request).await.map_err(status_error)?.into_inner();
    say(&format!("released {}", released.replicas.join(", ")));
    Ok(())
}

pub(crate) async fn sleep(args: &SleepArgs) -> anyhow::Result<()> {
    let request = SleepRequest { target: args.target.clone(), level: args.level };
    let asleep = connect_for_long_call(&args.admin).await?.sleep(request).await.map_err(status_error)?.into_inner();
    say(&format!("asleep {}", asleep.replicas.join(", ")));
    Ok(())
}

pub(crate) async fn wake(args: &TargetArgs) -> anyhow::Result<()> {
    let request = TargetRequest { target: args.target.clone() };
    let awake = connect_for_long_call(&args.admin).await?.wake(request).await.map_err(status_error)?.into_inner();
    say(&format!("awake {}", awake.replicas.join(", ")));
    Ok(())
}
