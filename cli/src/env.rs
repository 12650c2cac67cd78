//! `hostler env`: how programs on this host reach the fleet, as lines for a shell or as JSON.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::{Args, ValueEnum};
use hostler_controller::{Endpoint, FleetFolder};
use hostler_router::keys::{Secret, read_private};
use rustix::process::{Pid, test_kill_process};
use serde::{Deserialize, Serialize};

use crate::fleet_state::{describe_absence, describe_entries, has_jobs};
use crate::host_names::this_host;
use crate::local_fleet::find_local_fleet;
use crate::output::{complain, say};
use crate::settings::cluster_config;
use crate::trust::{ADDING_VARIABLE, Bundle, REPLACING_VARIABLES, bundle_of, write_bundle};
use crate::up_record::UpRouter;

/// Names that must bypass a proxy. Clients look a name up as it is written, so both are needed.
const LOCAL_NAMES: [&str; 2] = ["localhost", "127.0.0.1"];

/// Key for an edge that wants none: OpenAI's clients refuse to start without one.
const NO_KEY: &str = "none";

/// How often a follower checks whether the fleet has moved. A controller that leaves writes nothing
/// for a moment.
const FOLLOW_INTERVAL: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
pub(crate) struct EnvArgs {
    /// One line of JSON, for programs.
    #[arg(long)]
    json: bool,
    /// Another line whenever the fleet is reached in another way, until standard input ends.
    #[arg(long, requires = "json")]
    follow: bool,
    /// The model or the process, where several run on this machine, each in a `hostler up` of its
    /// own.
    model: Option<String>,
    /// Reach the fleet of somebody else, who has made this file for you with `hostler keys create
    /// --invite`.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["follow", "model"])]
    access: Option<PathBuf>,
    /// For which shell the lines are.
    #[arg(long, value_enum, default_value_t, conflicts_with = "json")]
    shell: Shell,
}

/// How a shell sets a variable of its environment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Shell {
    /// Any POSIX shell, such as bash and zsh.
    #[default]
    Sh,
    /// csh and tcsh.
    Csh,
    Fish,
}

impl Shell {
    pub(crate) fn export(self, name: &str, value: &str) -> String {
        // Quoting fails only for NUL, which neither the environment nor a key or an address
        // contains.
        let word = shlex::try_quote(value).unwrap_or_default();
        match self {
            Self::Sh => format!("export {name}={word}"),
            Self::Csh => format!("setenv {name} {word};"),
            Self::Fish => format!("set -gx {name} {word};"),
        }
    }
}

/// How a client reaches a fleet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ClientAccess {
    /// Host for whose programs the address is valid.
    pub(crate) host: String,
    pub(crate) base_url: String,
    pub(crate) api_key: String,
    /// Socket on that host that other users cannot reach, for programs without TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) socket: Option<PathBuf>,
    /// Certificate in PEM by which clients verify the fleet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) authority: Option<String>,
    /// For its own user, where its router runs on that host outside of a job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) operators: Option<OperatorAccess>,
}

/// How operators reach a router, on its host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OperatorAccess {
    pub(crate) socket: PathBuf,
    /// Address of the admin listener with the page, `HOST:PORT`.
    pub(crate) page: String,
}

pub(crate) async fn env(args: &EnvArgs, config: Option<&Path>) -> anyhow::Result<()> {
    let model = args.model.as_deref();
    if let Some(file) = &args.access {
        return env_of_others(file, args);
    }
    let access = read_access(config, model).await?;
    if args.json {
        say(&serde_json::to_string(&access)?);
        return if args.follow { follow(access, config, model).await } else { Ok(()) };
    }
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let bundle = access.authority.as_ref().map(|authority| {
        let file = FleetFolder::open(&cluster_config(config)?)?.path().join("ca-bundle.pem");
        write_bundle(file, authority, variable)
    });
    say_exports(args.shell, &access, bundle.transpose()?.as_ref(), variable);
    if let Some(folder) = FleetFolder::find(&cluster_config(config)?)? {
        describe_entries(&folder)?.iter().for_each(|line| complain(line));
    }
    Ok(())
}

/// How to reach somebody else's fleet, as its owner has written it down.
fn env_of_others(file: &Path, args: &EnvArgs) -> anyhow::Result<()> {
    let access: ClientAccess = serde_json::from_str(&read_private(file)?)
        .with_context(|| format!("{} is no file that `hostler keys create --invite` has made", file.display()))?;
    check_invitation(&access).with_context(|| format!("{} is no good invitation", file.display()))?;
    if args.json {
        say(&serde_json::to_string(&access)?);
        return Ok(());
    }
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let bundle = access.authority.as_ref().map(|authority| write_bundle(bundle_of(address_of(&access.base_url))?, authority, variable));
    say_exports(args.shell, &access, bundle.transpose()?.as_ref(), variable);
    Ok(())
}

/// Checks what somebody else has written down: an address with TLS, a key, and certificates alone.
fn check_invitation(access: &ClientAccess) -> anyhow::Result<()> {
    let address = access.base_url.parse::<http::Uri>().ok().filter(|address| address.scheme_str() == Some("https"));
    ensure!(address.is_some_and(|address| address.host().is_some_and(|host| !host.is_empty())), "its address is none with TLS");
    access.api_key.parse::<Secret>().context("it has no key")?;
    let is_certificate = |authority: &String| !authority.contains("PRIVATE KEY") && hostler_tls::has_certificates(authority);
    ensure!(access.authority.as_ref().is_some_and(is_certificate), "it has no certificate of the fleet");
    Ok(())
}

/// How others reach the fleet, without a key.
///
/// # Errors
/// When it is reached from its own host alone, or is not up.
pub(crate) async fn access_of_others(config: Option<&Path>) -> anyhow::Result<ClientAccess> {
    let access = read_access(config, None).await?;
    let host = host_of(&access.base_url);
    let is_of_host = host == "localhost" || host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    ensure!(
        !is_of_host,
        "the edge at {} is for programs of this host: `hostler init --share` says how to open a port for others",
        access.base_url
    );
    ensure!(
        access.authority.is_some(),
        "the edge at {} has no TLS by your fleet's authority, so others' keys could be read",
        access.base_url
    );
    Ok(ClientAccess { api_key: String::new(), socket: None, operators: None, ..access })
}

/// Reports how to reach the fleet whenever that changes, as long as somebody listens.
async fn follow(mut printed: ClientAccess, config: Option<&Path>, model: Option<&str>) -> anyhow::Result<()> {
    let listening = tokio::task::spawn_blocking(|| std::io::copy(&mut std::io::stdin(), &mut std::io::sink()));
    let following = async {
        loop {
            tokio::time::sleep(FOLLOW_INTERVAL).await;
            // Between two controllers there is no endpoint.
            let Ok(access) = read_access(config, model).await else { continue };
            if access != printed {
                say(&serde_json::to_string(&access)?);
                printed = access;
            }
        }
    };
    tokio::select! {
        _ = listening => Ok(()),
        failed = following => failed,
    }
}

/// How programs on this host reach the user's fleet of jobs, else what `hostler up` serves here.
async fn read_access(config: Option<&Path>, model: Option<&str>) -> anyhow::Result<ClientAccess> {
    match FleetFolder::find(&cluster_config(config)?)? {
        Some(folder) if has_jobs(Some(&folder))? => access_to_jobs(&folder),
        _ => {
            let up = find_local_fleet(model).await?;
            if let Some(silence) = &up.silence {
                bail!("{} does not answer: {silence}", up.describe());
            }
            access_to_up(&up.record.router)
        }
    }
}

fn access_to_up(router: &UpRouter) -> anyhow::Result<ClientAccess> {
    let api_key = match &router.key_file {
        Some(file) => read_key(file).context("the edge wants a key, and `hostler init` makes yours")?.reveal().to_owned(),
        None => NO_KEY.to_owned(),
    };
    let authority = router.authority.as_ref().map(|file| read_certificate(file)).transpose()?;
    let operators = OperatorAccess { socket: router.operators_socket.clone(), page: router.admin.clone() };
    let operators = Some(operators).filter(|operators| !operators.page.is_empty());
    Ok(ClientAccess { host: this_host(), base_url: router.base_url.clone(), api_key, socket: None, authority, operators })
}

fn read_key(file: &Path) -> anyhow::Result<Secret> {
    read_private(file)?.trim().parse().with_context(|| format!("{} holds no key", file.display()))
}

fn read_certificate(file: &Path) -> anyhow::Result<String> {
    fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))
}

fn access_to_jobs(folder: &FleetFolder) -> anyhow::Result<ClientAccess> {
    let Some(endpoint) = folder.endpoint()? else { bail!(describe_absence(Some(folder))?) };
    let this_host = this_host();
    match &endpoint.job {
        None => check_reachable(&endpoint, &this_host)?,
        Some(job) => ensure!(
            !folder.is_controller_gone()?,
            "the fleet's controller, in job {job}, has ended: `hostler wait` says when the next one runs, and submits it where there is none"
        ),
    }
    let key = read_key(&endpoint.key_file)?;
    let socket = endpoint.edge_socket.filter(|socket| endpoint.host == this_host && socket.exists());
    let authority = endpoint.authority.as_deref().map(read_certificate);
    let is_process_here = endpoint.job.is_none() && endpoint.host == this_host;
    let operators = is_process_here.then(|| OperatorAccess { socket: endpoint.operators_socket.clone(), page: endpoint.admin.clone() });
    Ok(ClientAccess {
        base_url: format!("{}/v1", endpoint.edge),
        host: endpoint.host,
        api_key: key.reveal().to_owned(),
        socket,
        authority: authority.transpose()?,
        operators,
    })
}

/// Checks that the edge can be reached. An edge on its host's loopback is reachable only there, and
/// every edge is gone with its controller.
fn check_reachable(endpoint: &Endpoint, this_host: &str) -> anyhow::Result<()> {
    let Endpoint { host, pid, edge, .. } = endpoint;
    if host != this_host {
        if !edge.contains("://127.") {
            return Ok(());
        }
        bail!("the fleet's router runs on {host}, and its address is good there alone: log in to {host}, or run `hostler connect {host}`");
    }
    // If this process may not signal that one, another user's process has reused its number.
    let is_gone = i32::try_from(*pid).ok().and_then(Pid::from_raw).is_none_or(|pid| test_kill_process(pid).is_err());
    if is_gone {
        bail!("the fleet's controller (process {pid}) has ended: `hostler wait` starts it again, and the fleet's jobs come back to it");
    }
    Ok(())
}

/// Prints the lines for a shell, and tells the user what they do not cover.
pub(crate) fn say_exports(shell: Shell, access: &ClientAccess, bundle: Option<&Bundle>, variable: impl Fn(&str) -> Option<String>) {
    exports(shell, access, bundle, variable).iter().for_each(|line| say(line));
    if let Some(bundle) = bundle.filter(|bundle| !bundle.has_roots) {
        complain(&format!(
            "this host's own certificates were not found: clients of the fleet need SSL_CERT_FILE={}, with which they reach nobody else",
            bundle.file.display()
        ));
    }
}

/// Lines for a shell.
///
/// Variables that keep requests from a proxy are extended, never replaced. `bundle` has the
/// certificates that clients must trust.
fn exports(shell: Shell, access: &ClientAccess, bundle: Option<&Bundle>, variable: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let set = |name| variable(name).filter(|value| !value.is_empty());
    let export = |name: &str, value: &str| shell.export(name, value);
    let (lower, upper) = (set("no_proxy"), set("NO_PROXY"));
    // Some programs read only one of them, so a new one starts from the other's value.
    let host = host_of(&access.base_url);
    let extended =
        |own: &Option<String>, other: &Option<String>| extend_no_proxy(own.as_ref().or(other.as_ref()).map_or("", String::as_str), host);
    let mut lines = vec![
        export("OPENAI_BASE_URL", &access.base_url),
        export("OPENAI_API_KEY", &access.api_key),
        export("NO_PROXY", &extended(&upper, &lower)),
        export("no_proxy", &extended(&lower, &upper)),
    ];
    if let Some(Bundle { file, has_roots }) = bundle {
        let names = REPLACING_VARIABLES.into_iter().filter(|_| *has_roots).chain([ADDING_VARIABLE]);
        lines.extend(names.map(|name| export(name, &file.display().to_string())));
    }
    lines
}

/// `HOST:PORT` of a base URL.
fn address_of(base_url: &str) -> &str {
    base_url.split("://").nth(1).unwrap_or_default().split('/').next().unwrap_or_default()
}

/// Host of a base URL.
fn host_of(base_url: &str) -> &str {
    let address = address_of(base_url);
    address.rsplit_once(':').map_or(address, |(host, _)| host)
}

/// Adds this host's loopback and the fleet's host to the list, each once.
fn extend_no_proxy(list: &str, fleet: &str) -> String {
    let mut entries: Vec<&str> = list.split(',').map(str::trim).filter(|entry| !entry.is_empty()).collect();
    if !entries.contains(&"*") {
        let names = LOCAL_NAMES.into_iter().chain(Some(fleet).filter(|fleet| !fleet.is_empty() && !LOCAL_NAMES.contains(fleet)));
        let missing = names.filter(|name| !entries.contains(name)).collect::<Vec<_>>();
        entries.extend(missing);
    }
    entries.join(",")
}

/// Whether a list keeps requests for `localhost` from a proxy.
pub(crate) fn bypasses_proxy(list: &str) -> bool {
    list.split(',').map(str::trim).any(|entry| entry == "*" || entry.trim_start_matches('.') == "localhost")
}

#[cfg(test)]
pub(crate) mod tests;
