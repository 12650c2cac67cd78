//! Rows that tables and pages show for each target, and the format of their numbers: medians and
//! ranges over rounds, ratios to the first target, and cautions for the reader.

use std::collections::{BTreeMap, BTreeSet};

use super::{Report, SweepStep, TargetReport};
use crate::figures::{Figures, Quantiles, Totals};

pub(super) struct Measure {
    pub(super) name: &'static str,
    pub(super) form: NumberFormat,
    of: fn(&Figures) -> Option<f64>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum NumberFormat {
    Count,
    Number,
    /// A number that is also shown as a ratio to the first target's.
    Compared,
    /// Share from 0 to 1, shown as a percentage.
    Share,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) least: f64,
    pub(super) most: f64,
}

/// A measure of every target; `None` if it was not measured.
pub(super) struct Row<'a> {
    pub(super) measure: &'a Measure,
    pub(super) cells: Vec<Option<Spread>>,
}

impl Row<'_> {
    /// Quantity that the row measures. Rows of the same quantity stand together.
    pub(super) fn group(&self) -> &'static str {
        let first = self.measure.name.split(' ').next().unwrap_or_default();
        if ["TTFT", "ITL", "TPOT", "E2E"].contains(&first) { first } else { "" }
    }

    pub(super) fn median(&self, target: usize) -> String {
        self.cells[target].map_or_else(|| "–".into(), |cell| self.measure.form.format_value(cell.median))
    }

    /// Minimum and maximum; empty if both are written alike.
    pub(super) fn range(&self, target: usize) -> String {
        let Some(Spread { least, most, .. }) = self.cells[target] else { return String::new() };
        let (least, most) = (self.measure.form.format_value(least), self.measure.form.format_value(most));
        if least == most { String::new() } else { format!("{least} – {most}") }
    }

    pub(super) fn has_ranges(&self) -> bool {
        (0..self.cells.len()).any(|target| !self.range(target).is_empty())
    }

    /// Ratio to the first target, for rates and times; empty for others, and if there is none.
    pub(super) fn ratio(&self, target: usize) -> String {
        match (self.measure.form, self.cells[target], self.cells[0]) {
            (NumberFormat::Compared, Some(cell), Some(first)) if first.median > 0.0 => format!("×{:.2}", cell.median / first.median),
            _ => String::new(),
        }
    }
}

const fn row(name: &'static str, form: NumberFormat, of: fn(&Figures) -> Option<f64>) -> Measure {
    Measure { name, form, of }
}

#[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^52")]
fn count(count: u64) -> f64 {
    count as f64
}

fn time(quantiles: &Quantiles, of: fn(&Quantiles) -> f64) -> Option<f64> {
    (quantiles.count > 0).then(|| of(quantiles))
}

/// Measures in the order of the tables.
///
/// Prompts are made without the model's tokenizer, so their mean shows their real length.
static MEASURES: [Measure; 30] = [
    row("requests", NumberFormat::Count, |figures| Some(count(figures.all.requests))),
    row("failed", NumberFormat::Count, |figures| Some(count(figures.all.failed.values().sum()))),
    row("requests/s", NumberFormat::Compared, |figures| Some(figures.all.requests_per_second)),
    row("output tokens/s", NumberFormat::Compared, |figures| Some(figures.all.output_tokens_per_second)),
    row("prompt tokens/s", NumberFormat::Compared, |figures| Some(figures.all.prompt_tokens_per_second).filter(|rate| *rate > 0.0)),
    row("goodput, requests/s", NumberFormat::Compared, |figures| figures.all.goodput),
    row("limits met", NumberFormat::Share, |figures| figures.all.met),
    row("TTFT p50, ms", NumberFormat::Compared, |figures| time(&figures.all.ttft_ms, |times| times.p50)),
    row("TTFT p90, ms", NumberFormat::Compared, |figures| time(&figures.all.ttft_ms, |times| times.p90)),
    row("TTFT p99, ms", NumberFormat::Compared, |figures| time(&figures.all.ttft_ms, |times| times.p99)),
    row("TTFT max, ms", NumberFormat::Compared, |figures| time(&figures.all.ttft_ms, |times| times.max)),
    row("ITL p50, ms", NumberFormat::Compared, |figures| time(&figures.all.itl_ms, |times| times.p50)),
    row("ITL p90, ms", NumberFormat::Compared, |figures| time(&figures.all.itl_ms, |times| times.p90)),
    row("ITL p99, ms", NumberFormat::Compared, |figures| time(&figures.all.itl_ms, |times| times.p99)),
    row("ITL max, ms", NumberFormat::Compared, |figures| time(&figures.all.itl_ms, |times| times.max)),
    row("TPOT p50, ms", NumberFormat::Compared, |figures| time(&figures.all.tpot_ms, |times| times.p50)),
    row("TPOT p90, ms", NumberFormat::Compared, |figures| time(&figures.all.tpot_ms, |times| times.p90)),
    row("TPOT p99, ms", NumberFormat::Compared, |figures| time(&figures.all.tpot_ms, |times| times.p99)),
    row("E2E p50, ms", NumberFormat::Compared, |figures| time(&figures.all.e2e_ms, |times| times.p50)),
    row("E2E p90, ms", NumberFormat::Compared, |figures| time(&figures.all.e2e_ms, |times| times.p90)),
    row("E2E p99, ms", NumberFormat::Compared, |figures| time(&figures.all.e2e_ms, |times| times.p99)),
    row("E2E max, ms", NumberFormat::Compared, |figures| time(&figures.all.e2e_ms, |times| times.max)),
    row("sent late p99, ms", NumberFormat::Number, |figures| time(&figures.all.late_ms, |times| times.p99)),
    row("tokens of a prompt, mean", NumberFormat::Number, |figures| figures.all.prompt_tokens_mean),
    row("tokens of an answer, mean", NumberFormat::Number, |figures| figures.all.output_tokens_mean),
    row("prompt tokens cached, by usage", NumberFormat::Share, |figures| figures.all.cached_share),
    row("prefix hit rate, by metrics", NumberFormat::Share, |figures| figures.fleet.and_then(|fleet| fleet.prefix_hit_rate)),
    row("KV cache in use, mean", NumberFormat::Share, |figures| figures.fleet.and_then(|fleet| fleet.kv_use_mean)),
    row("KV cache in use, most", NumberFormat::Share, |figures| figures.fleet.and_then(|fleet| fleet.kv_use_max)),
    row("seconds", NumberFormat::Number, |figures| Some(figures.all.seconds)),
];

/// Measures with a value, with the rounds of each target.
pub(super) fn rows(targets: &[Vec<&Figures>]) -> Vec<Row<'static>> {
    let cells = |measure: &Measure| -> Vec<Option<Spread>> {
        targets.iter().map(|rounds| Spread::of(rounds.iter().filter_map(|figures| (measure.of)(figures)))).collect()
    };
    let measured = |measure: &'static Measure| Row { measure, cells: cells(measure) };
    MEASURES.iter().map(measured).filter(|row| row.cells.iter().any(Option::is_some)).collect()
}

pub(super) fn rounds(report: &Report) -> Vec<Vec<&Figures>> {
    report.targets.iter().map(|target| target.rounds.iter().collect()).collect()
}

/// Rounds of each target, with only one kind of session in them, for each kind.
pub(super) fn kinds(report: &Report) -> BTreeMap<&str, Vec<Vec<Figures>>> {
    let names: BTreeSet<&str> =
        report.targets.iter().flat_map(|target| &target.rounds).flat_map(|round| round.kinds.keys().map(String::as_str)).collect();
    let only = |round: &Figures, name: &str| round.kinds.get(name).map(|all| Figures { all: all.clone(), ..Figures::default() });
    let of =
        |name: &str| report.targets.iter().map(|target| target.rounds.iter().filter_map(|round| only(round, name)).collect()).collect();
    names.into_iter().map(|name| (name, of(name))).collect()
}

/// Failures in all rounds and steps, by their kind, for each target.
pub(super) fn failures(report: &Report) -> BTreeMap<&str, Vec<u64>> {
    let mut failures: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    for (number, target) in report.targets.iter().enumerate() {
        for figures in everything(target) {
            for (how, count) in &figures.all.failed {
                failures.entry(how).or_insert_with(|| vec![0; report.targets.len()])[number] += count;
            }
        }
    }
    failures
}

/// A step of a sweep, over all rounds.
pub(super) struct Step<'a> {
    pub(super) concurrency: u32,
    rounds: Vec<&'a Totals>,
}

/// Steps of a target, by their clients.
pub(super) fn steps(target: &TargetReport) -> Vec<Step<'_>> {
    let mut steps: BTreeMap<u32, Vec<&Totals>> = BTreeMap::new();
    for SweepStep { concurrency, figures, .. } in &target.sweep {
        steps.entry(*concurrency).or_default().push(&figures.all);
    }
    steps.into_iter().map(|(concurrency, rounds)| Step { concurrency, rounds }).collect()
}

impl Step<'_> {
    /// Median over rounds.
    pub(super) fn median(&self, of: impl Fn(&Totals) -> f64) -> f64 {
        Spread::of(self.rounds.iter().map(|totals| of(totals))).map_or(0.0, |spread| spread.median)
    }

    pub(super) fn failed(&self) -> u64 {
        self.rounds.iter().flat_map(|totals| totals.failed.values()).sum()
    }
}

fn everything(target: &TargetReport) -> impl Iterator<Item = &Figures> {
    target.rounds.iter().chain(target.sweep.iter().map(|step| &step.figures))
}

/// Warnings that a reader must know before trusting the numbers.
pub(super) fn cautions(report: &Report) -> Vec<String> {
    let mut cautions = Vec::new();
    for target in &report.targets {
        let name = &target.name;
        let (mut requests, mut failed, mut late, mut fewest) = (0, 0, 0.0_f64, u64::MAX);
        for Figures { all, .. } in everything(target) {
            requests += all.requests;
            failed += all.failed.values().sum::<u64>();
            fewest = fewest.min(all.complete);
            // Lateness below 5 ms is the jitter of timers. Below a tenth of the measured time it
            // changes no conclusion.
            if all.late_ms.p99 > 5.0 && all.late_ms.p99 > all.ttft_ms.p50.max(all.e2e_ms.p50 / 10.0) / 10.0 {
                late = late.max(all.late_ms.p99);
            }
        }
        if failed > 0 {
            cautions.push(format!(
                "{name}: {failed} of {requests} requests failed; E2E, TPOT and tokens are those of the others, so they look better than \
                 they were."
            ));
        }
        if late > 0.0 {
            let late = number(late);
            cautions.push(format!(
                "{name}: requests were sent up to {late} ms late (p99), because the load generator or its limit of requests in flight \
                 could not keep up. Their times include that wait."
            ));
        }
        if target.sweep.is_empty() && fewest < 100 {
            cautions.push(format!("{name}: a round had only {fewest} complete answers, so its p99 is little more than its longest time."));
        }
        // With fewer than two answers per client, a step is mostly its own start and end.
        let short = target.sweep.iter().find(|step| step.figures.all.complete < 2 * u64::from(step.concurrency));
        if let Some(step) = short {
            let (clients, complete) = (step.concurrency, step.figures.all.complete);
            cautions.push(format!(
                "{name}: the step of {clients} clients had only {complete} complete answers, so from there on rates are too low; give \
                 --duration more time."
            ));
        }
    }
    cautions
}

impl Spread {
    /// Spread of these values; `None` without values.
    pub(super) fn of(values: impl Iterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let (least, most) = (*values.first()?, *values.last()?);
        let median = f64::midpoint(values[(values.len() - 1) / 2], values[values.len() / 2]);
        Some(Self { median, least, most })
    }
}

impl NumberFormat {
    pub(super) fn format_value(self, value: f64) -> String {
        match self {
            Self::Count => grouped(&format!("{value:.0}")),
            Self::Number | Self::Compared => number(value),
            Self::Share => format!("{:.1} %", value * 100.0),
        }
    }
}

/// Formats a number with three significant digits, or all of the whole part.
pub(super) fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 99.95 => grouped(&format!("{value:.0}")),
        size if size >= 9.995 => format!("{value:.1}"),
        size if size >= 0.0995 => format!("{value:.2}"),
        size if size > 0.0 => format!("{value:.3}"),
        _ => "0".into(),
    }
}

/// Groups digits by thousands: `12,345`.
fn grouped(digits: &str) -> String {
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) && !text.ends_with('-') {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
