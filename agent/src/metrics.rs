//! Counters of the agent, and figures read from its engines and GPUs when its metrics page is
//! requested.

use std::fmt;
use std::time::Duration;

use hostler_boot::metrics::{FigureTable, FigureValue, MetricRegistry, counter, gauge};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::counter::Counter;

use crate::advise::FindingKind;
use crate::cache::CacheCounters;
use crate::engine::Phase;
use crate::gpu::{Gpu, GpuReading};
use crate::node::{NodeState, Replica};

/// Counters of the agent itself.
#[derive(Debug)]
pub struct AgentMetrics {
    /// Answers relayed whole.
    pub complete: Counter,
    pub broken: Counter,
    /// Requests that a router cancelled.
    pub cancelled: Counter,
    /// Frames from routers with unknown request ids.
    pub unknown_frames: Counter,
}

impl Default for AgentMetrics {
    /// Counters without a page.
    fn default() -> Self {
        Self::register(&mut MetricRegistry::default())
    }
}

impl AgentMetrics {
    /// Registers the counters on `page`, and describes the figures of a node.
    pub fn register(page: &mut MetricRegistry) -> Self {
        let outcomes = ["complete", "broken", "cancelled"];
        let [complete, broken, cancelled] =
            page.register_counters("agent_relayed", "outcome", "Requests of routers, by how their answer ended.", outcomes);
        let unknown = "Frames of routers for requests that nobody knows any more.";
        let unknown_frames = page.register("agent_unknown_frames", unknown, Counter::default());
        page.describe(&ENGINES);
        page.describe(&GPUS);
        page.describe(&THROTTLED);
        page.describe(&FINDINGS);
        page.describe(&START_STAGES);
        Self { complete, broken, cancelled, unknown_frames }
    }
}

impl Collector for NodeState {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let labelled = |replica| (vec![index_of(replica)], replica);
        ENGINES.encode(&mut encoder, &self.replicas().iter().map(labelled).collect::<Vec<_>>())?;
        encode_gpus(&mut encoder, &replica_gpus(self))?;
        let stages = self.replicas().iter().flat_map(|replica| {
            let start = replica.engine.status().borrow().start.clone();
            let stages = start.iter().flat_map(|start| start.stages.clone()).collect::<Vec<_>>();
            stages.into_iter().map(|past| (vec![index_of(replica), past.stage.to_owned()], past.took))
        });
        START_STAGES.encode(&mut encoder, &stages.collect::<Vec<_>>())?;
        let findings = self.replicas().iter().flat_map(|replica| {
            let found = replica.findings();
            let stands = move |kind| found.iter().any(|finding| finding.kind == kind);
            FindingKind::ALL.map(|kind| (vec![index_of(replica), kind.as_str().to_owned()], stands(kind)))
        });
        FINDINGS.encode(&mut encoder, &findings.collect::<Vec<_>>())
    }
}

fn index_of(replica: &Replica) -> String {
    replica.index.to_string()
}

fn is_in(replica: &Replica, phase: Phase) -> FigureValue {
    (replica.engine.status().borrow().phase == phase).into()
}

fn cache(replica: &Replica) -> CacheCounters {
    replica.engine.cache().counters()
}

const ENGINES: FigureTable<Replica> = FigureTable {
    labels: &["replica"],
    figures: &[
        gauge("agent_engine_ready", "1 when the engine serves.", |replica| is_in(replica, Phase::Ready)),
        gauge("agent_engine_failed", "1 while the engine is down after a crash.", |replica| is_in(replica, Phase::Failed)),
        gauge("agent_engine_quarantined", "1 while the engine stays out of service until it is released.", |replica| {
            is_in(replica, Phase::Quarantined)
        }),
        gauge("agent_engine_sleeping", "1 while the engine has given its memory back.", |replica| is_in(replica, Phase::Sleeping)),
        gauge("agent_engine_start_percent", "How far the start of the engine has come; 100 when it serves.", |replica| {
            let status = replica.engine.status();
            let status = status.borrow();
            let begun: u32 = status.progress.as_ref().map_or(0, |progress| progress.percent.into());
            if status.phase == Phase::Ready { 100 } else { begun }.into()
        }),
        gauge("agent_engine_in_flight", "Requests of all routers in flight there.", |replica| replica.engine.traffic().in_flight().into()),
        gauge(
            "agent_engine_pending_tokens",
            "Prompt tokens of requests in flight that are still to be computed, as routers estimated them.",
            |replica| replica.engine.traffic().subscribe().borrow().totals().pending_tokens.into(),
        ),
        counter("agent_engine_restarts", "Starts of the engine after its first one.", |replica| {
            replica.engine.status().borrow().restarts.into()
        }),
        gauge("agent_cache_exact", "1 when the agent knows exactly which blocks the engine has cached.", |replica| {
            replica.engine.cache().watch().borrow().exact.into()
        }),
        counter("agent_cache_events", "Events about cached blocks that the engine sent.", |replica| cache(replica).events.into()),
        counter("agent_cache_gaps", "Times that some of these events were missing.", |replica| cache(replica).gaps.into()),
        counter("agent_cache_replays", "Gaps that the engine filled by sending the events again.", |replica| cache(replica).replays.into()),
        counter("agent_cache_resets", "Times that every block was forgotten because what was known could have been wrong.", |replica| {
            cache(replica).resets.into()
        }),
        counter("agent_cache_unknown_parents", "Blocks that were not taken in because the block before them is unknown.", |replica| {
            cache(replica).orphans.into()
        }),
        counter("agent_cache_malformed", "Messages about cached blocks that could not be read.", |replica| cache(replica).malformed.into()),
        counter(
            "agent_cache_ignored",
            "Events about other memory than the GPU's and the host's, or about other groups of layers than the one that is followed.",
            |replica| cache(replica).ignored.into(),
        ),
    ],
};

/// A GPU of a replica, and its reading.
type GpuState = (Gpu, GpuReading);

/// Figures of a GPU. Values that the driver does not report are not on the page.
const GPUS: FigureTable<GpuState> = FigureTable {
    labels: &["replica", "gpu", "uuid"],
    figures: &[
        gauge("agent_gpu_memory_bytes", "Memory of the GPU.", |(gpu, _)| gpu.memory_bytes.into()),
        gauge("agent_gpu_memory_used_bytes", "Memory of the GPU in use, by anybody.", |(_, now)| now.memory_used_bytes.into()),
        gauge("agent_gpu_utilisation", "Part of the last second in which a kernel ran, 0 to 1.", |(_, now)| {
            now.utilisation.map(|percent| f64::from(percent) / 100.0).into()
        }),
        gauge("agent_gpu_watts", "Power that the GPU takes.", |(_, now)| now.watts.into()),
        gauge("agent_gpu_watts_limit", "Power at which the GPU's clocks are lowered.", |(_, now)| now.watts_limit.into()),
        gauge("agent_gpu_sm_mhz", "Clock of the GPU's multiprocessors.", |(_, now)| now.sm_mhz.into()),
        gauge("agent_gpu_celsius", "Temperature of the GPU.", |(_, now)| now.celsius.into()),
        counter("agent_gpu_ecc_corrected", "Corrected memory errors since the driver was loaded.", |(_, now)| now.ecc_corrected.into()),
        counter("agent_gpu_ecc_uncorrected", "Uncorrected memory errors since the driver was loaded.", |(_, now)| {
            now.ecc_uncorrected.into()
        }),
        gauge("agent_gpu_remap_pending", "1 when rows of the GPU's memory wait for a reset to be replaced.", |(_, now)| {
            now.remap_pending.into()
        }),
        gauge("agent_gpu_remap_failed", "1 when a row of the GPU's memory could not be replaced.", |(_, now)| now.remap_failed.into()),
        gauge("agent_gpu_last_xid", "The driver's last XID about the GPU; 0 before the first.", |(_, now)| now.last_xid.into()),
    ],
};

const THROTTLED: FigureTable<()> = FigureTable {
    labels: &["replica", "gpu", "uuid", "reason"],
    figures: &[gauge("agent_gpu_throttled", "1 while the GPU's clocks are held down for this reason.", |()| true.into())],
};

const START_STAGES: FigureTable<Duration> = FigureTable {
    labels: &["replica", "stage"],
    figures: &[gauge("agent_engine_start_seconds", "How long this stage of the engine's last start took.", |took| {
        took.as_secs_f64().into()
    })],
};

const FINDINGS: FigureTable<bool> = FigureTable {
    labels: &["replica", "kind"],
    figures: &[gauge("agent_finding", "1 while `hostler advise` has this to say about the engine.", |stands| (*stands).into())],
};

/// GPUs of the replicas. A GPU that several engines share appears for each of them.
fn replica_gpus(node: &NodeState) -> Vec<(Vec<String>, GpuState)> {
    let of_replica =
        |replica| {
            let readings = node.gpu_readings(replica);
            let reading = move |gpu: &Gpu| readings.iter().find(|reading| reading.uuid == gpu.uuid).cloned();
            replica.traits.setup.gpus.iter().filter_map(move |gpu| {
                Some((vec![index_of(replica), gpu.index.to_string(), gpu.uuid.clone()], (gpu.clone(), reading(gpu)?)))
            })
        };
    node.replicas().iter().flat_map(of_replica).collect()
}

fn encode_gpus(encoder: &mut DescriptorEncoder<'_>, gpus: &[(Vec<String>, GpuState)]) -> fmt::Result {
    GPUS.encode(encoder, gpus)?;
    let reasons = gpus.iter().flat_map(|(labels, (_, reading))| {
        let with_reason = move |reason: &&str| ([labels.as_slice(), &[(*reason).to_owned()]].concat(), ());
        reading.throttled.iter().map(with_reason)
    });
    THROTTLED.encode(encoder, &reasons.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests;
