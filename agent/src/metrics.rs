//! Everything the agent counts, declared in one place.

use std::fmt::Write;

use hostler_boot::metrics::{MetricDescription, MetricRegistry};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

use crate::advise::FindingKind;
use crate::cache::CacheCounters;
use crate::engine::Phase;
use crate::gpu::{Gpu, GpuReading};
use crate::node::{NodeState, Replica};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

/// The agent's own metrics.
#[derive(Debug)]
pub struct AgentMetrics {
    registry: MetricRegistry,
    /// Answers relayed whole.
    pub complete: Counter,
    /// Answers that their engine did not finish.
    pub broken: Counter,
    /// Requests that a router cancelled.
    pub cancelled: Counter,
    /// Frames of routers for requests that nobody knows any more.
    pub unknown_frames: Counter,
}

impl Default for AgentMetrics {
    fn default() -> Self {
        let mut page = MetricRegistry::default();
        let help = "Requests of routers, by how their answer ended.";
        let relayed = page.register("agent_relayed", &["outcome"], help, Family::<OutcomeLabel, Counter>::default());
        let outcome = |outcome| relayed.get_or_create(&OutcomeLabel { outcome }).clone();
        let unknown = "Frames of routers for requests that nobody knows any more.";
        Self {
            complete: outcome("complete"),
            broken: outcome("broken"),
            cancelled: outcome("cancelled"),
            unknown_frames: page.register("agent_unknown_frames", &[], unknown, Counter::default()),
            registry: {
                page.describe(describe_engine_metrics());
                page
            },
        }
    }
}

/// Something about each engine that is read when the page is.
struct ReplicaMetric {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    value: fn(&Replica) -> u64,
}

const fn replica_metric(name: &'static str, kind: &'static str, help: &'static str, value: fn(&Replica) -> u64) -> ReplicaMetric {
    ReplicaMetric { name, kind, help, value }
}

fn is_in(replica: &Replica, phase: Phase) -> u64 {
    (replica.engine.status().borrow().phase == phase).into()
}

fn cache(replica: &Replica) -> CacheCounters {
    replica.engine.cache().counters()
}

const REPLICA_METRICS: &[ReplicaMetric] = &[
    replica_metric("hostler_agent_engine_ready", "gauge", "1 when the engine serves.", |replica| is_in(replica, Phase::Ready)),
    replica_metric("hostler_agent_engine_failed", "gauge", "1 while the engine is down after a crash.", |replica| {
        is_in(replica, Phase::Failed)
    }),
    replica_metric(
        "hostler_agent_engine_quarantined",
        "gauge",
        "1 while the engine stays out of service until it is released.",
        |replica| is_in(replica, Phase::Quarantined),
    ),
    replica_metric("hostler_agent_engine_sleeping", "gauge", "1 while the engine has given its memory back.", |replica| {
        is_in(replica, Phase::Sleeping)
    }),
    replica_metric(
        "hostler_agent_engine_start_percent",
        "gauge",
        "How far the start of the engine has come; 100 when it serves.",
        |replica| {
            let status = replica.engine.status();
            let status = status.borrow();
            let begun = status.progress.as_ref().map_or(0, |progress| progress.percent.into());
            if status.phase == Phase::Ready { 100 } else { begun }
        },
    ),
    replica_metric("hostler_agent_engine_in_flight", "gauge", "Requests of all routers in flight there.", |replica| {
        replica.engine.traffic().in_flight().into()
    }),
    replica_metric(
        "hostler_agent_engine_pending_tokens",
        "gauge",
        "Prompt tokens of requests in flight that are still to be computed, as routers estimated them.",
        |replica| replica.engine.traffic().subscribe().borrow().totals().pending_tokens,
    ),
    replica_metric("hostler_agent_engine_restarts_total", "counter", "Starts of the engine after its first one.", |replica| {
        replica.engine.status().borrow().restarts.into()
    }),
    replica_metric("hostler_agent_cache_exact", "gauge", "1 when the agent knows exactly which blocks the engine has cached.", |replica| {
        replica.engine.cache().watch().borrow().exact.into()
    }),
    replica_metric("hostler_agent_cache_events_total", "counter", "Events about cached blocks that the engine sent.", |replica| {
        cache(replica).events
    }),
    replica_metric("hostler_agent_cache_gaps_total", "counter", "Times that some of these events were missing.", |replica| {
        cache(replica).gaps
    }),
    replica_metric("hostler_agent_cache_replays_total", "counter", "Gaps that the engine filled by sending the events again.", |replica| {
        cache(replica).replays
    }),
    replica_metric(
        "hostler_agent_cache_resets_total",
        "counter",
        "Times that every block was forgotten because what was known could have been wrong.",
        |replica| cache(replica).resets,
    ),
    replica_metric(
        "hostler_agent_cache_unknown_parents_total",
        "counter",
        "Blocks that were not taken in because the block before them is unknown.",
        |replica| cache(replica).orphans,
    ),
    replica_metric("hostler_agent_cache_malformed_total", "counter", "Messages about cached blocks that could not be read.", |replica| {
        cache(replica).malformed
    }),
    replica_metric(
        "hostler_agent_cache_ignored_total",
        "counter",
        "Events about other memory than the GPU's, or about other groups of layers than the one that is followed.",
        |replica| cache(replica).ignored,
    ),
];

/// Something about each GPU. What the driver does not say is not on the page.
struct GpuMetric {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    value: fn(&Gpu, &GpuReading) -> Option<f64>,
}

const fn gpu_metric(name: &'static str, kind: &'static str, help: &'static str, value: fn(&Gpu, &GpuReading) -> Option<f64>) -> GpuMetric {
    GpuMetric { name, kind, help, value }
}

#[allow(clippy::cast_precision_loss, reason = "a metrics page has only floating point")]
const GPU_METRICS: &[GpuMetric] = &[
    gpu_metric("hostler_agent_gpu_memory_bytes", "gauge", "Memory of the GPU.", |gpu, _| Some(gpu.memory_bytes as f64)),
    gpu_metric("hostler_agent_gpu_memory_used_bytes", "gauge", "Memory of the GPU in use, by anybody.", |_, now| {
        now.memory_used_bytes.map(|bytes| bytes as f64)
    }),
    gpu_metric("hostler_agent_gpu_utilisation", "gauge", "Part of the last second in which a kernel ran, 0 to 1.", |_, now| {
        now.utilisation.map(|percent| f64::from(percent) / 100.0)
    }),
    gpu_metric("hostler_agent_gpu_watts", "gauge", "Power that the GPU takes.", |_, now| now.watts.map(f64::from)),
    gpu_metric("hostler_agent_gpu_watts_limit", "gauge", "Power at which the GPU's clocks are lowered.", |_, now| {
        now.watts_limit.map(f64::from)
    }),
    gpu_metric("hostler_agent_gpu_sm_mhz", "gauge", "Clock of the GPU's multiprocessors.", |_, now| now.sm_mhz.map(f64::from)),
    gpu_metric("hostler_agent_gpu_celsius", "gauge", "Temperature of the GPU.", |_, now| now.celsius.map(f64::from)),
    gpu_metric("hostler_agent_gpu_ecc_corrected_total", "counter", "Corrected memory errors since the driver was loaded.", |_, now| {
        now.ecc_corrected.map(|errors| errors as f64)
    }),
    gpu_metric("hostler_agent_gpu_ecc_uncorrected_total", "counter", "Uncorrected memory errors since the driver was loaded.", |_, now| {
        now.ecc_uncorrected.map(|errors| errors as f64)
    }),
    gpu_metric("hostler_agent_gpu_remap_pending", "gauge", "1 when rows of the GPU's memory wait for a reset to be replaced.", |_, now| {
        Some(now.remap_pending.into())
    }),
    gpu_metric("hostler_agent_gpu_remap_failed", "gauge", "1 when a row of the GPU's memory could not be replaced.", |_, now| {
        Some(now.remap_failed.into())
    }),
    gpu_metric("hostler_agent_gpu_last_xid", "gauge", "The driver's last XID about the GPU; 0 before the first.", |_, now| {
        Some(now.last_xid.into())
    }),
];

const THROTTLED: &str = "hostler_agent_gpu_throttled";
const THROTTLED_HELP: &str = "1 while the GPU's clocks are held down for this reason.";
const FINDINGS: &str = "hostler_agent_finding";
const FINDINGS_HELP: &str = "1 while `hostler advise` has this to say about the engine.";

/// The labels of a metric of a GPU.
const GPU_LABELS: &[&str] = &["replica", "gpu", "uuid"];

/// What is read from the engines when the page is, for the manual.
fn describe_engine_metrics() -> impl Iterator<Item = MetricDescription> {
    let engines = REPLICA_METRICS.iter().map(|&ReplicaMetric { name, kind, help, .. }| MetricDescription {
        name: name.into(),
        kind,
        labels: &["replica"],
        help,
    });
    let gpus = GPU_METRICS.iter().map(|&GpuMetric { name, kind, help, .. }| MetricDescription {
        name: name.into(),
        kind,
        labels: GPU_LABELS,
        help,
    });
    let labels = &["replica", "gpu", "uuid", "reason"];
    let throttled = MetricDescription { name: THROTTLED.into(), kind: "gauge", labels, help: THROTTLED_HELP };
    let findings = MetricDescription { name: FINDINGS.into(), kind: "gauge", labels: &["replica", "kind"], help: FINDINGS_HELP };
    engines.chain(gpus).chain([throttled, findings])
}

impl AgentMetrics {
    /// The page: the agent's own metrics, then those of its engines and GPUs.
    #[must_use]
    pub fn render(&self, node: &NodeState) -> String {
        let mut page = self.registry.render();
        for ReplicaMetric { name, kind, help, value } in REPLICA_METRICS {
            write_header(&mut page, name, kind, help);
            for replica in node.replicas() {
                let _ = writeln!(page, "{name}{{replica=\"{}\"}} {}", replica.index, value(replica));
            }
        }
        write_gpus(&mut page, &replica_gpus(node));
        write_header(&mut page, FINDINGS, "gauge", FINDINGS_HELP);
        for replica in node.replicas() {
            let findings = replica.findings();
            for kind in FindingKind::ALL {
                let stands = findings.iter().any(|finding| finding.kind == kind);
                let _ = writeln!(page, "{FINDINGS}{{replica=\"{}\",kind=\"{}\"}} {}", replica.index, kind.as_str(), u8::from(stands));
            }
        }
        page
    }

    /// What is on the page, for the manual.
    #[must_use]
    pub fn descriptions(&self) -> &[MetricDescription] {
        self.registry.descriptions()
    }
}

fn write_header(page: &mut String, name: &str, kind: &str, help: &str) {
    let family = name.trim_end_matches("_total");
    let _ = writeln!(page, "# HELP {family} {help}\n# TYPE {family} {kind}");
}

/// A GPU of a replica, and how it does.
struct ReplicaGpu {
    labels: String,
    gpu: Gpu,
    reading: GpuReading,
}

/// A GPU that several engines share is there for each of them.
fn replica_gpus(node: &NodeState) -> Vec<ReplicaGpu> {
    let mut gpus = Vec::new();
    for replica in node.replicas() {
        let readings = node.gpu_readings(replica);
        for gpu in &replica.traits.setup.gpus {
            let Some(reading) = readings.iter().find(|reading| reading.uuid == gpu.uuid) else { continue };
            let labels = format!("replica=\"{}\",gpu=\"{}\",uuid=\"{}\"", replica.index, gpu.index, gpu.uuid);
            gpus.push(ReplicaGpu { labels, gpu: gpu.clone(), reading: reading.clone() });
        }
    }
    gpus
}

fn write_gpus(page: &mut String, gpus: &[ReplicaGpu]) {
    for GpuMetric { name, kind, help, value } in GPU_METRICS {
        write_header(page, name, kind, help);
        for ReplicaGpu { labels, gpu, reading } in gpus {
            if let Some(value) = value(gpu, reading) {
                let _ = writeln!(page, "{name}{{{labels}}} {value}");
            }
        }
    }
    write_header(page, THROTTLED, "gauge", THROTTLED_HELP);
    for ReplicaGpu { labels, reading, .. } in gpus {
        for reason in &reading.throttled {
            let _ = writeln!(page, "{THROTTLED}{{{labels},reason=\"{reason}\"}} 1");
        }
    }
}

#[cfg(test)]
mod tests;
