//! Restarts of routers.
//!
//! A router keeps nothing that agents cannot report again: a killed one is whole when its agents
//! are back.

use std::time::Duration;

use crate::harness::{CHAT, Endpoint, Fleet, RunningRouter, Seen, Setup, Workplace, chat, chat_stream, kill_group, signal, until};
use hostler_proto::agent::v1::Phase;
use hostler_router::RouterConfig;
use rustix::process::Signal;

async fn first_answer(edge: &Endpoint) {
    until("an answer", async || {
        let request = http::Request::get("/health").body(http_body_util::Full::default()).unwrap();
        // The router may not listen yet.
        match edge.try_send(request).await {
            Ok(answer) if answer.status == 200 => Ok(()),
            Ok(answer) => Err(answer.status.to_string()),
            Err(error) => Err(error),
        }
    })
    .await;
    assert_eq!(edge.post(CHAT, &chat(3)).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_router_serves_as_soon_as_it_is_back() {
    let workplace = Workplace::new();
    let start = |name: &str, [edge, agents, admin]: [&str; 3]| {
        workplace.start(name, &["router", "--listen", edge, "--agents-listen", agents, "--admin-listen", admin])
    };
    let mut router = start("first", ["127.0.0.1:0"; 3]);
    let addresses = [router.address("edge").await, router.address("agents").await, router.address("admin").await];
    let mut fleet = Fleet::launch(Setup::agents(0)).await;
    for _ in 0..2 {
        fleet.add_agent(vec![addresses[1].to_string()]).await;
    }
    let (edge, admin) = (Endpoint::Tcp(addresses[0]), router.admin().await);
    first_answer(&edge).await;
    let mut running = edge.open(CHAT, &chat_stream(10_000)).await;
    running.events(2).await;

    signal(router.pid(), Signal::KILL);
    router.ended().await;
    assert!(running.finish().await.ended.is_err());
    let _router = start("second", addresses.map(|address| address.to_string()).each_ref().map(String::as_str));
    first_answer(&edge).await;
    until("both engines, with nothing left of the lost stream", async || {
        let replicas = admin.replicas().await.map_err(|status| status.to_string())?;
        let whole =
            replicas.len() == 2 && replicas.iter().all(|replica| replica.is_ready() && replica.in_flight == 0 && replica.restarts == 0);
        if whole { Ok(()) } else { Err(format!("{replicas:#?}")) }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn one_router_may_come_and_go_while_another_serves() {
    let mut fleet = Fleet::start(Setup::two_agents().routers(2)).await;
    let mut stream = fleet.edge().open(CHAT, &chat_stream(600)).await;
    stream.events(2).await;
    let leaving = fleet.routers.pop().unwrap();
    leaving.shutdown.drain();
    leaving.task.await.unwrap();
    let config = RouterConfig {
        listen: leaving.edge.to_string(),
        agents_listen: leaving.agents.to_string(),
        admin_listen: leaving.admin.to_string(),
        ..fleet.router_config()
    };
    fleet.routers.push(RunningRouter::start(config).await);
    fleet.until_ready().await;
    assert_eq!(fleet.routers[1].edge().post(CHAT, &chat(3)).await.status, 200);
    stream.finish().await.assert_whole_stream();
    fleet.until_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kept_engines_end_with_an_adopting_agent_that_keeps_none() {
    let fleet = Fleet::launch(Setup::agents(0)).await;
    let agents = fleet.routers[0].agents.to_string();
    let workplace = Workplace::new();
    let start = |name: &str, fate: &str| {
        let role = ["agent", "--router", &agents, "--node", "n0", "--engine", "simulated", "--replicas", "1", "--if-agent-dies", fate];
        workplace.start(name, &[&role[..], &["--", "--sim-start-ms", "50"]].concat())
    };
    let known = async || {
        until("a ready replica", async || {
            let replicas = fleet.admin().replicas().await.unwrap();
            let ready = replicas.iter().find(|replica| replica.is_ready()).cloned();
            ready.ok_or_else(|| format!("{replicas:?}"))
        })
        .await
    };
    let mut first = start("first", "keep");
    let orphan = known().await;
    let mut stream = fleet.edge().open(CHAT, &chat_stream(10_000)).await;
    stream.events(2).await;
    signal(first.pid(), Signal::KILL);
    first.ended().await;
    stream.finish().await.assert_broken_stream();
    assert!(crate::harness::is_alive(orphan.pid), "a kept engine does not depend on its agent's life");
    until("the first agent's end noticed", async || {
        let replicas = fleet.admin().replicas().await.unwrap();
        if replicas.iter().any(|replica| replica.is_ready()) { Err(format!("{replicas:?}")) } else { Ok(()) }
    })
    .await;
    let mut second = start("second", "kill");
    let adopted = known().await;
    assert_eq!((adopted.pid, adopted.epoch), (orphan.pid, orphan.epoch), "the same life goes on");
    assert_eq!(fleet.edge().post(CHAT, &chat(3)).await.status, 200);
    signal(second.pid(), Signal::KILL);
    second.ended().await;
    until("the engine's end", async || if crate::harness::is_alive(orphan.pid) { Err("it lives".to_owned()) } else { Ok(()) }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_waits_for_its_absent_agents_kept_engine() {
    // The next agent may be slow on a busy machine.
    let fleet = Fleet::launch(Setup::agents(0).router(|router| router.lease = Duration::from_secs(25))).await;
    let agents = fleet.routers[0].agents.to_string();
    let workplace = Workplace::new();
    let role = ["agent", "--router", &agents, "--node", "n0", "--engine", "simulated", "--replicas", "1", "--if-agent-dies", "keep"];
    let start = |name: &str| workplace.start(name, &[&role[..], &["--", "--sim-start-ms", "50"]].concat());
    let mut first = start("first");
    let seen = async |what: &str, is: &dyn Fn(&Seen) -> bool| {
        until(what, async || {
            let replicas = fleet.admin().replicas().await.unwrap();
            replicas.iter().find(|replica| is(replica)).cloned().ok_or_else(|| format!("{replicas:?}"))
        })
        .await
    };
    let kept = seen("a ready replica", &Seen::is_ready).await;
    signal(first.pid(), Signal::KILL);
    first.ended().await;
    seen("a lost agent", &|replica| replica.suspect).await;
    let edge = fleet.edge();
    let request = tokio::spawn(async move { edge.post(CHAT, &chat(3)).await });
    until("a request that waits", async || {
        let waiting = fleet.routers[0].metric("hostler_queued_requests").await;
        if waiting == 1.0 { Ok(()) } else { Err(format!("{waiting} wait")) }
    })
    .await;
    let _second = start("second");
    let answer = request.await.unwrap();
    let engine = seen("the replica", &Seen::is_ready).await;
    kill_group(kept.pid);
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!((engine.pid, engine.epoch), (kept.pid, kept.epoch));
}

#[tokio::test(start_paused = true)]
async fn a_request_waits_for_the_only_engines_next_life() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    fleet.kill("n0/0").await;
    fleet.until_replica("n0/0", "failed", |replica| replica.phase == Phase::Failed).await;
    let answer = fleet.edge().post(CHAT, &chat(3)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
}

#[tokio::test(start_paused = true)]
async fn a_request_waits_for_the_only_engine_to_load() {
    // The start takes longer than the router's startup grace.
    let fleet = Fleet::launch(Setup::agents(1).engine("--sim-start-ms 5000")).await;
    until("a loading replica", async || {
        let replicas = fleet.admin().replicas().await.unwrap();
        if replicas.is_empty() { Err("none is known".into()) } else { Ok(()) }
    })
    .await;
    let answer = fleet.edge().post(CHAT, &chat(3)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    fleet.until_idle().await;
}
