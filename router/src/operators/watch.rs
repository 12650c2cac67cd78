//! Reads the fleet every ten seconds, for the history of the last hour and for the events that tell
//! when something has begun to be wrong. A step costs one look at the fleet view and at the latest
//! decisions.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use tokio::time::sleep;

use super::{MAX_DECISIONS, Operators};
use crate::background::BackgroundTasks;
use crate::event_log::millis_since_1970;
use crate::history::{Reading, ReplicaReading, STEP_SECONDS, StreamStart, TenantReading};
use crate::placement::PlacementDecision;

impl Operators {
    /// Starts the task that reads the fleet.
    pub(crate) fn watch_fleet(&self, tasks: &BackgroundTasks) {
        let calls = self.clone();
        tasks.spawn(async move {
            let mut wrong = BTreeMap::new();
            loop {
                sleep(Duration::from_secs(STEP_SECONDS)).await;
                calls.history.add(calls.read_fleet(SystemTime::now()));
                wrong = calls.note_findings(wrong);
            }
        });
    }

    fn read_fleet(&self, now: SystemTime) -> Reading {
        let view = self.fleet.view();
        let replicas = view.replicas.iter().map(|replica| {
            let engine = replica.report.engine();
            let reading = ReplicaReading {
                tokens: engine.generation_tokens,
                served: replica.load.served,
                failures: replica.local_load.failures(),
                running: engine.running,
                waiting: engine.waiting,
                kv_use: engine.kv_use,
            };
            (replica.id.clone(), reading)
        });
        let tenants = self.admission.tenant_counts().into_iter().map(|(name, counts)| {
            let reading = TenantReading {
                requests: counts.admitted(),
                refused: counts.refused().map(|(_, count)| count).sum(),
                prompt_tokens: counts.prompt_tokens(),
                generation_tokens: counts.generation_tokens(),
                in_flight: counts.in_flight(),
            };
            (name, reading)
        });
        Reading {
            at: millis_since_1970(now),
            ends: self.placer.metrics.end_counts(),
            in_flight: self.admission.in_flight(),
            queued: self.queue.waiting_count(),
            replicas: replicas.collect(),
            tenants: tenants.collect(),
            starts: self.placer.decisions.latest(MAX_DECISIONS).iter().filter_map(|decision| stream_start(decision)).collect(),
        }
    }

    /// Records what has begun or ceased to be wrong since the findings `before`, by kind. Returns
    /// the present ones.
    fn note_findings(&self, before: BTreeMap<String, String>) -> BTreeMap<String, String> {
        let present: BTreeMap<String, String> = self.findings().into_iter().map(|finding| (finding.kind, finding.evidence)).collect();
        for (kind, evidence) in present.iter().filter(|(kind, _)| !before.contains_key(*kind)) {
            tracing::warn!(event = "finding_begun", kind, evidence, "something is wrong about the fleet");
            self.fleet.events().record("finding_begun", "", &format!("{kind}: {evidence}"), true);
        }
        for kind in before.keys().filter(|kind| !present.contains_key(*kind)) {
            tracing::info!(event = "finding_ended", kind, "it is wrong no more");
            self.fleet.events().record("finding_ended", "", &format!("{kind}: over"), false);
        }
        present
    }
}

fn stream_start(decision: &PlacementDecision) -> Option<StreamStart> {
    let outcome = *decision.outcome.lock();
    Some(StreamStart {
        sent_at: millis_since_1970(decision.decided_at),
        replica: decision.choice_name().clone(),
        first_token: outcome.first_token_seconds?,
        between_tokens: outcome.between_tokens_seconds,
    })
}
