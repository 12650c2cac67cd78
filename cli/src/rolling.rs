//! `hostler restart --rolling`: one replica after another is restarted, each when the one before it serves again, so that users notice nothing.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use hostler_proto::agent::v1::{Phase, Progress};
use hostler_proto::fleet::v1 as wire;

use crate::admin::{AdminArgs, Calls, connect, said};
use crate::output::say;

/// How often the replica that restarts is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// Every replica of the fleet, as a target.
const ALL: &str = "all";

/// What to restart, and how patiently.
#[derive(Debug)]
pub(crate) struct Rolling<'a> {
    /// A node, a replica, or `all`.
    pub(crate) target: &'a str,
    /// Restart even the only replica that serves a model.
    pub(crate) force: bool,
    /// How long one replica may take to serve again.
    pub(crate) wait: Duration,
    /// Which router is asked.
    pub(crate) admin: &'a AdminArgs,
}

/// A replica, as far as a rolling restart looks at it.
#[derive(Debug, Clone, PartialEq)]
struct Seen {
    id: String,
    node: String,
    epoch: u64,
    phase: Phase,
    /// Its agent is connected and reports.
    heard: bool,
    models: Vec<String>,
    reason: String,
    progress: Option<Progress>,
}

/// What to do with a replica whose turn it is.
#[derive(Debug, PartialEq, Eq)]
enum Turn {
    /// Restart it; this is the life to end.
    Restart(u64),
    /// It does not serve, so there is nothing to roll; the words say so.
    Leave(String),
    /// Nothing more may be restarted.
    Refuse(String),
}

/// What has become of a replica that was told to restart.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Back,
    Failed(String),
    /// Not yet, and what it does.
    Coming(String),
}

/// Restarts the target's replicas, one at a time.
pub(crate) async fn restart(rolling: &Rolling<'_>) -> anyhow::Result<()> {
    let mut fleet = connect(rolling.admin).await?;
    let ids = chosen(&list(&mut fleet).await?, rolling.target)?;
    let mut restarted = 0;
    for (index, id) in ids.iter().enumerate() {
        match turn(&list(&mut fleet).await?, id, rolling.force) {
            Turn::Leave(words) => say(&words),
            Turn::Refuse(words) => bail!("{words}{}", untouched(&ids[index..])),
            Turn::Restart(epoch) => {
                let begun = Instant::now();
                fleet.restart(wire::TargetRequest { target: id.clone() }).await.map_err(said)?;
                let back = follow(&mut fleet, id, epoch, rolling.wait).await;
                back.with_context(|| format!("the rolling restart stops at {id}{}", untouched(&ids[index + 1..])))?;
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

/// Waits until the replica serves again, telling what it does meanwhile.
async fn follow(fleet: &mut Calls, id: &str, epoch: u64, wait: Duration) -> anyhow::Result<()> {
    let deadline = Instant::now() + wait;
    let mut told = String::new();
    while Instant::now() < deadline {
        // A router that does not answer now may the next time.
        if let Ok(replicas) = list(fleet).await {
            match outcome(replicas.iter().find(|replica| replica.id == id), epoch) {
                Outcome::Back => return Ok(()),
                Outcome::Failed(reason) => bail!("{reason}"),
                Outcome::Coming(words) if words != told => {
                    say(&format!("{id}: {words}"));
                    told = words;
                }
                Outcome::Coming(_) => {}
            }
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
    bail!("it does not serve again within {} (--wait); last seen: {told}", humantime::format_duration(wait))
}

async fn list(fleet: &mut Calls) -> anyhow::Result<Vec<Seen>> {
    let nodes = fleet.list(wire::ListRequest {}).await.map_err(said)?.into_inner().nodes;
    let seen = |node: wire::Node| {
        let wire::Node { name, attached, replicas, .. } = node;
        replicas.into_iter().map(move |replica| seen(&name, attached, replica))
    };
    Ok(nodes.into_iter().flat_map(seen).collect())
}

fn seen(node: &str, attached: bool, replica: wire::Replica) -> Seen {
    let state = replica.state.unwrap_or_default();
    Seen {
        id: replica.id,
        node: node.to_owned(),
        epoch: replica.epoch,
        phase: state.phase(),
        heard: attached && !replica.suspect,
        models: state.models.into_iter().map(|model| model.id).collect(),
        reason: state.reason.lines().next().unwrap_or_default().to_owned(),
        progress: state.progress,
    }
}

/// The replicas that a target means.
fn chosen(fleet: &[Seen], target: &str) -> anyhow::Result<Vec<String>> {
    let ids: Vec<String> = fleet
        .iter()
        .filter(|replica| target == ALL || replica.id == target || replica.node == target)
        .map(|replica| replica.id.clone())
        .collect();
    if ids.is_empty() {
        let known: Vec<&str> = fleet.iter().map(|replica| replica.id.as_str()).collect();
        let known = if known.is_empty() { "there are none yet".to_owned() } else { known.join(", ") };
        bail!("no node or replica is called {target:?}; replicas: {known}");
    }
    Ok(ids)
}

fn serves(replica: &Seen) -> bool {
    replica.heard && replica.phase == Phase::Ready
}

/// What to do now with a replica.
fn turn(fleet: &[Seen], id: &str, force: bool) -> Turn {
    let Some(replica) = fleet.iter().find(|replica| replica.id == id) else {
        return Turn::Leave(format!("{id}: left alone, it is gone"));
    };
    if !serves(replica) {
        let phase = if replica.heard { replica.phase.word() } else { "out of reach" };
        return Turn::Leave(format!("{id}: left alone, it is {phase}"));
    }
    let lonely =
        replica.models.iter().find(|model| !fleet.iter().any(|other| other.id != id && serves(other) && other.models.contains(model)));
    match lonely {
        Some(model) if !force => Turn::Refuse(format!(
            "{id} is the only ready replica of {model}, and a restart would interrupt it: start another replica first, or say --force"
        )),
        _ => Turn::Restart(replica.epoch),
    }
}

/// What has become of a replica whose life `epoch` was to end.
fn outcome(replica: Option<&Seen>, epoch: u64) -> Outcome {
    let Some(replica) = replica.filter(|replica| replica.heard) else {
        return Outcome::Coming("its agent does not report".to_owned());
    };
    match replica.phase {
        Phase::Ready | Phase::Sleeping if replica.epoch > epoch => Outcome::Back,
        // It had crashed before it was told to restart, which ends its pause.
        Phase::Failed if replica.epoch == epoch => Outcome::Coming("about to start again after a crash".to_owned()),
        Phase::Failed | Phase::Quarantined | Phase::Stopped => Outcome::Failed(format!("{}: {}", replica.phase.word(), replica.reason)),
        Phase::Ready => Outcome::Coming("about to be drained".to_owned()),
        phase => Outcome::Coming(match &replica.progress {
            Some(progress) => format!("{}, {} ({} %)", phase.word(), progress.stage, progress.percent),
            None => phase.word().to_owned(),
        }),
    }
}

fn untouched(ids: &[String]) -> String {
    if ids.is_empty() { String::new() } else { format!("; not restarted: {}", ids.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replica(id: &str, phase: Phase) -> Seen {
        Seen {
            id: id.to_owned(),
            node: id.split('/').next().unwrap().to_owned(),
            epoch: 5,
            phase,
            heard: true,
            models: vec!["m".to_owned()],
            reason: "why".to_owned(),
            progress: None,
        }
    }

    #[test]
    fn a_target_is_a_node_a_replica_or_all() {
        let fleet = ["a/0", "a/1", "b/0"].map(|id| replica(id, Phase::Ready));
        assert_eq!(chosen(&fleet, "a").unwrap(), ["a/0", "a/1"]);
        assert_eq!(chosen(&fleet, "b/0").unwrap(), ["b/0"]);
        assert_eq!(chosen(&fleet, "all").unwrap(), ["a/0", "a/1", "b/0"]);
        let refused = chosen(&fleet, "c").unwrap_err().to_string();
        assert_eq!(refused, "no node or replica is called \"c\"; replicas: a/0, a/1, b/0");
    }

    #[test]
    fn only_a_replica_that_leaves_its_model_served_is_restarted() {
        let mut fleet = [replica("a/0", Phase::Ready), replica("a/1", Phase::Ready)];
        assert_eq!(turn(&fleet, "a/0", false), Turn::Restart(5));
        fleet[0].models.push("adapter".to_owned());
        assert!(matches!(turn(&fleet, "a/0", false), Turn::Refuse(words) if words.contains("only ready replica of adapter")));
        assert_eq!(turn(&fleet, "a/0", true), Turn::Restart(5));
        fleet[1].phase = Phase::Loading;
        fleet[0].models.pop();
        assert!(matches!(turn(&fleet, "a/0", false), Turn::Refuse(_)));
        assert!(matches!(turn(&fleet, "a/1", true), Turn::Leave(words) if words.contains("loading")));
        (fleet[1].phase, fleet[1].heard) = (Phase::Ready, false);
        assert!(matches!(turn(&fleet, "a/0", false), Turn::Refuse(_)));
    }

    #[test]
    fn a_replica_is_back_when_another_life_of_it_serves() {
        let now = |phase, epoch| outcome(Some(&Seen { epoch, ..replica("a/0", phase) }), 5);
        assert!(matches!(now(Phase::Ready, 5), Outcome::Coming(_)));
        assert!(matches!(now(Phase::Loading, 6), Outcome::Coming(_)));
        assert_eq!(now(Phase::Ready, 6), Outcome::Back);
        assert!(matches!(now(Phase::Failed, 5), Outcome::Coming(_)));
        assert_eq!(now(Phase::Failed, 6), Outcome::Failed("failed: why".to_owned()));
        assert!(matches!(outcome(None, 5), Outcome::Coming(_)));
    }
}
