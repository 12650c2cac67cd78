//! Pages recorded from real engines, older releases' names, and text that nobody should send.

use proptest::prelude::*;

use super::*;

const LOADED: &str = include_str!("../../../../tests/fixtures/vllm/metrics_0.32_loaded.txt");
const FRESH: &str = include_str!("../../../../tests/fixtures/vllm/metrics_0.32_idle_fresh.txt");
const FILTERED: &str = include_str!("../../../../tests/fixtures/vllm/metrics_0.32_filtered.txt");
const RUST: &str = include_str!("../../../../tests/fixtures/vllm/metrics_0.32_rust_frontend_idle.txt");

#[test]
fn a_loaded_engines_figures_are_all_read() {
    let figures = parse_metrics(LOADED);
    assert!((figures.kv_use - 0.003_906).abs() < 1e-6);
    let expected = EngineMetrics {
        running: 32,
        waiting: 0,
        kv_use: figures.kv_use,
        kv_blocks: Some(16_384),
        block_size: Some(128),
        prompt_tokens: 8_224,
        generation_tokens: 12_257,
        steps: 1_139,
        preemptions: 0,
        prefix_queries: 8_224,
        prefix_hits: 1_280,
    };
    assert_eq!(figures, expected);
}

#[test]
fn the_filtered_metrics_page_has_the_same_names() {
    let figures = parse_metrics(FILTERED);
    let expected =
        EngineMetrics { prompt_tokens: 3_180, generation_tokens: 868, steps: 498, prefix_queries: 3_180, ..EngineMetrics::default() };
    assert_eq!(figures, expected);
}

#[test]
fn fresh_engines_and_rust_front_ends_read_as_idle() {
    let fresh = parse_metrics(FRESH);
    assert_eq!((fresh.running, fresh.waiting, fresh.block_size), (0, 0, Some(128)));
    assert_eq!(parse_metrics(RUST), EngineMetrics::default());
}

#[test]
fn metric_names_of_old_releases_are_only_a_fallback() {
    let old = "vllm:gpu_cache_usage_perc{engine=\"0\"} 0.5\nvllm:gpu_prefix_cache_hits_total{engine=\"0\"} 7\n";
    assert_eq!((parse_metrics(old).kv_use, parse_metrics(old).prefix_hits), (0.5, 7));
    let both = format!("{old}vllm:kv_cache_usage_perc{{engine=\"0\"}} 0.25\n");
    assert_eq!((parse_metrics(&both).kv_use, parse_metrics(&both).prefix_hits), (0.25, 7));
}

#[test]
fn label_sets_are_summed_and_cache_usage_is_averaged() {
    let page = "vllm:num_requests_running{engine=\"0\"} 3.0\nvllm:num_requests_running{engine=\"1\"} 4\n\
        vllm:kv_cache_usage_perc{engine=\"0\"} 0.2\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.4\n\
        vllm:cache_config_info{num_gpu_blocks=\"10\",engine=\"0\",block_size=\"16\"} 1.0\n\
        vllm:cache_config_info{num_gpu_blocks=\"20\",engine=\"1\",block_size=\"16\"} 1.0\n";
    let figures = parse_metrics(page);
    assert_eq!(figures.running, 7);
    assert!((figures.kv_use - 0.3).abs() < 1e-9);
    assert_eq!((figures.kv_blocks, figures.block_size), (Some(30), Some(16)));
}

#[test]
fn odd_values_and_longer_metric_names_are_ignored() {
    let page = "vllm:num_requests_running NaN\nvllm:num_requests_waiting -3\n\
        vllm:num_requests_waiting_by_reason{reason=\"capacity\"} 9\n\
        vllm:prompt_tokens_total 1e3 1795220548\nvllm:num_preemptions_total +Inf\n\
        vllm:generation_tokens_total{a=\"}\\\"\",b=\"{\"} 5\n";
    let expected = EngineMetrics { prompt_tokens: 1_000, generation_tokens: 5, ..EngineMetrics::default() };
    assert_eq!(parse_metrics(page), expected);
}

#[test]
fn a_label_is_matched_by_its_whole_name() {
    let line = "x{user_block_size=\"1\",other=\"block_size=\\\"\",block_size=\"2\"} 1";
    let sample = PrometheusSample::parse(line).unwrap();
    assert_eq!(sample.label("block_size"), Some("2"));
    assert_eq!(sample.label("size"), None);
}

#[test]
fn the_filtered_metrics_path_requests_every_name() {
    let path = filtered_path();
    assert!(path.starts_with("/metrics/?name[]=vllm:num_requests_running&name[]="));
    assert_eq!(path.matches("name[]=").count(), NAMES.len() + 3 + 1);
    assert!(path.parse::<http::Uri>().is_ok());
}

proptest! {
    #[test]
    fn no_text_makes_the_reader_panic(page in "(vllm:num_requests_running|vllm:cache_config_info|[a-z]{0,3}|[{}\"=,\\\\ \n#]|[0-9.eNaé-]{0,4}){0,40}") {
        parse_metrics(&page);
    }
}
