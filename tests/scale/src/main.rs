//! Cost of a large fleet for a router: agents without engines in this process, the real router in
//! another, and one table of the costs.
//!
//! The test fails if a request fails or a replica does not come. Times and costs are printed beside
//! the bars, but fail nothing.

mod load;
mod router;
mod table;
mod viewers;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Parser;
use hostler_scale::Agents;
use tokio::time::{sleep, timeout};

use router::Router;
use table::{Row, Storm};
use viewers::Viewers;

/// Allocator of the program itself.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// What a router pays for a large fleet.
#[derive(Debug, Parser)]
#[command(name = "scale")]
struct Args {
    /// Replicas of the fleets, one after the other; the router is killed and started again under
    /// the last.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 10, 100, 1_000])]
    replicas: Vec<u32>,
    /// Replicas of each agent.
    #[arg(long, default_value_t = 5)]
    per_agent: u32,
    /// Requests to each fleet, and as many more per replica.
    #[arg(long, default_value_t = 4_000)]
    requests: u64,
    /// Requests at once.
    #[arg(long, default_value_t = 64)]
    at_once: u64,
    /// Viewers of the router's page.
    #[arg(long, default_value_t = 10)]
    viewers: usize,
    /// Seconds for which a fleet is watched that does nothing, without viewers and with them.
    #[arg(long, default_value_t = 10)]
    rest: u64,
    /// Seconds for which the router is away when it has been killed: agents dial less and less
    /// often.
    #[arg(long, default_value_t = 5)]
    away: u64,
    /// The program whose router is measured.
    #[arg(long, env = "HOSTLER_BIN", default_value = "target/release/hostler")]
    program: PathBuf,
}

const COMING: Duration = Duration::from_secs(60);

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    hostler_boot::raise_file_limit();
    let args = Args::parse();
    table::head();
    let mut storm = None;
    for (number, replicas) in args.replicas.iter().enumerate() {
        let row = fleet(&args, *replicas, number + 1 == args.replicas.len(), &mut storm).await?;
        table::show(&row);
    }
    storm.iter().for_each(table::storm);
    Ok(())
}

async fn fleet(args: &Args, replicas: u32, is_last: bool, storm: &mut Option<Storm>) -> anyhow::Result<Row> {
    let begun = Instant::now();
    let mut router = Router::start(&args.program, None).await?;
    let agents = Agents::start(replicas.div_ceil(args.per_agent), replicas.min(args.per_agent), router.addresses.agents);
    all_routable(&agents, &router).await?;
    let came = begun.elapsed();

    // By now the first messages of new connections have been sent.
    sleep(Duration::from_secs(1)).await;
    let (began, cpu, bytes) = (Instant::now(), router.cpu()?, agents.tally.bytes());
    sleep(Duration::from_secs(args.rest)).await;
    let (seconds, rest_cpu) = (began.elapsed().as_secs_f64(), router.cpu()? - cpu);
    let (up, down) = agents.tally.bytes();
    let rest = rest_cpu / seconds;

    let mut viewers = Viewers::open(&router, args.viewers).await?;
    // The first pictures are complete ones.
    sleep(Duration::from_secs(2)).await;
    let (began, cpu) = (Instant::now(), router.cpu()?);
    sleep(Duration::from_secs(args.rest)).await;
    let viewed = (router.cpu()? - cpu) / began.elapsed().as_secs_f64() - rest;
    viewers.check()?;
    drop(viewers);

    let count = args.requests + args.requests.min(10) * u64::from(replicas);
    let (began, cpu) = (Instant::now(), router.cpu()?);
    load::run(router.addresses.edge, count, args.at_once).await?;
    let (seconds_loaded, loaded_cpu) = (began.elapsed().as_secs_f64(), router.cpu()? - cpu);

    let list_cpu = router.cpu()?;
    let list_bytes = router.list().await?.1;
    let row = Row {
        replicas,
        came,
        rest,
        viewed,
        up: (up - bytes.0) as f64 / seconds,
        down: (down - bytes.1) as f64 / seconds,
        per_request: loaded_cpu / count as f64,
        of_requests: (loaded_cpu - rest * seconds_loaded) / count as f64,
        rate: count as f64 / seconds_loaded,
        list_cpu: router.cpu()? - list_cpu,
        list_bytes,
        resident: router.resident()?,
        served: agents.served(),
    };
    if is_last {
        *storm = Some(restart(args, &mut router, &agents).await?);
        load::run(router.addresses.edge, args.requests, args.at_once).await.context("after the restart")?;
    }
    Ok(row)
}

/// Kills the router and starts it again in its old place.
async fn restart(args: &Args, router: &mut Router, agents: &Agents) -> anyhow::Result<Storm> {
    let attempts = agents.tally.attempts();
    router.kill()?;
    // Every agent has seen the loss, and dials again meanwhile.
    timeout(COMING, async {
        while agents.tally.attached_now() > 0 {
            sleep(Duration::from_millis(1)).await;
        }
    })
    .await
    .context("agents stay attached to a router that is dead")?;
    sleep(Duration::from_secs(args.away)).await;
    let begun = Instant::now();
    *router = Router::start(&args.program, Some(router.addresses)).await?;
    let listens = begun.elapsed();
    all_routable(agents, router).await?;
    Ok(Storm { listens, back: begun.elapsed(), cpu: router.cpu()?, attempts: agents.tally.attempts() - attempts })
}

/// Waits until the router has every replica, ready.
async fn all_routable(agents: &Agents, router: &Router) -> anyhow::Result<()> {
    let attached = async {
        while !agents.are_attached() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(COMING, attached).await.with_context(|| format!("only {} agents came", agents.tally.attached_now()))?;
    let expected = agents.served().len();
    let mut ready = 0;
    for _ in 0..100 {
        ready = router.list().await?.0;
        if ready == expected {
            return Ok(());
        }
        sleep(Duration::from_millis(20)).await;
    }
    ensure!(ready == expected, "the router has {ready} replicas ready, of {expected}");
    Ok(())
}
