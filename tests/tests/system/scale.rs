//! A large fleet in small: agents without engines by the dozen, at a router in a separate process.
//!
//! `tests/scale` measures a thousand replicas.

use hostler_scale::{Agents, MODEL};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::harness::{Admin, CHAT, Endpoint, Program, Workplace, signal, soon, until};

const AGENTS: u32 = 20;
const REPLICAS: u32 = 5;

/// Starts a router at these addresses of edge, agents and operators.
fn router(workplace: &Workplace, name: &str, [edge, agents, admin]: [&str; 3]) -> Program {
    workplace.start(name, &["router", "--listen", edge, "--agents-listen", agents, "--admin-listen", admin])
}

/// Waits until the router can use every replica.
async fn until_routable(agents: &Agents, admin: Admin) {
    until("all replicas routable", async || {
        let replicas = admin.replicas().await.map_err(|status| status.to_string())?;
        let ready = replicas.iter().filter(|replica| replica.is_ready()).count();
        let whole = agents.are_attached() && ready == agents.served().len();
        if whole { Ok(()) } else { Err(format!("{} agents attached, {ready} replicas ready", agents.tally.attached_now())) }
    })
    .await;
}

fn request(number: usize) -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": format!("Tell me about engine {number}.")}], "max_tokens": 2, "stream": true})
}

/// Sends this many requests at once, each of which must be answered.
async fn answered(edge: &Endpoint, count: usize) {
    let sent = (0..count).map(|number| {
        let edge = edge.clone();
        tokio::spawn(async move { edge.post(CHAT, &request(number)).await.assert_whole_stream() })
    });
    for request in sent.collect::<Vec<_>>() {
        soon("an answer", request).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_replica_of_many_agents_returns_after_a_router_kill() {
    let workplace = Workplace::new();
    let mut first = router(&workplace, "first", ["127.0.0.1:0"; 3]);
    let addresses = [first.address("edge").await, first.address("agents").await, first.address("admin").await];
    let (edge, admin) = (Endpoint::Tcp(addresses[0]), first.admin().await);
    let agents = Agents::start(AGENTS, REPLICAS, addresses[1]);
    until_routable(&agents, admin).await;
    // Chance decides the order among equals.
    until("a request for each replica", async || {
        answered(&edge, (AGENTS * REPLICAS) as usize).await;
        let served = agents.served();
        if served.contains(&0) { Err(format!("some are never used: {served:?}")) } else { Ok(()) }
    })
    .await;

    signal(first.pid(), Signal::KILL);
    first.ended().await;
    until("agents that know", async || if agents.tally.attached_now() == 0 { Ok(()) } else { Err(String::new()) }).await;
    let _second = router(&workplace, "second", addresses.map(|address| address.to_string()).each_ref().map(String::as_str));
    until_routable(&agents, admin).await;
    answered(&edge, (AGENTS * REPLICAS) as usize).await;
}
