//! Values read from pages of metrics.

use super::*;

const TWO_ENGINES: &str = r#"# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="a {b} c"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a {b} c"} 0.75 1700000000
vllm:prefix_cache_queries_total{engine="0"} 1000.0
vllm:prefix_cache_queries_total{engine="1"} 3e3
vllm:prefix_cache_queries_created{engine="1"} 1.7e9
vllm:prefix_cache_hits_total{engine="0"} 500
vllm:prefix_cache_hits_total{engine="1"} NaN
"#;

fn fleet() -> FleetProbe {
    FleetProbe::new(Target::page("unix:/nowhere").unwrap())
}

#[test]
fn engines_on_one_metrics_page_are_added_up() {
    let reading = FleetSample::of(TWO_ENGINES);
    assert_eq!(reading, FleetSample { queries: Some(4000.0), hits: Some(500.0), kv_use: Some(0.5) });
}

#[test]
fn a_hostler_router_reports_the_same_figures() {
    let page = "hostler_replica_kv_use{node=\"a\",replica=\"a/0\"} 0.5\nhostler_replica_prefix_queries_total{replica=\"a/0\"} 8\nhostler_replica_prefix_hits_total{replica=\"a/0\"} 6\n# EOF\n";
    assert_eq!(FleetSample::of(page), FleetSample { queries: Some(8.0), hits: Some(6.0), kv_use: Some(0.5) });
}

#[test]
fn an_unrelated_page_yields_no_figures() {
    for page in
        ["", "<html>{}</html>", "process_open_fds 12\n", "vllm:kv_cache_usage_perc{engine=\"0\"}", "vllm:kv_cache_usage_perc nothing"]
    {
        assert!(!FleetSample::of(page).says_something(), "{page}");
    }
}

#[test]
fn the_hit_rate_excludes_requests_before_the_load() {
    let mut fleet = fleet();
    assert_eq!(fleet.figures(), None);
    let reading = |queries, hits, kv_use| FleetSample { queries: Some(queries), hits: Some(hits), kv_use: Some(kv_use) };
    fleet.take(reading(1000.0, 1000.0, 0.2));
    fleet.take(reading(1500.0, 1000.0, 0.6));
    fleet.take(reading(2000.0, 1250.0, 0.4));
    let figures = fleet.figures().unwrap();
    assert_eq!(figures.prefix_hit_rate, Some(0.25));
    assert!((figures.kv_use_mean.unwrap() - 0.4).abs() < 1e-9);
    assert_eq!(figures.kv_use_max, Some(0.6));
}

#[test]
fn counters_that_restart_give_no_rate() {
    let mut fleet = fleet();
    fleet.take(FleetSample { queries: Some(1000.0), hits: Some(900.0), kv_use: None });
    fleet.take(FleetSample { queries: Some(1100.0), hits: Some(10.0), kv_use: None });
    assert_eq!(fleet.figures(), Some(FleetFigures::default()));
}
