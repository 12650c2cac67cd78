//! End of a sweep: the step at which the target breaks, and why.
//!
//! The decision depends on figures; the `drive` makes the steps.

use std::fmt::Write;

use crate::figures::Totals;
use crate::record::Limits;
use crate::report::SweepStep;

/// Share of requests that may fail.
const MAX_FAILED_SHARE: f64 = 0.01;
/// Tokens per second have stopped growing if they are less than this many times the previous
/// step's.
///
/// Steps have twice the clients or more, so a target with room left gains much more.
const GROWTH: f64 = 1.05;
/// If the median time to the first token is also this many times as long, requests queue, and the
/// change is no noise.
const QUEUE: f64 = 2.0;

/// Why a step is the last one; `None` if it is not.
///
/// `before` is the step before it in the same round.
pub(crate) fn stop_reason(step: &SweepStep, before: Option<&SweepStep>, limits: &Limits) -> Option<String> {
    let all = &step.figures.all;
    let why = too_many_failed(all).or_else(|| limit_missed(all, limits)).or_else(|| no_growth(all, &before?.figures.all))?;
    let held = match before {
        Some(before) => format!(
            "; {} clients still gave {:.0} tokens/s with {:.0} ms to the first token at p99",
            before.concurrency, before.figures.all.output_tokens_per_second, before.figures.all.ttft_ms.p99
        ),
        None => String::new(),
    };
    Some(format!("at {} clients: {why}{held}", step.concurrency))
}

#[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^52")]
fn too_many_failed(all: &Totals) -> Option<String> {
    if all.requests == 0 {
        return Some("no request ended".to_owned());
    }
    let failed = all.failed.values().sum::<u64>();
    let share = failed as f64 / all.requests as f64;
    if share <= MAX_FAILED_SHARE {
        return None;
    }
    let mut text = format!("{:.1} % of the requests failed (", share * 100.0);
    for (number, (kind, count)) in all.failed.iter().enumerate() {
        let comma = if number > 0 { ", " } else { "" };
        let _ = write!(text, "{comma}{kind}: {count}");
    }
    text.push(')');
    Some(text)
}

fn limit_missed(all: &Totals, limits: &Limits) -> Option<String> {
    // An answer that is not a stream has its first token at its end.
    let ttft = if all.ttft_ms.count > 0 { all.ttft_ms.p99 } else { all.e2e_ms.p99 };
    let checks = [
        ("the time to the first token", ttft, limits.ttft),
        ("the mean time between tokens", all.tpot_ms.p99, limits.itl),
        ("the time to the end", all.e2e_ms.p99, limits.e2e),
    ];
    checks.into_iter().find_map(|(what, p99, limit)| {
        let limit = limit.filter(|limit| p99 > limit.as_secs_f64() * 1000.0)?;
        Some(format!("{what} is {p99:.0} ms at p99, above the limit of {}", humantime::format_duration(limit)))
    })
}

fn no_growth(all: &Totals, before: &Totals) -> Option<String> {
    let (tokens, tokens_before) = (all.output_tokens_per_second, before.output_tokens_per_second);
    let (first, first_before) = (all.ttft_ms.p50, before.ttft_ms.p50);
    let queued = first > QUEUE * first_before;
    (queued && tokens < GROWTH * tokens_before).then(|| {
        format!(
            "tokens/s no longer grow ({tokens:.0} after {tokens_before:.0}) while the median time to the first token does ({first:.0} ms after {first_before:.0} ms)"
        )
    })
}

#[cfg(test)]
mod tests;
