//! `hostler up` without jobs: a router and an agent in one process, for one machine.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::Context;
use hostler_agent::{AgentConfig, EngineProgram, IfAgentDies, IfEnginesFail};
use hostler_boot::{ListenError, Settings, Shutdown};
use hostler_proto::fleet::v1::Replica;
use hostler_router::keys::Secret;
use hostler_router::{Router, RouterConfig, StartError};

use crate::AdjustRouter;
use crate::admin::{connect_with, list_fleet};
use crate::agent::prepare_and_run;
use crate::local_fleet::{LocalFleet, PublishedRecord, UpRecord, find_local_fleets};
use crate::output::{describe, say};
use crate::router::{announce, router_config};
use crate::settings::user_key_file;
use crate::startup_progress::StartupProgress;

/// How often the engines are checked until they are ready.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Runs both until they have drained: first the router, so that requests finish, then the agent. If
/// a scheduler presses, both drain at the same time.
pub(crate) async fn up(settings: Settings, adjust_router: AdjustRouter) -> anyhow::Result<()> {
    let mut router_config = router_config(&settings, adjust_router)?;
    if !settings.is_set("router", "agents_listen") {
        router_config.agents_listen = "127.0.0.1:0".into();
    }
    let mut agent_config: AgentConfig = settings.section("agent")?;
    let (key_file, tls_dir) = (user_key_file(&router_config.keys_file), router_config.tls_dir.clone());
    apply_local_tls(&settings, &mut router_config, &mut agent_config);
    let is_simulated = matches!(hostler_agent::check_engine(&agent_config)?, EngineProgram::Simulated { .. });
    let router = match Router::bind(router_config).await {
        Ok(router) => router,
        Err(error) => return Err(explain_conflict(error).await),
    };
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
    agent_config.router.insert(0, router.agents_address().to_string());

    hostler_boot::raise_file_limit();
    let shutdown = Shutdown::new();
    let _signals = shutdown.install_signal_handlers(hostler_agent::signal_source(&agent_config))?;
    let (edge, admin) = (format!("{}://{}", router.edge_scheme(), router.edge_address()), router.admin_address());
    let (key, wants_keys) = (router.operator_key().clone(), router.requires_keys());
    let _record = publish(UpRecord::of_this_process(&router, &key_file, &tls_dir, is_simulated)?);
    announce(&router);
    // The router already answers while vLLM's version is queried, which takes seconds.
    let router_task = tokio::spawn(router.run(shutdown.clone()));
    let agent_shutdown = shutdown.sibling();
    let mut agent_task = tokio::spawn(prepare_and_run(agent_config, agent_shutdown.clone()));
    let invitation = tokio::spawn(announce_when_ready(edge, wants_keys, admin, key));
    tokio::select! {
        // An agent that ends unasked has an error to show.
        ended = &mut agent_task => {
            shutdown.stop();
            router_task.await??;
            return ended?;
        }
        () = shutdown.wait_drain() => {}
        // The agent leaves before its batch job ends.
        () = agent_shutdown.wait_drain() => shutdown.drain(),
    }
    router_task.await??;
    invitation.abort();
    agent_shutdown.drain();
    agent_task.await?
}

/// Writes down how other commands of this user find this process. They are not needed to serve.
fn publish(record: Option<UpRecord>) -> Option<PublishedRecord> {
    let published = record.context("its router has no socket for operators").and_then(|record| record.publish());
    published
        .inspect_err(|error| tracing::warn!(error = %describe(error), "`hostler down`, `env` and `wait` do not find this process"))
        .ok()
}

/// Says what is up here already, if that is why the address is in use.
async fn explain_conflict(error: StartError) -> anyhow::Error {
    let is_in_use = matches!(&error, StartError::Listen(ListenError::InUse { .. }) | StartError::Replaceable(_));
    let up: Vec<String> = if is_in_use { find_local_fleets().await.iter().map(LocalFleet::describe).collect() } else { Vec::new() };
    if up.is_empty() {
        return error.into();
    }
    anyhow::anyhow!(
        "up here already: {}; `hostler ps` shows it, `hostler down` ends it, and `--listen 127.0.0.1:0 --admin-listen 127.0.0.1:0` starts another one beside it ({error})",
        up.join(", ")
    )
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

/// Shows how far the engines have come until they serve or have failed, then how to use them.
async fn announce_when_ready(edge: String, wants_keys: bool, admin: SocketAddr, key: Secret) -> anyhow::Result<()> {
    let mut fleet = connect_with(&admin.to_string(), &key).await?;
    let mut start = StartupProgress::default();
    let replicas = loop {
        let nodes = list_fleet(&mut fleet).await?.nodes;
        let replicas: Vec<Replica> = nodes.into_iter().flat_map(|node| node.replicas).collect();
        start.lines(&replicas, Instant::now()).iter().for_each(|line| say(line));
        if !replicas.is_empty() && replicas.iter().all(|replica| !replica.is_coming()) {
            break replicas;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    };
    let ready: Vec<&Replica> = replicas.iter().filter(|replica| replica.is_ready()).collect();
    say(&format!("ready   {} of {} replicas", ready.len(), replicas.len()));
    if let Some(model) = ready.iter().find_map(|replica| replica.model_ids().next()) {
        let body = serde_json::json!({"model": model, "stream": true, "messages": [{"role": "user", "content": "Hello"}]});
        // The user puts a key into that variable.
        let shown = if wants_keys { " -H \"authorization: Bearer $HOSTLER_KEY\"" } else { "" };
        say(&format!(
            "curl -N {edge}/v1/chat/completions{shown} -H 'content-type: application/json' -d '{}'",
            body.to_string().replace('\'', "'\\''")
        ));
    }
    Ok(())
}
