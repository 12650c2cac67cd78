//! `hostler explain`: why a request went where it went, with the cost of every candidate, or as
//! JSON for scripts.
//!
//! The router reports only the inputs of its decision; `arithmetic` holds the formulas that are
//! printed with the numbers.

mod arithmetic;
mod time_spent;

use std::time::{Duration, UNIX_EPOCH};

use clap::Args;
use hostler_proto::fleet::v1::{Decision, ExplainRequest, ExplainResponse, Rates, RefusedRequest, Scored, Terms};
use serde_json::json;

use crate::admin::{AdminArgs, connect, status_error};
use crate::output::{Side, say, table};
use arithmetic::{figure, milliseconds};
use time_spent::time_spent;

#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// A request: the `x-hostler-id` of its answer, or the `x-request-id` that the client sent.
    /// Without it, the latest one.
    id: Option<String>,
    /// This many decisions, the latest first. A request has more than one when it was sent to
    /// another replica after a failure.
    #[arg(long, value_name = "N")]
    last: Option<u32>,
    /// JSON, for scripts.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(crate) admin: AdminArgs,
}

pub(crate) async fn explain(args: &ExplainArgs) -> anyhow::Result<()> {
    // All attempts of a named request; otherwise the last decision.
    let most = args.last.unwrap_or(if args.id.is_some() { 0 } else { 1 });
    let request = ExplainRequest { id: args.id.clone().unwrap_or_default(), most };
    let ExplainResponse { decisions, refused } = connect(&args.admin).await?.explain(request).await.map_err(status_error)?.into_inner();
    if args.json {
        say(&serde_json::to_string_pretty(&json!({ "decisions": decisions, "refused": refused }))?);
        return Ok(());
    }
    let told = refused.iter().map(refusal).chain(decisions.iter().map(text));
    let told: Vec<String> = told.map(|lines| lines.join("\n")).collect();
    say(&if told.is_empty() { "this router has had no request yet".to_owned() } else { told.join("\n\n") });
    Ok(())
}

/// Requests that were refused before a replica was chosen.
fn refusal(refused: &RefusedRequest) -> Vec<String> {
    let RefusedRequest { at_ms, count, method, path, model, key, tenant, status, cause, meaning } = refused;
    let named = [("model", model), ("key", key), ("tenant", tenant)].into_iter().filter(|(_, name)| !name.is_empty());
    let named: String = named.map(|(what, name)| format!("  {what} {name}")).collect();
    let alike = if *count > 1 { format!("; {count} alike, this the latest") } else { String::new() };
    vec![
        format!("{}  {method} {path}{named}", time_of(*at_ms)),
        format!("refused with status {status} before a replica was chosen, cause {cause}{alike}"),
        meaning.clone(),
    ]
}

fn time_of(at_ms: u64) -> String {
    humantime::format_rfc3339_millis(UNIX_EPOCH + Duration::from_millis(at_ms)).to_string()
}

fn text(decision: &Decision) -> Vec<String> {
    let mut lines = headline(decision);
    lines.extend(decision.scored.get(decision.chosen as usize).and_then(|chosen| time_spent(decision, chosen)));
    let mut order: Vec<(usize, &Scored)> = decision.scored.iter().enumerate().collect();
    let is_chosen = |index: usize| u32::try_from(index) == Ok(decision.chosen);
    order.sort_by(|(left, one), (right, other)| is_chosen(*right).cmp(&is_chosen(*left)).then_with(|| total(one).total_cmp(&total(other))));
    lines.push(String::new());
    lines.extend(costs(&order, is_chosen));
    lines.push(String::new());
    lines.extend(speeds(decision, &order, is_chosen));
    if let Some((_, chosen)) = order.first().filter(|(index, _)| is_chosen(*index)) {
        lines.push(String::new());
        lines.extend(arithmetic::break_down(decision, chosen));
        lines.push(String::new());
        lines.extend(outcome(decision, chosen));
    }
    lines
}

fn headline(decision: &Decision) -> Vec<String> {
    let when = time_of(decision.at_ms);
    let named = |what: &str, name: &str| if name.is_empty() { String::new() } else { format!("  {what} {name}") };
    let Decision { id, path, tokens, level, attempt, tied, candidates, .. } = decision;
    let why = match decision.why.as_str() {
        "only" => "the only candidate".to_owned(),
        "near_tie" => {
            format!("{tied} of {candidates} candidates cost about the least: the longest match, then the fewest in flight, then by lot")
        }
        "ends_first" => format!("none of {candidates} candidates can be expected to finish the answer before it leaves"),
        "last_resort" => format!("all of {candidates} candidates are doubtful"),
        _ => format!("the cheapest of {candidates} candidates"),
    };
    let fallback = if decision.fallback.is_empty() { String::new() } else { format!(" ({})", decision.fallback) };
    let resume = if decision.resume.is_empty() { String::new() } else { format!("; if its engine dies: {}", decision.resume) };
    let nominal = decision.nominal.unwrap_or_default();
    vec![
        format!("{when}  {id}{}  {path}{}", named("client's id", &decision.client_id), named("model", &decision.model)),
        format!(
            "{tokens} tokens, {} expected of the answer and hardly more than {}; cache known by: {level}{fallback}; \
             attempt {attempt}; queued for {:.3} s{resume}",
            figure(decision.output),
            figure(decision.long_output),
            decision.queue_seconds
        ),
        format!(
            "{why}; utilisation of the fleet {:.3}; mean prefill {} ms a token",
            decision.utilisation,
            figure(milliseconds(nominal.prefill))
        ),
    ]
}

fn total(scored: &Scored) -> f64 {
    let Terms { queue, prefill, load, steps, memory, congestion, decode } = scored.terms.unwrap_or_default();
    queue + prefill + load + steps + memory + congestion + decode
}

fn first_token(scored: &Scored) -> f64 {
    let Terms { queue, prefill, load, steps, memory, .. } = scored.terms.unwrap_or_default();
    queue + prefill + load + steps + memory
}

fn mark(is_chosen: bool) -> String {
    if is_chosen { "*" } else { "" }.to_owned()
}

/// Costs in milliseconds, and the figures behind them.
fn costs(order: &[(usize, &Scored)], is_chosen: impl Fn(usize) -> bool) -> Vec<String> {
    let mut sides = [Side::Right; 16];
    (sides[0], sides[1], sides[15]) = (Side::Left, Side::Left, Side::Left);
    let mut rows = vec![
        [
            "",
            "REPLICA",
            "COST ms",
            "QUEUE",
            "PREFILL",
            "LOAD",
            "STEPS",
            "MEMORY",
            "CONGESTION",
            "DECODE",
            "MATCHED",
            "UNCACHED",
            "IN FLIGHT",
            "PENDING",
            "AGE",
            "",
        ]
        .map(String::from),
    ];
    for (index, scored) in order {
        let terms = scored.terms.unwrap_or_default();
        let cost = |seconds: f64| format!("{:.2}", milliseconds(seconds));
        rows.push([
            mark(is_chosen(*index)),
            scored.replica.clone(),
            cost(total(scored)),
            cost(terms.queue),
            cost(terms.prefill),
            cost(terms.load),
            cost(terms.steps),
            cost(terms.memory),
            cost(terms.congestion),
            cost(terms.decode),
            matched_words(scored),
            scored.uncached.to_string(),
            scored.in_flight.to_string(),
            scored.pending.to_string(),
            format!("{:.3} s", scored.age),
            remark(scored),
        ]);
    }
    table(sides, &rows)
}

/// Matched tokens, and those among them that are in the host's memory and in files.
fn matched_words(scored: &Scored) -> String {
    match (scored.loaded.saturating_sub(scored.read), scored.read) {
        (0, 0) => scored.matched.to_string(),
        (host, 0) => format!("{} ({host} on host)", scored.matched),
        (0, files) => format!("{} ({files} in files)", scored.matched),
        (host, files) => format!("{} ({host} on host, {files} in files)", scored.matched),
    }
}

/// Remark that speaks against a candidate, whatever it costs.
fn remark(scored: &Scored) -> String {
    let doubtful = if scored.doubtful { "doubtful" } else { "" };
    let end = scored.time_left.map(|left| format!("ends in {left:.1} s; this answer needs about {:.1} s", scored.finish));
    [doubtful, end.as_deref().unwrap_or("")].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("; ")
}

/// Learned speeds in milliseconds, and the other figures that the formulas name.
fn speeds(decision: &Decision, order: &[(usize, &Scored)], is_chosen: impl Fn(usize) -> bool) -> Vec<String> {
    let mut sides = [Side::Right; 13];
    (sides[0], sides[1]) = (Side::Left, Side::Left);
    let mut rows = vec![
        [
            "",
            "REPLICA",
            "STEP ms",
            "PREFILL",
            "ATTENTION",
            "DECODE",
            "CONTEXT",
            "SLOWNESS",
            "HELD TOKENS",
            "CAPACITY",
            "KV",
            "BUDGET",
            "OVERDUE ms",
        ]
        .map(String::from),
    ];
    let row = |mark: String, name: &str, rates: Rates, rest: [String; 5]| {
        let Rates { step, prefill, attention, decode, context, slowness } = rates;
        let [step, prefill, attention, decode, context] =
            [step, prefill, attention, decode, context].map(|rate| figure(milliseconds(rate)));
        let [held, capacity, kv, budget, overdue] = rest;
        [mark, name.to_owned(), step, prefill, attention, decode, context, figure(slowness), held, capacity, kv, budget, overdue]
    };
    for (index, scored) in order {
        let rest = [
            scored.context.to_string(),
            scored.capacity.to_string(),
            format!("{:.0}%", scored.kv_use * 100.0),
            scored.budget.to_string(),
            figure(milliseconds(scored.overdue)),
        ];
        rows.push(row(mark(is_chosen(*index)), &scored.replica, scored.rates.unwrap_or_default(), rest));
    }
    rows.push(row(String::new(), "mean", decision.nominal.unwrap_or_default(), Default::default()));
    table(sides, &rows)
}

/// Prediction and outcome.
fn outcome(decision: &Decision, chosen: &Scored) -> Vec<String> {
    let unknown = |what: &str| format!("not known: {what}");
    let came = decision
        .first_token
        .map_or_else(|| unknown("it has not come, or the answer is no stream"), |seconds| format!("{:.2} ms", milliseconds(seconds)));
    let cached = decision.cached.map_or_else(
        || unknown("the answer has not ended, or its engine does not say"),
        |cached| format!("{cached} of {}", decision.told_tokens.unwrap_or(decision.tokens)),
    );
    let rows = [
        ["", "PREDICTED", "ACTUAL"].map(String::from),
        ["first token".into(), format!("{:.2} ms", milliseconds(first_token(chosen))), came],
        ["cached tokens".into(), format!("{} of {}", matched_words(chosen), decision.tokens), cached],
    ];
    let mut lines = table([Side::Left; 3], &rows);
    lines.extend(end_words(decision));
    lines
}

/// How the answer ended, as far as it has.
fn end_words(decision: &Decision) -> Option<String> {
    let status = decision.status.map(|status| format!("status {status}"));
    let end = Some(decision.end.replace('_', " ")).filter(|end| !end.is_empty());
    let between = decision.between_tokens.map(|seconds| format!("{:.2} ms between tokens", milliseconds(seconds)));
    let told: Vec<String> = [status, end, between].into_iter().flatten().collect();
    (!told.is_empty()).then(|| format!("the answer: {}", told.join(", ")))
}

#[cfg(test)]
mod tests;
