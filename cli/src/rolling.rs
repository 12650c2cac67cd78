//! `hostler restart --rolling`: restarts one replica after another, each when the one before it
//! serves again, so users notice nothing.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use hostler_proto::agent::v1::Phase;
use hostler_proto::fleet::v1::{ListResponse, Node, Replica, TargetRequest};

use crate::admin::{AdminArgs, AdminClient, connect, list_fleet, status_error};
use crate::output::say;

/// How often the restarting replica is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

const ALL: &str = "all";

#[derive(Debug)]
pub(crate) struct Rolling<'a> {
    pub(crate) target: &'a str,
    pub(crate) force: bool,
    pub(crate) wait: Duration,
    pub(crate) admin: &'a AdminArgs,
}

/// Decision about the next replica.
#[derive(Debug, PartialEq, Eq)]
enum RestartDecision {
    /// Restart the replica and end this life.
    Restart(u64),
    /// Skip the replica, which does not serve, for this reason.
    Skip(String),
    /// Restart nothing more.
    Refuse(String),
}

/// Outcome for a replica that was told to restart.
#[derive(Debug, PartialEq, Eq)]
enum RestartOutcome {
    Ready,
    Failed(String),
    /// Not restarted yet; this is its present state.
    Pending(String),
}

pub(crate) async fn restart(rolling: &Rolling<'_>) -> anyhow::Result<()> {
    let mut fleet = connect(rolling.admin).await?;
    let ids = select_targets(&list_fleet(&mut fleet).await?, rolling.target)?;
    let mut restarted = 0;
    for (index, id) in ids.iter().enumerate() {
        match decide(&list_fleet(&mut fleet).await?, id, rolling.force) {
            RestartDecision::Skip(words) => say(&words),
            RestartDecision::Refuse(words) => bail!("{words}{}", unrestarted_note(&ids[index..])),
            RestartDecision::Restart(epoch) => {
                let begun = Instant::now();
                fleet.restart(TargetRequest { target: id.clone() }).await.map_err(status_error)?;
                let back = wait_until_ready(&mut fleet, id, epoch, rolling.wait).await;
                back.with_context(|| format!("the rolling restart stops at {id}{}", unrestarted_note(&ids[index + 1..])))?;
                restarted += 1;
                say(&format!("{id}: ready again after {:.1} s ({} of {})", begun.elapsed().as_secs_f32(), index + 1, ids.len()));
            }
        }
    }
    if restarted == 0 {
        bail!("nothing was restarted: none of {} is ready", ids.join(", "));
    }
    Ok(())
}

/// Waits until the replica serves again, and reports what it does meanwhile.
async fn wait_until_ready(fleet: &mut AdminClient, id: &str, epoch: u64, wait: Duration) -> anyhow::Result<()> {
    let deadline = Instant::now() + wait;
    let mut printed = String::new();
    while Instant::now() < deadline {
        // A router that does not answer now may answer next time.
        if let Ok(listed) = list_fleet(fleet).await {
            match outcome(listed.find_replica(id), epoch) {
                RestartOutcome::Ready => return Ok(()),
                RestartOutcome::Failed(reason) => bail!("{reason}"),
                RestartOutcome::Pending(words) if words != printed => {
                    say(&format!("{id}: {words}"));
                    printed = words;
                }
                RestartOutcome::Pending(_) => {}
            }
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    bail!("it does not serve again within {} (--wait); last seen: {printed}", humantime::format_duration(wait))
}

/// Replicas that a target names.
fn select_targets(fleet: &ListResponse, target: &str) -> anyhow::Result<Vec<String>> {
    let is_meant = |(node, replica): &(&Node, &Replica)| target == ALL || replica.id == target || node.name == target;
    let ids: Vec<String> = fleet.replicas().filter(is_meant).map(|(_, replica)| replica.id.clone()).collect();
    if ids.is_empty() {
        let known: Vec<&str> = fleet.replicas().map(|(_, replica)| replica.id.as_str()).collect();
        let known = if known.is_empty() { "there are none yet".to_owned() } else { known.join(", ") };
        bail!("no node or replica is called {target:?}; replicas: {known}");
    }
    Ok(ids)
}

/// Whether the replica's agent is connected and reports.
fn is_connected((node, replica): (&Node, &Replica)) -> bool {
    node.attached && !replica.suspect
}

fn serves((node, replica): (&Node, &Replica)) -> bool {
    node.attached && replica.is_ready()
}

/// Decides about the next replica.
fn decide(fleet: &ListResponse, id: &str, force: bool) -> RestartDecision {
    let Some((node, replica)) = fleet.find_replica(id) else {
        return RestartDecision::Skip(format!("{id}: left alone, it is gone"));
    };
    if !serves((node, replica)) {
        let phase = if is_connected((node, replica)) { replica.phase().as_str() } else { "out of reach" };
        return RestartDecision::Skip(format!("{id}: left alone, it is {phase}"));
    }
    match find_unserved_model(fleet, &[id.to_owned()]) {
        Some(model) if !force => RestartDecision::Refuse(format!(
            "{id} is the only ready replica of {model}, and a restart would interrupt it: start another replica first, or say --force"
        )),
        _ => RestartDecision::Restart(replica.epoch),
    }
}

/// A model that is served now, but would not be without these replicas.
fn find_unserved_model<'a>(fleet: &'a ListResponse, without: &[String]) -> Option<&'a str> {
    let serving = fleet.replicas().filter(|found| serves(*found)).map(|(_, replica)| replica);
    let (leaving, staying): (Vec<&Replica>, Vec<&Replica>) = serving.partition(|replica| without.contains(&replica.id));
    let mut models = leaving.into_iter().flat_map(Replica::model_ids);
    models.find(|model| !staying.iter().any(|other| other.model_ids().any(|served| served == *model)))
}

/// Fails if a model would be left without a ready replica.
pub(crate) async fn check_models_stay_served(fleet: &mut AdminClient, target: &str) -> anyhow::Result<()> {
    let fleet = list_fleet(fleet).await?;
    // The router has a better error for a missing target.
    let Ok(ids) = select_targets(&fleet, target) else { return Ok(()) };
    match find_unserved_model(&fleet, &ids) {
        Some(model) => bail!("nobody would serve {model} without {target}: start another replica first, or say --force"),
        None => Ok(()),
    }
}

fn outcome(found: Option<(&Node, &Replica)>, epoch: u64) -> RestartOutcome {
    let Some((_, replica)) = found.filter(|found| is_connected(*found)) else {
        return RestartOutcome::Pending("its agent does not report".to_owned());
    };
    let phase = replica.phase();
    match phase {
        Phase::Ready | Phase::Sleeping if replica.epoch > epoch => RestartOutcome::Ready,
        // The engine had crashed before the restart was ordered, which ends its pause.
        Phase::Failed if replica.epoch == epoch => RestartOutcome::Pending("about to start again after a crash".to_owned()),
        Phase::Failed | Phase::Quarantined | Phase::Stopped => {
            RestartOutcome::Failed(format!("{}: {}", phase.as_str(), replica.first_reason()))
        }
        Phase::Ready => RestartOutcome::Pending("about to be drained".to_owned()),
        _ => RestartOutcome::Pending(match &replica.state().progress {
            Some(progress) => format!("{}, {} ({} %)", phase.as_str(), progress.stage, progress.percent),
            None => phase.as_str().to_owned(),
        }),
    }
}

fn unrestarted_note(ids: &[String]) -> String {
    if ids.is_empty() { String::new() } else { format!("; not restarted: {}", ids.join(", ")) }
}

#[cfg(test)]
mod tests {
    use hostler_proto::agent::v1::{Model, ReplicaState};

    use super::*;

    fn replica(id: &str, phase: Phase) -> Replica {
        let state = ReplicaState { phase: phase.into(), models: vec![model("m")], reason: "why".to_owned(), ..ReplicaState::default() };
        Replica { id: id.to_owned(), epoch: 5, state: Some(state), ..Replica::default() }
    }

    fn model(id: &str) -> Model {
        Model { id: id.to_owned(), ..Model::default() }
    }

    /// Ready replicas, each of the node that its name begins with.
    fn fleet(ids: &[&str]) -> ListResponse {
        let node = |id: &&str| Node {
            name: id.split('/').next().unwrap().to_owned(),
            attached: true,
            replicas: vec![replica(id, Phase::Ready)],
            ..Node::default()
        };
        ListResponse { nodes: ids.iter().map(node).collect(), ..ListResponse::default() }
    }

    fn state(fleet: &mut ListResponse, index: usize) -> &mut ReplicaState {
        fleet.nodes[index].replicas[0].state.as_mut().unwrap()
    }

    #[test]
    fn a_restart_target_is_a_node_replica_or_all() {
        let fleet = fleet(&["a/0", "a/1", "b/0"]);
        assert_eq!(select_targets(&fleet, "a").unwrap(), ["a/0", "a/1"]);
        assert_eq!(select_targets(&fleet, "b/0").unwrap(), ["b/0"]);
        assert_eq!(select_targets(&fleet, "all").unwrap(), ["a/0", "a/1", "b/0"]);
        let refused = select_targets(&fleet, "c").unwrap_err().to_string();
        assert_eq!(refused, "no node or replica is called \"c\"; replicas: a/0, a/1, b/0");
    }

    #[test]
    fn a_restart_needs_another_replica_to_serve_the_model() {
        let mut fleet = fleet(&["a/0", "a/1"]);
        assert_eq!(decide(&fleet, "a/0", false), RestartDecision::Restart(5));
        state(&mut fleet, 0).models.push(model("adapter"));
        assert!(matches!(decide(&fleet, "a/0", false), RestartDecision::Refuse(words) if words.contains("only ready replica of adapter")));
        assert_eq!(decide(&fleet, "a/0", true), RestartDecision::Restart(5));
        state(&mut fleet, 1).set_phase(Phase::Loading);
        state(&mut fleet, 0).models.pop();
        assert!(matches!(decide(&fleet, "a/0", false), RestartDecision::Refuse(_)));
        assert!(matches!(decide(&fleet, "a/1", true), RestartDecision::Skip(words) if words.contains("loading")));
        state(&mut fleet, 1).set_phase(Phase::Ready);
        fleet.nodes[1].attached = false;
        assert!(matches!(decide(&fleet, "a/0", false), RestartDecision::Refuse(_)));
    }

    #[test]
    fn a_model_is_unserved_when_all_its_ready_replicas_leave() {
        let mut fleet = fleet(&["a/0", "a/1", "b/0"]);
        let leaving = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>();
        assert_eq!(find_unserved_model(&fleet, &leaving(&["a/0", "a/1"])), None);
        assert_eq!(find_unserved_model(&fleet, &leaving(&["a/0", "a/1", "b/0"])), Some("m"));
        state(&mut fleet, 2).set_phase(Phase::Draining);
        assert_eq!(find_unserved_model(&fleet, &leaving(&["a/0", "a/1"])), Some("m"));
        assert_eq!(find_unserved_model(&fleet, &leaving(&["b/0"])), None, "which does not serve");
    }

    #[test]
    fn a_replica_is_back_when_another_life_of_it_serves() {
        let node = Node { attached: true, ..Node::default() };
        let now = |phase, epoch| outcome(Some((&node, &Replica { epoch, ..replica("a/0", phase) })), 5);
        assert!(matches!(now(Phase::Ready, 5), RestartOutcome::Pending(_)));
        assert!(matches!(now(Phase::Loading, 6), RestartOutcome::Pending(_)));
        assert_eq!(now(Phase::Ready, 6), RestartOutcome::Ready);
        assert!(matches!(now(Phase::Failed, 5), RestartOutcome::Pending(_)));
        assert_eq!(now(Phase::Failed, 6), RestartOutcome::Failed("failed: why".to_owned()));
        assert!(matches!(outcome(None, 5), RestartOutcome::Pending(_)));
    }
}
