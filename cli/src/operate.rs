//! `hostler drain`, `restart`, `release`, `sleep`, `wake` and `logs`: what operators ask of a router.

use std::time::Duration;

use anyhow::Context;
use clap::Args;
use hostler_proto::fleet::v1::fleet_client::FleetClient;
use hostler_proto::fleet::v1::{LogsRequest, SleepRequest, TargetRequest};
use tonic::transport::{Channel, Endpoint};

use crate::output::say;
use crate::rolling::{self, Rolling};

/// How long the router may take to accept, and to answer.
const DEADLINE: Duration = Duration::from_secs(10);

/// How long the router may take to answer what is answered when it is done. It gives up a little earlier, with a better sentence.
const DONE_DEADLINE: Duration = Duration::from_secs(31 * 60);

/// Which router is asked.
#[derive(Debug, Args)]
pub(crate) struct AdminArgs {
    /// Admin address of the router.
    #[arg(long, env = "HOSTLER_ADMIN", default_value = "127.0.0.1:8002", value_name = "HOST:PORT")]
    pub(crate) admin: String,
}

#[derive(Debug, Args)]
pub(crate) struct TargetArgs {
    /// A node, or a replica as `node/index`.
    target: String,
    #[command(flatten)]
    admin: AdminArgs,
}

#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// A replica, as `node/index`.
    replica: String,
    /// How many lines, 200 at most.
    #[arg(short = 'n', long, default_value_t = 50)]
    lines: u32,
    #[command(flatten)]
    admin: AdminArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RestartArgs {
    /// A node, or a replica as `node/index`; with --rolling also `all`, which is then the default.
    #[arg(required_unless_present = "rolling")]
    target: Option<String>,
    /// One replica after another, each when the one before it serves again, so that no request fails.
    #[arg(long)]
    rolling: bool,
    /// Restart even the only replica that serves a model.
    #[arg(long, requires = "rolling")]
    force: bool,
    /// How long each replica may take to serve again.
    #[arg(long, requires = "rolling", default_value = "30m", value_parser = humantime::parse_duration, value_name = "DURATION")]
    wait: Duration,
    #[command(flatten)]
    admin: AdminArgs,
}

#[derive(Debug, Args)]
pub(crate) struct SleepArgs {
    /// A node, or a replica as `node/index`.
    target: String,
    /// 1 keeps the weights in host memory and wakes in seconds; 2 forgets them, and waking reads them again.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=2))]
    level: u32,
    #[command(flatten)]
    admin: AdminArgs,
}

/// A client of the router whose admin listener is at `address`, with or without `http://`.
pub(crate) async fn connect(address: &str) -> anyhow::Result<FleetClient<Channel>> {
    connect_within(address, DEADLINE).await
}

/// As `connect`, for calls that are answered when they are done.
pub(crate) async fn connect_patiently(address: &str) -> anyhow::Result<FleetClient<Channel>> {
    connect_within(address, DONE_DEADLINE).await
}

async fn connect_within(address: &str, answer: Duration) -> anyhow::Result<FleetClient<Channel>> {
    let address = address.strip_prefix("http://").unwrap_or(address).trim_end_matches('/');
    let endpoint = Endpoint::from_shared(format!("http://{address}")).with_context(|| format!("{address:?} is not HOST:PORT"))?;
    let channel = endpoint.connect_timeout(DEADLINE).timeout(answer).connect().await;
    let channel = channel.with_context(|| {
        format!("cannot reach a router's admin listener at {address}; is the router running? name another with --admin HOST:PORT")
    })?;
    Ok(FleetClient::new(channel))
}

/// `hostler drain`.
pub(crate) async fn drain(args: &TargetArgs) -> anyhow::Result<()> {
    let request = TargetRequest { target: args.target.clone() };
    let drained = connect(&args.admin.admin).await?.drain(request).await.map_err(said)?.into_inner();
    say(&format!("draining {}", drained.replicas.join(", ")));
    Ok(())
}

/// `hostler restart`.
pub(crate) async fn restart(args: &RestartArgs) -> anyhow::Result<()> {
    let target = args.target.as_deref().unwrap_or("all");
    if args.rolling {
        let rolling = Rolling { target, force: args.force, wait: args.wait, admin: &args.admin.admin };
        return rolling::restart(&rolling).await;
    }
    let request = TargetRequest { target: target.to_owned() };
    let restarted = connect(&args.admin.admin).await?.restart(request).await.map_err(said)?.into_inner();
    say(&format!("restarting {}", restarted.replicas.join(", ")));
    Ok(())
}

/// `hostler release`.
pub(crate) async fn release(args: &TargetArgs) -> anyhow::Result<()> {
    let request = TargetRequest { target: args.target.clone() };
    let released = connect(&args.admin.admin).await?.release(request).await.map_err(said)?.into_inner();
    say(&format!("released {}", released.replicas.join(", ")));
    Ok(())
}

/// `hostler sleep`.
pub(crate) async fn sleep(args: &SleepArgs) -> anyhow::Result<()> {
    let request = SleepRequest { target: args.target.clone(), level: args.level };
    let asleep = connect_patiently(&args.admin.admin).await?.sleep(request).await.map_err(said)?.into_inner();
    say(&format!("asleep {}", asleep.replicas.join(", ")));
    Ok(())
}

/// `hostler wake`.
pub(crate) async fn wake(args: &TargetArgs) -> anyhow::Result<()> {
    let request = TargetRequest { target: args.target.clone() };
    let awake = connect_patiently(&args.admin.admin).await?.wake(request).await.map_err(said)?.into_inner();
    say(&format!("awake {}", awake.replicas.join(", ")));
    Ok(())
}

/// `hostler logs`.
pub(crate) async fn logs(args: &LogsArgs) -> anyhow::Result<()> {
    let request = LogsRequest { replica: args.replica.clone(), lines: args.lines };
    let logs = connect(&args.admin.admin).await?.logs(request).await.map_err(said)?.into_inner();
    logs.lines.iter().for_each(|line| say(line));
    Ok(())
}

/// The router's own sentence, without gRPC around it.
pub(crate) fn said(status: tonic::Status) -> anyhow::Error {
    anyhow::anyhow!("{}", status.message().to_owned())
}
