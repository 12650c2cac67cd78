//! The report as one page: a summary as a table, then charts, then the conditions.
//!
//! The page is self-contained, so it can be mailed and opened without a network, and it runs no
//! script. Texts from outside (names, errors) are escaped.

use std::fmt::Write;

use super::plot::{Axis, COLOURS, Curve, Group, Labels, Marks, Point, bars, escape, lines};
use super::rows::{Row, Spread, Step, cautions, failures, kinds, number, rounds, rows, steps};
use super::{Report, TargetReport};
use crate::figures::{Figures, Quantiles, Second, Totals};

const STYLE: &str = include_str!("page.css");

type QuantilesOf = fn(&Totals) -> &Quantiles;
type Quantile = fn(&Quantiles) -> f64;
type Total = fn(&Totals) -> f64;
type OverTime = fn(&Second) -> Option<f64>;

const GLOSSARY: [(&str, &str); 6] = [
    ("TTFT", "from when a request was due to its first token"),
    ("ITL", "between two tokens that follow each other, of all requests together"),
    ("TPOT", "mean time between the tokens of one answer"),
    ("E2E", "from when a request was due to its end"),
    ("due", "when it would have been sent had nothing been late; a closed loop's requests are due when a client is free"),
    ("goodput", "complete requests per second that met every limit that was set"),
];

#[must_use]
pub fn html(report: &Report) -> String {
    let mut page = String::new();
    let title = escape(&format!("hostler bench {}", report.scenario));
    let _ = write!(
        page,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n<p class=\"quiet\">{}</p>\n",
        escape(&report.began)
    );
    legend(&mut page, report);
    let cautions = cautions(report);
    if !cautions.is_empty() {
        page.push_str("<ul class=\"cautions\">\n");
        for caution in cautions {
            let _ = writeln!(page, "<li>{}</li>", escape(&caution));
        }
        page.push_str("</ul>\n");
    }
    if report.targets.iter().any(|target| !target.rounds.is_empty()) {
        write_conditions(&mut page, report);
    }
    if report.targets.iter().any(|target| !target.sweep.is_empty()) {
        write_sweep(&mut page, report);
    }
    write_failures(&mut page, report);
    conditions(&mut page, report);
    page.push_str("</main>\n</body>\n</html>\n");
    page
}

fn legend(page: &mut String, report: &Report) {
    page.push_str("<ul class=\"legend\">\n");
    for (number, target) in report.targets.iter().enumerate() {
        let (name, url, colour) = (escape(&target.name), escape(&target.url), number % COLOURS);
        let _ = writeln!(page, "<li><span class=\"swatch b{colour}\"></span><b>{name}</b> <span class=\"quiet\">{url}</span></li>");
    }
    page.push_str("</ul>\n");
}

fn names(report: &Report) -> Vec<String> {
    report.targets.iter().map(|target| target.name.clone()).collect()
}

fn write_conditions(page: &mut String, report: &Report) {
    let most_rounds = report.targets.iter().map(|target| target.rounds.len()).max().unwrap_or(0);
    page.push_str("<h2>Summary</h2>\n");
    if most_rounds > 1 {
        let _ = writeln!(page, "<p class=\"quiet\">Medians of {most_rounds} rounds, with the least and the most of them.</p>");
    }
    write_comparison(page, report, &rows(&rounds(report)));
    page.push_str("<h2>Times</h2>\n<div class=\"charts\">\n");
    let times: [(&str, QuantilesOf); 4] = [
        ("Time to the first token (TTFT)", |totals| &totals.ttft_ms),
        ("Time between tokens (ITL)", |totals| &totals.itl_ms),
        ("Mean time between the tokens of an answer (TPOT)", |totals| &totals.tpot_ms),
        ("Time of the whole answer (E2E)", |totals| &totals.e2e_ms),
    ];
    for (title, of) in times {
        let quantiles: [(&str, Quantile); 3] = [("p50", |times| times.p50), ("p90", |times| times.p90), ("p99", |times| times.p99)];
        let bar = |target: &TargetReport, quantile: Quantile| {
            Spread::of(target.rounds.iter().map(|round| of(&round.all)).filter(|times| times.count > 0).map(quantile))
        };
        let groups =
            quantiles.map(|(name, quantile)| Group { name, bars: report.targets.iter().map(|target| bar(target, quantile)).collect() });
        if groups.iter().any(|group| group.bars.iter().any(Option::is_some)) {
            page.push_str(&bars(&Labels { title, x: "share of requests or tokens that took no longer", y: "ms" }, &groups, &names(report)));
        }
    }
    page.push_str("</div>\n");
    over_time(page, report);
    for (kind, targets) in kinds(report) {
        let targets: Vec<Vec<&Figures>> = targets.iter().map(|rounds| rounds.iter().collect()).collect();
        let _ = writeln!(page, "<details><summary>Only: {}</summary>", escape(kind));
        write_comparison(page, report, &rows(&targets));
        page.push_str("</details>\n");
    }
}

fn write_comparison(page: &mut String, report: &Report, rows: &[Row<'_>]) {
    let ranges = rows.iter().any(Row::has_ranges);
    page.push_str("<div class=\"wide\"><table>\n<thead><tr><th></th>");
    for (number, target) in report.targets.iter().enumerate() {
        let columns = 1 + u8::from(ranges) + u8::from(number > 0);
        let (colour, name) = (number % COLOURS, escape(&target.name));
        let _ = write!(page, "<th colspan=\"{columns}\"><span class=\"swatch b{colour}\"></span>{name}</th>");
    }
    page.push_str("</tr></thead>\n<tbody>\n");
    let mut before = None;
    for row in rows {
        let new = before.replace(row.group()).is_some_and(|before| before != row.group());
        let _ = write!(page, "<tr{}><th>{}</th>", if new { " class=\"new\"" } else { "" }, escape(row.measure.name));
        for target in 0..row.cells.len() {
            let _ = write!(page, "<td class=\"value\">{}</td>", row.median(target));
            if ranges {
                let _ = write!(page, "<td class=\"range\">{}</td>", row.range(target));
            }
            if target > 0 {
                let _ = write!(page, "<td class=\"ratio\">{}</td>", row.ratio(target));
            }
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</tbody></table></div>\n");
}

fn over_time(page: &mut String, report: &Report) {
    let charts: [(&str, &str, OverTime); 4] = [
        ("Tokens", "tokens/s", |second| Some(f64::from(second.tokens))),
        ("Requests in flight", "requests", |second| Some(f64::from(second.in_flight))),
        ("Time to the first token, median of each second", "ms", |second| Some(second.ttft_p50_ms).filter(|time| *time > 0.0)),
        ("KV cache in use", "%", |second| second.kv_use.map(|share| share * 100.0)),
    ];
    let drawn = charts.map(|(title, y, of)| {
        let curve = |target: usize, round: usize, figures: &Figures| Curve {
            target,
            name: format!("{}, round {}", report.targets[target].name, round + 1),
            points: figures
                .series
                .iter()
                .filter_map(|second| Some(Point { x: f64::from(second.at), y: of(second)?, clients: 0 }))
                .collect(),
            marks: Marks::None,
        };
        let rounds = |(number, target): (usize, &TargetReport)| {
            target.rounds.iter().enumerate().map(|(round, figures)| curve(number, round, figures)).collect::<Vec<_>>()
        };
        let mut curves: Vec<Curve> = report.targets.iter().enumerate().flat_map(rounds).collect();
        curves.retain(|curve| curve.points.len() > 1);
        let most = |of: fn(&Point) -> f64| curves.iter().flat_map(|curve| &curve.points).map(of).fold(0.0, f64::max);
        let (x, up) = (Axis::linear(most(|point| point.x)), Axis::linear(most(|point| point.y)));
        let labels = Labels { title, x: "seconds after the start; a line for each round", y };
        if curves.is_empty() { String::new() } else { lines(&labels, &curves, &x, &up) }
    });
    if drawn.iter().any(|chart| !chart.is_empty()) {
        let _ = write!(page, "<h2>Over time</h2>\n<div class=\"charts\">\n{}</div>\n", drawn.concat());
    }
}

fn write_sweep(page: &mut String, report: &Report) {
    page.push_str("<h2>More and more clients</h2>\n<ul>\n");
    for target in report.targets.iter().filter(|target| !target.sweep.is_empty()) {
        let end = target.broke.as_deref().unwrap_or("held to the last step");
        let _ = writeln!(page, "<li><b>{}</b>: {}</li>", escape(&target.name), escape(end));
    }
    page.push_str("</ul>\n<div class=\"charts\">\n");
    let steps: Vec<Vec<Step<'_>>> = report.targets.iter().map(steps).collect();
    let curves = |marks: Marks, x: fn(&Step<'_>) -> f64, y: Total| -> Vec<Curve> {
        let point = |step: &Step<'_>| Point { x: x(step), y: step.median(y), clients: step.concurrency };
        let curve = |(target, steps): (usize, &Vec<Step<'_>>)| Curve {
            target,
            name: report.targets[target].name.clone(),
            points: steps.iter().map(point).filter(|point| point.x > 0.0 && point.y > 0.0).collect(),
            marks,
        };
        steps.iter().enumerate().map(curve).filter(|curve| !curve.points.is_empty()).collect()
    };
    let tokens: fn(&Step<'_>) -> f64 = |step| step.median(|totals| totals.output_tokens_per_second);
    let times: [(&str, Total); 5] = [
        ("TTFT p50 against tokens", |totals| totals.ttft_ms.p50),
        ("TTFT p99 against tokens", |totals| totals.ttft_ms.p99),
        ("ITL p50 against tokens", |totals| totals.itl_ms.p50),
        ("ITL p99 against tokens", |totals| totals.itl_ms.p99),
        ("E2E p99 against tokens", |totals| totals.e2e_ms.p99),
    ];
    for (title, of) in times {
        let curves = curves(Marks::Clients, tokens, of);
        if curves.is_empty() {
            continue;
        }
        let points = || curves.iter().flat_map(|curve| &curve.points);
        let (x, y) = (Axis::linear(points().map(|point| point.x).fold(0.0, f64::max)), Axis::fitting(points().map(|point| point.y)));
        page.push_str(&lines(&Labels { title, x: "tokens/s; numbers at points are clients", y: "ms" }, &curves, &x, &y));
    }
    let growth = curves(Marks::Dots, |step| f64::from(step.concurrency), |totals| totals.output_tokens_per_second);
    let points = || growth.iter().flat_map(|curve| &curve.points);
    let (x, y) = (Axis::logarithmic(points().map(|point| point.x)), Axis::linear(points().map(|point| point.y).fold(0.0, f64::max)));
    page.push_str(&lines(&Labels { title: "Tokens against clients", x: "clients", y: "tokens/s" }, &growth, &x, &y));
    page.push_str("</div>\n");
    for (target, steps) in report.targets.iter().zip(&steps).filter(|(_, steps)| !steps.is_empty()) {
        step_table(page, target, steps);
    }
}

fn step_table(page: &mut String, target: &TargetReport, steps: &[Step<'_>]) {
    let _ = writeln!(page, "<h3>{}</h3>\n<div class=\"wide\"><table>\n<thead><tr>", escape(&target.name));
    for head in ["clients", "requests/s", "tokens/s", "TTFT p50, ms", "TTFT p99, ms", "ITL p50, ms", "ITL p99, ms", "E2E p99, ms", "failed"]
    {
        let _ = write!(page, "<th>{head}</th>");
    }
    page.push_str("</tr></thead>\n<tbody>\n");
    let columns: [Total; 7] = [
        |totals| totals.requests_per_second,
        |totals| totals.output_tokens_per_second,
        |totals| totals.ttft_ms.p50,
        |totals| totals.ttft_ms.p99,
        |totals| totals.itl_ms.p50,
        |totals| totals.itl_ms.p99,
        |totals| totals.e2e_ms.p99,
    ];
    for step in steps {
        let _ = write!(page, "<tr><td>{}</td>", step.concurrency);
        for of in columns {
            let _ = write!(page, "<td>{}</td>", number(step.median(of)));
        }
        let _ = writeln!(page, "<td>{}</td></tr>", step.failed());
    }
    page.push_str("</tbody></table></div>\n");
}

fn write_failures(page: &mut String, report: &Report) {
    let failures = failures(report);
    if failures.is_empty() {
        return;
    }
    page.push_str("<h2>Failed, by how</h2>\n<div class=\"wide\"><table>\n<thead><tr><th></th>");
    for name in names(report) {
        let _ = write!(page, "<th>{}</th>", escape(&name));
    }
    page.push_str("</tr></thead>\n<tbody>\n");
    for (how, counts) in failures {
        let _ = write!(page, "<tr><th>{}</th>", escape(how));
        for count in counts {
            let _ = write!(page, "<td>{count}</td>");
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</tbody></table></div>\n");
}

fn conditions(page: &mut String, report: &Report) {
    let machine = &report.machine;
    page.push_str("<h2>Conditions</h2>\n<dl>\n");
    let mut write_row = |name: &str, value: &str| {
        let _ = writeln!(page, "<dt>{}</dt><dd>{}</dd>", escape(name), escape(value));
    };
    for (name, value) in &report.settings {
        write_row(name, value);
    }
    for target in &report.targets {
        write_row(&format!("model of {}", target.name), &target.model);
    }
    write_row("load made on", &format!("{}, {} cores, {}", machine.processor, machine.cores, machine.system));
    write_row("hostler", &machine.hostler);
    page.push_str("</dl>\n<h2>Words</h2>\n<dl>\n");
    for (word, meaning) in GLOSSARY {
        let _ = writeln!(page, "<dt>{word}</dt><dd>{meaning}</dd>");
    }
    page.push_str("</dl>\n");
}
