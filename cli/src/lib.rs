//! The command line: one file per subcommand, and this table of contents.

mod admin;
mod advise;
mod agent;
mod batch;
mod bench;
mod bridge;
mod check;
mod cluster;
mod connect;
mod controller;
mod controller_service;
mod docs;
mod doctor;
mod drain;
mod env;
mod explain;
mod file_end;
mod fleet_connection;
mod fleet_relay;
mod fleet_state;
mod help;
mod host_names;
mod init;
mod keeper;
mod keys;
mod local_fleet;
mod logs;
mod lora;
mod operate;
mod output;
mod page;
mod plan;
mod ps;
mod report;
mod rolling;
mod router;
mod secret_output;
mod settings;
mod sim;
mod simulate;
mod startup_progress;
mod suspension;
mod top;
mod trust;
mod up;
mod up_record;
mod usage;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use hostler_agent::AgentError;
use hostler_batch::BatchError;
use hostler_boot::telemetry;
use hostler_router::RouterConfig;

use settings::CommandFlags;

/// Allocator of every thread, measured with the load lab.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Serves LLMs from your GPUs behind one OpenAI-compatible address.
#[derive(Debug, Parser)]
#[command(name = "hostler", version, max_term_width = 110)]
struct Cli {
    /// Settings file [default: `~/.config/hostler/hostler.toml`, where there is one]
    #[arg(long, global = true, env = "HOSTLER_CONFIG", hide_env_values = true, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
#[allow(clippy::large_enum_variant, reason = "made once a process")]
enum Command {
    /// Serve a model, from this machine or from batch jobs of a cluster.
    ///
    /// From this machine a router, an agent and its engines run in this process. With --nodes, or
    /// --min and --max, they are batch jobs. `serve` and `run` mean the same.
    #[command(aliases = UP_ALIASES, after_long_help = hostler_agent::EXIT_CODES)]
    Up(cluster::UpArgs),
    /// Wait until a model serves that `hostler up` has started.
    #[command(after_long_help = cluster::WAIT_EXIT_CODES)]
    Wait(cluster::WaitArgs),
    /// Give a model that is up another number of nodes.
    Scale(cluster::ScaleArgs),
    /// End models that are up.
    ///
    /// With them go all their batch jobs, or their engines on this machine; running requests may
    /// finish. `stop` means the same.
    #[command(alias = "stop")]
    Down(cluster::DownArgs),
    /// Run the router.
    Router(router::RouterArgs),
    /// Run the agent of this node: it starts engines and serves routers.
    #[command(after_long_help = hostler_agent::EXIT_CODES)]
    Agent(settings::EngineArgs),
    /// Keep a fleet of batch jobs, with its router.
    ///
    /// It submits, replaces and ends the jobs that `hostler up` has asked for, and `hostler up`
    /// starts it.
    Controller(controller::ControllerArgs),
    /// Show what would run here, and why; starts nothing.
    ///
    /// Shown are the layout of replicas, their memory and the flags of each engine. Where a model
    /// does not fit a node, the plan says how many nodes would hold it (`--nodes-per-replica`).
    Plan(plan::PlanArgs),
    /// Show nodes and replicas: phase, load, cache, and what is wrong.
    ///
    /// `status` means the same.
    #[command(aliases = ["status", "list", "ls"])]
    Ps(ps::PsArgs),
    /// Watch nodes and replicas in the terminal.
    ///
    /// They can be drained, restarted and released there.
    Top(top::TopArgs),
    /// Open the router's page in a browser.
    ///
    /// It shows the fleet as it changes, and why each request went where it went.
    Page(page::PageArgs),
    /// Show what costs the engines speed, and what to change.
    Advise(advise::AdviseArgs),
    /// Empty a node or a replica, then stop it.
    Drain(drain::DrainArgs),
    /// Empty a node or a replica, then start it again.
    ///
    /// With --rolling one replica after another, so that no request fails.
    Restart(operate::RestartArgs),
    /// Let a quarantined, failed or stopped replica start again now.
    ///
    /// One that drains goes on serving.
    Release(operate::TargetArgs),
    /// Let replicas finish, then give their GPU memory back.
    ///
    /// They need --enable-sleep-mode among agent.engine_args.
    Sleep(operate::SleepArgs),
    /// Bring replicas that sleep back into service.
    Wake(operate::TargetArgs),
    /// Load, unload and list LoRA adapters.
    #[command(subcommand)]
    Lora(lora::Lora),
    /// Make, show and revoke the keys of those who may send requests.
    #[command(subcommand)]
    Keys(keys::Keys),
    /// Make what a fleet needs: its authority, your key, settings.
    ///
    /// What is there stays as it is.
    Init(init::InitArgs),
    /// Print how programs reach what is up, as variables for a shell.
    Env(env::EnvArgs),
    /// Reach your fleet on a login node from another machine, by ssh.
    Connect(connect::ConnectArgs),
    /// Say what keeps a model from being served here, and what to do.
    ///
    /// It looks at this machine, or at what batch jobs would find.
    Doctor(doctor::DoctorArgs),
    /// Make, show and revoke the tokens by which nodes join.
    #[command(subcommand)]
    Token(init::TokenCommand),
    /// Show the last lines of an engine's log, and follow it.
    Logs(logs::LogsArgs),
    /// Show why a request went where it went.
    Explain(explain::ExplainArgs),
    /// Show requests, tokens and node-hours by day, key, tenant or model.
    Usage(usage::UsageArgs),
    /// Write an archive for a bug report, without secrets.
    ///
    /// It has versions, settings, nodes, decisions, logs of engines that failed, and metrics.
    Report(report::ReportArgs),
    /// Measure an OpenAI endpoint, or several under the same load.
    Bench(hostler_bench::BenchArgs),
    /// Have a file of requests answered, behind those of people.
    ///
    /// The answers are written to another file. It goes on where it was killed.
    #[command(after_long_help = hostler_batch::EXIT_CODES)]
    Batch(batch::BatchCommandArgs),
    /// Stand in the place of an engine that somebody else runs; started by agents.
    #[command(hide = true)]
    Bridge(bridge::BridgeArgs),
    /// The simulated engine.
    #[command(subcommand)]
    Sim(sim::Sim),
    /// Compare ways to choose a replica, on a model of engines.
    Simulate(hostler_simulate::SimulateArgs),
    /// Read a settings file and say everything that is wrong with it.
    Check {
        /// The file; without it that of --config, or your own.
        file: Option<PathBuf>,
    },
    /// Print the script by which a shell completes this program's arguments.
    Completions { shell: clap_complete::Shell },
    /// Print the manual's generated parts.
    #[command(subcommand)]
    Docs(docs::Docs),
}

/// Other names of `hostler up`, which people type.
const UP_ALIASES: [&str; 2] = ["serve", "run"];

/// Changes properties of a router that no setting changes, for tests.
type AdjustRouter = fn(&mut RouterConfig);

/// Runs the program: reads the command line, runs the subcommand, and reports errors.
#[must_use]
pub fn main() -> ExitCode {
    main_with(|_| ())
}

/// Like `main`, with routers that a test has changed.
#[must_use]
pub fn main_with(adjust_router: AdjustRouter) -> ExitCode {
    if let Some(ended) = keeper::keeper() {
        return ended;
    }
    let matches = help::parse(help::shape(command(asks_about_jobs(std::env::args()))), std::env::args_os().collect());
    let cli = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(error) => error.exit(),
    };
    let flags = matches.subcommand().map(|(_, matches)| matches);
    let given = CommandFlags { flags, service: cli.command.service() };
    match run(cli, given, adjust_router) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::complain(&format!("error: {}", output::describe(&error)));
            exit_code(&error)
        }
    }
}

/// Exit code of an error. Agents, batches and waits for a model have their own codes. Every other
/// error is 1, and a wrong command line 2, by clap.
fn exit_code(error: &anyhow::Error) -> ExitCode {
    let of_agent = || error.downcast_ref::<AgentError>().map(AgentError::exit_code);
    let of_batch = || error.downcast_ref::<BatchError>().map(BatchError::exit_code);
    let of_watch = || error.downcast_ref::<cluster::WatchError>().map(cluster::WatchError::exit_code);
    let of_wait = || error.downcast_ref::<local_fleet::LocalWaitError>().map(local_fleet::LocalWaitError::exit_code);
    let of_detached = || error.downcast_ref::<up::EndedInBackground>().map(up::EndedInBackground::exit_code);
    of_agent().or_else(of_batch).or_else(of_watch).or_else(of_wait).or_else(of_detached).map_or(ExitCode::FAILURE, ExitCode::from)
}

/// Whether the command line asks for the help of `hostler up` with batch jobs, which take no flags
/// of this machine's router and agent.
fn asks_about_jobs(words: impl Iterator<Item = String>) -> bool {
    let words: Vec<String> = words.take_while(|word| word != "--").collect();
    let has = |flags: &[&str]| words.iter().any(|word| flags.contains(&word.split('=').next().unwrap_or_default()));
    (has(&["up"]) || has(&UP_ALIASES)) && has(&["-h", "--help"]) && has(&["--nodes", "--min", "--max", "--walltime"])
}

/// The command line, with a flag for each setting. `hides_local_flags` leaves local flags out of
/// the help of `hostler up`.
fn command(hides_local_flags: bool) -> clap::Command {
    let settings = [
        ("controller", settings::controller()),
        ("up", settings::local()),
        ("router", settings::router()),
        ("agent", settings::agent()),
        ("plan", settings::agent()),
    ];
    settings.into_iter().fold(Cli::command(), |command, (name, sections)| {
        let hides = hides_local_flags && name == "up";
        let flags = hostler_boot::Settings::flags(&sections).into_iter().map(move |flag| flag.hide(hides));
        command.mut_subcommand(name, |command| {
            // `hostler plan` describes GPUs by a flag of its own.
            let own: Vec<String> = command.get_arguments().filter_map(|arg| arg.get_long().map(str::to_owned)).collect();
            command.args(flags.filter(|flag| !flag.get_long().is_some_and(|long| own.iter().any(|own| own == long))))
        })
    })
}

impl Command {
    /// Service name that collectors see for the role of this command, if it runs one.
    fn service(&self) -> Option<&'static str> {
        match self {
            Self::Up(args) if !args.is_for_jobs() => Some("hostler"),
            Self::Router(_) => Some("hostler-router"),
            Self::Agent(_) => Some("hostler-agent"),
            Self::Controller(_) => Some("hostler-controller"),
            _ => None,
        }
    }

    fn admin(&mut self) -> Option<&mut admin::AdminArgs> {
        match self {
            Self::Ps(args) => Some(&mut args.admin),
            Self::Top(args) => Some(&mut args.admin),
            Self::Page(args) => Some(&mut args.admin),
            Self::Advise(args) => Some(&mut args.admin),
            Self::Drain(args) => Some(&mut args.admin),
            Self::Release(args) | Self::Wake(args) => Some(&mut args.admin),
            Self::Restart(args) => Some(&mut args.admin),
            Self::Sleep(args) => Some(&mut args.admin),
            Self::Lora(command) => Some(command.admin()),
            Self::Logs(args) => Some(&mut args.admin),
            Self::Explain(args) => Some(&mut args.admin),
            Self::Report(args) => Some(&mut args.admin),
            _ => None,
        }
    }
}

fn run(mut cli: Cli, given: CommandFlags<'_>, adjust_router: AdjustRouter) -> anyhow::Result<()> {
    let file = settings::config_file(cli.config);
    if let Some(admin) = cli.command.admin() {
        admin.config.clone_from(&file);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    // Loading settings may name a collector, which needs the runtime.
    let _entered = runtime.enter();
    let ended = match cli.command {
        Command::Up(args) => {
            if args.is_for_jobs() {
                let settings = args.load(&given, file.as_deref(), None)?;
                runtime.block_on(cluster::up(&args, &given, &settings, file.as_deref()))
            } else if args.is_for_service() {
                up::write_service(&args.load(&given, file.as_deref(), None)?)
            } else if args.detaches() {
                args.load(&given, file.as_deref(), None)?;
                runtime.block_on(up::detach())
            } else {
                args.leave_terminal()?;
                let (voice, log) = up::Voice::of_this_command(args.is_background());
                let settings = args.load(&given, file.as_deref(), log)?;
                runtime.block_on(up::up(settings, adjust_router, voice, args.takes_over()))
            }
        }
        Command::Wait(args) => runtime.block_on(cluster::wait(&args, file.as_deref())),
        Command::Scale(args) => runtime.block_on(cluster::scale(&args, file.as_deref())),
        Command::Down(args) => runtime.block_on(cluster::down(&args, file.as_deref())),
        Command::Router(args) => runtime.block_on(router::router(&given.load(file.as_deref(), None)?, &args, adjust_router)),
        Command::Agent(engine) => runtime.block_on(agent::agent(&given.load(file.as_deref(), Some(&engine))?)),
        Command::Controller(args) if args.ensure => runtime.block_on(cluster::ensure(file.as_deref())),
        Command::Controller(args) => {
            runtime.block_on(controller::controller(&given.load(file.as_deref(), None)?, &args, file.as_deref(), adjust_router))
        }
        Command::Plan(args) => runtime.block_on(plan::plan(&given.load(file.as_deref(), Some(&args.engine))?, &args)),
        Command::Ps(args) => runtime.block_on(ps::ps(&args)),
        Command::Top(args) => runtime.block_on(top::top(&args)),
        Command::Page(args) => runtime.block_on(page::page(&args)),
        Command::Advise(args) => runtime.block_on(advise::advise(&args)),
        Command::Drain(args) => runtime.block_on(drain::drain(&args)),
        Command::Restart(args) => runtime.block_on(operate::restart(&args)),
        Command::Release(args) => runtime.block_on(operate::release(&args)),
        Command::Sleep(args) => runtime.block_on(operate::sleep(&args)),
        Command::Wake(args) => runtime.block_on(operate::wake(&args)),
        Command::Lora(command) => runtime.block_on(lora::lora(&command)),
        Command::Keys(command) => runtime.block_on(keys::keys(&command, file.as_deref())),
        Command::Init(args) => runtime.block_on(init::init(&args, file.as_deref())),
        Command::Env(args) => runtime.block_on(env::env(&args, file.as_deref())),
        Command::Connect(args) => runtime.block_on(connect::connect(&args)),
        Command::Doctor(args) => runtime.block_on(doctor::doctor(&CommandFlags::default().load(file.as_deref(), None)?, &args)),
        Command::Token(command) => init::token(&command, file.as_deref()),
        Command::Logs(args) => runtime.block_on(logs::logs(&args)),
        Command::Explain(args) => runtime.block_on(explain::explain(&args)),
        Command::Usage(args) => usage::usage(&args, file.as_deref()),
        Command::Report(args) => runtime.block_on(report::report(&CommandFlags::default().load(file.as_deref(), None)?, &args)),
        Command::Bench(args) => runtime.block_on(bench::bench(&args, file.as_deref())),
        Command::Batch(args) => runtime.block_on(batch::batch(&args, file.as_deref())),
        Command::Bridge(args) => runtime.block_on(bridge::bridge(args)),
        Command::Sim(sim) => runtime.block_on(sim::run(sim)),
        Command::Simulate(args) => simulate::simulate(&args),
        Command::Check { file: named } => check::check(named.or(file).as_deref()),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut command(false), "hostler", &mut script);
            output::say(String::from_utf8_lossy(&script).trim_end());
            Ok(())
        }
        Command::Docs(docs) => docs::print(&docs, command(false)),
    };
    runtime.block_on(telemetry::flush_events());
    // Leftover tasks, such as a signal handler or a lingering connection, do not delay the exit.
    runtime.shutdown_background();
    ended
}
