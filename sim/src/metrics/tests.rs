//! Metric names, help texts, types and labels against the recorded ones.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::EngineArgs;
use crate::tests::fixture_text;

/// Each sample name with the sets of its label names.
fn labels(text: &str) -> BTreeMap<String, BTreeSet<Vec<String>>> {
    let mut samples: BTreeMap<String, BTreeSet<Vec<String>>> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (name, rest) = line.split_once('{').unwrap_or((line.split(' ').next().unwrap(), ""));
        let names = rest.split(',').filter_map(|label| Some(label.split_once("=\"")?.0.to_owned()));
        samples.entry(name.to_owned()).or_default().insert(names.collect());
    }
    samples
}

fn rendered() -> String {
    render(&Metrics::default(), &EngineArgs::from_flags(&["--served-model-name", "tiny"]), &[])
}

#[test]
fn every_metric_family_matches_vllms_help_and_type() {
    let recorded = fixture_text("metrics_0.32_loaded.txt");
    let headers: BTreeSet<&str> = recorded.lines().filter(|line| line.starts_with('#')).collect();
    let ours = rendered();
    for line in ours.lines().filter(|line| line.starts_with('#')) {
        assert!(headers.contains(line), "{line}");
    }
}

#[test]
fn every_sample_has_vllms_labels_in_order() {
    let recorded = labels(&fixture_text("metrics_0.32_loaded.txt"));
    for (name, ours) in labels(&rendered()) {
        assert_eq!(Some(&ours), recorded.get(&name), "{name}");
    }
}

#[test]
fn every_sample_that_routers_read_is_present() {
    let ours = labels(&rendered());
    for name in [
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_waiting_by_reason",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "iteration_tokens_total_count",
        "request_success_total",
        "cache_config_info",
        "engine_sleep_state",
        "admission_rejections_total",
    ] {
        assert!(ours.contains_key(&format!("vllm:{name}")), "{name}");
    }
    let text = rendered();
    assert!(text.contains(r#"block_size="16""#) && text.contains(r#"num_gpu_blocks="4096""#));
}

#[test]
fn a_filter_keeps_only_the_named_samples() {
    let names = ["vllm:iteration_tokens_total_count".to_owned(), "nothing".to_owned()];
    let text = render(&Metrics::default(), &EngineArgs::default(), &names);
    assert_eq!(text.lines().count(), 3, "{text}");
    assert!(text.ends_with("vllm:iteration_tokens_total_count{engine=\"0\",model_name=\"sim\"} 0.0\n"));
}

#[test]
fn label_values_are_escaped() {
    let args = EngineArgs::from_flags(&["--served-model-name", "a\"b\\c"]);
    let text = render(&Metrics::default(), &args, &["vllm:num_requests_running".to_owned()]);
    assert!(text.contains(r#"model_name="a\"b\\c""#), "{text}");
}
