//! Emptying a router, a replica, a node: running requests finish, no new ones begin, and nothing is
//! left.

use std::time::Duration;

use tokio::time::Instant;

use hostler_agent::AgentError;
use hostler_proto::agent::v1::Phase;
use tokio::net::TcpStream;
use tonic::Code;

use crate::harness::{CHAT, Endpoint, Fleet, Setup, chat, chat_stream, soon, until};

#[tokio::test(start_paused = true)]
async fn a_draining_router_finishes_requests_and_refuses_connections() {
    let mut fleet = Fleet::start(Setup::two_agents().engine("--sim-step-ms 10")).await;
    let mut stream = fleet.edge().open(CHAT, &chat_stream(150)).await;
    stream.events(2).await;
    let router = &fleet.routers[0];
    router.shutdown.drain();
    until("refused connections", async || match TcpStream::connect(router.edge).await {
        Ok(_) => Err("a connection was accepted".into()),
        Err(_) => Ok(()),
    })
    .await;
    let readiness = Endpoint::Tcp(router.admin).get("/readyz").await;
    assert_eq!((readiness.status.as_u16(), readiness.text().as_str()), (503, "draining\n"));
    assert_eq!(router.metric("hostler_in_flight").await, 1.0, "operators see it finish");
    stream.finish().await.assert_whole_stream();
    soon("the router's end", fleet.routers.remove(0).task).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_router_ends_at_once_when_told_twice() {
    let mut fleet = Fleet::start(Setup::agents(1)).await;
    let mut stream = fleet.edge().open(CHAT, &chat_stream(10_000)).await;
    stream.events(2).await;
    let router = fleet.routers.remove(0);
    router.shutdown.drain();
    tokio::task::yield_now().await;
    assert!(!router.task.is_finished());
    let begun = Instant::now();
    router.shutdown.stop();
    soon("the router's end", router.task).await.unwrap();
    assert!(begun.elapsed() < Duration::from_secs(3), "it took {:?}", begun.elapsed());
    assert!(stream.finish().await.ended.is_err());
}

#[tokio::test(start_paused = true)]
async fn streams_beyond_a_routers_drain_timeout_get_an_error_event() {
    let mut fleet = Fleet::start(Setup::agents(1).router(|router| router.drain_timeout = Duration::from_millis(200))).await;
    let mut stream = fleet.edge().open(CHAT, &chat_stream(10_000)).await;
    stream.events(2).await;
    let router = fleet.routers.remove(0);
    router.shutdown.drain();
    let answer = stream.finish().await;
    answer.assert_broken_stream();
    assert!(answer.text().contains("the router is leaving"), "{}", answer.text());
    soon("the router's end", router.task).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_drained_replica_finishes_and_returns_when_restarted() {
    let fleet = Fleet::start(Setup::two_agents().engine("--sim-step-ms 10")).await;
    let (edge, admin) = (fleet.edge(), fleet.admin());
    let (mut one, mut other) = (edge.open(CHAT, &chat_stream(150)).await, edge.open(CHAT, &chat_stream(150)).await);
    one.events(2).await;
    other.events(2).await;
    fleet.until_in_flight("n0/0", 1).await;
    let before = fleet.replica("n0/0").await;
    assert_eq!(admin.drain("n0/0").await.unwrap(), ["n0/0"]);
    fleet.until_replica("n0/0", "draining", |replica| replica.phase == Phase::Draining).await;
    for _ in 0..6 {
        assert_eq!(edge.post(CHAT, &chat(2)).await.status, 200);
    }
    assert_eq!(fleet.replica("n0/0").await.in_flight, 1);
    one.finish().await.assert_whole_stream();
    other.finish().await.assert_whole_stream();
    let stopped = fleet.until_replica("n0/0", "stopped", |replica| replica.phase == Phase::Stopped).await;
    assert_eq!((stopped.served, stopped.pid), (before.served + 1, 0));
    assert!(!fleet.is_running(before.pid));
    assert_eq!(edge.post(CHAT, &chat(2)).await.status, 200);

    assert_eq!(admin.restart("n0/0").await.unwrap(), ["n0/0"]);
    let back = fleet.until_replica("n0/0", "ready", crate::harness::Seen::is_ready).await;
    assert!(back.epoch > before.epoch);
    admin.drain("n1/0").await.unwrap();
    fleet.until_replica("n1/0", "stopped", |replica| replica.phase == Phase::Stopped).await;
    assert_eq!(edge.post(CHAT, &chat(2)).await.status, 200, "the restarted one serves alone");
}

#[tokio::test(start_paused = true)]
async fn a_drained_node_stops_its_replicas_and_tells_clients() {
    let fleet = Fleet::start(Setup::agents(1).agent(|agent| agent.replicas = 2)).await;
    let mut stream = fleet.edge().open(CHAT, &chat_stream(200)).await;
    stream.events(2).await;
    assert_eq!(fleet.admin().drain("n0").await.unwrap(), ["n0/0", "n0/1"]);
    stream.finish().await.assert_whole_stream();
    for id in ["n0/0", "n0/1"] {
        fleet.until_replica(id, "stopped", |replica| replica.phase == Phase::Stopped).await;
    }
    let answer = fleet.edge().post(CHAT, &chat(2)).await;
    assert_eq!(answer.status, 503);
    assert!(answer.message().contains("n0/0 is stopped") && answer.message().contains("n0/1 is stopped"), "{}", answer.text());
    fleet.admin().restart("n0").await.unwrap();
    fleet.until_ready().await;
    assert_eq!(fleet.edge().post(CHAT, &chat(2)).await.status, 200);
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_shuts_down_finishes_streams_and_leaves_nothing() {
    let mut fleet = Fleet::start(Setup::two_agents().engine("--sim-step-ms 10")).await;
    let mut streams = Vec::new();
    for _ in 0..4 {
        let mut stream = fleet.edge().open(CHAT, &chat_stream(150)).await;
        stream.events(2).await;
        streams.push(stream);
    }
    let engine = fleet.until_replica("n0/0", "half of the streams", |replica| replica.in_flight == 2).await;
    let agent = fleet.agents.remove(0);
    agent.shutdown.drain();
    fleet.until_replica("n0/0", "draining", |replica| replica.phase == Phase::Draining).await;
    assert_eq!(fleet.edge().post(CHAT, &chat(2)).await.status, 200);
    for stream in streams {
        stream.finish().await.assert_whole_stream();
    }
    soon("the agent's end", agent.task).await.unwrap().unwrap();
    assert!(!fleet.is_running(engine.pid));
    let left: Vec<_> = std::fs::read_dir(&agent.run_dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["lock"], "only the lock of the whole run directory stays");
    until("the node to be forgotten", async || {
        let nodes = fleet.admin().nodes().await.unwrap();
        if nodes.iter().all(|node| node.name != "n0") { Ok(()) } else { Err(format!("{nodes:?}")) }
    })
    .await;
    assert_eq!(fleet.edge().post(CHAT, &chat(2)).await.status, 200);
}

#[tokio::test(start_paused = true)]
async fn an_agent_told_to_stop_twice_kills_its_engines() {
    let mut fleet = Fleet::start(Setup::agents(1)).await;
    let mut stream = fleet.edge().open(CHAT, &chat_stream(10_000)).await;
    stream.events(2).await;
    let engine = fleet.replica("n0/0").await;
    let agent = fleet.agents.remove(0);
    agent.shutdown.drain();
    agent.shutdown.stop();
    let cut_off = soon("the agent's end", agent.task).await.unwrap().unwrap_err();
    assert!(matches!(cut_off, AgentError::CutOff { requests: 1 }), "{cut_off}");
    assert!(!fleet.is_running(engine.pid));
    stream.finish().await.assert_broken_stream();
}

#[tokio::test(start_paused = true)]
async fn an_order_for_an_unknown_target_names_the_known_ones() {
    let fleet = Fleet::start(Setup::agents(1).agent(|agent| agent.replicas = 2)).await;
    let refused = fleet.admin().drain("n7").await.unwrap_err();
    assert_eq!((refused.code(), refused.message()), (Code::NotFound, "no node or replica is called \"n7\"; replicas: n0/0, n0/1"));
    let refused = fleet.admin().logs("n0", 5).await.unwrap_err();
    assert!(refused.message().contains("such as n0/0"), "{refused}");
}
