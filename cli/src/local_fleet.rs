//! Models of one machine, each served by a running `hostler up` without jobs: which there are, what
//! they serve, and how they are waited for and ended.
//!
//! The first `hostler up` has a router. Others join it, each with an agent of its own.

mod end;
mod log_file;
mod record;
mod wait;

use anyhow::bail;
use hostler_proto::fleet::v1::{FleetFinding, ListResponse, Node, Replica};

use crate::admin::{connect_to_socket, list_fleet};
use crate::fleet_state::NOTHING_UP;

pub(crate) use self::end::down;
pub(crate) use self::log_file::UpLog;
use self::record::find_records;
pub(crate) use self::record::{JoinedAgent, PublishedRecord, UpRecord, UpRouter};
pub(crate) use self::wait::{LocalWaitError, wait};

/// A running `hostler up` of this user.
#[derive(Debug, Clone)]
pub(crate) struct LocalFleet {
    pub(crate) record: UpRecord,
    /// Replicas of its own agent; of the first one also those of agents that somebody has started
    /// otherwise.
    pub(crate) replicas: Vec<Replica>,
    /// What is wrong about the fleet of its router, as its clients see it; none of one that joined.
    pub(crate) findings: Vec<FleetFinding>,
}

impl LocalFleet {
    /// Such as `tiny (hostler up, process 4711)`.
    pub(crate) fn describe(&self) -> String {
        let models = self.models();
        let name = if self.record.name.is_empty() { "no model yet" } else { &self.record.name };
        let models = if models.is_empty() { name.to_owned() } else { models.join(", ") };
        let simulated = if self.record.is_simulated { "simulated, " } else { "" };
        format!("{models} ({simulated}`hostler up`, process {})", self.record.pid)
    }

    /// Names that clients may use.
    pub(crate) fn models(&self) -> Vec<&str> {
        let mut models: Vec<&str> = self.replicas.iter().flat_map(Replica::model_ids).collect();
        models.sort_unstable();
        models.dedup();
        models
    }

    /// Whether its command or its engines have this name. Engines say theirs only when they answer.
    pub(crate) fn serves(&self, name: &str) -> bool {
        let own = self.record.name.as_str();
        let is_own = own == name || own.rsplit('/').next() == Some(name);
        is_own || self.replicas.iter().any(|replica| replica.model_ids().any(|model| model == name))
    }

    /// Whether its process has the router.
    pub(crate) fn has_router(&self) -> bool {
        self.record.joined.is_none()
    }

    /// Whether both are served by one router.
    pub(crate) fn shares_router(&self, other: &Self) -> bool {
        self.record.router.operators_socket == other.record.router.operators_socket
    }
}

/// Each of them, as a list in a sentence.
pub(crate) fn describe_all(fleets: &[LocalFleet]) -> String {
    fleets.iter().map(LocalFleet::describe).collect::<Vec<_>>().join(", ")
}

/// Finds all of this user's on this host, those with a router first. A router that does not answer
/// has no replicas.
pub(crate) async fn find_local_fleets() -> Vec<LocalFleet> {
    let records = find_records().await;
    let mut found = Vec::new();
    for first in records.iter().filter(|record| record.joined.is_none()) {
        let listed = list(first).await.unwrap_or_default();
        let joined =
            records.iter().filter(|record| record.joined.is_some() && record.router.operators_socket == first.router.operators_socket);
        found.extend(share_out(first, &joined.collect::<Vec<_>>(), listed));
    }
    found
}

async fn list(record: &UpRecord) -> anyhow::Result<ListResponse> {
    list_fleet(&mut connect_to_socket(&record.router.operators_socket).await?).await
}

/// Gives each `hostler up` of a router its own replicas.
fn share_out(first: &UpRecord, joined: &[&UpRecord], listed: ListResponse) -> Vec<LocalFleet> {
    let ListResponse { mut nodes, findings, .. } = listed;
    let replicas = |nodes: Vec<Node>| nodes.into_iter().flat_map(|node| node.replicas).collect();
    let of_joined = joined.iter().map(|record| {
        let own = |node: &mut Node| record.joined.as_ref().is_some_and(|agent| agent.node == node.name);
        LocalFleet { record: (*record).clone(), replicas: replicas(nodes.extract_if(.., own).collect()), findings: Vec::new() }
    });
    let of_joined: Vec<LocalFleet> = of_joined.collect();
    std::iter::once(LocalFleet { record: first.clone(), replicas: replicas(nodes), findings }).chain(of_joined).collect()
}

/// The one that serves this model; without a name, any where all share a router.
///
/// # Errors
/// When there is none, or several and no name chooses.
pub(crate) async fn find_local_fleet(name: Option<&str>) -> anyhow::Result<LocalFleet> {
    let mut fleets = find_local_fleets().await;
    let up = describe_all(&fleets);
    match (name, fleets.len()) {
        (_, 0) => bail!(NOTHING_UP),
        (Some(name), _) => match fleets.into_iter().find(|fleet| fleet.serves(name)) {
            Some(fleet) => Ok(fleet),
            None => bail!("{name} is not up here; up is {up}"),
        },
        (None, _) if fleets.iter().all(|fleet| fleet.shares_router(&fleets[0])) => Ok(fleets.remove(0)),
        (None, several) => bail!("{several} models are up, so name one of them: {up}"),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// One whose process has this number, and whose edge this port.
    pub(crate) fn fleet(number: i32, replicas: Vec<Replica>) -> LocalFleet {
        let record = record::tests::record(number, format!("/run/router-{number}.sock").as_ref());
        LocalFleet { record, replicas, findings: Vec::new() }
    }

    /// One beside `first`, with an agent of this node.
    pub(crate) fn joined(number: i32, first: &LocalFleet, name: &str, replicas: Vec<Replica>) -> LocalFleet {
        let agent = JoinedAgent { node: format!("n0.{name}"), gpus: Vec::new() };
        let mut beside = fleet(number, replicas);
        (beside.record.name, beside.record.joined) = (name.to_owned(), Some(agent));
        beside.record.router.clone_from(&first.record.router);
        beside
    }

    #[test]
    fn each_up_of_a_router_has_the_replicas_of_its_own_node() {
        let node = |name: &str| Node {
            name: name.into(),
            replicas: vec![Replica { id: format!("{name}/0"), ..Replica::default() }],
            ..Node::default()
        };
        let first = fleet(7, Vec::new());
        let (b, c) = (joined(8, &first, "b", Vec::new()), joined(9, &first, "c", Vec::new()));
        let shared = share_out(
            &first.record,
            &[&b.record, &c.record],
            ListResponse { nodes: vec![node("n0"), node("n0.b"), node("other")], ..ListResponse::default() },
        );
        let ids: Vec<Vec<&str>> = shared.iter().map(|up| up.replicas.iter().map(|replica| replica.id.as_str()).collect()).collect();
        assert_eq!(ids, [vec!["n0/0", "other/0"], vec!["n0.b/0"], vec![]], "the agent of the third has not come yet");
    }

    #[test]
    fn a_name_is_known_before_the_engines_answer() {
        let mut loading = fleet(7, Vec::new());
        loading.record.name = "Qwen/Qwen3-8B".into();
        assert!(loading.serves("Qwen/Qwen3-8B") && loading.serves("Qwen3-8B") && !loading.serves("Qwen") && !loading.serves(""));
        assert_eq!(loading.describe(), "Qwen/Qwen3-8B (`hostler up`, process 7)");
    }

    #[test]
    fn a_fleet_without_an_answering_engine_says_so() {
        let mut starting = fleet(7, vec![Replica::default()]);
        assert_eq!(starting.describe(), "no model yet (`hostler up`, process 7)");
        starting.record.is_simulated = true;
        assert_eq!(starting.describe(), "no model yet (simulated, `hostler up`, process 7)");
    }
}
