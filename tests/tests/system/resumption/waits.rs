//! Streams of the only replica: they wait until it is there again, or another one.

use hostler_agent::AgentError;
use tokio::time::Instant;

use super::*;
use crate::harness::{MODEL, until};

fn alone() -> Setup {
    Setup::agents(1).engine("--sim-step-ms 10").router(|router| router.stream_keepalive = Duration::from_millis(200))
}

/// A single engine that takes long to start.
fn slow() -> Setup {
    alone().engine("--sim-start-ms 4000")
}

async fn open_all(fleet: &Fleet, count: u32, tokens: usize) -> Vec<Answering> {
    let mut opened = Vec::new();
    for number in 0..count {
        let mut stream = fleet.edge().open(CHAT, &stream_of(number as usize, tokens)).await;
        stream.events(3).await;
        opened.push(stream);
    }
    fleet.until_in_flight("n0/0", count).await;
    opened
}

/// Kills the only engine, whose streams then wait for the next one.
async fn kill_only_engine(fleet: &Fleet) {
    fleet.kill("n0/0").await;
    fleet.until_replica("n0/0", "starting again", |replica| !replica.is_ready()).await;
}

#[tokio::test(start_paused = true)]
async fn streams_of_the_only_engine_resume_after_its_restart() {
    for is_crash in [false, true] {
        let fleet = Fleet::start(alone()).await;
        let opened = open_all(&fleet, 8, TOKENS).await;
        if is_crash {
            fleet.crash("n0/0").await;
        } else {
            fleet.kill("n0/0").await;
        }
        let answers = finish(opened).await;
        assert!(answers.iter().all(|answer| answer.text().contains(": keep-alive\n\n")), "{is_crash}");
        assert_unharmed(&fleet, &answers, 8).await;
    }
}

#[tokio::test(start_paused = true)]
async fn streams_resume_at_the_announced_successor_of_their_node() {
    let mut fleet = Fleet::start(alone().agent(|agent| agent.drain_timeout = SHORT_DRAIN)).await;
    let opened = open_all(&fleet, 4, LONG).await;
    fleet.admin().expect(MODEL, None, "a job waits").await.unwrap();
    fleet.agents[0].shutdown.drain();
    let ended = soon("the agent's end", &mut fleet.agents[0].task).await.unwrap();
    assert!(matches!(ended, Err(AgentError::CutOff { requests: 4 })), "{ended:?}");
    let agents = fleet.routers[0].agents.to_string();
    fleet.add_agent(vec![agents]).await;
    assert_moved(&fleet, &finish(opened).await, |moves| moves == 4).await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_frees_its_waiting_streams_place() {
    let fleet = Fleet::start(slow()).await;
    let in_flight = async || fleet.routers[0].metric("hostler_in_flight").await;
    let opened = open_all(&fleet, 2, TOKENS).await;
    kill_only_engine(&fleet).await;
    assert_eq!(in_flight().await, 2.0);
    drop(opened);
    until("no request in flight", async || if in_flight().await == 0.0 { Ok(()) } else { Err("some are".to_owned()) }).await;
    assert!(!fleet.replica("n0/0").await.is_ready());
}

#[tokio::test(start_paused = true)]
async fn a_draining_router_ends_the_streams_that_wait() {
    let mut fleet = Fleet::start(slow()).await;
    let opened = open_all(&fleet, 2, TOKENS).await;
    kill_only_engine(&fleet).await;
    let router = fleet.routers.remove(0);
    router.shutdown.drain();
    let begun = Instant::now();
    for answer in finish(opened).await {
        answer.assert_broken_stream();
        assert!(answer.text().contains("it could not be resumed: "), "{}", answer.text());
    }
    soon("the router's end", router.task).await.unwrap();
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
}
