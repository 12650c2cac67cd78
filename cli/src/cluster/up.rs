//! `hostler up` with a number of nodes: adds an entry to the fleet, whose nodes are batch jobs.

use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail, ensure};
use clap::{ArgGroup, Args};
use hostler_agent::AgentConfig;
use hostler_boot::Settings;
use hostler_boot::telemetry::LogFile;
use hostler_cluster::{Budget, FleetEntry, FleetSize};
use hostler_controller::{ControllerPlace, JobProgram, build_submission};
use hostler_router::RouterConfig;
use hostler_scheduler::Scheduler;

use super::budget::{parse_node_hours, parse_until};
use super::controller_job;
use super::controller_start::ensure_current_controller;
use super::entries::{milliseconds_since_1970, name_of_model, parse_nodes, put_entry};
use super::walltime::parse_walltime;
use super::watch::{WATCH_TIMEOUT, Watch};
use super::{Fleet, say_changed_settings};
use crate::help::CLUSTER;
use crate::init::ensure_user_key;
use crate::output::{complain, say};
use crate::settings::{self, CommandFlags, EngineArgs};

/// The options of `hostler up`, beside the settings of this machine's router and agent.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("size").args(["nodes", "max"]))]
pub(crate) struct UpArgs {
    /// The model: a folder, or a name on Hugging Face.
    #[arg(id = "MODEL", conflicts_with = "model")]
    model: Option<String>,
    #[command(flatten)]
    local: LocalArgs,
    /// Serve it from so many nodes of a cluster, each a batch job, instead of from this machine.
    #[arg(long, value_name = "N", value_parser = parse_nodes, requires = "walltime", conflicts_with_all = ["min", "max", "idle_after"])]
    nodes: Option<u32>,
    /// How long each job may run, such as 2:00:00 or 2h. A job is replaced before its end.
    #[arg(long, value_name = "TIME", value_parser = parse_walltime, requires = "size")]
    walltime: Option<Duration>,
    /// At least so many nodes, also none, of a size that follows what clients want.
    #[arg(long, value_name = "N", requires = "max", hide_short_help = true, help_heading = CLUSTER)]
    min: Option<u32>,
    /// At most so many nodes, of a size that follows what clients want.
    #[arg(long, value_name = "N", value_parser = parse_nodes, requires_all = ["min", "walltime"], hide_short_help = true, help_heading = CLUSTER)]
    max: Option<u32>,
    /// A node that nobody has asked for so long ends.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "30m", requires = "max", hide_short_help = true, help_heading = CLUSTER)]
    idle_after: Duration,
    /// What the model is called in `hostler wait`, `scale` and `down`; without it the last part of
    /// MODEL.
    #[arg(long, value_name = "NAME", requires = "size", hide_short_help = true, help_heading = CLUSTER)]
    name: Option<String>,
    /// Queue of its jobs, or Slurm's partition, instead of `cluster.queue`.
    #[arg(long, value_name = "QUEUE", requires = "size", hide_short_help = true, help_heading = CLUSTER)]
    queue: Option<String>,
    /// Account that is charged for its jobs, instead of `cluster.account`.
    #[arg(long, value_name = "ACCOUNT", requires = "size", hide_short_help = true, help_heading = CLUSTER)]
    account: Option<String>,
    /// What each of its nodes has, instead of `cluster.resources`.
    #[arg(long, value_name = "RESOURCES", requires = "size", hide_short_help = true, help_heading = CLUSTER)]
    resources: Option<String>,
    /// Serve until then and no longer, such as 18:00, `2026-11-30 06:00` or 90m. Its nodes leave
    /// then, and running answers may finish.
    #[arg(long, value_name = "TIME", value_parser = parse_until, requires = "size", hide_short_help = true, help_heading = CLUSTER)]
    until: Option<SystemTime>,
    /// Use so many node-hours from now on and no more.
    #[arg(long, value_name = "HOURS", value_parser = parse_node_hours, requires = "size", hide_short_help = true, help_heading = CLUSTER)]
    node_hours: Option<Duration>,
    /// Print what would be submitted, and start nothing.
    #[arg(long, requires = "size", hide_short_help = true, help_heading = CLUSTER)]
    dry_run: bool,
    /// Leave it, once it serves, in the background.
    ///
    /// From this machine it serves in the background, without a terminal. Jobs are not waited for;
    /// `hostler wait` does that.
    #[arg(long, conflicts_with = "dry_run")]
    detach: bool,
    /// Take the place of the `hostler up` that serves this model here, without refusing a request;
    /// where none does, start as ever.
    ///
    /// The other one finishes what runs there and ends. Requests wait for the new engines.
    #[arg(long, conflicts_with_all = ["nodes", "max"], hide_short_help = true)]
    takeover: bool,
    /// Write a unit of your systemd that runs this command, and say how it is started; serve
    /// nothing now.
    #[arg(long, conflicts_with_all = ["nodes", "max", "detach"], hide_short_help = true)]
    service: bool,
    /// This process is in the background; `--detach` has started it.
    #[arg(long, hide = true, conflicts_with_all = ["nodes", "max", "detach"])]
    background: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

/// Words for settings of this machine that people type elsewhere.
#[derive(Debug, Args)]
struct LocalArgs {
    /// Port of the edge, instead of all of --listen.
    ///
    /// The admin listener takes any free port then, unless the settings say which.
    #[arg(long, value_name = "N", conflicts_with_all = ["listen", "nodes", "max"])]
    port: Option<u16>,
    /// Want a key from clients: yours, which `hostler env` has.
    ///
    /// It is made where there is none, in `user.key` beside --keys-file, or in ~/.config/hostler.
    #[arg(long, conflicts_with_all = ["nodes", "max"])]
    api_key: bool,
}

impl LocalArgs {
    /// Sets what these words stand for.
    fn apply(&self, settings: &mut Settings) -> anyhow::Result<()> {
        if let Some(port) = self.port {
            let router: RouterConfig = settings.section("router")?;
            let host = router.listen.rsplit_once(':').map_or("127.0.0.1", |(host, _)| host);
            settings.set("router", "listen", format!("{host}:{port}").into());
            if !settings.is_set("router", "admin_listen") {
                settings.set("router", "admin_listen", "127.0.0.1:0".into());
            }
        }
        if self.api_key {
            let router: RouterConfig = settings.section("router")?;
            let keys = ensure_user_key(&router.keys_file)?;
            settings.set("router", "keys_file", keys.display().to_string().into());
        }
        Ok(())
    }
}

impl UpArgs {
    /// Loads the settings, with the model named here, and starts logging, into this file if there
    /// is one.
    pub(crate) fn load(&self, given: &CommandFlags<'_>, file: Option<&Path>, log: Option<LogFile>) -> anyhow::Result<Settings> {
        let mut settings = given.read(file, Some(&self.engine))?;
        given.start_log(&settings, log)?;
        if let Some(model) = &self.model {
            settings.set("agent", "model", model.clone().into());
        }
        self.local.apply(&mut settings)?;
        Ok(settings)
    }

    /// Whether batch jobs are to serve the model.
    pub(crate) fn is_for_jobs(&self) -> bool {
        self.size().is_some()
    }

    /// Whether this machine is to serve the model in the background.
    pub(crate) fn detaches(&self) -> bool {
        self.detach && !self.is_for_jobs()
    }

    /// Whether a unit is to be written instead.
    pub(crate) fn is_for_service(&self) -> bool {
        self.service
    }

    /// Whether it takes the place of the `hostler up` that serves the model.
    pub(crate) fn takes_over(&self) -> bool {
        self.takeover
    }

    /// Whether this process is the one in the background.
    pub(crate) fn is_background(&self) -> bool {
        self.background
    }

    /// Gives this process a session of its own, if it is in the background.
    pub(crate) fn leave_terminal(&self) -> anyhow::Result<()> {
        if self.background {
            rustix::process::setsid().context("a shell's own job cannot have a session of its own: --detach starts it")?;
        }
        Ok(())
    }

    fn size(&self) -> Option<FleetSize> {
        match (self.nodes, self.min, self.max) {
            (Some(nodes), ..) => Some(FleetSize::Fixed(nodes)),
            (None, Some(min), Some(max)) => Some(FleetSize::Elastic { min, max, idle_after: self.idle_after }),
            _ => None,
        }
    }

    fn entry(&self, model: &str, nodes_per_replica: u32) -> anyhow::Result<FleetEntry> {
        // Jobs run elsewhere, in another folder.
        let is_folder = Path::new(model).is_dir();
        let model = if is_folder { std::path::absolute(model)?.display().to_string() } else { model.to_owned() };
        let name = self.name.clone().unwrap_or_else(|| name_of_model(&model));
        let size = self.size().context("--nodes says how many nodes serve it, or --min and --max")?;
        let asked = milliseconds_since_1970();
        let entry = FleetEntry {
            size: size.of_nodes(&name, nodes_per_replica)?,
            name,
            model,
            walltime: self.walltime.context("--walltime says how long a job may run")?,
            engine_args: self.engine.extra.clone(),
            nodes_per_replica,
            queue: self.queue.clone().unwrap_or_default(),
            account: self.account.clone().unwrap_or_default(),
            resources: self.resources.clone().unwrap_or_default(),
            budget: Budget { until: self.until, node_time: self.node_hours, asked },
            asked,
        };
        entry.check()?;
        Ok(entry)
    }
}

/// Writes the entry, has it carried out, and watches until it serves.
pub(crate) async fn up(args: &UpArgs, given: &CommandFlags<'_>, settings: &Settings, file: Option<&Path>) -> anyhow::Result<()> {
    refuse_local_flags(given)?;
    let agent: AgentConfig = settings.section("agent")?;
    ensure!(!agent.model.is_empty() || args.dry_run, "name the model to serve: `hostler up MODEL --nodes N --walltime TIME`");
    let entry = args.entry(&agent.model, agent.nodes_per_replica.max(1))?;
    let fleet = if args.dry_run { Fleet::peek(file)? } else { Fleet::open(file)? };
    let scheduler = fleet.config.find_scheduler()?;
    fleet.config.for_entry(&entry).check_one_node(scheduler)?;
    fleet.check_scheduler().await?;
    if args.dry_run {
        return show_submission(&fleet, scheduler, &entry);
    }
    check_initialised(&settings.section("router")?)?;
    warn_of_obstacle(&fleet, scheduler, &entry).await?;
    let name = entry.name.clone();
    let watch = Watch::new(&fleet, &name);
    let (put, has_changed) = fleet.folder.change_wanted(fleet.job_settings(&agent)?, |entries| put_entry(entries, entry))?;
    put?;
    say_changed_settings(&fleet, has_changed)?;
    let controller = ensure_current_controller(&fleet).await?;
    say(&format!("fleet     {name}, kept by the controller {controller} (log: {})", fleet.folder.controller_log().display()));
    if args.detach {
        return Ok(());
    }
    watch.run(WATCH_TIMEOUT).await
}

/// Flags of the agent that an entry has for its jobs.
const TO_JOBS: [&str; 2] = ["--model", "--nodes-per-replica"];

/// Rejects flags of this machine's router and agent: they do not reach jobs, and must not be lost
/// silently.
fn refuse_local_flags(given: &CommandFlags<'_>) -> anyhow::Result<()> {
    let flags: Vec<String> = given.given_of(&settings::roles()).into_iter().filter(|flag| !TO_JOBS.contains(&flag.as_str())).collect();
    if flags.is_empty() {
        return Ok(());
    }
    bail!(
        "{} would change this machine's router or agent alone: what jobs are to have stands in the configuration file, and arguments of engines after `--`",
        flags.join(", ")
    )
}

fn check_initialised(router: &RouterConfig) -> anyhow::Result<()> {
    let is_missing = router.tls_dir.as_os_str().is_empty() || router.keys_file.as_os_str().is_empty();
    ensure!(!is_missing, "there is no fleet of yours yet: `hostler init` makes its authority and your key");
    Ok(())
}

/// Warns if no node could run a job of this entry. The scheduler would let it wait forever, but it
/// may know better.
async fn warn_of_obstacle(fleet: &Fleet, scheduler: Scheduler, entry: &FleetEntry) -> anyhow::Result<()> {
    let program = std::env::current_exe().context("this program does not know its own path")?;
    let agent = JobProgram { program: &program, config: fleet.file.as_deref() };
    let submission = build_submission(entry, 1, &fleet.config, &fleet.folder, &agent);
    if let Ok(Some(obstacle)) = scheduler.find_obstacle(&submission).await {
        complain(&format!("warning: {obstacle}; `hostler doctor` says what to mend"));
    }
    Ok(())
}

/// Prints the first submission as shell command lines.
fn show_submission(fleet: &Fleet, scheduler: Scheduler, entry: &FleetEntry) -> anyhow::Result<()> {
    let parts = match entry.size {
        FleetSize::Fixed(nodes) => nodes,
        FleetSize::Elastic { min, .. } => min.max(1),
    };
    if !fleet.folder.has_tag() {
        complain("TAG is chosen when the first model of this fleet is brought up");
    }
    let program = std::env::current_exe().context("this program does not know its own path")?;
    if fleet.config.controller == ControllerPlace::Job {
        say(&controller_job::render(fleet, scheduler)?.to_string());
    }
    let agent = JobProgram { program: &program, config: fleet.file.as_deref() };
    say(&scheduler.render(&build_submission(entry, parts, &fleet.config, &fleet.folder, &agent)).to_string());
    Ok(())
}
