//! A replica over several nodes: one engine of which each node runs a part, under an agent of its
//! own.
//!
//! The agent of node 0 is the head. It supervises its own part as any engine, serves the routers,
//! and decides when an epoch begins and ends. The agents of the other nodes are members: each holds
//! one connection to the head and starts and kills its part as the head says (`crate::member`).
//! `roster` decides (pure), `head` waits and sends, `wire` is the protocol, `setup` compares the
//! nodes.

pub(crate) mod address;
pub(crate) mod beat;
mod head;
mod roster;
pub(crate) mod setup;
pub(crate) mod wire;

use std::time::Duration;

use self::address::HeadAddress;
pub(crate) use self::head::{Gang, GangSettings, MemberOutput};
pub(crate) use self::roster::{FarActivity, Loss, MemberView};
use crate::config::{AgentConfig, IfAgentDies};
use crate::job::{self, Job};

/// Most nodes of one replica.
const MAX_NODES: u32 = 64;

/// Folder of the heads' addresses, beside the file that names the router.
const HEADS: &str = "heads";

/// Place of an agent in a replica over several nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GangPlace {
    /// Nodes of the replica, at least two.
    pub(crate) nodes: u32,
    /// Number of this node; the head is 0.
    pub(crate) number: u32,
    pub(crate) head: HeadAddress,
    pub(crate) lease: Duration,
}

/// Settings that do not go together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GangSettingsError {
    #[error("--member {0} is the number of a node in a replica over several nodes: say over how many with --nodes-per-replica")]
    MemberAlone(u32),
    #[error("--member {number}: the nodes of a replica over {nodes} have the numbers 0, which is the head, to {}", nodes - 1)]
    NoSuchMember { number: u32, nodes: u32 },
    #[error("--nodes-per-replica {0}: a replica has {MAX_NODES} nodes at most")]
    TooManyNodes(u32),
    #[error(
        "a replica over several nodes needs a place where their agents meet: name it with --head HOST:PORT, the address of node 0, or with --head-file FILE on a file system of all nodes"
    )]
    NoHead,
    #[error("a replica over several nodes is all that its nodes serve: leave out {0}")]
    Excluded(&'static str),
    #[error("{0}")]
    Interface(String),
}

/// The settings with what a batch job says of this node's place in a replica over several.
///
/// Each node of a job runs the same command line, so its number is the scheduler's, and the head's
/// address stands in a file of the fleet's folder.
pub(crate) fn settle(mut config: AgentConfig, job: Option<&Job>, variable: impl Fn(&str) -> Option<String>) -> AgentConfig {
    let Some(job) = job.filter(|_| config.nodes_per_replica > 1) else { return config };
    if config.member == 0 {
        config.member = job::host_number(job.scheduler, variable).unwrap_or(0);
    }
    if config.head.is_empty()
        && config.head_file.as_os_str().is_empty()
        && let Some(folder) = config.router_file.parent().filter(|folder| !folder.as_os_str().is_empty())
    {
        config.head_file = folder.join(HEADS).join(format!("{}.json", job.id.replace('/', "_")));
    }
    config
}

/// Whether the settings spread a replica over several nodes.
///
/// # Errors
/// When they cannot, wherever the nodes are.
pub fn check_spread(config: &AgentConfig) -> Result<bool, GangSettingsError> {
    let (nodes, number) = (config.nodes_per_replica, config.member);
    if nodes <= 1 {
        return if number == 0 { Ok(false) } else { Err(GangSettingsError::MemberAlone(number)) };
    }
    if nodes > MAX_NODES {
        return Err(GangSettingsError::TooManyNodes(nodes));
    }
    if number >= nodes {
        return Err(GangSettingsError::NoSuchMember { number, nodes });
    }
    let excluded = [
        ("--attach", !config.attach.is_empty()),
        ("--replicas", config.replicas > 1),
        ("--standby", config.standby),
        ("--if-agent-dies keep", config.if_agent_dies == IfAgentDies::Keep),
    ];
    match excluded.into_iter().find(|(_, is_given)| *is_given) {
        Some((what, _)) => Err(GangSettingsError::Excluded(what)),
        None => Ok(true),
    }
}

impl GangPlace {
    /// The place that the settings give; `None` if each replica has one node.
    ///
    /// # Errors
    /// When settings do not go together.
    pub(crate) fn of(config: &AgentConfig) -> Result<Option<Self>, GangSettingsError> {
        if !check_spread(config)? {
            return Ok(None);
        }
        let (nodes, number) = (config.nodes_per_replica, config.member);
        if !config.replica_interface.is_empty() {
            address::address_of(&config.replica_interface).map_err(GangSettingsError::Interface)?;
        }
        let head = HeadAddress::of(config).ok_or(GangSettingsError::NoHead)?;
        Ok(Some(Self { nodes, number, head, lease: config.member_lease }))
    }

    pub(crate) fn is_head(&self) -> bool {
        self.number == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(change: impl Fn(&mut AgentConfig)) -> Result<Option<GangPlace>, String> {
        let mut config = AgentConfig { nodes_per_replica: 2, head: "n1:8010".into(), ..AgentConfig::default() };
        change(&mut config);
        GangPlace::of(&config).map_err(|error| error.to_string())
    }

    #[test]
    fn settings_give_an_agent_its_place() {
        assert_eq!(place(|config| config.nodes_per_replica = 1), Ok(None));
        assert!(place(|_| {}).unwrap().unwrap().is_head());
        assert_eq!(place(|config| config.member = 1).unwrap().unwrap().number, 1);
    }

    #[test]
    fn settings_that_do_not_go_together_are_refused_with_what_to_do() {
        let refused = |change: fn(&mut AgentConfig), word: &str| {
            let said = place(change).unwrap_err();
            assert!(said.contains(word), "{said}");
        };
        refused(|config| (config.nodes_per_replica, config.member) = (0, 1), "--nodes-per-replica");
        refused(|config| config.member = 2, "0, which is the head, to 1");
        refused(|config| config.nodes_per_replica = 65, "64");
        refused(|config| config.head.clear(), "--head-file");
        refused(|config| config.replicas = 2, "--replicas");
        refused(|config| config.standby = true, "--standby");
        refused(|config| config.replica_interface = "none7".into(), "none7");
    }
}
