//! Times to the first token as an SVG picture: a panel for each workload, a bar for each policy.
//!
//! The bar ends at the mean, its whisker at the ninetieth percentile. It is drawn by hand, so that
//! it needs no library and opens anywhere.

use std::fmt::Write;

use crate::batch::Outcome;
use crate::report::{by_workload, seconds};

const WIDTH: f64 = 860.0;
const ROW: f64 = 22.0;
/// Space above the bars of a panel for its title, and below them for the axis.
const TITLE: f64 = 40.0;
const AXIS: f64 = 46.0;
/// Beginning and furthest end of the bars; numbers stand to the right.
const LEFT: f64 = 150.0;
const RIGHT: f64 = 720.0;

#[must_use]
pub fn svg(outcomes: &[Outcome]) -> String {
    let panels = by_workload(outcomes);
    let height: f64 = panels.iter().map(|panel| panel_height(panel)).sum::<f64>() + 16.0;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"system-ui, sans-serif\" font-size=\"12\" fill=\"#24292f\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    let mut top = 8.0;
    for panel in panels {
        draw(&mut text, panel, top);
        top += panel_height(panel);
    }
    text.push_str("</svg>\n");
    text
}

fn panel_height(panel: &[Outcome]) -> f64 {
    TITLE + ROW * panel.len() as f64 + AXIS
}

/// Draws a panel. Writing to a string does not fail, so its result is dropped.
fn draw(text: &mut String, panel: &[Outcome], top: f64) {
    let most = panel.iter().map(|outcome| outcome.measures.ttft_p90.max(outcome.measures.ttft_mean)).fold(0.0, f64::max);
    let tick = tick(most);
    let end = if tick > 0.0 { (most / tick).ceil() * tick } else { 1.0 };
    let at = |value: f64| LEFT + (RIGHT - LEFT) * (value / end).clamp(0.0, 1.0);
    let (first, bottom) = (top + TITLE, top + TITLE + ROW * panel.len() as f64);
    let _ =
        writeln!(text, "<text x=\"16\" y=\"{:.1}\" font-size=\"15\" font-weight=\"600\">{}</text>", top + 24.0, escape(&panel[0].workload));
    let mut value = 0.0;
    while tick > 0.0 && value <= end * 1.001 {
        let x = at(value);
        let _ = writeln!(text, "<line x1=\"{x:.1}\" y1=\"{first:.1}\" x2=\"{x:.1}\" y2=\"{bottom:.1}\" stroke=\"#d8dee4\"/>");
        let _ = writeln!(
            text,
            "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#57606a\">{}</text>",
            bottom + 16.0,
            number(value)
        );
        value += tick;
    }
    let middle = f64::midpoint(LEFT, RIGHT);
    let caption = "seconds to the first token: bar = mean, whisker = 90 %";
    let _ = writeln!(text, "<text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#57606a\">{caption}</text>", bottom + 32.0);
    for (row, Outcome { policy, measures, .. }) in panel.iter().enumerate() {
        let y = first + ROW * row as f64;
        let line = y + ROW / 2.0;
        let (color, weight) = if policy.starts_with("hostler") { ("#0969da", "600") } else { ("#8c959f", "400") };
        let name = escape(policy);
        let _ = writeln!(
            text,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" font-weight=\"{weight}\">{name}</text>",
            LEFT - 8.0,
            y + 15.0
        );
        let width = at(measures.ttft_mean) - LEFT;
        let _ = writeln!(
            text,
            "<rect x=\"{LEFT}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"{}\" rx=\"2\" fill=\"{color}\"/>",
            y + 4.0,
            ROW - 8.0
        );
        let (mean, whisker) = (at(measures.ttft_mean), at(measures.ttft_p90));
        let _ = writeln!(
            text,
            "<path d=\"M{mean:.1} {line:.1}H{whisker:.1}M{whisker:.1} {:.1}v8\" stroke=\"#57606a\" stroke-width=\"1.5\" fill=\"none\"/>",
            line - 4.0
        );
        let numbers = format!("{} / {}", seconds(measures.ttft_mean), seconds(measures.ttft_p90));
        let _ = writeln!(text, "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"#57606a\">{numbers}</text>", RIGHT + 16.0, y + 15.0);
    }
}

/// One, two or five times a power of ten, so that four to ten of them make `most`.
fn tick(most: f64) -> f64 {
    if !(most.is_finite() && most > 0.0) {
        return 0.0;
    }
    let power = 10.0_f64.powf((most / 4.0).log10().floor());
    let steps = most / 4.0 / power;
    power
        * if steps >= 5.0 {
            5.0
        } else if steps >= 2.0 {
            2.0
        } else {
            1.0
        }
}

/// Formats a number without needless zeros.
fn number(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests;
