//! Works out the terms of a candidate's cost with their numbers, so anybody can check them by hand.
//!
//! The formulas are those that the placement crate documents at its `Terms`; a test compares the
//! two.

use hostler_proto::fleet::v1::{Decision, Rates, Scored, Terms};

/// Bounds within which slowness counts.
const SLOWNESS: (f64, f64) = (0.25, 8.0);

/// Share of the decoding that is charged.
const DECODE_SHARE: f64 = 0.15;

/// A term: its formula with names and with numbers (none if it is 0 for a reason), and its value in
/// milliseconds.
#[derive(Debug)]
pub(super) struct TermBreakdown {
    pub(super) term: &'static str,
    formula: String,
    numbers: String,
    pub(super) value: f64,
}

/// Converts seconds to milliseconds, the unit in which people think of them.
pub(super) fn milliseconds(seconds: f64) -> f64 {
    seconds * 1000.0
}

/// Formats a number with four significant digits, and no more zeros than needed.
pub(super) fn figure(value: f64) -> String {
    let scientific = format!("{value:.3e}");
    let exponent = scientific.split_once('e').and_then(|(_, exponent)| exponent.parse::<i32>().ok());
    // Infinity and NaN have no exponent.
    let Some(exponent) = exponent else { return value.to_string() };
    let decimals = usize::try_from(3 - exponent).unwrap_or(0);
    let plain = format!("{value:.decimals$}");
    let trimmed = if plain.contains('.') { plain.trim_end_matches('0').trim_end_matches('.') } else { &plain };
    trimmed.to_owned()
}

/// Terms of `scored`, one after the other, and their sum.
pub(super) fn break_down(decision: &Decision, scored: &Scored) -> Vec<String> {
    let rates = scored.rates.unwrap_or_default();
    let mut lines = vec![format!(
        "{} worked out in milliseconds, with h = {} matched tokens, u = {} uncached tokens, s = {} slowness",
        scored.replica,
        scored.matched,
        scored.uncached,
        figure(slowness(&rates)),
    )];
    let worked = terms(decision, scored);
    for TermBreakdown { term, formula, numbers, value } in &worked {
        lines.push(format!("  {term:<10}  = {formula}"));
        if !numbers.is_empty() {
            lines.push(format!("  {:<10}  = {numbers} = {}", "", figure(*value)));
        }
    }
    let Terms { queue, prefill, load, steps, memory, congestion, decode } = scored.terms.unwrap_or_default();
    let summands = [queue, prefill, load, steps, memory, congestion, decode].map(milliseconds);
    let sum = summands.map(figure).join(" + ");
    lines.push(format!("  {:<10}  = {sum} = {}", "total", figure(summands.iter().sum())));
    lines
}

/// `t` and the seven terms, from the figures that the router sent.
pub(super) fn terms(decision: &Decision, scored: &Scored) -> Vec<TermBreakdown> {
    let step = step(scored);
    vec![
        breakdown(
            "t",
            "step + decode·in_flight + context·held tokens",
            [
                figure(milliseconds(rates(scored).step)),
                format!("{}·{}", figure(milliseconds(rates(scored).decode)), scored.in_flight),
                format!("{}·{}", figure(milliseconds(rates(scored).context)), scored.context),
            ]
            .join(" + "),
            step,
        ),
        queue(scored),
        prefill(scored),
        load(scored),
        steps(scored, step),
        memory(decision, scored, step),
        congestion(decision, scored),
        decode(decision, scored, step),
    ]
}

fn breakdown(term: &'static str, formula: &str, numbers: String, value: f64) -> TermBreakdown {
    TermBreakdown { term, formula: formula.to_owned(), numbers, value }
}

fn rates(scored: &Scored) -> Rates {
    scored.rates.unwrap_or_default()
}

fn slowness(rates: &Rates) -> f64 {
    rates.slowness.clamp(SLOWNESS.0, SLOWNESS.1)
}

#[allow(clippy::cast_precision_loss, reason = "token counts are far below 2^52")]
fn count(tokens: u64) -> f64 {
    tokens as f64
}

/// Seconds of a step that decodes the replica's running requests.
pub(super) fn step_seconds(scored: &Scored) -> f64 {
    let Rates { step, decode, context, .. } = rates(scored);
    step + decode * f64::from(scored.in_flight) + context * count(scored.context)
}

fn step(scored: &Scored) -> f64 {
    milliseconds(step_seconds(scored))
}

fn queue(scored: &Scored) -> TermBreakdown {
    let (rate, slowness) = (milliseconds(rates(scored).prefill), slowness(&rates(scored)));
    let overdue = milliseconds(scored.overdue);
    let numbers = format!("max({}·{}·{}, {})", figure(rate), scored.pending, figure(slowness), figure(overdue));
    breakdown("queue", "max(prefill·pending·s, overdue)", numbers, (rate * count(scored.pending) * slowness).max(overdue))
}

fn prefill(scored: &Scored) -> TermBreakdown {
    let (rate, attention) = (milliseconds(rates(scored).prefill), milliseconds(rates(scored).attention));
    let (slowness, matched, uncached) = (slowness(&rates(scored)), f64::from(scored.matched), f64::from(scored.uncached));
    let numbers =
        format!("({}·{uncached} + {}·{uncached}·({matched} + {}))·{}", figure(rate), figure(attention), uncached / 2.0, figure(slowness));
    let value = (rate * uncached + attention * uncached * (matched + uncached / 2.0)) * slowness;
    breakdown("prefill", "(prefill·u + attention·u·(h + u/2))·s", numbers, value)
}

fn load(scored: &Scored) -> TermBreakdown {
    let (loaded, read, value) = (scored.loaded, scored.read, milliseconds(scored.load_seconds));
    if loaded == 0 {
        return breakdown("load", "0, as nothing is loaded from the host", String::new(), 0.0);
    }
    let from_files = if read > 0 { format!(", {read} of them from files") } else { String::new() };
    let how = format!("{} until {loaded} tokens are loaded from the host{from_files}, after those of requests ahead", figure(value));
    breakdown("load", &how, String::new(), value)
}

fn steps(scored: &Scored, step: f64) -> TermBreakdown {
    let Scored { pending, uncached, budget, .. } = scored;
    let steps = pending.saturating_add(u64::from(*uncached)).div_ceil(u64::from((*budget).max(1))).max(1);
    let numbers = format!("max(1, ceil(({pending} + {uncached})/{budget}))·{}", figure(step));
    breakdown("steps", "max(1, ceil((pending + u)/budget))·t", numbers, count(steps) * step)
}

/// Memory term, which has three cases; only the one that holds is shown.
fn memory(decision: &Decision, scored: &Scored, step: f64) -> TermBreakdown {
    let (capacity, context, output) = (count(scored.capacity), count(scored.context), decision.output);
    if scored.capacity == 0 {
        return breakdown("memory", "0, as the capacity is not known", String::new(), 0.0);
    }
    let held = if scored.kv_use > 0.0 { context.min(scored.kv_use * capacity) } else { context };
    let new = f64::from(scored.uncached) + f64::from(scored.loaded);
    let excess = held + new + output - capacity;
    if excess <= 0.0 {
        let reason = format!("0, as held + u + loaded + output = {} + {new} + {} ≤ {capacity} = capacity", figure(held), figure(output));
        return breakdown("memory", &reason, String::new(), 0.0);
    }
    let sequences = f64::from(scored.in_flight.max(1));
    let share = ((excess * sequences / held).ceil() / sequences).min(1.0);
    let numbers = format!("min(1, ceil({}·{sequences}/{})/{sequences})·{}·{}", figure(excess), figure(held), figure(output), figure(step));
    breakdown(
        "memory",
        "min(1, ceil(excess·n/held)/n)·output·t, excess = held + u + loaded + output − capacity",
        numbers,
        share * output * step,
    )
}

/// Congestion term. The share of arrivals is known only by its effect, so the sum follows from the
/// term itself.
fn congestion(decision: &Decision, scored: &Scored) -> TermBreakdown {
    let utilisation = decision.utilisation;
    let price = 2.0 * utilisation / (1.0 - utilisation);
    let nominal = decision.nominal.unwrap_or_default();
    let each = milliseconds(nominal.prefill + nominal.attention * (f64::from(scored.matched) + f64::from(scored.uncached) / 2.0));
    let value = milliseconds(scored.terms.unwrap_or_default().congestion);
    let sum = if price * each > 0.0 { value / (price * each) } else { f64::from(scored.uncached) };
    let numbers = format!("2·{0}/(1 − {0})·{1}·{2}", figure(utilisation), figure(each), figure(sum));
    breakdown("congestion", "2ρ/(1 − ρ)·mean prefill of an uncached token·Σ over u of 1/(1 + arrivals)", numbers, price * each * sum)
}

fn decode(decision: &Decision, scored: &Scored, step: f64) -> TermBreakdown {
    let Rates { decode, context, .. } = rates(scored);
    let (output, in_flight) = (decision.output, f64::from(scored.in_flight));
    let slowdown = milliseconds(decode + context * (f64::from(decision.tokens) + output / 2.0));
    let numbers = format!("{DECODE_SHARE}·{}·({} + {in_flight}·{})", figure(output), figure(step), figure(slowdown));
    let value = DECODE_SHARE * output * (step + in_flight * slowdown);
    breakdown("decode", "0.15·output·(t + in_flight·Δ), Δ = decode + context·(tokens + output/2)", numbers, value)
}
