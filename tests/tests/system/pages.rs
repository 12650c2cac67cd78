//! Pages for operators and their monitoring: each role has its own, and a router's also has its
//! agents' reports.

use std::collections::HashSet;

use crate::harness::{CHAT, Endpoint, Fleet, Setup, chat, until};

/// Requests the page and checks it against the rules of its format.
async fn assert_follows_its_format(pages: &Endpoint) {
    let page = pages.get("/metrics").await;
    let openmetrics = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    assert_eq!((page.status.as_u16(), page.header("content-type")), (200, Some(openmetrics)));
    assert_families(page.text().strip_suffix("# EOF\n").unwrap());
}

/// Checks that each family appears once, with help, kind and its own samples below.
fn assert_families(page: &str) {
    let (mut names, mut samples) = (HashSet::new(), HashSet::new());
    let (mut helped, mut family, mut kind) = ("", "", "");
    for line in page.lines() {
        match line.splitn(4, ' ').collect::<Vec<_>>()[..] {
            ["#", "HELP", name, help] => {
                assert!(names.insert(name) && !help.is_empty(), "{line}: {page}");
                helped = name;
            }
            ["#", "TYPE", name, named] => {
                assert!(name == helped && ["counter", "gauge", "histogram"].contains(&named), "{line}: {page}");
                (family, kind) = (name, named);
            }
            ["#", "UNIT", name, unit] => assert!(name == family && name.ends_with(&format!("_{unit}")), "{line}: {page}"),
            _ => {
                let (series, value) = line.rsplit_once(' ').unwrap();
                assert!(samples.insert(series) && value.parse::<f64>().is_ok(), "{line}: {page}");
                let suffixes: &[&str] = match kind {
                    "counter" => &["_total"],
                    "histogram" => &["_sum", "_count", "_bucket"],
                    _ => &[""],
                };
                let name = series.split('{').next().unwrap();
                assert!(suffixes.iter().any(|suffix| name.strip_suffix(suffix) == Some(family)), "{line} in {family}: {page}");
                assert!(kind != "counter" || name.ends_with("_total"), "{line}: {page}");
            }
        }
    }
    assert!(!samples.is_empty(), "{page}");
}

#[tokio::test(start_paused = true)]
async fn the_metrics_page_has_router_and_replica_figures() {
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
    let text = page.text();
    for (node, replica) in [("n0", "n0/0"), ("n1", "n1/0")] {
        assert!(text.contains(&format!("hostler_replica_ready{{node=\"{node}\",replica=\"{replica}\"}} 1\n")), "{text}");
    }
    assert_follows_its_format(&admin).await;
}

#[tokio::test(start_paused = true)]
async fn an_agents_pages_are_served_on_its_own_socket() {
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
    assert_follows_its_format(&pages).await;
    fleet.fault("n0/0", "die").await;
    until("the agent not ready", async || {
        let page = pages.get("/readyz").await;
        if page.status == 503 { Ok(()) } else { Err(page.text()) }
    })
    .await;
}
