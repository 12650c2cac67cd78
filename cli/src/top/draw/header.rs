//! Lines at the top: the router, and the totals of its fleet.

use hostler_proto::agent::v1::{EngineLoad, Phase};
use hostler_proto::fleet::v1::{FirstTokens, ListResponse, ModelDemand, Replica, TenantUse};
use ratatui::text::Line;

use super::figures::{gpu_figures, percent, rate, seconds, share};
use super::palette::Palette;
use super::span;
use crate::output::time_in_words;
use crate::ps::GpuTotal;
use crate::top::model::TopModel;

pub(super) fn header_lines(model: &TopModel, palette: Palette) -> Vec<Line<'static>> {
    let version = model.picture().map(|fleet| format!(" {}", fleet.router_version)).unwrap_or_default();
    let mut title = vec![span("hostler top", palette.strong())];
    if let Some(age) = model.age() {
        title.push(span(&format!("  OLD FIGURES, of {} ago", time_in_words(age.as_secs())), palette.alarm()));
    }
    title.push(span(&format!("  router{version} at {}", model.router), palette.plain()));
    let mut lines = vec![Line::from(title)];
    let Some(fleet) = model.picture() else { return lines };
    let mut add = |label: &str, words: &[String]| {
        if !words.is_empty() {
            lines.push(Line::from(vec![span(&format!("{label:<9}"), palette.label()), span(&words.join("  "), palette.plain())]));
        }
    };
    add("Trouble", &fleet.findings.iter().map(|finding| finding.evidence.clone()).collect::<Vec<_>>());
    add("Fleet", &fleet_words(fleet));
    add("GPUs", &gpu_words(fleet));
    add("Engines", &engine_words(model, fleet));
    add("Router", &router_words(fleet));
    add("Requests", &request_words(model));
    add("Models", &fleet.demand.iter().map(demand_words).collect::<Vec<_>>());
    add("Tenants", &fleet.tenants.iter().map(tenant_words).collect::<Vec<_>>());
    lines
}

fn fleet_words(fleet: &ListResponse) -> Vec<String> {
    let counted = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let mut phases: Vec<(Phase, usize)> = Vec::new();
    for (_, replica) in fleet.replicas() {
        match phases.iter_mut().find(|(phase, _)| *phase == replica.phase()) {
            Some((_, count)) => *count += 1,
            None => phases.push((replica.phase(), 1)),
        }
    }
    let replicas = fleet.replicas().count();
    let phases: Vec<String> = phases.iter().map(|(phase, count)| format!("{count} {}", phase.as_str())).collect();
    let told = if replicas == 0 { String::new() } else { format!(": {}", phases.join(", ")) };
    vec![counted(fleet.nodes.len(), "node"), format!("{}{told}", counted(replicas, "replica"))]
}

fn gpu_words(fleet: &ListResponse) -> Vec<String> {
    let Some(gpus) = GpuTotal::of(fleet.replicas().flat_map(|(_, replica)| &replica.state().gpus)) else { return Vec::new() };
    let [utilisation, memory, celsius, watts] = gpu_figures(&gpus);
    let named = [("use ", utilisation), ("memory ", memory), ("hottest ", celsius), ("power ", watts)];
    let known = named.into_iter().filter(|(_, figure)| !figure.is_empty()).map(|(name, figure)| format!("{name}{figure}"));
    std::iter::once(gpus.count.to_string()).chain(known).collect()
}

fn engine_words(model: &TopModel, fleet: &ListResponse) -> Vec<String> {
    let replicas = || fleet.replicas().map(|(_, replica)| replica);
    let tokens: f64 = replicas().filter_map(|of| model.tokens_per_second(&of.id)).sum();
    let engines = || replicas().filter_map(Replica::engine);
    let (running, waiting): (u32, u32) = (engines().map(|of| of.running).sum(), engines().map(|of| of.waiting).sum());
    let hits = share(engines().map(|of| of.prefix_hits).sum(), engines().map(|of| of.prefix_queries).sum());
    #[allow(clippy::cast_precision_loss, reason = "a share that people read")]
    let (used, blocks) = engines()
        .fold((0.0, 0.0), |(used, all), EngineLoad { kv_use, kv_blocks, .. }| (used + kv_use * kv_blocks as f64, all + kv_blocks as f64));
    let mut words = vec![format!("{running} running"), format!("{waiting} waiting")];
    words.extend((blocks > 0.0).then(|| format!("KV {}", percent(used / blocks))));
    words.push(format!("{} tokens/s", rate(tokens)));
    words.extend(hits.map(|hits| format!("prefix hits {}", percent(hits))));
    words
}

fn router_words(fleet: &ListResponse) -> Vec<String> {
    let mut words = vec![format!("{} in flight", fleet.in_flight), format!("{} queued", fleet.queued)];
    words.extend(fleet.first_tokens.map(first_token_words));
    words
}

/// `12.3/s answered  940/s failed: 900 no room, 40 errors`.
fn request_words(model: &TopModel) -> Vec<String> {
    let [Some(answered), Some(full), Some(error)] = model.ends_per_second() else { return Vec::new() };
    let causes = [(full, "no room"), (error, "errors")].into_iter().filter(|(per_second, _)| *per_second > 0.0);
    let causes: Vec<String> = causes.map(|(per_second, what)| format!("{} {what}", rate(per_second))).collect();
    let why = if causes.is_empty() { String::new() } else { format!(": {}", causes.join(", ")) };
    vec![format!("{}/s answered", rate(answered)), format!("{}/s failed{why}", rate(full + error))]
}

/// `first token 85ms, p99 1.2s of 120 streams`.
pub(super) fn first_token_words(times: FirstTokens) -> String {
    let streams = if times.streams == 1 { "stream" } else { "streams" };
    format!("first token {}, p99 {} of {} {streams}", seconds(times.p50), seconds(times.p99), times.streams)
}

fn demand_words(of: &ModelDemand) -> String {
    let queued = if of.waiting > 0 { format!(", {} queued", of.waiting) } else { String::new() };
    let last = of.last_request_ms_ago.map_or_else(|| ", none asked".to_owned(), |ms| format!(", last {} ago", time_in_words(ms / 1000)));
    format!("{}: {} in flight{queued}{}", of.model, of.in_flight, if of.in_flight > 0 { String::new() } else { last })
}

fn tenant_words(of: &TenantUse) -> String {
    format!("{}: {} in flight, {} of its limits left", of.name, of.in_flight, percent(of.left))
}
