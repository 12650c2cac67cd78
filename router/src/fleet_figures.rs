//! Figures that are read from the router's state when its metrics page is requested, one table line
//! each.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use hostler_boot::metrics::{FigureTable, FigureValue, MetricRegistry, counter, gauge};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use strum::VariantNames;
use tokio::time::Instant;

use crate::admission::TenantCounts;
use crate::crash_suspects::CrashSuspects;
use crate::findings::FindingKind;
use crate::fleet::{EntryUse, FleetView, Node, Phase, Replica};
use crate::keys::Keys;
use crate::operators::Operators;
use crate::outcome::Verdict;
use crate::prompt::PromptStats;
use crate::tls::RouterTls;

/// The sources of the figures.
#[derive(Debug)]
pub(crate) struct RouterCollector {
    pub(crate) calls: Operators,
    pub(crate) crash_suspects: Arc<CrashSuspects>,
    pub(crate) keys: Keys,
    pub(crate) tls: RouterTls,
}

impl Collector for RouterCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let view = self.calls.fleet.view();
        let replicas = view.replicas.iter().map(|replica| (vec![replica.node.to_string(), replica.id.to_string()], replica.clone()));
        REPLICAS.encode(&mut encoder, &replicas.collect::<Vec<_>>())?;
        NODES.encode(&mut encoder, &self.nodes(&view, Instant::now()))?;
        let entries = view.entries().iter().map(|entry| (vec![entry.name.clone()], entry.clone()));
        ENTRIES.encode(&mut encoder, &entries.collect::<Vec<_>>())?;
        let used = view.entries().iter().flat_map(|EntryUse { name, node_seconds, .. }| {
            node_seconds.iter().map(move |(used, seconds)| (vec![name.clone(), used.clone()], *seconds))
        });
        NODE_SECONDS.encode(&mut encoder, &used.collect::<Vec<_>>())?;
        ROUTER.encode_only(&mut encoder, self)?;
        let verdicts =
            Verdict::VARIANTS.iter().map(|word| vec![(*word).to_owned()]).zip(self.calls.placer.metrics.end_counts().by_verdict());
        VERDICTS.encode(&mut encoder, &verdicts.collect::<Vec<_>>())?;
        let found = self.calls.findings();
        let findings =
            FindingKind::VARIANTS.iter().map(|kind| (vec![(*kind).to_owned()], found.iter().any(|finding| finding.kind == *kind)));
        FINDINGS.encode(&mut encoder, &findings.collect::<Vec<_>>())?;
        let tenants = self.calls.admission.tenant_counts();
        let named = tenants.iter().map(|(name, counts)| (vec![name.to_string()], &**counts));
        TENANTS.encode(&mut encoder, &named.collect::<Vec<_>>())?;
        let refused = tenants
            .iter()
            .flat_map(|(name, counts)| counts.refused().map(move |(limit, count)| (vec![name.to_string(), limit.to_owned()], count)));
        TENANT_LIMITS.encode(&mut encoder, &refused.collect::<Vec<_>>())?;
        CERTIFICATES.encode(&mut encoder, &self.certificates())?;
        PROMPTS.encode_only(&mut encoder, &self.calls.placer.prompts.stats())
    }
}

/// Facts about a node, besides its replicas.
#[derive(Debug)]
struct NodeFacts {
    /// Seconds until the node's agent leaves.
    leaves_in: Option<f64>,
    certificate_expires_at: Option<u64>,
}

impl RouterCollector {
    /// The facts about each attached node.
    fn nodes(&self, view: &FleetView, now: Instant) -> Vec<(Vec<String>, NodeFacts)> {
        let newest = self.tls.agents.as_ref().map(|agents| &agents.newest);
        let facts = |node: &Node| {
            let leaves_at = node.job.as_ref().and_then(|job| job.leaves_at);
            let leaves_in = leaves_at.map(|at| at.saturating_duration_since(now).as_secs_f64());
            let certificate_expires_at = newest.and_then(|newest| newest.expires_at(&node.name));
            (vec![node.name.to_string()], NodeFacts { leaves_in, certificate_expires_at })
        };
        view.nodes.iter().filter(|node| node.is_attached).map(facts).collect()
    }

    /// Expiry of the certificates that are not renewed by themselves: Unix time in seconds.
    fn certificates(&self) -> Vec<(Vec<String>, Option<u64>)> {
        let edge = self.tls.edge.as_ref().map(|edge| ("edge", edge.expires_at()));
        let authority = self.tls.agents.as_ref().map(|agents| ("authority", agents.authority.expires_at()));
        [edge, authority].into_iter().flatten().map(|(name, expires_at)| (vec![name.to_owned()], expires_at)).collect()
    }
}

/// Describes the figures.
pub(crate) fn describe(registry: &mut MetricRegistry) {
    registry.describe(&REPLICAS);
    registry.describe(&NODES);
    registry.describe(&ENTRIES);
    registry.describe(&NODE_SECONDS);
    registry.describe(&ROUTER);
    registry.describe(&VERDICTS);
    registry.describe(&FINDINGS);
    registry.describe(&TENANTS);
    registry.describe(&TENANT_LIMITS);
    registry.describe(&CERTIFICATES);
    registry.describe(&PROMPTS);
}

const NODES: FigureTable<NodeFacts> = FigureTable {
    labels: &["node"],
    figures: &[
        gauge("node_leaves_in_seconds", "Time until the node's agent leaves because its batch job ends, where that is known.", |node| {
            node.leaves_in.into()
        }),
        gauge(
            "node_certificate_expiry_timestamp_seconds",
            "When the node's newest certificate known here expires, in Unix time.",
            |node| node.certificate_expires_at.into(),
        ),
    ],
};

const ENTRIES: FigureTable<EntryUse> = FigureTable {
    labels: &["entry"],
    figures: &[gauge("budget_ends_in_seconds", "Time until the budget of a fleet's entry ends if its nodes of now run on.", |entry| {
        entry.budget_ends_at.map(|at| at.saturating_duration_since(Instant::now()).as_secs_f64()).into()
    })],
};

const NODE_SECONDS: FigureTable<f64> = FigureTable {
    labels: &["entry", "use"],
    figures: &[counter("node_seconds", "Seconds that the jobs of a fleet's entry have had nodes, by what these did.", |seconds| {
        (*seconds).into()
    })],
};

const TENANTS: FigureTable<TenantCounts> = FigureTable {
    labels: &["tenant"],
    figures: &[
        counter("tenant_requests", "Requests of the tenant, or of a key without one, that its limits let in.", |tenant| {
            tenant.admitted().into()
        }),
        gauge("tenant_in_flight", "Requests of the tenant that are in flight or queued in this router.", |tenant| {
            tenant.in_flight().into()
        }),
        counter(
            "tenant_prompt_tokens",
            "Prompt tokens of its answers that have ended, as engines reported or the router estimated them.",
            |tenant| tenant.prompt_tokens().into(),
        ),
        counter(
            "tenant_generation_tokens",
            "Tokens generated in its answers that have ended, as engines reported or the router saw them.",
            |tenant| tenant.generation_tokens().into(),
        ),
    ],
};

const TENANT_LIMITS: FigureTable<u64> = FigureTable {
    labels: &["tenant", "limit"],
    figures: &[counter("tenant_refused", "Requests of the tenant that this limit of its keys did not let in.", |count| (*count).into())],
};

const CERTIFICATES: FigureTable<Option<u64>> = FigureTable {
    labels: &["certificate"],
    figures: &[gauge(
        "certificate_expiry_timestamp_seconds",
        "When the edge's certificate or the fleet's authority expires, in Unix time.",
        |expires_at| (*expires_at).into(),
    )],
};

const FINDINGS: FigureTable<bool> = FigureTable {
    labels: &["finding"],
    figures: &[gauge(
        "findings",
        "1 while this is wrong about the fleet, as `hostler ps` says; each has an alert of its name.",
        |is_found| (*is_found).into(),
    )],
};

const VERDICTS: FigureTable<u64> = FigureTable {
    labels: &["verdict"],
    figures: &[counter(
        "requests",
        "Requests that have ended, by what that says of the fleet: `full` and `error` are its failures, `client_fault` are those of clients.",
        |count| (*count).into(),
    )],
};

const ROUTER: FigureTable<RouterCollector> = FigureTable {
    labels: &[],
    figures: &[
        gauge("in_flight", "Requests in flight in this router.", |now| now.calls.admission.in_flight().into()),
        gauge("queued_requests", "Requests that wait for a replica with room.", |now| now.calls.queue.waiting_count().into()),
        gauge("crash_suspects", "Requests that were in flight when an engine died, and were not answered since.", |now| {
            now.crash_suspects.suspect_count().into()
        }),
        gauge("confined_tenants", "Tenants whose requests have crashed several engines and go to one replica of a model.", |now| {
            now.crash_suspects.confined_count().into()
        }),
        counter("nodes_lost", "Nodes whose agent went without having stopped its engines, and has not come back within a minute.", |now| {
            now.calls.fleet.view().nodes_lost.into()
        }),
        gauge("models_expected", "Models that a controller keeps in the fleet, by their names.", |now| {
            now.calls.fleet.view().expected_models().into()
        }),
        gauge("key_file_usable", "0 while the changed key file cannot be read, and the keys before it stay.", |now| {
            now.keys.is_file_usable().into()
        }),
        gauge("index_blocks", "Different blocks that the affinity index holds.", |now| now.calls.placer.index.len().into()),
        gauge("index_bytes", "Memory of the affinity index.", |now| now.calls.placer.index.bytes().into()),
    ],
};

/// How many models' encoders have this status.
fn model_count(prompts: &PromptStats, standing: &str) -> FigureValue {
    prompts.models.iter().find(|(word, _)| *word == standing).map_or(0, |(_, count)| *count).into()
}

const PROMPTS: FigureTable<PromptStats> = FigureTable {
    labels: &[],
    figures: &[
        gauge("models_proved", "Models whose tokenizer agrees with their engine.", |now| model_count(now, "proved")),
        gauge("models_different", "Models whose tokenizer differs from their engine: placed by text.", |now| model_count(now, "different")),
        gauge("models_unusable", "Models whose tokenizer cannot be used: placed by text.", |now| model_count(now, "unusable")),
        counter("prompts_encoded", "Prompts that were turned into tokens.", |now| now.encodes.into()),
        counter("prompts_failed", "Prompts that a template or tokenizer refused: placed by text.", |now| now.failed.into()),
        counter("prompts_busy", "Prompts placed by text because the tokenizer's threads were busy.", |now| now.busy.into()),
        counter("prompts_rendered", "Prompts whose tokens an engine has said, because no encoder is proved for them.", |now| {
            now.rendered.into()
        }),
        counter("prompts_rendered_late", "Prompts placed by text because an engine did not say their tokens in time.", |now| {
            now.rendered_late.into()
        }),
        counter(
            "prompts_not_rendered",
            "Prompts placed by text because engines render enough, refused, or gave no usable answer.",
            |now| now.not_rendered.into(),
        ),
        counter("prompt_encoded_bytes", "Bytes of text that went through a tokenizer.", |now| now.encoded_bytes.into()),
        counter("prompt_segment_hits", "Segments of prompts whose tokens were remembered.", |now| now.segment_hits.into()),
        counter("prompt_segment_misses", "Segments of prompts that had to be encoded.", |now| now.segment_misses.into()),
    ],
};

fn is_in(replica: &Replica, phase: Phase) -> FigureValue {
    (replica.state.phase == phase).into()
}

const REPLICAS: FigureTable<Replica> = FigureTable {
    labels: &["node", "replica"],
    figures: &[
        gauge("replica_ready", "1 when the replica can be sent requests.", |replica| replica.is_ready().into()),
        gauge("replica_failed", "1 while the agent waits before it starts a failed engine again.", |replica| is_in(replica, Phase::Failed)),
        gauge("replica_quarantined", "1 while it stays out of service until an operator releases it.", |replica| {
            is_in(replica, Phase::Quarantined)
        }),
        gauge("replica_sleeping", "1 while its engine has given its memory back.", |replica| is_in(replica, Phase::Sleeping)),
        gauge("replica_findings", "Things that cost it speed; see `hostler advise`.", |replica| replica.state.findings.into()),
        gauge("replica_lease_lapsed", "1 when its agent's lease has lapsed.", |replica| replica.lease_lapsed.into()),
        counter("replica_restarts", "Starts of the engine after its first one.", |replica| replica.state.restarts.into()),
        counter("replica_hangs", "Times that its engine had work and gave no tokens, or failed its test completions.", |replica| {
            replica.state.hangs.into()
        }),
        gauge("replica_cache_level", "How its cache is known: 2 exactly, 1 by the text that was sent there.", |replica| {
            if replica.cache.slot.is_some() { 2_u32 } else { 1 }.into()
        }),
        gauge("replica_cached_blocks", "KV blocks that the affinity index has for it.", |replica| {
            replica.cache.stats.blocks.load(Ordering::Relaxed).into()
        }),
        gauge("replica_host_cached_blocks", "KV blocks in its host's memory that the affinity index has for it.", |replica| {
            replica.host_cache.usable_blocks().into()
        }),
        gauge("replica_file_cached_blocks", "KV blocks in files of its host that the affinity index has for its node.", |replica| {
            replica.file_cache.usable_blocks().into()
        }),
        counter("replica_cache_resyncs", "How often its whole cache was asked for because the index differed from it.", |replica| {
            replica.cache.stats.resyncs.load(Ordering::Relaxed).into()
        }),
        gauge("replica_pending_tokens", "Prompt tokens of this router's requests that it has still to compute.", |replica| {
            replica.local_load.pending_tokens().into()
        }),
        gauge("replica_prefill_rate", "Prompt tokens that it computes in a second, as learned.", |replica| {
            (1.0 / replica.local_load.learned().rates.prefill.max(1e-9)).into()
        }),
        gauge("replica_slowness", "How much slower than its learned rates it has lately been, as a factor.", |replica| {
            replica.local_load.learned().rates.slowness.into()
        }),
        gauge("replica_local_in_flight", "Requests of this router in flight there.", |replica| replica.local_load.in_flight().into()),
        gauge("replica_in_flight", "Requests of all routers in flight there, counted by its agent.", |replica| {
            replica.load.in_flight.into()
        }),
        counter("replica_served", "Requests taken since its agent started.", |replica| replica.load.served.into()),
        gauge("replica_running", "Requests that the engine runs.", |replica| replica.report.engine().running.into()),
        gauge("replica_waiting", "Requests that wait in the engine.", |replica| replica.report.engine().waiting.into()),
        gauge("replica_kv_use", "Share of the engine's KV blocks in use, 0 to 1.", |replica| replica.report.engine().kv_use.into()),
        counter("replica_prompt_tokens", "Prompt tokens that the engine has processed.", |replica| {
            replica.report.engine().prompt_tokens.into()
        }),
        counter("replica_generation_tokens", "Tokens that the engine has generated.", |replica| {
            replica.report.engine().generation_tokens.into()
        }),
        counter("replica_preemptions", "Requests that the engine has preempted.", |replica| replica.report.engine().preemptions.into()),
        counter("replica_prefix_queries", "Tokens looked up in the engine's prefix cache.", |replica| {
            replica.report.engine().prefix_queries.into()
        }),
        counter("replica_prefix_hits", "Tokens found in the engine's prefix cache.", |replica| replica.report.engine().prefix_hits.into()),
    ],
};
