//! The last hour in steps of ten seconds: of the fleet, of each replica and of each tenant. Pure:
//! `operators` reads the figures and adds a step, the page shows them, and findings look at the
//! last minute.
//!
//! The hour of 1,000 replicas and 100 tenants takes 13 MB at most, which a test counts.

mod series;
mod starts;
mod step;

use std::sync::Arc;

use parking_lot::Mutex;

use crate::outcome::EndCounts;
use series::SeriesTable;
pub(crate) use starts::{StreamStart, first_token_quantiles, nearest_rank};
pub(crate) use step::{FleetStep, ReplicaReading, ReplicaStep, TenantReading, TenantStep};

/// Seconds of a step.
pub(crate) const STEP_SECONDS: u64 = 10;

/// Steps of an hour.
pub(crate) const MAX_STEPS: usize = 360;

/// Recent steps whose first tokens are updated: those of slow streams come late.
pub(crate) const OPEN_STEPS: usize = 6;

/// Steps of a minute.
const MINUTE_STEPS: usize = 6;

/// Most replicas with steps of their own.
const MAX_REPLICAS: usize = 1000;

/// Most tenants with steps of their own; admission names fewer.
const MAX_TENANTS: usize = 100;

/// What is read at the end of a step.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    /// Milliseconds since 1970.
    pub(crate) at: u64,
    /// Requests that have ended since the router began.
    pub(crate) ends: EndCounts,
    /// Requests in flight in this router, and those of them that wait for a replica with room.
    pub(crate) in_flight: usize,
    pub(crate) queued: usize,
    pub(crate) replicas: Vec<(Arc<str>, ReplicaReading)>,
    pub(crate) tenants: Vec<(Arc<str>, TenantReading)>,
    /// Streams that were sent lately, as far as they have begun.
    pub(crate) starts: Vec<StreamStart>,
}

/// Clones share the history.
#[derive(Debug, Clone, Default)]
pub(crate) struct History(Arc<Mutex<Hour>>);

#[derive(Debug)]
struct Hour {
    /// The oldest first; at most [`MAX_STEPS`].
    fleet: Vec<FleetStep>,
    replicas: SeriesTable<ReplicaReading, ReplicaStep>,
    tenants: SeriesTable<TenantReading, TenantStep>,
    /// Ends until the last step.
    ends: EndCounts,
    /// When the last step ended.
    sampled_at: Option<u64>,
}

impl Default for Hour {
    fn default() -> Self {
        Self {
            fleet: Vec::new(),
            replicas: SeriesTable::new(MAX_REPLICAS),
            tenants: SeriesTable::new(MAX_TENANTS),
            ends: EndCounts::default(),
            sampled_at: None,
        }
    }
}

impl History {
    /// Adds a step that ends with this reading.
    pub(crate) fn add(&self, reading: Reading) {
        self.0.lock().add(reading);
    }

    /// The fleet's latest steps, at most so many, the oldest first.
    pub(crate) fn latest(&self, most: usize) -> Vec<FleetStep> {
        let hour = self.0.lock();
        hour.fleet[hour.fleet.len().saturating_sub(most)..].to_vec()
    }

    /// When the last step ended; 0 before the first.
    pub(crate) fn last_at(&self) -> u64 {
        self.0.lock().sampled_at.unwrap_or_default()
    }

    /// Requests that have ended in the last minute and up to ten seconds before, given the counts
    /// of now.
    pub(crate) fn recent_ends(&self, now: &EndCounts) -> EndCounts {
        let hour = self.0.lock();
        let recent = &hour.fleet[hour.fleet.len().saturating_sub(MINUTE_STEPS)..];
        recent.iter().fold(now.since(&hour.ends), |sum, step| sum.plus(&step.ends))
    }

    /// The steps of a replica with the moments at which they end; none where it was not known.
    pub(crate) fn of_replica(&self, id: &str) -> Vec<(u64, Option<ReplicaStep>)> {
        let hour = self.0.lock();
        hour.replicas.steps(id, &hour.fleet)
    }

    /// The steps of a tenant.
    pub(crate) fn of_tenant(&self, name: &str) -> Vec<(u64, Option<TenantStep>)> {
        let hour = self.0.lock();
        hour.tenants.steps(name, &hour.fleet)
    }
}

impl Hour {
    fn add(&mut self, reading: Reading) {
        let Reading { at, ends, in_flight, queued, replicas, tenants, starts } = reading;
        let seconds = seconds_between(self.sampled_at.replace(at), at);
        let (counted, mut step) = (ends.since(&self.ends), FleetStep { at, seconds, in_flight, queued, ..FleetStep::default() });
        (self.ends, step.ends) = (ends, counted);
        let grown = self.replicas.add(replicas, |before, now| ReplicaStep::between(before, now, seconds));
        step.sum(&grown);
        self.tenants.add(tenants, |before, now| TenantStep::between(before, now, seconds));
        if self.fleet.len() >= MAX_STEPS {
            self.fleet.remove(0);
        }
        self.fleet.push(step);
        self.look_at_starts(&starts);
    }
}

/// The length of a step. A clock that was set back, or a first step, makes it the usual one.
#[allow(clippy::cast_precision_loss, reason = "milliseconds of seconds")]
fn seconds_between(before: Option<u64>, now: u64) -> f32 {
    let millis = before.and_then(|before| now.checked_sub(before)).filter(|millis| *millis >= 1000);
    millis.unwrap_or(STEP_SECONDS * 1000) as f32 / 1000.0
}

#[cfg(test)]
mod tests;
