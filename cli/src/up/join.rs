//! `hostler up` beside one that runs: which router is joined, and with which node and GPUs. Pure,
//! but for `free_gpus`, which asks the driver.

use std::collections::BTreeSet;

use anyhow::{bail, ensure};
use hostler_agent::{AgentConfig, EngineProgram, Gpu};
use hostler_proto::agent::v1::Phase;

use crate::local_fleet::LocalFleet;
use crate::up_record::JoinedAgent;

/// What a command is to do that would serve from this machine.
#[derive(Debug)]
pub(super) enum Place<'a> {
    /// With a router of its own.
    Own,
    /// With the router of this one.
    Beside(&'a LocalFleet),
}

/// What a command asks for.
#[derive(Debug)]
pub(super) struct Wish<'a> {
    /// The model's name; empty for the simulated engine without one.
    pub(super) name: &'a str,
    /// The edge's address, if a setting says it; with port 0 it is nobody's.
    pub(super) listen: Option<&'a str>,
}

/// Decides where a command serves: with the router that has the address, or the only one of this
/// user.
///
/// # Errors
/// When that router serves the model already, or several routers run and nothing chooses one.
pub(super) fn choose_place<'a>(wish: &Wish<'_>, fleets: &'a [LocalFleet]) -> anyhow::Result<Place<'a>> {
    let routers: Vec<&LocalFleet> = fleets.iter().filter(|fleet| fleet.has_router()).collect();
    let first = match (wish.listen, &routers[..]) {
        (_, []) => return Ok(Place::Own),
        (Some(listen), several) => match several.iter().find(|fleet| port(&fleet.record.router.base_url) == port(listen)) {
            Some(first) => first,
            None => return Ok(Place::Own),
        },
        (None, [only]) => only,
        (None, several) => {
            let addresses: Vec<&str> = several.iter().map(|fleet| fleet.record.router.base_url.as_str()).collect();
            bail!(
                "{} routers of yours run here ({}): --port of one of them chooses it, and a free port another router",
                several.len(),
                addresses.join(", ")
            )
        }
    };
    if let Some(same) = fleets.iter().find(|fleet| fleet.shares_router(first) && is_same(fleet, wish.name)) {
        let models = same.models();
        let name = if wish.name.is_empty() { models.first().copied().unwrap_or_default() } else { wish.name };
        bail!(
            "up here already: {}, at {}; `hostler ps` shows it, `hostler down {name}` ends it; another model joins it, and with --port N a router of its own serves it, too",
            same.describe(),
            same.record.router.base_url
        );
    }
    Ok(Place::Beside(first))
}

pub(super) fn is_same(fleet: &LocalFleet, name: &str) -> bool {
    if name.is_empty() { fleet.record.name.is_empty() && !fleet.is_taken_down() } else { fleet.serves(name) }
}

/// The port of an address, or of a URL with a path.
pub(super) fn port(text: &str) -> Option<u16> {
    let authority = text.split("://").last()?.split('/').next()?;
    authority.rsplit_once(':')?.1.parse().ok()
}

/// The preferred name for a node, or else the host's with a number, that none of these has.
pub(super) fn node_name(host: &str, preferred: Option<String>, fleets: &[LocalFleet]) -> String {
    let taken = nodes_of(fleets);
    let numbered = (2..).map(|number| format!("{host}.{number}"));
    preferred.into_iter().chain(numbered).find(|node| !taken.contains(node.as_str())).expect("numbers do not end")
}

/// The nodes of their agents, also of one that has not come yet.
pub(super) fn nodes_of(fleets: &[LocalFleet]) -> BTreeSet<&str> {
    let joined = fleets.iter().filter_map(|fleet| fleet.record.joined.as_ref()).map(|agent| agent.node.as_str());
    let attached = fleets.iter().flat_map(|fleet| &fleet.replicas).filter_map(|replica| Some(replica.id.rsplit_once('/')?.0));
    joined.chain(attached).collect()
}

/// UUIDs of the GPUs that this agent's engines may have beside those of others; empty if they need
/// none, or there are none.
///
/// # Errors
/// When all are taken, or one that the settings name.
pub(super) async fn free_gpus(config: &AgentConfig, engine: &EngineProgram, fleets: &[LocalFleet]) -> anyhow::Result<Vec<String>> {
    let needs_gpus = match engine {
        EngineProgram::Vllm { .. } => true,
        EngineProgram::Simulated { .. } => !config.nvml_lib.as_os_str().is_empty(),
        EngineProgram::Attached { .. } => false,
    };
    if !needs_gpus {
        return Ok(Vec::new());
    }
    match hostler_agent::find_gpus(config).await? {
        Ok(gpus) => choose_free(&gpus, !config.gpus.is_empty(), fleets),
        Err(_) => Ok(Vec::new()),
    }
}

/// Those of these GPUs that nobody has. `are_named` if the settings name them.
fn choose_free(gpus: &[Gpu], are_named: bool, fleets: &[LocalFleet]) -> anyhow::Result<Vec<String>> {
    let holder = |gpu: &Gpu| fleets.iter().find(|fleet| gpus_of(fleet).any(|uuid| uuid == gpu.uuid));
    let taken: Vec<String> = gpus.iter().filter_map(|gpu| Some(format!("GPU {} by {}", gpu.index, holder(gpu)?.describe()))).collect();
    let free: Vec<String> = gpus.iter().filter(|gpu| holder(gpu).is_none()).map(|gpu| gpu.uuid.clone()).collect();
    let advice = "`hostler down` ends one of them; started again with --gpus 0 or --replicas 1 it leaves room";
    ensure!(!free.is_empty(), "all GPUs are taken: {}; {advice}", taken.join(", "));
    ensure!(!are_named || taken.is_empty(), "agent.gpus names GPUs that are taken: {}; {advice}", taken.join(", "));
    Ok(free)
}

/// UUIDs of the GPUs that one has: those of its replicas, and what it was given before its agent
/// has come.
fn gpus_of(fleet: &LocalFleet) -> impl Iterator<Item = &str> {
    let given = fleet.record.joined.iter().flat_map(|JoinedAgent { gpus, .. }| gpus).filter(|_| fleet.replicas.is_empty());
    let holding = fleet.replicas.iter().filter(|replica| replica.phase() != Phase::Stopped);
    let used = holding.flat_map(|replica| replica.state.iter()).flat_map(|state| &state.gpus).map(|gpu| &gpu.uuid);
    given.chain(used).map(String::as_str)
}

#[cfg(test)]
mod tests;
