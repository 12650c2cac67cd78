//! The report as text for a terminal: measures as lines, targets as columns beside each other.

use std::fmt::Write;

use super::rows::{Row, cautions, failures, kinds, number, rounds, rows, steps};
use super::{Report, TargetReport};

/// Lines of the tables for single kinds of sessions.
///
/// The complete tables would hide the differences.
const KIND_MEASURES: [&str; 8] =
    ["requests", "failed", "output tokens/s", "TTFT p50, ms", "TTFT p99, ms", "ITL p50, ms", "E2E p50, ms", "E2E p99, ms"];

#[must_use]
pub fn table(report: &Report) -> String {
    let mut text = format!("{}, {}\n", report.scenario, report.began);
    for (name, value) in &report.settings {
        let _ = writeln!(text, "  {name} {value}");
    }
    let most_rounds = report.targets.iter().map(|target| target.rounds.len()).max().unwrap_or(0);
    if most_rounds > 0 {
        let medians = if most_rounds > 1 { format!(" (medians of {most_rounds} rounds, least – most)") } else { String::new() };
        let _ = writeln!(text, "\nAll requests{medians}");
        write_comparison(&mut text, report, rows(&rounds(report)));
        for (name, targets) in kinds(report) {
            let targets: Vec<Vec<_>> = targets.iter().map(|rounds| rounds.iter().collect()).collect();
            let of_a_kind = rows(&targets).into_iter().filter(|row| KIND_MEASURES.contains(&row.measure.name)).collect();
            let _ = writeln!(text, "\nOf these: {name}");
            write_comparison(&mut text, report, of_a_kind);
        }
    }
    for target in report.targets.iter().filter(|target| !target.sweep.is_empty()) {
        write_sweep(&mut text, target);
    }
    let failures = failures(report);
    if !failures.is_empty() {
        text.push_str("\nFailed, by how\n");
        let mut lines = vec![heads(report)];
        lines.extend(failures.into_iter().map(|(how, counts)| {
            let counts = counts.into_iter().map(|count| count.to_string());
            std::iter::once(how.to_owned()).chain(counts).collect()
        }));
        aligned(&mut text, &lines);
    }
    let cautions = cautions(report);
    if !cautions.is_empty() {
        text.push_str("\nMind\n");
        for caution in cautions {
            let _ = writeln!(text, "  {caution}");
        }
    }
    text
}

fn heads(report: &Report) -> Vec<String> {
    std::iter::once(String::new()).chain(report.targets.iter().map(|target| target.name.clone())).collect()
}

fn write_comparison(text: &mut String, report: &Report, rows: Vec<Row<'_>>) {
    // Each target has up to three columns: median, range, ratio to the first. Unneeded ones are
    // left out.
    let ranges = rows.iter().any(Row::has_ranges);
    let mut head = vec![String::new()];
    for (number, target) in report.targets.iter().enumerate() {
        head.push(target.name.clone());
        head.extend(ranges.then(String::new));
        head.extend((number > 0).then(String::new));
    }
    let mut lines = vec![head];
    let mut before = None;
    for row in rows {
        if before.replace(row.group()).is_some_and(|before| before != row.group()) {
            lines.push(Vec::new());
        }
        let mut line = vec![row.measure.name.to_owned()];
        for target in 0..row.cells.len() {
            line.push(row.median(target));
            line.extend(ranges.then(|| row.range(target)));
            line.extend((target > 0).then(|| row.ratio(target)));
        }
        lines.push(line);
    }
    aligned(text, &lines);
}

fn write_sweep(text: &mut String, target: &TargetReport) {
    let _ = writeln!(text, "\n{}: more and more clients", target.name);
    let heads = ["clients", "requests/s", "tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "E2E p50", "E2E p99, ms", "failed"];
    let mut lines = vec![heads.map(String::from).to_vec()];
    for step in steps(target) {
        lines.push(vec![
            step.concurrency.to_string(),
            number(step.median(|totals| totals.requests_per_second)),
            number(step.median(|totals| totals.output_tokens_per_second)),
            number(step.median(|totals| totals.ttft_ms.p50)),
            number(step.median(|totals| totals.ttft_ms.p99)),
            number(step.median(|totals| totals.itl_ms.p50)),
            number(step.median(|totals| totals.itl_ms.p99)),
            number(step.median(|totals| totals.e2e_ms.p50)),
            number(step.median(|totals| totals.e2e_ms.p99)),
            step.failed().to_string(),
        ]);
    }
    aligned(text, &lines);
    let end = target.broke.as_deref().unwrap_or("it held to the last step");
    let _ = writeln!(text, "  {end}");
}

/// Aligns the first column to the left, the others to the right.
fn aligned(text: &mut String, lines: &[Vec<String>]) {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns)
        .map(|column| lines.iter().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0))
        .collect();
    for line in lines {
        let mut written = String::new();
        for (column, cell) in line.iter().enumerate() {
            let width = widths[column];
            let _ = if column == 0 { write!(written, "  {cell:<width$}") } else { write!(written, "  {cell:>width$}") };
        }
        text.push_str(written.trim_end());
        text.push('\n');
    }
}
