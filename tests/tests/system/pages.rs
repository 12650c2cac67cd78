//! The pages for operators and their monitoring: each role has its own, and a router's also has what its agents report.

use crate::harness::{CHAT, Endpoint, Fleet, Setup, chat, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_routers_page_has_its_own_figures_and_those_of_every_replica() {
    let fleet = Fleet::start(Setup::two_agents()).await;
    for _ in 0..4 {
        assert_eq!(fleet.edge().post(CHAT, &chat(5)).await.status, 200);
    }
    let admin = Endpoint::Tcp(fleet.routers[0].admin);
    let page = until("all four on the page", async || {
        let page = admin.get("/metrics").await;
        let served = admin.metric("hostler_replica_served_total").await;
        let generated = admin.metric("hostler_replica_generation_tokens_total").await;
        if served == 4.0 && generated >= 20.0 { Ok(page) } else { Err(page.text()) }
    })
    .await;
    assert!(page.header("content-type").unwrap().starts_with("application/openmetrics-text"));
    let text = page.text();
    assert!(text.ends_with("# EOF\n") && text.matches("# EOF").count() == 1, "{text}");
    for (node, replica) in [("n0", "n0/0"), ("n1", "n1/0")] {
        assert!(text.contains(&format!("hostler_replica_ready{{node=\"{node}\",replica=\"{replica}\"}} 1\n")), "{text}");
    }
    let families = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let mut names: Vec<&str> = families.map(|family| family.split(' ').next().unwrap()).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count, "a family is there twice: {text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agents_pages_are_on_a_socket_of_its_own() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    assert_eq!(fleet.edge().post(CHAT, &chat(5)).await.status, 200);
    let mut directories = std::fs::read_dir(&fleet.agents[0].run_dir).unwrap().map(|entry| entry.unwrap().path());
    let socket = directories.find(|path| path.is_dir()).unwrap().join("admin.sock");
    let pages = Endpoint::Unix(socket);
    assert_eq!(pages.get("/readyz").await.status, 200);
    until("the request on the page", async || {
        let page = pages.get("/metrics").await.text();
        let counted = page.contains("hostler_agent_relayed_total{outcome=\"complete\"} 1\n");
        if counted && page.contains("hostler_agent_engine_ready{replica=\"0\"} 1\n") { Ok(()) } else { Err(page) }
    })
    .await;
    fleet.fault("n0/0", "die").await;
    until("the agent not ready", async || {
        let page = pages.get("/readyz").await;
        if page.status == 503 { Ok(()) } else { Err(page.text()) }
    })
    .await;
}
