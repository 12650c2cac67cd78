//! Ends of sweeps.

use std::time::Duration;

use super::*;
use crate::figures::{Figures, Quantiles};

fn step(concurrency: u32, tokens_per_second: f64, ttft_ms: f64) -> SweepStep {
    let ttft_ms = Quantiles { count: 100, p50: ttft_ms, p99: 2.0 * ttft_ms, ..Quantiles::default() };
    let all = Totals { requests: 100, complete: 100, output_tokens_per_second: tokens_per_second, ttft_ms, ..Totals::default() };
    SweepStep { round: 0, concurrency, figures: Figures { all, ..Figures::default() } }
}

#[test]
fn a_sweep_continues_while_its_target_has_room() {
    let none = Limits::default();
    assert_eq!(stop_reason(&step(1, 100.0, 10.0), None, &none), None);
    assert_eq!(stop_reason(&step(5, 450.0, 25.0), Some(&step(1, 100.0, 10.0)), &none), None, "slower, but it gives more");
    assert_eq!(stop_reason(&step(10, 450.0, 15.0), Some(&step(5, 450.0, 10.0)), &none), None, "no more, but no queue either");
}

#[test]
fn a_growing_queue_without_more_tokens_ends_the_sweep() {
    let why = stop_reason(&step(250, 3100.0, 210.0), Some(&step(100, 3000.0, 80.0)), &Limits::default()).unwrap();
    assert_eq!(
        why,
        "at 250 clients: tokens/s no longer grow (3100 after 3000) while the median time to the first token does (210 ms after 80 ms); 100 clients still gave 3000 tokens/s with 160 ms to the first token at p99"
    );
}

#[test]
fn a_sweep_tolerates_one_failure_in_a_hundred() {
    let mut at_fifty = step(50, 100.0, 10.0);
    at_fifty.figures.all.failed = [("status 429".to_owned(), 1)].into();
    assert_eq!(stop_reason(&at_fifty, None, &Limits::default()), None);
    at_fifty.figures.all.failed = [("broken".to_owned(), 1), ("status 429".to_owned(), 2)].into();
    let why = stop_reason(&at_fifty, None, &Limits::default()).unwrap();
    assert_eq!(why, "at 50 clients: 3.0 % of the requests failed (broken: 1, status 429: 2)");
    at_fifty.figures.all = Totals::default();
    assert_eq!(stop_reason(&at_fifty, None, &Limits::default()).unwrap(), "at 50 clients: no request ended");
}

#[test]
fn a_latency_limit_is_judged_at_the_p99() {
    let limits = |ttft| Limits { ttft: Some(Duration::from_millis(ttft)), ..Limits::default() };
    assert_eq!(stop_reason(&step(10, 100.0, 90.0), None, &limits(180)), None);
    let why = stop_reason(&step(10, 100.0, 100.0), None, &limits(180)).unwrap();
    assert_eq!(why, "at 10 clients: the time to the first token is 200 ms at p99, above the limit of 180ms");
}
