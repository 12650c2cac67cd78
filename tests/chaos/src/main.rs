//! Chaos test of two routers, three agents and six engines, as processes of the real program.
//!
//! Faults of every kind hit them at random, while clients ask questions with known answers. The
//! test fails if a client gets a forbidden answer, or if something is left afterwards.
//!
//! The seed determines the times of the faults (`plan`) and the questions of each client. The
//! machine's timing determines how they coincide, so a seed that has found a bug should be tried
//! more than once.

mod after;
mod client;
mod faults;
mod fleet;
mod load;
mod plan;
mod process;
mod questions;
mod tally;
mod verdict;

use std::io::{Write, stderr, stdout};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use anyhow::{bail, ensure};
use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::after::Baseline;
use crate::fleet::Fleet;
use crate::load::Load;
use crate::tally::Tally;

/// What clients notice when everything happens to a fleet at once.
#[derive(Debug, Parser)]
#[command(name = "chaos")]
struct Args {
    /// Minutes of load.
    #[arg(long, default_value_t = 3.0)]
    minutes: f64,
    /// Half a minute of it, which takes about one in all.
    #[arg(long, conflicts_with = "minutes")]
    quick: bool,
    /// What happens when; the one of an earlier run happens again. Drawn when it is not given.
    #[arg(long)]
    seed: Option<u64>,
    /// Clients at once.
    #[arg(long, default_value_t = 32)]
    clients: u64,
    /// Seconds after which an answer that has not ended is one too late.
    #[arg(long, default_value_t = 60)]
    patience: u64,
    /// Tell each thing that happens, as it happens.
    #[arg(long)]
    verbose: bool,
    /// The program of routers, agents and engines.
    #[arg(long, env = "HOSTLER_BIN", default_value = "target/debug/hostler")]
    program: PathBuf,
}

const QUICK: Duration = Duration::from_secs(30);

/// Least rate of whole answers a second; a run with fewer proves nothing.
const LEAST_WHOLE: f64 = 2.0;

/// Runs until the load is over or interrupted.
///
/// Everything started ends with the runtime at the latest.
#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    hostler_boot::raise_file_limit();
    let args = Args::parse();
    let seed = args.seed.unwrap_or_else(|| fastrand::u64(..u64::from(u32::MAX)));
    say(&format!("seed {seed}"));
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        ran = chaos(&args, seed) => ran,
        _ = interrupt.recv() => bail!("interrupted"),
        _ = terminate.recv() => bail!("told to end"),
    }
}

async fn chaos(args: &Args, seed: u64) -> anyhow::Result<ExitCode> {
    let length = if args.quick { QUICK } else { Duration::try_from_secs_f64(60.0 * args.minutes)? };
    let questions = questions::learn().await?;
    let mut fleet = Arc::new(Fleet::start(&args.program).await?);
    let before = Baseline::of(&fleet).await;
    let tally = Arc::new(Tally::new(args.verbose));
    let patience = Duration::from_secs(args.patience);
    let load = Load { fleet: fleet.clone(), questions, tally: tally.clone(), patience, number: AtomicU64::new(0) };
    let load = Arc::new(load);

    let begun = Instant::now();
    let watching = AbortOnDropHandle::new(tokio::spawn(after::watch(fleet.clone(), tally.clone())));
    let steps = plan::plan(seed, length);
    tokio::join!(load.run(seed, args.clients, begun + length), faults::carry_out(&fleet, steps, begun, &tally));
    drop(watching);
    tally.note(&format!("{:6.2} s  everything is left alone", begun.elapsed().as_secs_f64()));

    after::check_recovery(&fleet, &tally, &before).await;
    load.probe(seed).await;
    let whole = tally.whole();
    tally.note(&format!("{:6.2} s  the fleet is whole again, and is ended", begun.elapsed().as_secs_f64()));
    after::end(&fleet, &tally).await;
    tally.note(&format!("{:6.2} s  the end", begun.elapsed().as_secs_f64()));
    say(&tally.table());
    let violations = tally.violations();
    if !violations.is_empty() {
        drop(load);
        std::fs::write(fleet.place.path().join("faults"), tally.notes())?;
        if let Some(fleet) = Arc::get_mut(&mut fleet) {
            fleet.place.keep();
        }
        violations.iter().for_each(|violation| complain(&format!("violation: {violation}")));
        complain(&format!("seed {seed}; logs, and what happened when: {}", fleet.place.path().display()));
        return Ok(ExitCode::FAILURE);
    }
    ensure!(whole as f64 > LEAST_WHOLE * length.as_secs_f64(), "only {whole} whole answers: this says nothing");
    Ok(ExitCode::SUCCESS)
}

/// Writes a line. A closed output is not an error.
pub(crate) fn say(line: &str) {
    let _ = writeln!(stdout(), "{line}");
}

fn complain(line: &str) {
    let _ = writeln!(stderr(), "{line}");
}
