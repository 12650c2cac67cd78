//! Hands the places and owners of responses to the router's successor. Engines keep responses, but
//! not their owners.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::{RETENTION, ResponseAffinity, StoredResponse};
use crate::engine_life::EngineLife;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ResponseRecord {
    id: String,
    replica: String,
    epoch: u64,
    tenant: String,
    left_ms: u64,
}

impl ResponseRecord {
    pub(super) fn new(id: &str, stored: &StoredResponse, now: Instant) -> Self {
        Self {
            id: id.to_owned(),
            replica: stored.life.replica.to_string(),
            epoch: stored.life.epoch,
            tenant: stored.tenant.to_string(),
            left_ms: u64::try_from(stored.expires_at.saturating_duration_since(now).as_millis()).unwrap_or(u64::MAX),
        }
    }
}

impl ResponseAffinity {
    /// All responses, those that expire soonest first. Further ones are sent to `successor`.
    pub(crate) fn export(&self, successor: mpsc::UnboundedSender<ResponseRecord>) -> Vec<ResponseRecord> {
        let now = Instant::now();
        let mut table = self.0.lock();
        table.successor = Some(successor);
        let mut records: Vec<_> = table.by_id.iter().map(|(id, stored)| ResponseRecord::new(id, stored, now)).collect();
        drop(table);
        records.sort_by_key(|record| record.left_ms);
        records
    }

    /// Remembers a response that another router reported.
    pub(crate) fn import(&self, record: ResponseRecord) {
        let ResponseRecord { id, replica, epoch, tenant, left_ms } = record;
        let (now, left) = (Instant::now(), Duration::from_millis(left_ms).min(RETENTION));
        let life = EngineLife { replica: replica.into(), epoch };
        self.record_stored(&id, StoredResponse { life, tenant: tenant.into(), expires_at: now + left }, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_successor_knows_the_owners_of_all_stored_responses() {
        let (before, after) = (ResponseAffinity::default(), ResponseAffinity::default());
        let life = EngineLife { replica: "n0/0".into(), epoch: 7 };
        let (ours, now) = ("ours".into(), Instant::now());
        before.record("resp_1", life.clone(), &ours, now);
        let (sender, mut changes) = mpsc::unbounded_channel();
        before.export(sender).into_iter().for_each(|record| after.import(record));
        before.record("resp_2", life.clone(), &ours, now);
        after.import(changes.recv().await.unwrap());
        for id in ["resp_1", "resp_2"] {
            assert!(after.belongs_to_another(id, "theirs", now) && !after.belongs_to_another(id, "ours", now));
        }
        assert!(!after.belongs_to_another("resp_1", "theirs", now + RETENTION));
    }
}
