//! Lists of nodes and of replicas, and the text shown if a list is empty.

use hostler_proto::agent::v1::Phase;
use hostler_proto::fleet::v1::{Node, Replica};

use super::figures::{UNKNOWN, gpu_figures, hit_share, percent, rate, seconds, share};
use super::palette::Palette;
use super::screen_table::{ScreenTable, TableCell, TableColumn, cell, column};
use crate::output::Side;
use crate::output::time_in_words;
use crate::ps::{GpuTotal, NO_AGENT, remark, short_name};
use crate::top::model::{Panel, TopModel};
use crate::top::order::SortedReplica;

/// Used shares of KV blocks from which an engine soon has to wait, or preempts.
const KV_LEVELS: (f64, f64) = (0.8, 0.95);

/// Temperatures in °C from which GPUs are near the limit at which they lower their clocks.
const CELSIUS_LEVELS: (f64, f64) = (80.0, 88.0);

const NODE_COLUMNS: [TableColumn; 10] = [
    column("NODE", Side::Left, 0, 24),
    column("AGENT", Side::Left, 1, 9),
    column("READY", Side::Right, 2, 6),
    column("JOB", Side::Left, 4, 16),
    column("JOB ENDS IN", Side::Left, 3, 11),
    column("GPUS", Side::Left, 9, 20),
    column("USE", Side::Right, 5, 4),
    column("MEMORY", Side::Right, 6, 11),
    column("TEMP", Side::Right, 7, 5),
    column("POWER", Side::Right, 8, 6),
];

pub(super) fn node_table(model: &TopModel, palette: Palette) -> ScreenTable<10> {
    let row = |node: &Node| {
        let ready = node.replicas.iter().filter(|replica| node.attached && replica.is_ready()).count();
        let (agent, style) = if node.attached { ("attached", palette.phase(Phase::Ready)) } else { ("lost", palette.phase(Phase::Failed)) };
        let job = node.job.as_ref();
        let gpus = GpuTotal::of(node.replicas.iter().flat_map(|replica| &replica.state().gpus));
        let [utilisation, memory, celsius, watts] = gpu_cells(gpus.as_ref(), palette);
        [
            cell(&node.name, palette.strong()),
            cell(agent, style),
            cell(&format!("{ready}/{}", node.replicas.len()), palette.plain()),
            cell(&job.map(|job| job.id.clone()).unwrap_or_default(), palette.plain()),
            cell(&job.and_then(|job| job.ends_in_ms).map(|left| time_in_words(left / 1000)).unwrap_or_default(), palette.plain()),
            cell(&gpus.as_ref().map(gpu_names).unwrap_or_default(), palette.plain()),
            utilisation,
            memory,
            celsius,
            watts,
        ]
    };
    ScreenTable {
        columns: NODE_COLUMNS,
        rows: model.shown_nodes().iter().map(row).collect(),
        selected: model.selected_row(Panel::Nodes).filter(|_| model.panel == Panel::Nodes),
        is_focused: model.panel == Panel::Nodes,
        is_old: model.age().is_some(),
    }
}

/// Utilisation, memory, temperature and power; empty if there are no GPUs.
fn gpu_cells(gpus: Option<&GpuTotal>, palette: Palette) -> [TableCell; 4] {
    let [utilisation, memory, celsius, watts] = gpus.map(gpu_figures).unwrap_or_default();
    let heat = gpus.and_then(|gpus| gpus.celsius).map_or(0.0, f64::from);
    [
        cell(&utilisation, palette.plain()),
        cell(&memory, palette.plain()),
        cell(&celsius, palette.level(heat, CELSIUS_LEVELS)),
        cell(&watts, palette.plain()),
    ]
}

/// `4×H200`.
fn gpu_names(gpus: &GpuTotal) -> String {
    format!("{}×{}", gpus.count, short_name(&gpus.name))
}

const REPLICA_COLUMNS: [TableColumn; 15] = [
    column("REPLICA", Side::Left, 0, 24),
    // As wide as the longest phase.
    column("PHASE      ", Side::Left, 1, 11),
    column("RUN", Side::Right, 2, 4),
    column("WAIT", Side::Right, 2, 4),
    column("KV", Side::Right, 3, 4),
    column("CACHED", Side::Right, 9, 6),
    column("TOK/S", Side::Right, 4, 6),
    column("FIRST", Side::Right, 6, 5),
    column("P99", Side::Right, 7, 5),
    column("HITS", Side::Right, 8, 4),
    column("GPU", Side::Right, 10, 4),
    column("MEMORY", Side::Right, 11, 9),
    column("TEMP", Side::Right, 12, 5),
    column("POWER", Side::Right, 13, 6),
    TableColumn { title: "MODEL, OR WHY NOT READY", side: Side::Left, rank: 5, most: 120, flexible_from: 18 },
];

pub(super) fn replica_table(model: &TopModel, palette: Palette) -> ScreenTable<15> {
    let shown = model.shown_replicas();
    let row = |of: &SortedReplica<'_>| {
        let SortedReplica { replica, tokens_per_second, .. } = of;
        let known = |text: Option<String>| cell(&text.unwrap_or_else(|| UNKNOWN.to_owned()), palette.plain());
        let gpus = GpuTotal::of(replica.state().gpus.iter());
        let [utilisation, memory, celsius, watts] = gpu_cells(gpus.as_ref(), palette);
        let (engine, phase) = (replica.engine(), replica.phase());
        let kv_use = engine.unwrap_or_default().kv_use;
        [
            cell(&replica.id, palette.strong()),
            cell(phase.as_str(), palette.phase(phase)),
            known(engine.map(|engine| engine.running.to_string())),
            known(engine.map(|engine| engine.waiting.to_string())),
            cell(&engine.map_or_else(|| UNKNOWN.to_owned(), |_| percent(kv_use)), palette.level(kv_use, KV_LEVELS)),
            known(cached_share(replica).map(percent)),
            known(tokens_per_second.map(rate)),
            known(replica.first_tokens.map(|times| seconds(times.p50))),
            known(replica.first_tokens.map(|times| seconds(times.p99))),
            known(engine.and_then(hit_share).map(percent)),
            utilisation,
            memory,
            celsius,
            watts,
            cell(&model_or_reason(replica), palette.plain()),
        ]
    };
    ScreenTable {
        columns: REPLICA_COLUMNS,
        rows: shown.iter().map(row).collect(),
        selected: model.selected_row(Panel::Replicas),
        is_focused: model.panel == Panel::Replicas,
        is_old: model.age().is_some(),
    }
}

/// Share of the engine's blocks that the router knows to be cached.
pub(super) fn cached_share(replica: &Replica) -> Option<f64> {
    let cache = replica.cache();
    share(cache.blocks, replica.engine()?.kv_blocks).filter(|_| cache.exact)
}

fn model_or_reason(replica: &Replica) -> String {
    if replica.is_ready() { replica.model_ids().next().unwrap_or_default().to_owned() } else { remark(replica) }
}

/// Remark of `hostler ps` about the selected replica, which may have had no room in its row.
pub(super) fn selected_remark(model: &TopModel) -> Option<String> {
    let id = model.selected_replica.as_ref().filter(|_| model.panel == Panel::Replicas)?;
    let (_, replica) = model.picture()?.find_replica(id)?;
    Some(remark(replica)).filter(|words| !words.is_empty()).map(|words| format!("{id}: {words}"))
}

/// Text shown instead of replicas if there are none.
pub(super) fn emptiness(model: &TopModel) -> String {
    match model.picture() {
        None => "waiting for the router's first answer".to_owned(),
        Some(fleet) if fleet.nodes.is_empty() => NO_AGENT.to_owned(),
        Some(fleet) if fleet.replicas().next().is_none() => "no node has told of a replica yet".to_owned(),
        Some(_) => format!("no replica matches {:?}: / changes that, Esc shows all", model.filter),
    }
}
