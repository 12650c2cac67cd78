//! `hostler bench`: measures OpenAI endpoints. A crate of its own measures; this module connects it
//! to the terminal and files.

use std::fs;
use std::io::{IsTerminal, stderr};
use std::path::Path;

use anyhow::{Context, bail};
use hostler_bench::progress::{ProgressStyle, ProgressWriter};
use hostler_bench::{BenchArgs, CommonArgs, report};

use crate::fleet_relay::FleetRelay;
use crate::output::say;

/// Measures, shows the progress, and writes the report.
pub(crate) async fn bench(args: &BenchArgs, config: Option<&Path>) -> anyhow::Result<()> {
    hostler_boot::raise_file_limit();
    let mut args = args.clone();
    let CommonArgs { target, metrics, .. } = &mut args.common;
    let mut relaying = Vec::new();
    for target in target.iter_mut().chain(metrics) {
        let (led, relay) = FleetRelay::lead(target.clone(), config)?;
        *target = led;
        relaying.extend(relay);
    }
    let files = [&args.common.json, &args.common.html];
    for file in files.into_iter().flatten() {
        // Check now: after an hour of measuring it would be too late to report this.
        writable(file)?;
    }
    let columns = std::env::var("COLUMNS").ok();
    let look = ProgressStyle::choose(args.common.quiet, stderr().is_terminal(), columns.as_deref());
    let mut shown = ProgressWriter::new(stderr(), look);
    // The measurement goes on even if nobody reads the progress any more.
    let report = hostler_bench::run(&args, |progress| drop(shown.show(&progress))).await;
    let _ = shown.end();
    let report = report?;
    say(report::table(&report).trim_end());
    write(args.common.json.as_deref(), || report::json(&report))?;
    write(args.common.html.as_deref(), || report::html(&report))?;
    let figures = report.targets.iter().map(|target| target.rounds.iter().chain(target.sweep.iter().map(|step| &step.figures)));
    for (target, figures) in report.targets.iter().zip(figures) {
        if figures.map(|figures| figures.all.complete).sum::<u64>() == 0 {
            bail!("{} answered no request; see above how they failed", target.name);
        }
    }
    Ok(())
}

fn writable(file: &Path) -> anyhow::Result<()> {
    fs::OpenOptions::new().create(true).append(true).open(file).map(drop).with_context(|| format!("cannot write {}", file.display()))
}

fn write(file: Option<&Path>, text: impl FnOnce() -> String) -> anyhow::Result<()> {
    let Some(file) = file else { return Ok(()) };
    fs::write(file, text()).with_context(|| format!("cannot write {}", file.display()))
}
