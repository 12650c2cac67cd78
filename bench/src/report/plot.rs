//! Charts as SVG within the page: bars beside each other for quantiles, lines for series and
//! sweeps.
//!
//! They are drawn by hand, so that the page needs no library and no network. Colours are the page's
//! own, by number of the target, so that they follow its light and dark and are equal in every
//! chart.

use std::fmt::Write;

use super::rows::{Spread, number};

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 296.0;
/// Margins of a chart: numbers of the vertical axis, title, labels of the horizontal axis.
const LEFT: f64 = 62.0;
const RIGHT: f64 = 542.0;
const TOP: f64 = 54.0;
const BOTTOM: f64 = 242.0;

/// Least width of a bar with a number above it; narrower ones would overlap.
const LEAST_LABELLED: f64 = 26.0;
/// Number of colours that can be distinguished; further targets reuse them.
pub(super) const COLOURS: usize = 8;

/// Limits of values.
///
/// Values outside of them are no times, rates or counts of a load, and would only make axes that
/// cannot be drawn.
const LEAST: f64 = 1e-9;
const MOST: f64 = 1e15;

pub(super) struct Labels<'a> {
    pub(super) title: &'a str,
    pub(super) x: &'a str,
    pub(super) y: &'a str,
}

pub(super) struct Group<'a> {
    pub(super) name: &'a str,
    /// Bars, one for each target.
    pub(super) bars: Vec<Option<Spread>>,
}

pub(super) struct Curve {
    /// Target of the curve.
    pub(super) target: usize,
    /// Text shown on hover.
    pub(super) name: String,
    pub(super) points: Vec<Point>,
    pub(super) marks: Marks,
}

/// Marks drawn at each point.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Marks {
    None,
    Dots,
    /// A dot with the number of clients beside it.
    Clients,
}

pub(super) struct Point {
    pub(super) x: f64,
    pub(super) y: f64,
    /// Clients of a step of a sweep; 0 elsewhere.
    pub(super) clients: u32,
}

/// Mapping of values to positions on the page.
pub(super) struct Axis {
    low: f64,
    high: f64,
    logarithmic: bool,
    ticks: Vec<f64>,
}

impl Axis {
    /// Linear axis from zero.
    pub(super) fn linear(most: f64) -> Self {
        let most = most.min(MOST);
        let tick = tick(most);
        let mut ticks = vec![0.0];
        while ticks.len() < 2 || ticks[ticks.len() - 1] < most * 0.999 {
            ticks.push(ticks.len() as f64 * tick);
        }
        Self { low: 0.0, high: ticks[ticks.len() - 1], logarithmic: false, ticks }
    }

    /// Axis from zero, or logarithmic if the largest value would make the smallest ones look alike.
    ///
    /// Values must be above zero.
    pub(super) fn fitting(values: impl Iterator<Item = f64> + Clone) -> Self {
        let most = values.clone().fold(0.0, f64::max);
        let least = values.filter(|value| *value > 0.0).fold(f64::MAX, f64::min);
        if most > 5.0 * least { Self::logarithmic([least, most].into_iter()) } else { Self::linear(most) }
    }

    /// Axis on which each power of ten is as long as the next, for values above zero.
    pub(super) fn logarithmic(values: impl Iterator<Item = f64>) -> Self {
        let values = values.filter(|value| *value > 0.0).map(|value| value.clamp(LEAST, MOST));
        let (least, most) = values.fold((f64::MAX, 0.0_f64), |(least, most), value| (least.min(value), most.max(value)));
        if most == 0.0 {
            return Self::linear(1.0);
        }
        let wide = most / least > 200.0;
        let steps: &[f64] = if wide { &[1.0] } else { &[1.0, 2.0, 5.0] };
        let mut ticks = Vec::new();
        let mut power = 10.0_f64.powf(least.log10().floor());
        while ticks.last().is_none_or(|last| *last < most) {
            ticks.extend(steps.iter().map(|step| step * power));
            power *= 10.0;
        }
        let first = ticks.iter().rposition(|tick| *tick <= least).unwrap_or(0);
        let last = ticks.iter().position(|tick| *tick >= most).unwrap_or(ticks.len() - 1);
        let ticks = ticks[first..=last.max(first + 1).min(ticks.len() - 1)].to_vec();
        Self { low: ticks[0], high: ticks[ticks.len() - 1], logarithmic: true, ticks }
    }

    fn share(&self, value: f64) -> f64 {
        let share = if self.high <= self.low {
            0.0
        } else if self.logarithmic {
            (value / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        share.clamp(0.0, 1.0)
    }

    fn named(&self, label: &str) -> String {
        if self.logarithmic { format!("{label} (logarithmic)") } else { label.to_owned() }
    }

    /// Number without needless zeros, in the axis' unit: thousands as `k`, millions as `M`.
    ///
    /// On a logarithmic axis each value has its own unit.
    fn written(&self, value: f64) -> String {
        let (value, unit) = match if self.logarithmic { value } else { self.high } {
            _ if value == 0.0 => (0.0, ""),
            size if size >= 1e6 => (value / 1e6, "M"),
            size if size >= 1e4 => (value / 1e3, "k"),
            _ => (value, ""),
        };
        let text = format!("{value:.6}");
        format!("{}{unit}", text.trim_end_matches('0').trim_end_matches('.'))
    }

    fn across(&self, value: f64) -> f64 {
        LEFT + (RIGHT - LEFT) * self.share(value)
    }

    fn up(&self, value: f64) -> f64 {
        BOTTOM - (BOTTOM - TOP) * self.share(value)
    }
}

/// Quantiles of several targets.
///
/// A bar ends at the median of its rounds; its whisker spans their minimum to their maximum.
pub(super) fn bars(labels: &Labels<'_>, groups: &[Group<'_>], names: &[String]) -> String {
    let most = groups.iter().flat_map(|group| group.bars.iter().flatten()).map(|bar| bar.most).fold(0.0, f64::max);
    let axis = Axis::linear(most);
    let mut text = begin_chart(labels, &axis);
    below(&mut text, labels.x);
    let room = (RIGHT - LEFT) / groups.len().max(1) as f64;
    let width = (room * 0.8 / names.len().max(1) as f64).min(64.0);
    for (number_of_group, group) in groups.iter().enumerate() {
        let middle = LEFT + room * (number_of_group as f64 + 0.5);
        let first = middle - width * names.len() as f64 / 2.0;
        write_label(&mut text, (middle, BOTTOM + 17.0), "class=\"tick\" text-anchor=\"middle\"", group.name);
        for (target, bar) in group.bars.iter().enumerate() {
            let Some(bar) = bar else { continue };
            let (x, y, colour) = (first + width * target as f64, axis.up(bar.median), target % COLOURS);
            let mut tooltip = format!("{}, {}: {}", names[target], group.name, number(bar.median));
            if bar.least < bar.most {
                let _ = write!(tooltip, " ({} – {})", number(bar.least), number(bar.most));
            }
            let _ = writeln!(
                text,
                "<rect class=\"f{colour}\" x=\"{:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" rx=\"2\"><title>{}</title></rect>",
                x + 1.5,
                width - 3.0,
                (BOTTOM - y).max(1.0),
                escape(&tooltip)
            );
            let (centre, top) = (x + width / 2.0, axis.up(bar.most));
            if bar.least < bar.most {
                let low = axis.up(bar.least);
                let _ = writeln!(
                    text,
                    "<path class=\"whisker\" d=\"M{centre:.1} {low:.1}V{top:.1}M{:.1} {top:.1}h8M{:.1} {low:.1}h8\"/>",
                    centre - 4.0,
                    centre - 4.0
                );
            }
            if width >= LEAST_LABELLED {
                write_label(&mut text, (centre, top - 4.0), "class=\"small\" text-anchor=\"middle\"", &number(bar.median));
            }
        }
    }
    text.push_str("</svg>\n");
    text
}

/// Lines in one chart.
pub(super) fn lines(labels: &Labels<'_>, curves: &[Curve], x: &Axis, y: &Axis) -> String {
    let mut text = begin_chart(labels, y);
    below(&mut text, &x.named(labels.x));
    let mut free = f64::MIN;
    for tick in &x.ticks {
        let across = x.across(*tick);
        // Leave out numbers that would overlap the previous one.
        if across - free >= 30.0 {
            let _ = writeln!(text, "<path class=\"grid\" d=\"M{across:.1} {BOTTOM}v5\"/>");
            write_label(&mut text, (across, BOTTOM + 17.0), "class=\"tick\" text-anchor=\"middle\"", &x.written(*tick));
            free = across;
        }
    }
    for curve in curves {
        let colour = curve.target % COLOURS;
        let mut path = String::new();
        for (place, point) in curve.points.iter().enumerate() {
            let _ = write!(path, "{}{:.1} {:.1}", if place == 0 { 'M' } else { 'L' }, x.across(point.x), y.up(point.y));
        }
        let _ = writeln!(text, "<path class=\"line s{colour}\" d=\"{path}\"><title>{}</title></path>", escape(&curve.name));
        for point in curve.points.iter().filter(|_| curve.marks != Marks::None) {
            let (across, up) = (x.across(point.x), y.up(point.y));
            let tooltip = format!("{}, {} clients: {}", curve.name, point.clients, number(point.y));
            let _ = writeln!(
                text,
                "<circle class=\"f{colour}\" cx=\"{across:.1}\" cy=\"{up:.1}\" r=\"3.5\"><title>{}</title></circle>",
                escape(&tooltip)
            );
            // The first target's labels stand above its points, those of the others below, as their
            // curves are often close.
            let beside = if curve.target == 0 { up - 7.0 } else { up + 15.0 };
            if curve.marks == Marks::Clients {
                let look = format!("class=\"small f{colour}\" text-anchor=\"middle\"");
                write_label(&mut text, (across, beside), &look, &point.clients.to_string());
            }
        }
    }
    text.push_str("</svg>\n");
    text
}

/// Draws the title and the vertical axis.
fn begin_chart(labels: &Labels<'_>, y: &Axis) -> String {
    let title = escape(labels.title);
    let mut text = format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\">\n");
    write_label(&mut text, (8.0, 20.0), "class=\"title\"", labels.title);
    write_label(&mut text, (8.0, TOP - 16.0), "class=\"tick\"", &y.named(labels.y));
    for tick in &y.ticks {
        let up = y.up(*tick);
        let _ = writeln!(text, "<path class=\"grid\" d=\"M{LEFT} {up:.1}H{RIGHT}\"/>");
        write_label(&mut text, (LEFT - 8.0, up + 4.0), "class=\"tick\" text-anchor=\"end\"", &y.written(*tick));
    }
    text
}

fn below(text: &mut String, label: &str) {
    write_label(text, (f64::midpoint(LEFT, RIGHT), BOTTOM + 40.0), "class=\"tick\" text-anchor=\"middle\"", label);
}

fn write_label(text: &mut String, (x, y): (f64, f64), look: &str, words: &str) {
    let _ = writeln!(text, "<text x=\"{x:.1}\" y=\"{y:.1}\" {look}>{}</text>", escape(words));
}

/// One, two or five times a power of ten, so that four to ten of them make `most`.
fn tick(most: f64) -> f64 {
    if most < LEAST {
        return 1.0;
    }
    let power = 10.0_f64.powf((most / 4.0).log10().floor());
    let digit = match most / 4.0 / power {
        steps if steps >= 5.0 => 5.0,
        steps if steps >= 2.0 => 2.0,
        _ => 1.0,
    };
    power * digit
}

/// Escapes text, also for attributes in double quotes.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
