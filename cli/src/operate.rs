//! `hostler drain`, `restart` and `logs`: what operators ask of a router.

use std::time::Duration;

use anyhow::Context;
use clap::Args;
use hostler_proto::fleet::v1::fleet_client::FleetClient;
use hostler_proto::fleet::v1::{LogsRequest, TargetRequest};
use tonic::transport::{Channel, Endpoint};

use crate::output::say;

/// How long the router may take to accept, and to answer.
const DEADLINE: Duration = Duration::from_secs(10);

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

/// A client of the router whose admin listener is at `address`, with or without `http://`.
pub(crate) async fn connect(address: &str) -> anyhow::Result<FleetClient<Channel>> {
    let address = address.strip_prefix("http://").unwrap_or(address).trim_end_matches('/');
    let endpoint = Endpoint::from_shared(format!("http://{address}")).with_context(|| format!("{address:?} is not HOST:PORT"))?;
    let channel = endpoint.connect_timeout(DEADLINE).timeout(DEADLINE).connect().await;
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
pub(crate) async fn restart(args: &TargetArgs) -> anyhow::Result<()> {
    let request = TargetRequest { target: args.target.clone() };
    let restarted = connect(&args.admin.admin).await?.restart(request).await.map_err(said)?.into_inner();
    say(&format!("restarting {}", restarted.replicas.join(", ")));
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
