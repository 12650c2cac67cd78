//! `hostler up` without jobs: a router and an agent in one process, for one machine. Where one runs
//! already, an agent alone, which serves the router of that one.

mod detach;
mod invitation;
mod join;
mod kept_router;
mod service;
mod takeover;
mod voice;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use hostler_agent::{AgentConfig, EngineProgram, IfAgentDies, IfEnginesFail, model_names};
use hostler_boot::{Settings, Shutdown, this_host};
use hostler_router::{Router, RouterConfig, RouterPlace};
use tokio::task::JoinHandle;
use tokio_util::task::AbortOnDropHandle;

pub(crate) use self::detach::{EndedInBackground, detach};
use self::invitation::{Announced, Invitation};
use self::join::{Place, Wish, choose_place, free_gpus, node_name};
use self::kept_router::keep_router;
pub(crate) use self::service::write_service;
use self::takeover::{end_predecessor, find_predecessor, place_beside, take_addresses};
pub(crate) use self::voice::Voice;
use crate::AdjustRouter;
use crate::admin::{connect_to_socket, connect_with};
use crate::agent::prepare_and_run;
use crate::cluster::name_of_model;
use crate::local_fleet::{LocalFleet, UpTurn, explain_conflict, find_local_fleets};
use crate::output::{describe, say};
use crate::router::{address_lines, keep_state, local_state, log_exposures, router_config};
use crate::settings::user_key_file;
use crate::up_record::{JoinedAgent, PublishedRecord, UpRecord, UpRouter};

/// How often the engines are checked until they are ready.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// How long the router's own agent may take to say which GPUs it has. It asks vLLM for its version
/// first, which took up to 20 s with a cold disk.
const GPUS_TIMEOUT: Duration = Duration::from_secs(60);

/// An agent whose router is that of another `hostler up` ends when the router has been gone for so
/// long, because the next one has another address.
const ROUTER_PATIENCE: Duration = Duration::from_secs(30);

/// An agent whose router is that of another `hostler up`, and which that router does not take in,
/// ends after so long. A node of this name that has just died counts for half a minute.
const ATTACH_PATIENCE: Duration = Duration::from_secs(60);

/// Advice to one whose address is that of another `hostler up`.
const BESIDE: &str =
    "`hostler ps` shows it, `hostler down` ends it, and `--listen 127.0.0.1:0 --admin-listen 127.0.0.1:0` starts another one beside it";

/// Last words of one whose place another one has taken.
const REPLACED: &str = "another router has taken this one's place";

/// Advice to one that is to take the place of a running one.
const NOT_GIVEN: &str =
    "it does not give its place away: an earlier version does not, nor one that its log says so of; `hostler down` ends it";

/// Serves until a signal, beside a running `hostler up` of this user, in the place of one
/// (`takes_over`) or with a router of its own.
pub(crate) async fn up(settings: Settings, adjust_router: AdjustRouter, voice: Voice, takes_over: bool) -> anyhow::Result<()> {
    let mut router_config = router_config(&settings, adjust_router)?;
    keep_state(&mut router_config, &settings, local_state().as_deref());
    if !settings.is_set("router", "agents_listen") {
        router_config.agents_listen = "127.0.0.1:0".into();
    }
    if let Some(log) = voice.log().filter(|_| router_config.access_log_file.as_os_str().is_empty()) {
        router_config.access_log_file = log.to_owned();
    }
    let mut agent_config: AgentConfig = settings.section("agent")?;
    let (key_file, tls_dir) = (user_key_file(&router_config.keys_file), router_config.tls_dir.clone());
    let token_file = agent_config.join_token_file.clone();
    apply_local_tls(&settings, &mut router_config, &mut agent_config);
    let engine = hostler_agent::check_engine(&agent_config)?;
    if is_simulated(&engine) {
        voice.say("engine  simulated: its words mean nothing; `hostler up MODEL` serves a model");
    }
    if agent_config.if_agent_dies == IfAgentDies::Auto {
        // Engines that a person starts in a terminal end with it.
        agent_config.if_agent_dies = IfAgentDies::Kill;
    }
    if agent_config.if_engines_fail == IfEnginesFail::Auto {
        // Somebody looks on, and mends the cause sooner when the command ends with it.
        agent_config.if_engines_fail = IfEnginesFail::End;
    }
    if !settings.is_set("agent", "router") {
        agent_config.router.clear();
    }
    // The router file is for the agents of jobs.
    agent_config.router_file.clear();

    let _bounded = voice.keep_log_bounded();
    let turn = UpTurn::take().await?;
    let (name, fleets) = (served_name(&agent_config), find_local_fleets().await);
    let listen = settings.is_set("router", "listen").then_some(router_config.listen.as_str());
    let wish = Wish { name: &name, listen };
    let predecessor = if takes_over { find_predecessor(&wish, &fleets)?.cloned() } else { None };
    let place = match &predecessor {
        Some(joined) if !joined.has_router() => {
            fleets.iter().find(|fleet| fleet.has_router() && fleet.shares_router(joined)).map(Place::Beside)
        }
        Some(_) => Some(Place::Own),
        None => Some(choose_place(&wish, &fleets)?),
    };
    if let Place::Beside(first) = place.context("the router has just ended: try again")? {
        check_router_settings(&settings, first)?;
        agent_config.join_token_file = token_file;
        let plan = JoinPlan { name, first: first.clone(), predecessor, turn };
        return join_router(agent_config, &engine, plan, voice).await;
    }
    let wants_token = !router_config.tls_dir.as_os_str().is_empty();
    if let Some(running) = &predecessor {
        take_addresses(&settings, &mut router_config, &running.record.router);
        place_beside(&mut agent_config, &engine, running, &fleets).await?;
    }
    let config = router_config.clone();
    let bound = if predecessor.is_some() { Router::take_over(config).await } else { Router::bind_replaceable(config).await };
    let router = match bound {
        Ok(router) => router,
        Err(error) => return Err(explain_conflict(error, if predecessor.is_some() { NOT_GIVEN } else { BESIDE }).await),
    };
    let record = UpRouter::of(&router, &key_file, &tls_dir, wants_token)?.context("its router has no socket for operators");
    let mut record = record.and_then(|router| UpRecord::of_this_process(name, router, None, is_simulated(&engine)));
    if let (Ok(record), Some(_)) = (&mut record, &predecessor) {
        record.node.clone_from(&agent_config.node);
    }
    let record = publish(record, &voice)?;
    drop(turn);
    let key_file = router.requires_keys().then_some(key_file);
    run_with_router(agent_config, router, RunPlan { router_config, key_file, predecessor, record }, voice).await
}

/// What a process with a router needs to know beside its configuration.
struct RunPlan {
    /// What the router was bound with.
    router_config: RouterConfig,
    /// The user's key, if the edge wants keys.
    key_file: Option<PathBuf>,
    /// The `hostler up` whose place it takes.
    predecessor: Option<LocalFleet>,
    /// By which other commands find this process.
    record: Option<PublishedRecord>,
}

/// Runs both until they have drained: first the router, so that requests finish, then the agent. If
/// a scheduler presses, both drain at the same time.
async fn run_with_router(mut agent_config: AgentConfig, router: Router, plan: RunPlan, voice: Voice) -> anyhow::Result<()> {
    let RunPlan { router_config, key_file, predecessor, record } = plan;
    agent_config.router.insert(0, router.agents_address().to_string());
    // It outlives the router only where another one has taken that one's place.
    agent_config.router_timeout = agent_config.router_timeout.or(Some(ROUTER_PATIENCE));
    hostler_boot::raise_file_limit();
    let shutdown = Shutdown::new();
    let _signals = shutdown.install_signal_handlers(hostler_agent::signal_source(&agent_config))?;
    let own_node = predecessor.as_ref().map(|_| agent_config.node.clone());
    let invitation = Invitation::to_edge(format!("{}://{}", router.edge_scheme(), router.edge_address()), key_file, own_node);
    let place = router.place();
    let takes_over = predecessor.is_some();
    let leaving = predecessor.map(|running| (spawn_end(running.clone(), agent_config.node.clone(), Some(place.clone())), running));
    let _marked = mark_leaving(record, &shutdown);
    let (admin, key) = (router.admin_address(), router.operator_key().clone());
    log_exposures(&router);
    let lines = address_lines(&router);
    voice.say(&lines[0]);
    lines[1..].iter().for_each(|line| voice.say_to_scripts(line));
    say_places(&voice, Some(&format!("{}://{admin}", router.admin_scheme())));
    let announced = Announced::begin(invitation, voice, &shutdown, async move {
        if takes_over {
            until_found().await;
        }
        connect_with(&admin.to_string(), &key).await
    });
    // The router already answers while vLLM's version is queried, which takes seconds.
    let router_task = tokio::spawn(keep_router(router, router_config, shutdown.clone()));
    let agent_shutdown = shutdown.sibling();
    let agent_task = tokio::spawn(prepare_and_run(agent_config, agent_shutdown.clone()));
    let ended = until_both_have_ended(router_task, agent_task, &shutdown, &agent_shutdown).await;
    announced.end().await;
    if place.is_replaced() {
        // Whoever took this one's place knows nothing of the one before.
        let waiting = leaving.filter(|(task, _)| !task.is_finished());
        waiting.map(|(_, running)| running.ask_to_leave()).transpose()?;
        say(&format!("ended   {REPLACED}"));
    }
    ended
}

/// Tells other commands that this process leaves, from the drain on.
fn mark_leaving(record: Option<PublishedRecord>, shutdown: &Shutdown) -> AbortOnDropHandle<()> {
    let draining = shutdown.wait_drain();
    AbortOnDropHandle::new(tokio::spawn(async move {
        draining.await;
        record.iter().for_each(PublishedRecord::mark_leaving);
        // It is removed with this task.
        std::future::pending::<()>().await;
    }))
}

/// Ends the `hostler up` whose place this process takes, while this one serves.
fn spawn_end(running: LocalFleet, node: String, place: Option<RouterPlace>) -> AbortOnDropHandle<()> {
    AbortOnDropHandle::new(tokio::spawn(async move {
        if let Err(error) = end_predecessor(running, node, place).await {
            tracing::error!(error = %describe(&error), "the one whose place this is stays");
        }
    }))
}

async fn until_both_have_ended(
    mut router_task: JoinHandle<anyhow::Result<()>>,
    mut agent_task: JoinHandle<anyhow::Result<()>>,
    shutdown: &Shutdown,
    agent_shutdown: &Shutdown,
) -> anyhow::Result<()> {
    tokio::select! {
        // A router whose place is taken ends as soon as the drain begins, and unasked it ends only
        // without a drain. So the drain is looked at first.
        biased;
        () = shutdown.wait_drain() => {}
        // The agent leaves before its batch job ends.
        () = agent_shutdown.wait_drain() => shutdown.drain(),
        // An agent that ends unasked has an error to show.
        ended = &mut agent_task => {
            shutdown.stop();
            router_task.await??;
            return ended?;
        }
        // A router ends unasked when it did not get the place that it was to take.
        ended = &mut router_task => {
            agent_shutdown.stop();
            agent_task.await??;
            return ended?;
        }
    }
    router_task.await??;
    agent_shutdown.drain();
    agent_task.await?
}

/// Waits until the operators' socket is that of this process's router. Before, another one answers
/// at its addresses.
async fn until_found() {
    let is_own = |fleet: &LocalFleet| fleet.has_router() && u32::try_from(fleet.record.pid) == Ok(std::process::id());
    while !find_local_fleets().await.iter().any(is_own) {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Says to people where the log and the page are.
fn say_places(voice: &Voice, page: Option<&str>) {
    if let Some(page) = page {
        voice.say_to_people(&format!("page    {page}/, to which `hostler page` lets a browser in"));
    }
    if let Some(log) = voice.log() {
        voice.say_to_people(&format!("log     {}", log.display()));
    }
}

/// What an agent that joins a router needs to know.
struct JoinPlan {
    /// What it serves.
    name: String,
    /// The `hostler up` with the router.
    first: LocalFleet,
    /// The `hostler up` whose place it takes.
    predecessor: Option<LocalFleet>,
    /// Held until others can see which node and which GPUs it has.
    turn: UpTurn,
}

/// Runs an agent alone, for the router of a running `hostler up`.
async fn join_router(mut config: AgentConfig, engine: &EngineProgram, plan: JoinPlan, voice: Voice) -> anyhow::Result<()> {
    let JoinPlan { name, first, predecessor, turn } = plan;
    let router = first.record.router.clone();
    if router.wants_token {
        ensure!(
            !config.join_token_file.as_os_str().is_empty(),
            "agents join the router of {} by a token: `hostler token create --out FILE`, then --join-token-file FILE",
            first.describe()
        );
    } else {
        config.join_token_file.clear();
    }
    config.router = vec![router.agents.clone()];
    config.router_timeout = config.router_timeout.or(Some(ROUTER_PATIENCE));
    config.attach_timeout = config.attach_timeout.or(Some(ATTACH_PATIENCE));
    let fleets = wait_for_gpus(&first).await?;
    let is_other = |fleet: &&LocalFleet| predecessor.as_ref().is_none_or(|running| running.record != fleet.record);
    let others: Vec<LocalFleet> = fleets.iter().filter(is_other).cloned().collect();
    let gpus = free_gpus(&config, engine, &others).await?;
    if !gpus.is_empty() {
        config.gpus = gpus.join(",");
    }
    if config.node.is_empty() {
        let named = Some(&name).filter(|name| !name.is_empty()).map(|name| format!("{}.{}", this_host(), name_of_model(name)));
        config.node = node_name(&this_host(), named, &fleets);
    }
    hostler_boot::raise_file_limit();
    let shutdown = Shutdown::new();
    let _signals = shutdown.install_signal_handlers(hostler_agent::signal_source(&config))?;
    let agent = JoinedAgent { node: config.node.clone(), gpus };
    let invitation = Invitation::to(&router, Some(agent.node.clone()));
    let record = publish(UpRecord::of_this_process(name, router.clone(), Some(agent), is_simulated(engine)), &voice)?;
    let _marked = mark_leaving(record, &shutdown);
    drop(turn);
    voice.say(&format!("edge    {}", router.base_url));
    voice.say_to_scripts(&format!("socket  {}", router.operators_socket.display()));
    voice.say(&format!("joined  {}, as node {}", first.describe(), config.node));
    say_places(&voice, None);
    let _leaving = predecessor.map(|running| spawn_end(running, config.node.clone(), None));
    let announced = Announced::begin(invitation, voice, &shutdown, async move { connect_to_socket(&router.operators_socket).await });
    let ended = prepare_and_run(config, shutdown).await;
    announced.end().await;
    ended
}

/// What is up at this router, once the agent of its own process has come.
async fn wait_for_gpus(first: &LocalFleet) -> anyhow::Result<Vec<LocalFleet>> {
    let deadline = Instant::now() + GPUS_TIMEOUT;
    loop {
        let mut fleets = find_local_fleets().await;
        fleets.retain(|fleet| fleet.shares_router(first));
        match fleets.iter().find(|fleet| fleet.has_router()) {
            Some(LocalFleet { silence: Some(silence), .. }) => bail!("{} does not answer: {silence}", first.describe()),
            Some(now) if now.replicas.is_empty() => {}
            Some(_) => return Ok(fleets),
            None => bail!("{} has just ended: try again", first.describe()),
        }
        ensure!(
            Instant::now() < deadline,
            "{} has not said within {} which GPUs it has: try again when it is further",
            first.describe(),
            humantime::format_duration(GPUS_TIMEOUT)
        );
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

fn is_simulated(engine: &EngineProgram) -> bool {
    matches!(engine, EngineProgram::Simulated { .. })
}

/// What this command serves: the first name that it gives its model, else the model, else the
/// servers; empty for the simulated engine without a name.
fn served_name(config: &AgentConfig) -> String {
    let named = model_names(&config.model, &config.engine_args).into_iter().next();
    named.unwrap_or_else(|| if config.model.is_empty() { config.attach.join(",") } else { config.model.clone() })
}

/// Refuses settings of this command line that a running router cannot take, so that none is lost
/// silently.
fn check_router_settings(settings: &Settings, first: &LocalFleet) -> anyhow::Result<()> {
    let lost = settings.given().filter_map(|(name, _, origin)| {
        let key = name.strip_prefix("router.")?;
        let is_of_command = origin.starts_with("flag") || origin == "command line";
        (is_of_command && !["listen", "admin_listen"].contains(&key) && !settings.is_set("agent", key)).then_some(name)
    });
    let lost: Vec<String> = lost.collect();
    ensure!(
        lost.is_empty(),
        "{} would be for the router, which runs already in {}: end that first, or give this model a router of its own with --port N",
        lost.join(", "),
        first.describe()
    );
    Ok(())
}

/// Writes down how other commands of this user find this process. A process in a terminal serves
/// without it. Of one in the background nobody would know.
fn publish(record: anyhow::Result<UpRecord>, voice: &Voice) -> anyhow::Result<Option<PublishedRecord>> {
    match record.and_then(|record| record.publish()) {
        Ok(published) => Ok(Some(published)),
        Err(error) if voice.is_background() => Err(error.context("nobody would find this process in the background, so it ends")),
        Err(error) => {
            tracing::warn!(error = %describe(&error), "`hostler down`, `env` and `wait` do not find this process");
            Ok(None)
        }
    }
}

/// Adapts TLS for one machine. A router that only this process's agent can reach needs no
/// authority, and an agent of only this process's router needs no token.
///
/// So a machine that is part of a fleet may also be tried alone.
fn apply_local_tls(settings: &Settings, router: &mut RouterConfig, agent: &mut AgentConfig) {
    let joins = !agent.join_token_file.as_os_str().is_empty();
    if !settings.is_set("router", "agents_listen") && !joins {
        router.tls_dir.clear();
    }
    if router.tls_dir.as_os_str().is_empty() && !settings.is_set("agent", "router") {
        agent.join_token_file.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_agent_whose_router_has_ended_already_drains_and_is_not_stopped() {
        for _ in 0..32 {
            let shutdown = Shutdown::new();
            let agent_shutdown = shutdown.sibling();
            shutdown.drain();
            let router_task = tokio::spawn(async { Ok(()) });
            let (drained, stopped) = (agent_shutdown.wait_drain(), agent_shutdown.wait_stop());
            let agent_task = tokio::spawn(async move {
                tokio::select! {
                    biased;
                    () = stopped => bail!("stopped"),
                    () = drained => Ok(()),
                }
            });
            tokio::task::yield_now().await;
            until_both_have_ended(router_task, agent_task, &shutdown, &agent_shutdown).await.unwrap();
        }
    }
}
