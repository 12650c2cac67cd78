//! Guard of the hot paths: counts the instructions and system calls of a request and of a streamed
//! event with valgrind's callgrind, and compares them with a budget.
//!
//! The counts do not depend on how busy the machine is, so CI can refuse a change that makes a path
//! dearer.
//!
//! Each case is a run of this program under valgrind, in which the real router or agent has a
//! separate thread; only that thread is counted.

mod budget;
mod cases;
mod counted;
mod fake_engine;
mod table;
mod valgrind;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use clap::Parser;

use budget::Budget;
use cases::Case;
use table::Row;

/// Allocator of the program itself.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Counts what a request and an event cost, and compares it with the budget.
#[derive(Debug, Parser)]
#[command(name = "guard")]
struct Args {
    /// Write what was counted into the budget.
    #[arg(long)]
    accept: bool,
    /// Count only cases whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// Keep callgrind's files in this directory, for `callgrind_annotate`.
    #[arg(long)]
    keep: Option<PathBuf>,
    /// Run one case in this process, uncounted unless valgrind does.
    #[arg(long)]
    case: Option<Case>,
    /// The budget.
    #[arg(long, default_value = "tests/guard/budget.toml")]
    budget: PathBuf,
}

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    // The counted agent starts this program as its engine's keeper, and the keeper starts it as the
    // engine.
    match arguments.first().and_then(|first| first.to_str()) {
        Some("keeper") => return hostler_agent::keeper::run_subcommand(&arguments[1..]),
        Some("sim") => return fake_engine::main(&arguments[1..]),
        _ => {}
    }
    match guard(&Args::parse()) {
        Ok(code) => code,
        Err(error) => {
            table::complain(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn guard(args: &Args) -> anyhow::Result<ExitCode> {
    if let Some(case) = args.case {
        return case.run().map(|()| ExitCode::SUCCESS);
    }
    let mut budget = Budget::read(&args.budget)?;
    let scratch = tempfile::tempdir()?;
    let folder = args.keep.as_deref().unwrap_or(scratch.path());
    std::fs::create_dir_all(folder)?;
    let cases: Vec<Case> = Case::all().filter(|case| case.name().contains(&args.only)).collect();
    let rows = count_all(&cases, folder, &budget)?;
    if args.accept {
        rows.iter().for_each(|row| budget.set(row.case, row.now));
        budget.write(&args.budget)?;
    }
    Ok(if table::verdict(&rows, args.accept) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Counts these cases, as many at a time as there are cores, and shows each after those before it.
fn count_all(cases: &[Case], folder: &Path, budget: &Budget) -> anyhow::Result<Vec<Row>> {
    let next = AtomicUsize::new(0);
    let (sender, counted) = mpsc::channel();
    let work = |sender: mpsc::Sender<_>| {
        while let Some((at, case)) = Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|at| Some((at, *cases.get(at)?))) {
            let count = valgrind::count(case, folder);
            // Nobody listens any more if another case has failed.
            if sender.send((at, count)).is_err() {
                return;
            }
        }
    };
    let work = &work;
    std::thread::scope(|scope| {
        for sender in std::iter::repeat_n(sender, std::thread::available_parallelism().map_or(1, usize::from)) {
            scope.spawn(move || work(sender));
        }
        let (mut rows, mut early) = (Vec::new(), BTreeMap::new());
        for (at, count) in counted {
            early.insert(at, count?);
            while let Some(now) = early.remove(&rows.len()) {
                let case = cases[rows.len()];
                let row = Row { case, budget: budget.of(case), now };
                table::show(&row, rows.is_empty());
                rows.push(row);
            }
        }
        Ok(rows)
    })
}
