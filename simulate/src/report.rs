//! Outcomes for people and for other programs: a table, CSV.

use std::fmt::Write;

use crate::batch::Outcome;

/// Columns of numbers: heading, name in CSV, value as printed.
type Column = (&'static str, fn(&Outcome) -> String);

const COLUMNS: [Column; 12] = [
    ("TTFT mean", |outcome| seconds(outcome.measures.ttft_mean)),
    ("p50", |outcome| seconds(outcome.measures.ttft_p50)),
    ("p90", |outcome| seconds(outcome.measures.ttft_p90)),
    ("p99", |outcome| seconds(outcome.measures.ttft_p99)),
    ("TPOT ms", |outcome| format!("{:.1}", outcome.measures.tpot_mean * 1000.0)),
    ("hits", |outcome| percent(outcome.measures.hit_rate)),
    ("loaded", |outcome| percent(outcome.measures.loaded_rate)),
    ("goodput", |outcome| percent(outcome.measures.goodput)),
    ("imbalance", |outcome| format!("{:.2}", outcome.measures.imbalance)),
    ("cut", |outcome| percent(outcome.measures.cut)),
    ("preempted", |outcome| outcome.measures.preemptions.to_string()),
    ("all done s", |outcome| format!("{:.0}", outcome.measures.makespan)),
];

#[must_use]
pub fn table(outcomes: &[Outcome]) -> String {
    let mut text = String::new();
    for (number, of_workload) in by_workload(outcomes).into_iter().enumerate() {
        let rows: Vec<Vec<String>> = of_workload
            .iter()
            .map(|outcome| std::iter::once(outcome.policy.clone()).chain(COLUMNS.iter().map(|(_, value)| value(outcome))).collect())
            .collect();
        let headings: Vec<&str> =
            std::iter::once(of_workload[0].workload.as_str()).chain(COLUMNS.iter().map(|(heading, _)| *heading)).collect();
        let widths: Vec<usize> = headings
            .iter()
            .enumerate()
            .map(|(column, heading)| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0).max(heading.chars().count()))
            .collect();
        if number > 0 {
            text.push('\n');
        }
        line(&mut text, &headings, &widths);
        for row in &rows {
            line(&mut text, row, &widths);
        }
    }
    text
}

/// Groups consecutive outcomes of the same workload.
pub(crate) fn by_workload(outcomes: &[Outcome]) -> Vec<&[Outcome]> {
    outcomes.chunk_by(|one, other| one.workload == other.workload).collect()
}

/// Writes a line with the first cell to the left, numbers to the right.
fn line(text: &mut String, cells: &[impl AsRef<str>], widths: &[usize]) {
    for (column, (cell, width)) in cells.iter().zip(widths).enumerate() {
        let cell = cell.as_ref();
        let _ = if column == 0 { write!(text, "{cell:<width$}") } else { write!(text, "  {cell:>width$}") };
    }
    text.push('\n');
}

/// CSV with a line of headings and one for each outcome. Times are in seconds.
#[must_use]
pub fn csv(outcomes: &[Outcome]) -> String {
    let mut text =
        "workload,policy,requests,ttft_mean,ttft_p50,ttft_p90,ttft_p99,tpot_mean,hit_rate,loaded_rate,goodput,imbalance,cut,preemptions,makespan\n"
            .to_owned();
    for Outcome { workload, policy, measures } in outcomes {
        let numbers = [
            measures.ttft_mean,
            measures.ttft_p50,
            measures.ttft_p90,
            measures.ttft_p99,
            measures.tpot_mean,
            measures.hit_rate,
            measures.loaded_rate,
            measures.goodput,
            measures.imbalance,
            measures.cut,
        ];
        let _ = write!(text, "{workload},{policy},{}", measures.requests);
        numbers.iter().for_each(|number| {
            let _ = write!(text, ",{number:.6}");
        });
        let _ = writeln!(text, ",{},{:.3}", measures.preemptions, measures.makespan);
    }
    text
}

/// Formats seconds with about three digits.
pub(crate) fn seconds(value: f64) -> String {
    if value < 10.0 { format!("{value:.2}") } else { format!("{value:.1}") }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

#[cfg(test)]
pub(crate) mod tests;
