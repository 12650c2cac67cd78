//! `hostler up --takeover`: takes the place of the `hostler up` of this machine that serves the
//! model.
//!
//! One with a router hands its sockets over (decision 21), and its agent serves the new router. It
//! is told to leave when its own requests have ended and the new engines serve, or wait for its
//! GPUs. So there is always an engine that requests go to or wait for.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use hostler_agent::{AgentConfig, EngineProgram};
use hostler_boot::Settings;
use hostler_proto::fleet::v1::Replica;
use hostler_router::{RouterConfig, RouterPlace};
use tokio::time::sleep;

use super::POLL_INTERVAL;
use super::join::{Wish, free_gpus, is_same, node_name, nodes_of, port};
use crate::admin::{connect_to_socket, list_fleet};
use crate::host_names::this_host;
use crate::local_fleet::LocalFleet;
use crate::up_record::UpRouter;

/// How long the router may take to know this process's engines. The agent asks vLLM for its version
/// first, which took up to 20 s with a cold disk.
const ENGINES_TIMEOUT: Duration = Duration::from_secs(120);

/// The `hostler up` whose place a command takes: the one that serves the model, at the address that
/// the command has for the edge.
///
/// # Errors
/// When several do and no address chooses, or one does at another address.
pub(super) fn find_predecessor<'a>(wish: &Wish<'_>, fleets: &'a [LocalFleet]) -> anyhow::Result<Option<&'a LocalFleet>> {
    let named: Vec<&LocalFleet> = fleets.iter().filter(|fleet| !wish.name.is_empty() && fleet.record.name == wish.name).collect();
    // A name that its command did not say may be one of its model's.
    let serving = if named.is_empty() { fleets.iter().filter(|fleet| is_same(fleet, wish.name)).collect() } else { named };
    let is_there = |fleet: &&LocalFleet| wish.listen.is_none_or(|listen| port(&fleet.record.router.base_url) == port(listen));
    let there: Vec<&LocalFleet> = serving.iter().copied().filter(is_there).collect();
    match (&there[..], wish.listen) {
        ([only], _) => Ok(Some(only)),
        ([], Some(listen)) if !serving.is_empty() => bail!(
            "{} serves this model at {}, and not at {listen}: leave the address out, or leave --takeover out for a router beside it",
            serving[0].describe(),
            serving[0].record.router.base_url
        ),
        ([], _) => Ok(None),
        ([first, ..], _) => bail!(
            "several `hostler up` serve this model, such as {} at {}: --port of one chooses it",
            first.describe(),
            first.record.router.base_url
        ),
    }
}

/// Sets the addresses of the running router where no setting says another one, and where it is
/// found.
pub(super) fn take_addresses(settings: &Settings, config: &mut RouterConfig, running: &UpRouter) {
    let is_given = |key: &str, address: &str| settings.is_set("router", key) && port(address) != Some(0);
    let addresses = [
        ("listen", &mut config.listen, &running.listen),
        ("agents_listen", &mut config.agents_listen, &running.agents),
        ("admin_listen", &mut config.admin_listen, &running.admin),
    ];
    for (key, address, taken) in addresses {
        if !taken.is_empty() && !is_given(key, address) {
            address.clone_from(taken);
        }
    }
    if config.operators_socket.as_os_str().is_empty() {
        config.operators_socket.clone_from(&running.operators_socket);
    }
}

/// Gives the agent a node of its own beside that of its predecessor, and the GPUs that no other
/// `hostler up` has.
///
/// # Errors
/// When the settings name the predecessor's node, or no GPU is left.
pub(super) async fn place_beside(
    config: &mut AgentConfig,
    engine: &EngineProgram,
    predecessor: &LocalFleet,
    fleets: &[LocalFleet],
) -> anyhow::Result<()> {
    ensure!(
        !nodes_of(fleets).contains(config.node.as_str()),
        "agent.node is that of the running one, and both run for a while: leave it out, or take another name"
    );
    let others: Vec<LocalFleet> = fleets.iter().filter(|fleet| fleet.record != predecessor.record).cloned().collect();
    let gpus = if others.is_empty() { Vec::new() } else { free_gpus(config, engine, &others).await? };
    if !gpus.is_empty() {
        config.gpus = gpus.join(",");
    }
    if config.node.is_empty() {
        config.node = node_name(&this_host(), Some(this_host()), fleets);
    }
    Ok(())
}

/// Tells the predecessor to leave, once its own requests have ended and the engines of `node`
/// serve; or are known to the router, where they wait for GPUs of the predecessor.
///
/// # Errors
/// When the router does not come to know them. The predecessor stays then.
pub(super) async fn end_predecessor(predecessor: LocalFleet, node: String, place: Option<RouterPlace>) -> anyhow::Result<()> {
    let words = predecessor.describe();
    if let Some(place) = place {
        place.wait_predecessor_left().await;
    }
    let began = Instant::now();
    loop {
        let listed = async { list_fleet(&mut connect_to_socket(&predecessor.record.router.operators_socket).await?).await }.await;
        let nodes = listed.map(|listed| listed.nodes).unwrap_or_default();
        let own: Vec<Replica> = nodes.into_iter().filter(|known| known.name == node).flat_map(|node| node.replicas).collect();
        if may_leave(&predecessor.replicas, &own) {
            break;
        }
        ensure!(
            !own.is_empty() || began.elapsed() < ENGINES_TIMEOUT,
            "the router has not come to know the engines of this process, so {words} serves on"
        );
        sleep(POLL_INTERVAL).await;
    }
    if predecessor.record.is_process_gone() {
        return Ok(());
    }
    predecessor.ask_to_leave()?;
    tracing::info!(event = "predecessor_leaves", "{words} finishes its requests and ends: its place is taken");
    Ok(())
}

/// Whether these engines, or their start, stand in for those of the predecessor.
fn may_leave(of_predecessor: &[Replica], own: &[Replica]) -> bool {
    let gpus = |replicas: &[Replica]| -> BTreeSet<String> {
        replicas.iter().flat_map(|replica| replica.state.iter()).flat_map(|state| &state.gpus).map(|gpu| gpu.uuid.clone()).collect()
    };
    own.iter().any(Replica::is_ready) && !own.iter().any(Replica::is_coming) || !gpus(own).is_disjoint(&gpus(of_predecessor))
}

#[cfg(test)]
mod tests {
    use hostler_boot::SettingSources;
    use hostler_proto::agent::v1::{Gpu, Phase, ReplicaState};

    use super::*;
    use crate::local_fleet::tests::{fleet, joined};

    #[test]
    fn the_place_is_taken_of_the_one_that_serves_the_model_at_the_address() {
        let mut a = fleet(7, Vec::new());
        a.record.name = "a".into();
        let b = joined(8, &a, "b", Vec::new());
        let mut other = fleet(9, Vec::new());
        other.record.name = "a".into();
        let found = |name, listen, fleets: &[LocalFleet]| {
            find_predecessor(&Wish { name, listen }, fleets)
                .map(|found| found.map(|fleet| fleet.record.pid))
                .map_err(|error| error.to_string())
        };
        let two = [a.clone(), b.clone()];
        assert_eq!([found("a", None, &two), found("b", None, &two), found("c", None, &two)], [Ok(Some(7)), Ok(Some(8)), Ok(None)]);
        let three = [a, b, other];
        assert!(found("a", None, &three).unwrap_err().ends_with("--port of one chooses it"));
        assert_eq!(found("a", Some("127.0.0.1:9"), &three), Ok(Some(9)));
        assert!(found("a", Some("127.0.0.1:10"), &three).unwrap_err().contains("and not at 127.0.0.1:10"));
        assert_eq!(found("c", Some("127.0.0.1:10"), &three), Ok(None));
    }

    #[test]
    fn the_old_engines_leave_when_the_new_ones_serve_or_wait_for_their_gpus() {
        let replica = |phase: Phase, gpu: &str| {
            let gpus = Some(gpu).filter(|gpu| !gpu.is_empty()).map(|uuid| Gpu { uuid: uuid.into(), ..Gpu::default() });
            let state = ReplicaState { phase: phase.into(), gpus: gpus.into_iter().collect(), ..ReplicaState::default() };
            Replica { state: Some(state), ..Replica::default() }
        };
        let leaves = |old: &str, new: &[(Phase, &str)]| {
            let own: Vec<Replica> = new.iter().map(|(phase, gpu)| replica(*phase, gpu)).collect();
            may_leave(&[replica(Phase::Ready, old)], &own)
        };
        assert!(!leaves("", &[]) && !leaves("", &[(Phase::Starting, "")]) && !leaves("A", &[(Phase::Loading, "B")]));
        assert!(leaves("", &[(Phase::Ready, "")]) && leaves("A", &[(Phase::Starting, "A")]));
        assert!(!leaves("", &[(Phase::Ready, ""), (Phase::Loading, "")]) && !leaves("", &[(Phase::Failed, "")]));
    }

    #[test]
    fn addresses_that_nobody_has_said_are_those_of_the_running_router() {
        let running = fleet(7, Vec::new()).record.router;
        let given = |sections: &[(&str, &str)]| {
            let mut settings = Settings::load(&crate::settings::local(), &SettingSources::default()).unwrap();
            sections.iter().for_each(|(key, value)| settings.set("router", key, (*value).into()));
            let mut config =
                RouterConfig { listen: "127.0.0.1:8000".into(), admin_listen: "127.0.0.1:8002".into(), ..RouterConfig::default() };
            for (key, value) in sections {
                *if *key == "listen" { &mut config.listen } else { &mut config.admin_listen } = (*value).to_owned();
            }
            take_addresses(&settings, &mut config, &running);
            assert_eq!((&config.agents_listen, &config.operators_socket), (&running.agents, &running.operators_socket));
            (config.listen, config.admin_listen)
        };
        assert_eq!(given(&[]), (running.listen.clone(), running.admin.clone()));
        assert_eq!(given(&[("listen", "0.0.0.0:7"), ("admin_listen", "127.0.0.1:0")]), ("0.0.0.0:7".into(), running.admin.clone()));
    }
}
