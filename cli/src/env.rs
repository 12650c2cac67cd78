//! `hostler env`: how programs on this host reach the fleet, as lines for a shell or as JSON.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use hostler_controller::{Endpoint, FleetFolder};
use hostler_router::keys::{Secret, read_private};
use rustix::process::{Pid, test_kill_process};
use serde::{Deserialize, Serialize};

use crate::output::say;
use crate::settings::cluster_config;

/// What a proxy must not be asked for. Clients look a name up as it is written, so both count.
const LOCAL_NAMES: [&str; 2] = ["localhost", "127.0.0.1"];

#[derive(Debug, Args)]
pub(crate) struct EnvArgs {
    /// One line of JSON, for programs.
    #[arg(long)]
    json: bool,
}

/// How a client reaches a fleet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ClientAccess {
    /// The host for whose programs the address is good.
    pub(crate) host: String,
    pub(crate) base_url: String,
    pub(crate) api_key: String,
    /// A socket of that host which other users cannot reach; for `hostler connect`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) socket: Option<PathBuf>,
}

pub(crate) fn env(args: &EnvArgs, config: Option<&Path>) -> anyhow::Result<()> {
    let access = read_access(config)?;
    if args.json {
        say(&serde_json::to_string(&access)?);
    } else {
        exports(&access, |name| std::env::var(name).ok()).iter().for_each(|line| say(line));
    }
    Ok(())
}

/// How programs on this host reach the user's fleet.
fn read_access(config: Option<&Path>) -> anyhow::Result<ClientAccess> {
    let folder = FleetFolder::open(&cluster_config(config)?)?;
    let endpoint = folder.endpoint()?.context("no fleet of yours runs: `hostler up MODEL --nodes 1 --walltime 1:00:00` starts one")?;
    let this_host = this_host();
    check_reachable(&endpoint, &this_host)?;
    let text = read_private(&endpoint.key_file)?;
    let key: Secret = text.trim().parse().with_context(|| format!("{} holds no key", endpoint.key_file.display()))?;
    let socket = endpoint.edge_socket.filter(|socket| endpoint.host == this_host && socket.exists());
    Ok(ClientAccess { base_url: format!("{}/v1", endpoint.edge), host: endpoint.host, api_key: key.reveal().to_owned(), socket })
}

/// An edge on its host's loopback is reached there alone, and each is gone with the controller.
fn check_reachable(endpoint: &Endpoint, this_host: &str) -> anyhow::Result<()> {
    let Endpoint { host, pid, edge, .. } = endpoint;
    if host != this_host {
        if !edge.contains("://127.") {
            return Ok(());
        }
        bail!("the fleet's router runs on {host}, and its address is good there alone: log in to {host}, or run `hostler connect {host}`");
    }
    // A process of another user has its number, if this one may not signal it.
    let is_gone = i32::try_from(*pid).ok().and_then(Pid::from_raw).is_none_or(|pid| test_kill_process(pid).is_err());
    if is_gone {
        bail!(
            "the fleet's controller (process {pid}) has ended: `hostler controller` starts it again, and the fleet's jobs come back to it"
        );
    }
    Ok(())
}

/// As a controller writes it down.
pub(crate) fn this_host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Lines for a POSIX shell. A variable that keeps requests from a proxy is extended, never replaced.
pub(crate) fn exports(access: &ClientAccess, variable: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let set = |name| variable(name).filter(|value| !value.is_empty());
    let export = |name: &str, value: &str| {
        // The environment has none, and neither key nor address.
        let word = shlex::try_quote(value).unwrap_or_default();
        format!("export {name}={word}")
    };
    let (lower, upper) = (set("no_proxy"), set("NO_PROXY"));
    // Some programs read one of them alone, so a new one begins as the other is.
    let extended =
        |own: &Option<String>, other: &Option<String>| extend_no_proxy(own.as_ref().or(other.as_ref()).map_or("", String::as_str));
    vec![
        export("OPENAI_BASE_URL", &access.base_url),
        export("OPENAI_API_KEY", &access.api_key),
        export("NO_PROXY", &extended(&upper, &lower)),
        export("no_proxy", &extended(&lower, &upper)),
    ]
}

/// The list with this host's loopback in it, once.
fn extend_no_proxy(list: &str) -> String {
    let mut entries: Vec<&str> = list.split(',').map(str::trim).filter(|entry| !entry.is_empty()).collect();
    if !entries.contains(&"*") {
        let missing = LOCAL_NAMES.into_iter().filter(|name| !entries.contains(name)).collect::<Vec<_>>();
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
