use super::*;
use crate::measure::Measures;

pub(crate) fn outcome(workload: &str, policy: &str, ttft_mean: f64) -> Outcome {
    let measures = Measures {
        requests: 10,
        ttft_mean,
        ttft_p50: ttft_mean,
        ttft_p90: ttft_mean * 2.0,
        ttft_p99: ttft_mean * 3.0,
        tpot_mean: 0.02,
        hit_rate: 0.5,
        loaded_rate: 0.25,
        goodput: 1.0,
        imbalance: 1.25,
        cut: 0.0,
        preemptions: 3,
        makespan: 60.0,
        ttfts: Vec::new(),
    };
    Outcome { workload: workload.into(), policy: policy.into(), measures }
}

#[test]
fn a_table_has_aligned_columns_for_each_workload() {
    let text = table(&[outcome("one", "short", 0.5), outcome("one", "a-longer-name", 123.4), outcome("two", "short", 0.5)]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 6);
    assert!(lines[0].starts_with("one ") && lines[3].is_empty() && lines[4].starts_with("two "));
    assert!(lines[1].starts_with("short               0.50") && lines[2].starts_with("a-longer-name      123.4"), "{text}");
    assert_eq!(lines[1].chars().count(), lines[2].chars().count());
}

#[test]
fn csv_has_a_heading_for_each_field() {
    let text = csv(&[outcome("one", "short", 0.5)]);
    let mut lines = text.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let (headings, fields) = (lines.next().unwrap(), lines.next().unwrap());
    assert_eq!(headings.len(), fields.len());
    assert_eq!((headings[3], fields[3], headings[13], fields[13]), ("ttft_mean", "0.500000", "preemptions", "3"));
}
