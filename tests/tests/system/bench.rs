//! `hostler bench` from the command line, against a whole fleet.

use serde_json::Value;

use crate::harness::{Fleet, Setup, Workplace};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bench_compares_two_targets_and_writes_the_report() {
    let (fleet, workplace) = (Fleet::start(Setup::agents(2)).await, Workplace::new());
    let (edge, admin) = (format!("http://{}", fleet.routers[0].edge), format!("http://{}", fleet.routers[0].admin));
    let file = |name: &str| workplace.path().join(name).to_str().unwrap().to_owned();
    let (json, html) = (file("report.json"), file("report.html"));
    let targets = ["--target", &edge, "--name", "one", "--metrics", &admin, "--target", &edge, "--name", "other", "--metrics", &admin];
    let load = ["prefix", "--groups", "2", "--prefix-tokens", "300", "--requests", "20", "--concurrency", "4", "--warm-up", "0s"];
    let sizes = ["--input-tokens", "20", "--output-tokens", "10", "--json", &json, "--html", &html];
    let ended = workplace.run(&[&["bench"], &load[..], &targets, &sizes].concat()).await;
    assert!(ended.success, "{}", ended.stderr);
    assert!(["one", "other", "TTFT"].iter().all(|word| ended.stdout.contains(word)), "{}", ended.stdout);

    let report: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    for target in report["targets"].as_array().unwrap() {
        let figures = &target["rounds"][0];
        assert_eq!((&figures["all"]["requests"], &figures["all"]["complete"]), (&20.into(), &20.into()), "{figures}");
        let cached = figures["all"]["cached_share"].as_f64().unwrap();
        assert!(cached > 0.5, "all but the first of each group find its prompt in a cache: {cached}");
        assert!(figures["fleet"]["kv_use_max"].is_number(), "the router tells of its engines: {figures}");
    }
    let page = std::fs::read_to_string(html).unwrap();
    assert!(page.starts_with("<!DOCTYPE html>") && page.contains("<svg") && !page.contains("<script"), "{page}");
}

#[tokio::test]
async fn bench_names_a_target_that_does_not_answer() {
    let ended = Workplace::new().run(&["bench", "sustained", "--target", "unix:/nowhere/engine.sock"]).await;
    assert!(!ended.success && ended.stderr.contains("unix:/nowhere/engine.sock") && ended.stderr.contains("--target"), "{}", ended.stderr);
}
