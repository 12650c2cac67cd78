//! Models of one machine, each served by a running `hostler up` without jobs: which there are, what
//! they serve, and how they are waited for and ended.
//!
//! The first `hostler up` has a router. Others join it, each with an agent of its own.

mod conflict;
mod end;
mod log_file;
mod others;
mod turn;
mod wait;

use std::time::Duration;

use anyhow::bail;
use hostler_proto::agent::v1::Phase;
use hostler_proto::fleet::v1::{FleetFinding, ListResponse, Node, Replica};
use tokio::time::timeout;

use crate::admin::{connect_to_socket, list_fleet};
use crate::suspension::describe_suspension;
use crate::up_record::{UpRecord, find_records};

pub(crate) use self::conflict::explain_conflict;
pub(crate) use self::end::down;
pub(crate) use self::log_file::{UpLog, keep_bounded};
pub(crate) use self::others::{OtherRouter, describe_nothing_up, find_other_routers};
pub(crate) use self::turn::UpTurn;
pub(crate) use self::wait::{LocalWaitError, wait};

/// Deadline of a router of this host for saying what it serves.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);

/// A running `hostler up` of this user.
#[derive(Debug, Clone)]
pub(crate) struct LocalFleet {
    pub(crate) record: UpRecord,
    /// Replicas of its own agent; of the first one also those of agents that somebody has started
    /// otherwise.
    pub(crate) replicas: Vec<Replica>,
    /// What is wrong about the fleet of its router, as its clients see it; none of one that joined.
    pub(crate) findings: Vec<FleetFinding>,
    /// Why its process, or its router, does not answer, and what to do.
    pub(crate) silence: Option<String>,
}

impl LocalFleet {
    /// Such as `tiny (hostler up, process 4711)`.
    pub(crate) fn describe(&self) -> String {
        let models = self.models();
        let name = if self.record.name.is_empty() { "no model yet" } else { &self.record.name };
        let models = if models.is_empty() { name.to_owned() } else { models.join(", ") };
        let state = if self.record.is_leaving {
            "leaving, "
        } else if self.is_taken_down() {
            "taken down, "
        } else {
            ""
        };
        let simulated = if self.record.is_simulated { "simulated, " } else { "" };
        format!("{models} ({state}{simulated}`hostler up`, process {})", self.record.pid)
    }

    /// Names that clients may use.
    pub(crate) fn models(&self) -> Vec<&str> {
        let mut models: Vec<&str> = self.replicas.iter().filter(|replica| !is_stopped(replica)).flat_map(Replica::model_ids).collect();
        models.sort_unstable();
        models.dedup();
        models
    }

    /// Whether its command or its engines have this name. Engines say theirs only when they answer.
    pub(crate) fn serves(&self, name: &str) -> bool {
        let own = self.record.name.as_str();
        let is_own = own == name || own.rsplit('/').next() == Some(name);
        !self.is_taken_down() && (is_own || self.replicas.iter().any(|replica| replica.model_ids().any(|model| model == name)))
    }

    /// Whether a person means it by this word: a name that it serves, or the number of its process.
    fn is_called(&self, word: &str) -> bool {
        self.serves(word) || self.record.pid.to_string() == word
    }

    /// Whether its engines were stopped on purpose, and its process goes on as the router of
    /// others.
    pub(crate) fn is_taken_down(&self) -> bool {
        self.has_router() && !self.replicas.is_empty() && self.replicas.iter().all(is_stopped)
    }

    /// Whether its process has the router.
    pub(crate) fn has_router(&self) -> bool {
        self.record.joined.is_none()
    }

    /// Without the replicas of other agents, as far as its own node is known.
    pub(crate) fn with_own_replicas(mut self) -> Self {
        let prefix = format!("{}/", self.record.node);
        self.replicas.retain(|replica| self.record.node.is_empty() || replica.id.starts_with(&prefix));
        self
    }

    /// Whether both are served by one router.
    pub(crate) fn shares_router(&self, other: &Self) -> bool {
        self.record.router.operators_socket == other.record.router.operators_socket
    }
}

fn is_stopped(replica: &Replica) -> bool {
    replica.phase() == Phase::Stopped
}

/// Those that are up, as a list in a sentence.
pub(crate) fn describe_all(fleets: &[LocalFleet]) -> String {
    let up: Vec<String> = fleets.iter().filter(|fleet| !fleet.is_taken_down()).map(LocalFleet::describe).collect();
    if up.is_empty() { "no model".to_owned() } else { up.join(", ") }
}

/// Finds all of this user's on this host, those with a router first. A router that does not answer
/// has no replicas.
pub(crate) async fn find_local_fleets() -> Vec<LocalFleet> {
    let records = find_records().await;
    let mut found = Vec::new();
    for first in records.iter().filter(|record| record.joined.is_none()) {
        let (listed, silence) = match list(first).await {
            Ok(listed) => (listed.unwrap_or_default(), None),
            Err(silence) => (ListResponse::default(), Some(silence)),
        };
        let joined =
            records.iter().filter(|record| record.joined.is_some() && record.router.operators_socket == first.router.operators_socket);
        let fleets = share_out(first, &joined.collect::<Vec<_>>(), listed);
        found.extend(fleets.into_iter().map(|fleet| {
            let own = describe_suspension(fleet.record.pid);
            LocalFleet { silence: own.or_else(|| silence.clone()), ..fleet }
        }));
    }
    found
}

/// What a router says; nothing if it has just ended. The error says that it does not answer, and
/// what to do.
async fn list(record: &UpRecord) -> Result<Option<ListResponse>, String> {
    if let Some(silence) = describe_suspension(record.pid) {
        return Err(silence);
    }
    let listed = async { list_fleet(&mut connect_to_socket(&record.router.operators_socket).await?).await };
    match timeout(LIST_TIMEOUT, listed).await {
        Ok(listed) => Ok(listed.ok()),
        Err(_) => Err(format!(
            "the router in process {} takes connections, but has not answered within {}; if it stays so, `hostler down` ends it",
            record.pid,
            humantime::format_duration(LIST_TIMEOUT)
        )),
    }
}

/// Gives each `hostler up` of a router its own replicas.
fn share_out(first: &UpRecord, joined: &[&UpRecord], listed: ListResponse) -> Vec<LocalFleet> {
    let ListResponse { mut nodes, findings, .. } = listed;
    let replicas = |nodes: Vec<Node>| nodes.into_iter().flat_map(|node| node.replicas).collect();
    let of_joined = joined.iter().map(|record| {
        let own = |node: &mut Node| record.joined.as_ref().is_some_and(|agent| agent.node == node.name);
        let own = replicas(nodes.extract_if(.., own).collect());
        LocalFleet { record: (*record).clone(), replicas: own, findings: Vec::new(), silence: None }
    });
    let of_joined: Vec<LocalFleet> = of_joined.collect();
    std::iter::once(LocalFleet { record: first.clone(), replicas: replicas(nodes), findings, silence: None }).chain(of_joined).collect()
}

/// The one that a person means by this word; `None` if there is none.
///
/// # Errors
/// When several have this name.
fn find_called<'a>(fleets: &'a [LocalFleet], word: &str) -> anyhow::Result<Option<&'a LocalFleet>> {
    let called: Vec<&LocalFleet> = fleets.iter().filter(|fleet| fleet.is_called(word)).collect();
    if let [first, _, ..] = called[..] {
        let all: Vec<String> =
            called.iter().map(|fleet| format!("process {} at {}", fleet.record.pid, fleet.record.router.base_url)).collect();
        bail!("{} serve {word}: {}; say the process instead of the name, such as {}", called.len(), all.join(", "), first.record.pid);
    }
    Ok(called.first().copied())
}

/// The one of this name or process; without a word, any where all share a router.
///
/// # Errors
/// When there is none, or several and nothing chooses.
pub(crate) async fn find_local_fleet(word: Option<&str>) -> anyhow::Result<LocalFleet> {
    let mut fleets = find_local_fleets().await;
    let up = describe_all(&fleets);
    match (word, fleets.len()) {
        (_, 0) => bail!(describe_nothing_up().await),
        (Some(word), _) => match find_called(&fleets, word)? {
            Some(fleet) => Ok(fleet.clone()),
            None => bail!("{word} is not up here; up is {up}"),
        },
        (None, _) if fleets.iter().all(|fleet| fleet.shares_router(&fleets[0])) => Ok(fleets.remove(0)),
        (None, several) => bail!("{several} models are up, so name one of them: {up}"),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use hostler_proto::agent::v1::ReplicaState;

    use super::*;
    use crate::up_record::{self, JoinedAgent};

    /// One whose process has this number, and whose edge this port.
    pub(crate) fn fleet(number: i32, replicas: Vec<Replica>) -> LocalFleet {
        let record = up_record::tests::record(number, format!("/run/router-{number}.sock").as_ref());
        LocalFleet { record, replicas, findings: Vec::new(), silence: None }
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
    fn a_name_that_two_have_is_refused_and_the_process_chooses() {
        let mut two = [7, 8].map(|pid| fleet(pid, Vec::new()));
        for fleet in &mut two {
            fleet.record.name = "a".into();
        }
        let refused = find_called(&two, "a").unwrap_err().to_string();
        let both = "process 7 at http://127.0.0.1:7/v1, process 8 at http://127.0.0.1:8/v1";
        assert_eq!(refused, format!("2 serve a: {both}; say the process instead of the name, such as 7"));
        assert_eq!(find_called(&two, "8").unwrap().unwrap().record.pid, 8);
        assert!(find_called(&two, "b").unwrap().is_none());
    }

    #[test]
    fn a_model_that_was_taken_down_is_no_longer_up() {
        let stopped =
            Replica { state: Some(ReplicaState { phase: Phase::Stopped.into(), ..ReplicaState::default() }), ..Replica::default() };
        let mut first = fleet(7, vec![stopped.clone(), stopped.clone()]);
        first.record.name = "Qwen/Qwen3-8B".into();
        assert!(first.is_taken_down() && !first.serves("Qwen3-8B"));
        assert_eq!(first.describe(), "Qwen/Qwen3-8B (taken down, `hostler up`, process 7)");
        // The process of one that has joined has nothing else to do.
        assert!(joined(8, &first, "b", vec![stopped]).serves("b"));
        first.replicas[1].state = None;
        assert!(first.serves("Qwen3-8B"), "one of its engines is left");
    }

    #[test]
    fn a_fleet_without_an_answering_engine_says_so() {
        let mut starting = fleet(7, vec![Replica::default()]);
        assert_eq!(starting.describe(), "no model yet (`hostler up`, process 7)");
        starting.record.is_simulated = true;
        assert_eq!(starting.describe(), "no model yet (simulated, `hostler up`, process 7)");
    }
}
