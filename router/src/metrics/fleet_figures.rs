//! The metrics that are read from the fleet when the metrics page is asked for, one line of a table each.

use std::fmt::Write;
use std::sync::atomic::Ordering;

use hostler_boot::metrics::MetricDescription;

use crate::fleet::{EngineLoad, FleetView, Phase, Replica};
use crate::prompt::PromptStats;

/// What the page shows besides the router's own counts.
#[derive(Debug)]
pub(crate) struct MetricsSnapshot<'a> {
    /// The fleet.
    pub(crate) view: &'a FleetView,
    /// Requests in flight in this router.
    pub(crate) in_flight: usize,
    /// Requests that wait for a replica.
    pub(crate) queued: usize,
    /// Requests that were in flight when an engine died, and have not been answered since.
    pub(crate) crash_suspects: usize,
    /// Different blocks that the affinity index holds, and its memory.
    pub(crate) index_size: (usize, usize),
    /// The encoders of prompts.
    pub(crate) prompts: PromptStats,
}

/// Writes them in the OpenMetrics text format.
pub(super) fn write_page(page: &mut String, now: &MetricsSnapshot<'_>) {
    for figure in REPLICA_FIGURES {
        let name = figure.name;
        let _ = writeln!(page, "# HELP {name} {}\n# TYPE {name} {}", figure.help, figure.kind);
        let suffix = if figure.kind == "counter" { "_total" } else { "" };
        for replica in &now.view.replicas {
            let (node, id) = (escape(&replica.node), escape(&replica.id));
            let _ = writeln!(page, "{name}{suffix}{{node=\"{node}\",replica=\"{id}\"}} {}", (figure.value)(replica));
        }
    }
    for figure in ROUTER_FIGURES {
        let RouterFigure { name, kind, help, value } = figure;
        let suffix = if *kind == "counter" { "_total" } else { "" };
        let _ = writeln!(page, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name}{suffix} {}", value(now));
    }
}

/// A metric of the whole router that is read when the page is.
struct RouterFigure {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    value: fn(&MetricsSnapshot<'_>) -> f64,
}

const fn router_figure(name: &'static str, kind: &'static str, help: &'static str, value: fn(&MetricsSnapshot<'_>) -> f64) -> RouterFigure {
    RouterFigure { name, kind, help, value }
}

/// How many models' encoders stand so.
#[allow(clippy::cast_precision_loss, reason = "a metrics page has only floating point")]
fn model_count(now: &MetricsSnapshot<'_>, standing: &str) -> f64 {
    now.prompts.models.iter().find(|(word, _)| *word == standing).map_or(0.0, |(_, count)| *count as f64)
}

#[allow(clippy::cast_precision_loss, reason = "a metrics page has only floating point")]
const ROUTER_FIGURES: &[RouterFigure] = &[
    router_figure("hostler_in_flight", "gauge", "Requests in flight in this router.", |now| now.in_flight as f64),
    router_figure("hostler_queued_requests", "gauge", "Requests that wait for a replica with room.", |now| now.queued as f64),
    router_figure(
        "hostler_crash_suspects",
        "gauge",
        "Requests that were in flight when an engine died, and were not answered since.",
        |now| now.crash_suspects as f64,
    ),
    router_figure("hostler_index_blocks", "gauge", "Different blocks that the affinity index holds.", |now| now.index_size.0 as f64),
    router_figure("hostler_index_bytes", "gauge", "Memory of the affinity index.", |now| now.index_size.1 as f64),
    router_figure("hostler_models_proved", "gauge", "Models whose tokenizer agrees with their engine.", |now| model_count(now, "proved")),
    router_figure("hostler_models_different", "gauge", "Models whose tokenizer differs from their engine: placed by text.", |now| {
        model_count(now, "different")
    }),
    router_figure("hostler_models_unusable", "gauge", "Models whose tokenizer cannot be used: placed by text.", |now| {
        model_count(now, "unusable")
    }),
    router_figure("hostler_prompts_encoded", "counter", "Prompts that were turned into tokens.", |now| now.prompts.encodes as f64),
    router_figure("hostler_prompts_failed", "counter", "Prompts that a template or tokenizer refused: placed by text.", |now| {
        now.prompts.failed as f64
    }),
    router_figure("hostler_prompts_busy", "counter", "Prompts placed by text because the tokenizer's threads were busy.", |now| {
        now.prompts.busy as f64
    }),
    router_figure("hostler_prompt_encoded_bytes", "counter", "Bytes of text that went through a tokenizer.", |now| {
        now.prompts.encoded_bytes as f64
    }),
    router_figure("hostler_prompt_segment_hits", "counter", "Segments of prompts whose tokens were remembered.", |now| {
        now.prompts.segment_hits as f64
    }),
    router_figure("hostler_prompt_segment_misses", "counter", "Segments of prompts that had to be encoded.", |now| {
        now.prompts.segment_misses as f64
    }),
];

fn escape(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// A metric that each replica has.
struct ReplicaFigure {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    value: fn(&Replica) -> f64,
}

/// A metric that the engine reported, 0 before it has.
#[allow(clippy::cast_precision_loss, reason = "a metrics page has only floating point")]
fn engine_figure(replica: &Replica, figure: fn(&EngineLoad) -> u64) -> f64 {
    figure(&replica.load.engine) as f64
}

fn phase_flag(replica: &Replica, phase: Phase) -> f64 {
    f64::from(u8::from(replica.state.phase == phase))
}

const fn replica_figure(name: &'static str, kind: &'static str, help: &'static str, value: fn(&Replica) -> f64) -> ReplicaFigure {
    ReplicaFigure { name, kind, help, value }
}

#[allow(clippy::cast_precision_loss, reason = "a metrics page has only floating point")]
const REPLICA_FIGURES: &[ReplicaFigure] = &[
    replica_figure("hostler_replica_ready", "gauge", "1 when the replica can be sent requests.", |replica| {
        f64::from(u8::from(replica.is_ready()))
    }),
    replica_figure("hostler_replica_failed", "gauge", "1 while the agent waits before it starts a failed engine again.", |replica| {
        phase_flag(replica, Phase::Failed)
    }),
    replica_figure("hostler_replica_quarantined", "gauge", "1 while it stays out of service until an operator releases it.", |replica| {
        phase_flag(replica, Phase::Quarantined)
    }),
    replica_figure("hostler_replica_sleeping", "gauge", "1 while its engine has given its memory back.", |replica| {
        phase_flag(replica, Phase::Sleeping)
    }),
    replica_figure("hostler_replica_findings", "gauge", "Things that cost it speed; see `hostler advise`.", |replica| {
        replica.state.findings as f64
    }),
    replica_figure("hostler_replica_lease_lapsed", "gauge", "1 when its agent's lease has lapsed.", |replica| {
        f64::from(u8::from(replica.lease_lapsed))
    }),
    replica_figure("hostler_replica_restarts", "counter", "Starts of the engine after its first one.", |replica| {
        f64::from(replica.state.restarts)
    }),
    replica_figure(
        "hostler_replica_cache_level",
        "gauge",
        "How its cache is known: 2 exactly, 1 by the text that was sent there.",
        |replica| {
            if replica.cache.slot.is_some() { 2.0 } else { 1.0 }
        },
    ),
    replica_figure("hostler_replica_cached_blocks", "gauge", "KV blocks that the affinity index has for it.", |replica| {
        replica.cache.stats.blocks.load(Ordering::Relaxed) as f64
    }),
    replica_figure(
        "hostler_replica_cache_resyncs",
        "counter",
        "How often its whole cache was asked for because the index differed from it.",
        |replica| replica.cache.stats.resyncs.load(Ordering::Relaxed) as f64,
    ),
    replica_figure(
        "hostler_replica_pending_tokens",
        "gauge",
        "Prompt tokens of this router's requests that it has still to compute.",
        |replica| replica.local_load.pending_tokens() as f64,
    ),
    replica_figure("hostler_replica_prefill_rate", "gauge", "Prompt tokens that it computes in a second, as learned.", |replica| {
        1.0 / replica.local_load.learned().rates.prefill.max(1e-9)
    }),
    replica_figure(
        "hostler_replica_slowness",
        "gauge",
        "How much slower than its learned rates it has lately been, as a factor.",
        |replica| replica.local_load.learned().rates.slowness,
    ),
    replica_figure("hostler_replica_local_in_flight", "gauge", "Requests of this router in flight there.", |replica| {
        f64::from(replica.local_load.in_flight())
    }),
    replica_figure("hostler_replica_in_flight", "gauge", "Requests of all routers in flight there, counted by its agent.", |replica| {
        f64::from(replica.load.in_flight)
    }),
    replica_figure("hostler_replica_served", "counter", "Requests taken since its agent started.", |replica| replica.load.served as f64),
    replica_figure("hostler_replica_running", "gauge", "Requests that the engine runs.", |replica| {
        engine_figure(replica, |load| load.running.into())
    }),
    replica_figure("hostler_replica_waiting", "gauge", "Requests that wait in the engine.", |replica| {
        engine_figure(replica, |load| load.waiting.into())
    }),
    replica_figure("hostler_replica_kv_use", "gauge", "Share of the engine's KV blocks in use, 0 to 1.", |replica| {
        replica.load.engine.kv_use
    }),
    replica_figure("hostler_replica_prompt_tokens", "counter", "Prompt tokens that the engine has processed.", |replica| {
        engine_figure(replica, |load| load.prompt_tokens)
    }),
    replica_figure("hostler_replica_generation_tokens", "counter", "Tokens that the engine has generated.", |replica| {
        engine_figure(replica, |load| load.generation_tokens)
    }),
    replica_figure("hostler_replica_preemptions", "counter", "Requests that the engine has preempted.", |replica| {
        engine_figure(replica, |load| load.preemptions)
    }),
    replica_figure("hostler_replica_prefix_queries", "counter", "Tokens looked up in the engine's prefix cache.", |replica| {
        engine_figure(replica, |load| load.prefix_queries)
    }),
    replica_figure("hostler_replica_prefix_hits", "counter", "Tokens found in the engine's prefix cache.", |replica| {
        engine_figure(replica, |load| load.prefix_hits)
    }),
];

/// What is on the page of these, for the manual.
pub(super) fn descriptions() -> Vec<MetricDescription> {
    let described = |figure: &ReplicaFigure| MetricDescription {
        name: format!("{}{}", figure.name, if figure.kind == "counter" { "_total" } else { "" }),
        kind: figure.kind,
        labels: &["node", "replica"],
        help: figure.help,
    };
    let own = |figure: &RouterFigure| MetricDescription {
        name: format!("{}{}", figure.name, if figure.kind == "counter" { "_total" } else { "" }),
        kind: figure.kind,
        labels: &[],
        help: figure.help,
    };
    REPLICA_FIGURES.iter().map(described).chain(ROUTER_FIGURES.iter().map(own)).collect()
}
