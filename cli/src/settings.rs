//! Settings of each role, and where they are read from.

use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{ArgMatches, Args};
use hostler_agent::AgentConfig;
use hostler_boot::telemetry::{self, LogConfig, LogFile};
use hostler_boot::{Section, SettingSources, Settings};
use hostler_controller::ClusterConfig;
use hostler_router::RouterConfig;

/// What comes after `--` on the command line.
#[derive(Debug, Args)]
pub(crate) struct EngineArgs {
    /// More arguments for every engine, as they are.
    #[arg(last = true, value_name = "ENGINE ARGUMENTS")]
    pub(crate) extra: Vec<String>,
}

pub(crate) fn router() -> Vec<Section> {
    vec![Section::of::<RouterConfig>("router"), log()]
}

pub(crate) fn agent() -> Vec<Section> {
    vec![Section::of::<AgentConfig>("agent"), log()]
}

pub(crate) fn controller() -> Vec<Section> {
    vec![Section::of::<RouterConfig>("router"), Section::of::<ClusterConfig>("cluster"), log()]
}

pub(crate) fn all() -> Vec<Section> {
    vec![Section::of::<RouterConfig>("router"), Section::of::<AgentConfig>("agent"), Section::of::<ClusterConfig>("cluster"), log()]
}

/// Sections that `hostler up` has flags for.
pub(crate) fn local() -> Vec<Section> {
    roles().into_iter().chain([log()]).collect()
}

/// Sections of this machine's router and agent.
pub(crate) fn roles() -> Vec<Section> {
    vec![Section::of::<RouterConfig>("router"), Section::of::<AgentConfig>("agent")]
}

fn log() -> Section {
    Section::of::<LogConfig>("log")
}

/// The configuration file: the named one, or the user's own if it exists.
pub(crate) fn config_file(named: Option<PathBuf>) -> Option<PathBuf> {
    named.or_else(|| own_config_file().filter(|path| path.is_file()))
}

/// Path of the user's own configuration file, whether or not it exists.
pub(crate) fn own_config_file() -> Option<PathBuf> {
    Some(hostler_boot::home::config_dir()?.join("hostler/hostler.toml"))
}

/// The user's own key, which `hostler init` makes beside the key file.
pub(crate) fn user_key_file(keys_file: &Path) -> PathBuf {
    keys_file.with_file_name("user.key")
}

/// Environment variables that are text; settings are nothing else.
pub(crate) fn environment() -> Vec<(String, String)> {
    std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?))).collect()
}

#[derive(Default)]
pub(crate) struct CommandFlags<'a> {
    pub(crate) flags: Option<&'a ArgMatches>,
    /// Service name that collectors see for the role to run, if there is one.
    pub(crate) service: Option<&'static str>,
}

impl CommandFlags<'_> {
    /// Merges file, environment and flags, and starts logging. One file may hold the sections of
    /// all roles.
    pub(crate) fn load(&self, file: Option<&Path>, engine: Option<&EngineArgs>) -> anyhow::Result<Settings> {
        let settings = self.read(file, engine)?;
        self.start_log(&settings, None)?;
        Ok(settings)
    }

    /// Merges file, environment and flags.
    pub(crate) fn read(&self, file: Option<&Path>, engine: Option<&EngineArgs>) -> anyhow::Result<Settings> {
        let mut settings = Settings::load(&all(), &SettingSources { file, environment: environment(), flags: self.flags })?;
        if let Some(engine) = engine.filter(|engine| !engine.extra.is_empty()) {
            settings.set("agent", "engine_args", engine.extra.clone().into());
        }
        Ok(settings)
    }

    /// Starts logging, of a role into this file, if there is one.
    pub(crate) fn start_log(&self, settings: &Settings, file: Option<LogFile>) -> anyhow::Result<()> {
        let log = settings.section("log")?;
        match self.service {
            Some(service) => telemetry::init_role(&log, service, file)?,
            None => telemetry::init(&log)?,
        }
        Ok(())
    }

    /// Flags of these sections on the command line, as written.
    pub(crate) fn given_of(&self, sections: &[Section]) -> Vec<String> {
        let given = |id: &str| self.flags.is_some_and(|flags| flags.value_source(id) == Some(ValueSource::CommandLine));
        let flags = Settings::flags(sections);
        flags.iter().filter(|flag| given(flag.get_id().as_str())).filter_map(|flag| Some(format!("--{}", flag.get_long()?))).collect()
    }
}

/// The router's key file, by the file and the environment; empty if not set.
pub(crate) fn keys_file(file: Option<&Path>) -> anyhow::Result<PathBuf> {
    Ok(router_config(file)?.keys_file)
}

/// The folder of the fleet's authority, by the file and the environment; empty if not set.
pub(crate) fn tls_dir(file: Option<&Path>) -> anyhow::Result<PathBuf> {
    Ok(router_config(file)?.tls_dir)
}

/// The operators' socket of the router, by the file and the environment; empty if not set.
pub(crate) fn operators_socket(file: Option<&Path>) -> anyhow::Result<PathBuf> {
    Ok(router_config(file)?.operators_socket)
}

/// The router's settings, by the file and the environment.
pub(crate) fn router_config(file: Option<&Path>) -> anyhow::Result<RouterConfig> {
    Ok(load(file)?.section("router")?)
}

/// The settings of the fleet's jobs, by the file and the environment.
pub(crate) fn agent_config(file: Option<&Path>) -> anyhow::Result<AgentConfig> {
    Ok(load(file)?.section("agent")?)
}

pub(crate) fn cluster_config(file: Option<&Path>) -> anyhow::Result<ClusterConfig> {
    Ok(load(file)?.section("cluster")?)
}

fn load(file: Option<&Path>) -> anyhow::Result<Settings> {
    Ok(Settings::load(&all(), &SettingSources { file, environment: environment(), flags: None })?)
}

/// Checks a file that describes a site: settings of jobs and their agents, without those of a
/// router.
pub(crate) fn check_site(file: &Path) -> anyhow::Result<()> {
    let sections = [Section::of::<AgentConfig>("agent"), Section::of::<ClusterConfig>("cluster")];
    let settings = Settings::load(&sections, &SettingSources { file: Some(file), ..SettingSources::default() })?;
    settings.section::<AgentConfig>("agent")?;
    settings.section::<ClusterConfig>("cluster")?;
    Ok(())
}
