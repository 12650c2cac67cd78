//! The command line: one file per subcommand, and this table of contents.

mod agent;
mod docs;
mod explain;
mod operate;
mod output;
mod ps;
mod router;
mod settings;
mod sim;
mod simulate;
mod up;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use settings::Given;

/// Allocates for every thread; measured with the load lab.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// A distributed router for LLM inference.
#[derive(Debug, Parser)]
#[command(name = "hostler", version, about, max_term_width = 110)]
struct Cli {
    /// Configuration file (TOML); without it `~/.config/hostler/hostler.toml`, where there is one.
    #[arg(long, global = true, env = "HOSTLER_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
#[allow(clippy::large_enum_variant, reason = "made once a process")]
enum Command {
    /// Run everything on this machine: a router, an agent and its engines.
    Up(settings::EngineArgs),
    /// Run the router.
    Router,
    /// Run the agent of this node: it starts the engines and serves the routers.
    Agent(settings::EngineArgs),
    /// Show nodes and replicas: phase, load, KV use, what is known of the cache.
    Ps(ps::PsArgs),
    /// Empty a node or a replica, then stop it.
    Drain(operate::TargetArgs),
    /// Empty a node or a replica, then start it again.
    Restart(operate::TargetArgs),
    /// Show the last lines of an engine's log.
    Logs(operate::LogsArgs),
    /// Show why a request went where it went.
    Explain(explain::ExplainArgs),
    /// The simulated engine, and a load generator.
    #[command(subcommand)]
    Sim(sim::Sim),
    /// Compare ways to choose a replica, on a model of engines.
    Simulate(hostler_simulate::SimulateArgs),
    /// Read a configuration file and say what is wrong with it.
    Check {
        /// The file.
        file: PathBuf,
    },
    /// Print the manual's generated parts.
    #[command(subcommand)]
    Docs(docs::Docs),
}

/// The program: reads the command line, runs the subcommand, says what went wrong.
#[must_use]
pub fn main() -> ExitCode {
    let mut command = Cli::command();
    for (name, sections) in [("up", settings::all()), ("router", settings::router()), ("agent", settings::agent())] {
        command = command.mut_subcommand(name, |command| command.args(hostler_boot::Settings::flags(&sections)));
    }
    let matches = command.get_matches();
    let cli = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(error) => error.exit(),
    };
    let flags = matches.subcommand().map(|(_, matches)| matches);
    match run(cli, Given { flags }) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::complain(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli, given: Given<'_>) -> anyhow::Result<()> {
    let file = settings::file(cli.config);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let ended = match cli.command {
        Command::Up(engine) => runtime.block_on(up::up(given.load(file.as_deref(), Some(&engine))?)),
        Command::Router => runtime.block_on(router::router(&given.load(file.as_deref(), None)?)),
        Command::Agent(engine) => runtime.block_on(agent::agent(&given.load(file.as_deref(), Some(&engine))?)),
        Command::Ps(args) => runtime.block_on(ps::ps(&args)),
        Command::Drain(args) => runtime.block_on(operate::drain(&args)),
        Command::Restart(args) => runtime.block_on(operate::restart(&args)),
        Command::Logs(args) => runtime.block_on(operate::logs(&args)),
        Command::Explain(args) => runtime.block_on(explain::explain(&args)),
        Command::Sim(sim) => runtime.block_on(sim::run(sim)),
        Command::Simulate(args) => simulate::simulate(&args),
        Command::Check { file } => settings::check(&file),
        Command::Docs(docs) => {
            docs::print(&docs);
            Ok(())
        }
    };
    // Whatever is left (a signal handler, a connection that lingers) does not keep the program.
    runtime.shutdown_background();
    ended
}
